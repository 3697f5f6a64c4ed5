//! The `ucm` command: looks at a node's cache, at the machine it runs on, and at the remote pool.
//!
//! **Invariant:** exit codes are stable: 0 done, 1 what was asked for is not there, 2 usage or configuration, 3 the environment lacks
//! something, 4 IO, 5 wrong bytes or damage, 6 incompatible, 7 fenced, 8 refused or too late.

mod doctor;
mod inspect;
mod peer;
mod pool;
mod top;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::{Parser, Subcommand};
use ucm::{Config, Error};

/// KV cache of a node: inspection and diagnosis.
#[derive(Debug, Parser)]
#[command(name = "ucm", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    settings: Settings,
}

#[derive(Debug, clap::Args)]
struct Settings {
    /// Configuration file (TOML).
    #[arg(long, short, global = true, env = "UCM_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Sets one value, as section.key=value or pool.N.key=value; may be repeated. Wins over the
    /// environment (`UCM__SECTION__KEY`), which wins over the file.
    #[arg(long = "set", short, global = true, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Prints what is in a living cache and checks it for contradictions.
    Inspect {
        /// One JSON document instead of text.
        #[arg(long)]
        json: bool,
    },
    /// Shows what happens in a living cache, again and again, until it is interrupted. Leaves the cache when
    /// its last rank and scheduler do, and waits for the next ones.
    Top {
        /// Milliseconds between two looks.
        #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(10..))]
        interval_ms: u64,
        /// End after so many looks.
        #[arg(long)]
        count: Option<u64>,
    },
    /// Says what this machine has, what ucm would use of it, and what to do about the rest.
    Doctor {
        /// One JSON document instead of text.
        #[arg(long)]
        json: bool,
    },
    /// Declares a rank gone although its process lives; its fills are loaded by others, it is fenced.
    EvictRank {
        /// Its seat, as `ucm inspect` shows it.
        #[arg(long, value_name = "SEAT")]
        seat: u8,
        /// Only if this stay still holds the seat.
        #[arg(long, value_name = "N")]
        generation: Option<u32>,
    },
    /// Serves this node's memory to its ranks and to other nodes, as `remote.*` says, until SIGTERM.
    Peer {
        /// Wait until the peer that serves this node now has ended, then take over.
        #[arg(long)]
        standby: bool,
        /// Say where it serves as one JSON document.
        #[arg(long)]
        json: bool,
    },
    /// Looks at the remote pool whose directory is `remote.directory`; gets, puts, removes.
    Pool {
        #[command(subcommand)]
        command: pool::Command,
        /// How long everything may take.
        #[arg(long, global = true, default_value_t = 5000)]
        timeout_ms: u64,
    },
    /// Prints the settings in force.
    Config,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("ucm: {error}");
            ExitCode::from(u8::try_from(error.kind() as u32).unwrap_or(1))
        }
    }
}

fn run(cli: &Cli) -> Result<ExitCode, Error> {
    let config = Config::load(cli.settings.config.as_deref(), std::env::vars(), &cli.settings.set)?;
    match &cli.command {
        Command::Inspect { json } => inspect::run(&config, *json),
        Command::Top { interval_ms, count } => {
            top::run(&config, Duration::from_millis(*interval_ms), *count)
        }
        Command::Doctor { json } => doctor::run(&config, *json),
        Command::EvictRank { seat, generation } => evict_rank(&config, *seat, *generation),
        Command::Peer { standby, json } => peer::run(&config, *standby, *json),
        Command::Pool { command, timeout_ms } => pool::run(&config, command, *timeout_ms),
        Command::Config => {
            print(&config.to_toml()?);
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// How long to wait for members that are just coming or going.
const PATIENCE: Duration = Duration::from_secs(2);

fn evict_rank(config: &Config, seat: u8, generation: Option<u32>) -> Result<ExitCode, Error> {
    let expelled = ucm::expel(config, PATIENCE, seat, generation)?;
    if !expelled.done {
        print(&format!("the member on seat {seat} has left meanwhile\n"));
        return Ok(ExitCode::from(8));
    }
    print(&format!(
        "the member on seat {seat} is expelled; {} of its fills are in quarantine until it lets go or \
         ends\n",
        expelled.fills
    ));
    Ok(ExitCode::SUCCESS)
}

/// Prints to standard output; a closed pipe is no error.
fn print(text: &str) {
    use std::io::Write as _;
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}
