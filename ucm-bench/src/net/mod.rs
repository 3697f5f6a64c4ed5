//! The `net` workload: reads from another process, by an engine and by the barest way there is.
//!
//! Owns: the command line of `ucm-bench net`, the interleaving, and its results.
//! **Invariant:** engine and floor alternate exchange by exchange, so that whatever disturbs the
//! machine disturbs both; all bytes of both are compared afterwards.

mod case;
mod floor;
mod owner;
mod way;

use serde_json::json;

use crate::{
    cli::Common, document::Document, env::Env, error::BenchError, figure::Figure,
    progress::Progress, ranks::Ranks, stats::percentile, table::Table,
};
use case::Case;
use way::Way;

pub(crate) use owner::run as run_rank;

const CASES: &str = "4096,65536,515072,1048576,4497408,589824/4497408,61x1728,2602x1728,61x8448,\
                     532x8448,61x37440,120x37440,61x73728";

/// Options of `ucm-bench net`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Engine to measure
    #[arg(long, value_enum, default_value = "tcp")]
    engine: Engine,
    /// Shapes: BYTES, COUNTxBYTES (scattered pieces) or BYTES/OBJECT (a slice)
    #[arg(long, value_delimiter = ',', default_value = CASES)]
    case: Vec<Case>,
    /// Time for each case and run, floor and engine together
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    case_ms: u64,
}

/// What moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Engine {
    /// Sockets; the floor is a bare vectored exchange
    Tcp,
    /// Mapped segments; the floor is memcpy
    Shm,
    /// An RDMA adapter; the floor is that of tcp
    Rdma,
}

impl Engine {
    fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Shm => "shm",
            Self::Rdma => "rdma",
        }
    }
}

/// One value a run.
#[derive(Default)]
struct Samples {
    p50_us: Vec<f64>,
    p99_us: Vec<f64>,
    floor_us: Vec<f64>,
    min_us: Vec<f64>,
    floor_min_us: Vec<f64>,
}

/// Measures.
pub(crate) fn run(args: &Args, common: &Common) -> Result<Document, BenchError> {
    let mut owner = Ranks::start("net", 1)?;
    let mut way = Way::open(args.engine, &args.case, &mut owner)?;
    let mut document = Document::new("net", Env::collect());
    describe(&mut document, args, common, &way);
    let steps = u64::from(common.runs) * args.case.len() as u64;
    let progress = Progress::new("net", steps, common.quiet);
    let mut all: Vec<Samples> = args.case.iter().map(|_| Samples::default()).collect();
    let (mut wrong, mut first_wrong) = (0, None);
    for _ in 0..common.runs {
        for (number, (case, samples)) in args.case.iter().zip(&mut all).enumerate() {
            way.clear()?;
            let pieces = case.pieces();
            measure(&mut way, number, &pieces, args.case_ms, samples)?;
            let (engine, floor) = way.destinations()?;
            for (who, bytes) in [("engine", engine), ("floor", floor)] {
                let (count, first) = case::wrong(&bytes, &pieces);
                wrong += count;
                if let Some(at) = first {
                    first_wrong
                        .get_or_insert_with(|| format!("{who}, case {}, byte {at}", case.text()));
                }
            }
            progress.advance(1);
        }
    }
    drop(progress);
    document.result("wrong_bytes", wrong);
    if let Some(text) = first_wrong {
        document.result("first_wrong_byte", text);
    }
    report(&mut document, args, &all)?;
    Ok(document)
}

fn measure(
    way: &mut Way,
    number: usize,
    pieces: &[case::Piece],
    limit_ms: u64,
    samples: &mut Samples,
) -> Result<(), BenchError> {
    const WARM: usize = 5;
    let (mut engine, mut floor) = (Vec::new(), Vec::new());
    let limit_ns = limit_ms as f64 * 1e6;
    let mut spent = 0.0;
    while engine.len() < WARM + 20 || (spent < limit_ns && engine.len() < 20_000) {
        let plan = way.plan(pieces);
        let plan_again = way.plan(pieces);
        // Who goes first changes, so that neither always finds what the other left in the caches.
        let even = engine.len().is_multiple_of(2);
        if even {
            floor.push(way.floor(number, pieces)?);
        }
        engine.push(way.engine(if even { plan } else { plan_again })?);
        if !even {
            floor.push(way.floor(number, pieces)?);
        }
        spent += engine.last().unwrap_or(&0.0) + floor.last().unwrap_or(&0.0);
        if spent > 20.0 * limit_ns && engine.len() > WARM {
            break;
        }
    }
    engine.drain(..WARM.min(engine.len() - 1));
    floor.drain(..WARM.min(floor.len() - 1));
    engine.sort_by(f64::total_cmp);
    floor.sort_by(f64::total_cmp);
    samples.p50_us.push(percentile(&engine, 0.5) / 1e3);
    samples.p99_us.push(percentile(&engine, 0.99) / 1e3);
    samples.floor_us.push(percentile(&floor, 0.5) / 1e3);
    samples.min_us.push(percentile(&engine, 0.0) / 1e3);
    samples.floor_min_us.push(percentile(&floor, 0.0) / 1e3);
    Ok(())
}

fn describe(document: &mut Document, args: &Args, common: &Common, way: &Way) {
    let floor = match args.engine {
        Engine::Tcp | Engine::Rdma => {
            "a bare exchange of vectored writes and reads over a socket to the same process"
        }
        Engine::Shm => "memcpy of the same pieces out of the same mapping",
    };
    document.about(
        "Reads from another process",
        &format!("The engine {} against {floor}, exchange by exchange.", args.engine.name()),
    );
    document.config("engine", args.engine.name());
    document.config("case", json!(args.case));
    document.config("case_ms", args.case_ms);
    document.config("runs", common.runs);
    document.env_mut().engine = Some(args.engine.name().into());
    document.env_mut().page_tier.clone_from(&way.page_tier);
}

fn report(document: &mut Document, args: &Args, all: &[Samples]) -> Result<(), BenchError> {
    let missing = || BenchError::Peer("no samples".into());
    let of = |values: &[f64]| Figure::of(values.iter().copied()).ok_or_else(missing);
    let head =
        ["case", "p50_us", "p99_us", "floor_us", "ratio", "ratio_of_minima", "ns_per_fragment"];
    let mut table = Table::new(head);
    let mut cases = Vec::new();
    for (case, samples) in args.case.iter().zip(all) {
        let (p50, floor) = (of(&samples.p50_us)?, of(&samples.floor_us)?);
        let p99 = of(&samples.p99_us)?;
        let ratio = p50.ratio_to(&floor).ok_or_else(missing)?;
        let minima = of(&samples.min_us)?.min() / of(&samples.floor_min_us)?.min();
        let fragment = p50.median() * 1e3 / case.count() as f64;
        cases.push(json!({
            "case": case.text(),
            "bytes": case.total(),
            "fragments": case.count(),
            "p50_us": p50.median(), "p50_us_min": p50.min(), "p50_us_max": p50.max(),
            "p99_us": p99.median(), "p99_us_min": p99.min(), "p99_us_max": p99.max(),
            "floor_us": floor.median(), "floor_us_min": floor.min(), "floor_us_max": floor.max(),
            "ratio": ratio.median(), "ratio_min": ratio.min(), "ratio_max": ratio.max(),
            "ratio_of_minima": minima,
            "ns_per_fragment": fragment,
        }));
        document.figure(&format!("ratio_{}", case.field()), &ratio);
        document.figure(&format!("p50_us_{}", case.field()), &p50);
        table.row([
            case.text().to_owned(),
            format!("{:.1}", p50.median()),
            format!("{:.1}", p99.median()),
            format!("{:.1}", floor.median()),
            format!("{:.3}", ratio.median()),
            format!("{minima:.3}"),
            format!("{fragment:.0}"),
        ]);
    }
    document.result("cases", json!(cases));
    document.table(table);
    Ok(())
}
