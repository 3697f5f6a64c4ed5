//! The standard set of measurements.
//!
//! Owns: the list of jobs, and where results go: tables on stdout, `run.json` and `report.html` in a
//! folder.
//! **Invariant:** a job that fails stops no other; what was measured is written in any case, and the
//! exit code is that of the worst failure.

use std::{
    fs,
    io::{self, IsTerminal as _, Write as _},
    path::PathBuf,
};

use crate::{
    cli::{Common, has_subcommand, judge, measure_line, print},
    document::Document,
    error::{BenchError, exit_code},
    progress::Progress,
    report::report_html,
    run_file::RunFile,
    trace::TraceSource,
};

/// Options of `ucm-bench suite`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Jobs to run, by name or by the part before the dash (default: all)
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Small sizes and few repeats: shows that everything works, its figures mean little
    #[arg(long)]
    quick: bool,
    /// Folder for run.json and report.html
    #[arg(long, value_name = "DIR", default_value = "target/bench/latest")]
    out: PathBuf,
    /// Print the jobs and their command lines, run nothing
    #[arg(long)]
    list: bool,
}

/// One measurement: a command line of this program in two sizes.
#[derive(Debug)]
struct Job {
    name: &'static str,
    full: &'static str,
    quick: &'static str,
    /// About how many seconds it takes, for the progress bar: full, quick.
    seconds: (u64, u64),
}

const JOBS: &[Job] = &[
    Job {
        name: "replay",
        full: "trace --replay --ranks 4 --runs 3",
        quick: "trace --replay --ranks 4 --runs 1 --working-set-bytes 134217728",
        seconds: (60, 4),
    },
    Job {
        name: "replay-model",
        full: "trace --replay --capacity-pct 5,30 --assert hit_difference<=0",
        quick: "trace --replay --capacity-pct 10 --requests 600 --assert hit_difference<=0",
        seconds: (15, 2),
    },
    Job {
        name: "load-file",
        full: "load --backend file --verify --runs 5 --assert backend_loads<=256",
        quick: "load --backend file --blocks 16 --verify --runs 1 --assert backend_loads<=64",
        seconds: (15, 2),
    },
    Job {
        name: "load-slow",
        full: "load --backend slow --latency-us 2000 --verify --runs 5 --assert backend_loads<=256",
        quick: "load --backend slow --latency-us 2000 --blocks 16 --verify --runs 1 \
                --assert backend_loads<=64",
        seconds: (10, 2),
    },
    Job {
        name: "load-memory",
        full: "load --backend memory --verify --runs 5 --assert backend_loads<=256",
        quick: "load --backend memory --blocks 16 --verify --runs 1 --assert backend_loads<=64",
        seconds: (10, 2),
    },
    Job {
        name: "staging",
        full: "staging --assert cancel_lost<=0 --assert idle_polls<=0",
        quick: "staging --requests 40 --depth 1,2 --cancels 2000 --idle-ms 100 --runs 1 \
                --assert cancel_lost<=0",
        seconds: (60, 3),
    },
    Job { name: "ctrl", full: "ctrl", quick: "ctrl --quick", seconds: (60, 10) },
    Job {
        name: "crash",
        full: "crash --kills 60 --stops 5 --assert leaked_slots<=0 --assert leaked_pins<=0 \
               --assert stuck_waiters<=0",
        quick: "crash --kills 5 --stops 1 --assert leaked_slots<=0 --assert leaked_pins<=0 \
                --assert stuck_waiters<=0",
        seconds: (30, 5),
    },
    Job {
        name: "net-tcp",
        full: "net --engine tcp",
        quick: "net --engine tcp --case-ms 20 --runs 2 --case 4096,61x1728,4497408",
        seconds: (20, 1),
    },
    Job {
        name: "net-shm",
        full: "net --engine shm",
        quick: "net --engine shm --case-ms 20 --runs 2 --case 4096,61x1728,4497408",
        seconds: (20, 1),
    },
    Job {
        name: "ranges",
        full: "ranges --shape idx --verify --assert amplification<=1 --assert repeat_remote<=0",
        quick: "ranges --shape idx --pages 4 --requests 1 --ranks 1,2 --runs 1 --verify \
                --assert amplification<=1 --assert repeat_remote<=0",
        seconds: (20, 2),
    },
    Job {
        name: "directory",
        full: "directory",
        quick: "directory --keys 20000 --questions 200 --runs 2",
        seconds: (30, 1),
    },
    Job {
        name: "file",
        full: "file --total-bytes 536870912 --verify",
        quick: "file --total-bytes 33554432 --runs 1 --restart-objects 0 --verify",
        seconds: (40, 2),
    },
    Job {
        name: "file-8448",
        full: "file --object-bytes 8448 --total-bytes 268435456 --restart-objects 0 --verify",
        quick: "file --object-bytes 8448 --total-bytes 33554432 --runs 1 --restart-objects 0 --verify",
        seconds: (40, 2),
    },
    Job {
        name: "trace-conversation",
        full: "trace --trace conversation",
        quick: "trace --trace conversation --requests 2000",
        seconds: (3, 1),
    },
    Job {
        name: "trace-synthetic",
        full: "trace --trace synthetic",
        quick: "trace --trace synthetic --requests 2000",
        seconds: (2, 1),
    },
];

impl Job {
    fn words(&self, quick: bool) -> Vec<&'static str> {
        let line = if quick { self.quick } else { self.full };
        line.split_whitespace().collect()
    }

    fn seconds(&self, quick: bool) -> u64 {
        if quick { self.seconds.1 } else { self.seconds.0 }
    }

    /// `load` means `load-file`, `load-slow` and `load-memory`.
    fn is_called(&self, name: &str) -> bool {
        let rest = self.name.strip_prefix(name);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    }

    /// Why it cannot run here.
    fn missing(&self, quick: bool) -> Option<String> {
        let words = self.words(quick);
        let subcommand = words.first().copied().unwrap_or_default();
        if !has_subcommand(subcommand) {
            return Some(format!("there is no subcommand {subcommand}"));
        }
        let trace = words.iter().skip_while(|word| **word != "--trace").nth(1);
        trace.and_then(|name| TraceSource::find(name).err()).map(|error| error.to_string())
    }
}

/// Runs the jobs.
pub(crate) fn run(args: &Args, common: &Common) -> Result<(), BenchError> {
    let jobs = chosen(&args.names)?;
    if args.list {
        return jobs.iter().try_for_each(|job| {
            print(&format!("{:20} ucm-bench {}", job.name, job.words(args.quick).join(" ")))
        });
    }
    let steps = jobs.iter().map(|job| job.seconds(args.quick)).sum();
    let progress = Progress::new("suite", steps, common.quiet);
    let mut documents = Vec::new();
    let mut failures = Vec::new();
    for (number, job) in jobs.iter().enumerate() {
        let place = format!("suite {}/{}: {}", number + 1, jobs.len(), job.name);
        progress.label(&place);
        if !common.quiet && !io::stderr().is_terminal() {
            // A log has no bar.
            let _ = writeln!(io::stderr(), "{place}, about {} s", job.seconds(args.quick));
        }
        if let Some(why) = job.missing(args.quick) {
            say(common, &format!("SKIP {}: {why}\n", job.name))?;
        } else {
            match measure_line(&job.words(args.quick), common.quiet) {
                Ok((document, asserts)) => {
                    show(common, job, &document)?;
                    failures.extend(judge(&document, &asserts).err().map(|e| (job.name, e)));
                    documents.push(document);
                }
                Err(error) => failures.push((job.name, error)),
            }
        }
        progress.advance(job.seconds(args.quick));
    }
    drop(progress);
    let run = RunFile::new(documents);
    run.write(&args.out.join("run.json"))?;
    let report = args.out.join("report.html");
    fs::write(&report, report_html(run.documents())?)
        .map_err(|e| BenchError::path("write", &report, e))?;
    if common.json {
        let text = serde_json::to_string(&run)
            .map_err(|error| BenchError::io("cannot form JSON", error.into()))?;
        print(&text)?;
    }
    for (job, error) in &failures {
        say(common, &format!("FAILED {job}: {error}"))?;
    }
    worst(failures)
}

fn chosen(names: &[String]) -> Result<Vec<&'static Job>, BenchError> {
    for name in names {
        if !JOBS.iter().any(|job| job.is_called(name)) {
            let known: Vec<&str> = JOBS.iter().map(|job| job.name).collect();
            return Err(BenchError::Usage(format!(
                "there is no job {name}; there are: {}",
                known.join(", ")
            )));
        }
    }
    let wanted = |job: &&Job| names.is_empty() || names.iter().any(|name| job.is_called(name));
    Ok(JOBS.iter().filter(wanted).collect())
}

fn show(common: &Common, job: &Job, document: &Document) -> Result<(), BenchError> {
    let mut text = format!("== {}: {}\n", job.name, document.title());
    for table in document.tables() {
        text.push('\n');
        text.push_str(&table.to_string());
    }
    say(common, &text)
}

fn say(common: &Common, text: &str) -> Result<(), BenchError> {
    if common.json { Ok(()) } else { Progress::suspend(|| print(text)) }
}

/// Wrong bytes before everything else, then what failed first.
fn worst(failures: Vec<(&'static str, BenchError)>) -> Result<(), BenchError> {
    let mut failures: Vec<BenchError> = failures.into_iter().map(|(_, error)| error).collect();
    let wrong = failures.iter().position(|e| e.exit_code() == exit_code::WRONG_BYTES);
    if failures.is_empty() { Ok(()) } else { Err(failures.swap_remove(wrong.unwrap_or(0))) }
}

#[cfg(test)]
mod tests {
    use super::{BenchError, JOBS, chosen, worst};
    use crate::cli::{has_subcommand, parses};

    #[test]
    fn every_job_is_a_command_line_in_both_sizes() {
        for job in JOBS {
            for quick in [false, true] {
                let words = job.words(quick);
                if has_subcommand(words[0]) {
                    assert_eq!(parses(&words), Ok(()), "{}", job.name);
                }
            }
        }
    }

    #[test]
    fn jobs_are_chosen_by_name_or_group() {
        let names = |names: &[&str]| -> Result<Vec<&str>, BenchError> {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            Ok(chosen(&names)?.into_iter().map(|job| job.name).collect())
        };
        assert_eq!(names(&[]).unwrap().len(), JOBS.len());
        assert_eq!(names(&["load"]).unwrap(), ["load-file", "load-slow", "load-memory"]);
        assert_eq!(names(&["replay"]).unwrap(), ["replay", "replay-model"]);
        assert_eq!(names(&["load-slow", "ctrl"]).unwrap(), ["load-slow", "ctrl"]);
        assert_eq!(names(&["loa"]).unwrap_err().exit_code(), 2);
    }

    #[test]
    fn wrong_bytes_outweigh_other_failures() {
        let wrong = || BenchError::WrongBytes { count: 1, first: "x".into() };
        let other = || BenchError::Assertion("y".into());
        assert_eq!(worst(vec![("a", other()), ("b", wrong())]).unwrap_err().exit_code(), 5);
        assert_eq!(worst(vec![("a", other())]).unwrap_err().exit_code(), 1);
        worst(Vec::new()).unwrap();
    }
}
