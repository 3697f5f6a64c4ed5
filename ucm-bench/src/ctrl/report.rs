//! The results of the `ctrl` workload.
//!
//! Owns: names, tables and plots.
//! **Invariant:** differences and ratios are taken run by run, between things measured in turn.

use serde_json::{Map, Value, json};

use super::{
    Args, peer,
    samples::{OfSize, Samples, figure},
};
use crate::{
    cli::Common, document::Document, error::BenchError, figure::Figure, plot::Plot, table::Table,
};

pub(crate) fn report(
    document: &mut Document,
    args: &Args,
    common: &Common,
    samples: &Samples,
    skipped: &[String],
) -> Result<(), BenchError> {
    describe(document, args, common);
    let (main, curve) = samples.sizes.split_first().ok_or_else(|| peer("nothing was measured"))?;
    for (name, figure) in figures(main)? {
        document.figure(name, &figure);
    }
    document.result("bytes_per_slot", bytes_per_slot(main));
    pressure(document, samples)?;
    wakes(document, samples)?;
    waiting(document, args, samples)?;
    let ranks = ranks(document, samples)?;
    let scaling = scaling(document, curve, skipped)?;
    document.table(document.results_table());
    document.table(ranks);
    document.table(scaling);
    Ok(())
}

fn describe(document: &mut Document, args: &Args, common: &Common) {
    document.about(
        "The shared index",
        "What finding, pinning, filling and waiting for a shard costs, without moving its bytes, next \
         to what memory and kernel charge for the same accesses and wake-ups.",
    );
    document.highlight([
        "hit_ns",
        "lookup_ns_per_block",
        "wake_ratio",
        "idle_wakeups",
        "bytes_per_slot",
    ]);
    document.config("ranks", json!(args.ranks));
    document.config("slots", args.slots);
    document.config("keys", args.keys);
    document.config("scaling", json!(args.scaling));
    document.config("wakes", args.wakes);
    document.config("waiters", args.waiters);
    document.config("wait_ms", args.wait_ms);
    document.config("idle_seconds", args.idle_seconds);
    document.config("runs", common.runs);
}

/// Hits, lookups and floors of tables of one size.
fn figures(size: &OfSize) -> Result<Vec<(&'static str, Figure)>, BenchError> {
    Ok(vec![
        ("hit_ns", size.figure(|s| s.hit_ns)?),
        ("hit_floor_ns", size.figure(|s| s.read_floor_ns)?),
        ("hit_over_floor_ns", size.figure(|s| s.over_read_ns)?),
        ("hit_chase_floor_ns", size.figure(|s| s.chase_floor_ns)?),
        ("hit_over_chase_ns", size.figure(|s| s.over_chase_ns)?),
        ("hit_pin_floor_ns", size.figure(|s| s.pin_floor_ns)?),
        ("lookup_ns_per_block", size.figure(|s| s.lookup_ns)?),
        ("prefix_lookup_ns_per_block", size.figure(|s| s.prefix_ns)?),
    ])
}

fn bytes_per_slot(size: &OfSize) -> f64 {
    size.bytes as f64 / f64::from(size.size.slots)
}

fn pressure(document: &mut Document, samples: &Samples) -> Result<(), BenchError> {
    document.figure("miss_ns", &figure(samples.miss_ns.iter().copied())?);
    let prealloc = &samples.prealloc;
    document.figure("prealloc_acquire_ns", &figure(prealloc.iter().map(|p| p.with_ns))?);
    document.figure("unprepared_acquire_ns", &figure(prealloc.iter().map(|p| p.without_ns))?);
    let saved = figure(prealloc.iter().map(|p| p.without_ns - p.with_ns))?;
    document.figure("prealloc_saved_ns", &saved);
    document.figure("prealloc_ns", &figure(prealloc.iter().map(|p| p.prealloc_ns))?);
    document.figure("prealloc_made_ratio", &figure(prealloc.iter().map(|p| p.made_ratio))?);
    Ok(())
}

fn wakes(document: &mut Document, samples: &Samples) -> Result<(), BenchError> {
    let of = |values: &[f64]| figure(values.iter().copied());
    let (wake, floor) = (of(&samples.wake.p50)?, of(&samples.futex.p50)?);
    document.figure("wake_us_p50", &wake);
    document.figure("wake_us_p99", &of(&samples.wake.p99)?);
    document.figure("futex_floor_us_p50", &floor);
    document.figure("futex_floor_us_p99", &of(&samples.futex.p99)?);
    let ratio = wake.ratio_to(&floor).ok_or_else(|| peer("a wake-up took no time"))?;
    document.figure("wake_ratio", &ratio);
    let mut plot = Plot::lines("Wake-up of a process that sleeps", "percentile", "us");
    plot.line("cache", samples.wake.distribution());
    plot.line("bare futex", samples.futex.distribution());
    document.plot(plot);
    Ok(())
}

fn waiting(document: &mut Document, args: &Args, samples: &Samples) -> Result<(), BenchError> {
    let cpu = &samples.waiters_cpu_ms;
    document.figure("waiters_cpu_ms", &figure(cpu.iter().copied())?);
    let waited_s = f64::from(args.waiters) * args.wait_ms as f64 / 1e3;
    document.figure("waiter_cpu_ms_per_s", &figure(cpu.iter().map(|ms| ms / waited_s))?);
    document.result("idle_wakeups", samples.idle.wakeups);
    document.result("idle_cpu_ms_per_s", samples.idle.cpu_ms_per_s);
    document.result("waiting_wakeups", samples.waiting.wakeups);
    document.result("waiting_cpu_ms_per_s", samples.waiting.cpu_ms_per_s);
    document.result("watched_threads", samples.idle.threads);
    Ok(())
}

fn put(fields: &mut Map<String, Value>, name: &str, figure: &Figure) {
    fields.insert(name.to_owned(), figure.median().into());
    fields.insert(format!("{name}_min"), figure.min().into());
    fields.insert(format!("{name}_max"), figure.max().into());
}

fn ranks(document: &mut Document, samples: &Samples) -> Result<Table, BenchError> {
    let mut table = Table::new(["processes at once", "hit", "min", "max", "cpu"]);
    let mut list = Vec::new();
    for of in &samples.together {
        let wall = figure(of.wall_ns.iter().copied())?;
        let cpu = figure(of.cpu_ns.iter().copied())?;
        let human = |value: f64| Table::human("hit_ns", &value.into());
        table.row([
            of.ranks.to_string(),
            human(wall.median()),
            human(wall.min()),
            human(wall.max()),
            human(cpu.median()),
        ]);
        let mut fields = Map::new();
        fields.insert("ranks".into(), of.ranks.into());
        put(&mut fields, "hit_ns", &wall);
        put(&mut fields, "hit_cpu_ns", &cpu);
        list.push(Value::Object(fields));
    }
    document.result("hit_ns_ranks", list);
    Ok(table)
}

fn scaling(
    document: &mut Document,
    curve: &[OfSize],
    skipped: &[String],
) -> Result<Table, BenchError> {
    let mut list = Vec::new();
    let mut table = None;
    let mut plot = Plot::lines("Hits and lookups by size of the cache", "slots", "ns").x_log();
    let mut lines: Vec<(&str, Vec<(f64, f64)>)> = Vec::new();
    for size in curve {
        let figures = figures(size)?;
        let names = figures.iter().map(|(name, _)| (*name).to_owned());
        let head = ["slots".to_owned()].into_iter().chain(names).chain(["bytes per slot".into()]);
        let table = table.get_or_insert_with(|| Table::new(head));
        let bytes = bytes_per_slot(size);
        let cells = figures.iter().map(|(name, f)| Table::human(name, &f.median().into()));
        let first = [size.size.slots.to_string()].into_iter();
        table.row(first.chain(cells).chain([format!("{bytes:.1}")]));
        let mut fields = Map::new();
        fields.insert("slots".into(), size.size.slots.into());
        for (index, (name, figure)) in figures.iter().enumerate() {
            put(&mut fields, name, figure);
            if lines.len() <= index {
                lines.push((name, Vec::new()));
            }
            let line = lines.get_mut(index).map(|(_, points)| points);
            line.into_iter()
                .for_each(|points| points.push((f64::from(size.size.slots), figure.median())));
        }
        fields.insert("bytes_per_slot".into(), bytes.into());
        list.push(Value::Object(fields));
    }
    for (name, points) in lines {
        plot.line(name, points);
    }
    if !list.is_empty() {
        document.plot(plot);
    }
    document.result("scaling", list);
    document.result("scaling_skipped", json!(skipped));
    if let (Some(small), Some(large)) = (curve.first(), curve.last()) {
        let growth = |pick: fn(&super::spec::Speeds) -> f64| {
            let (large, small) = (large.figure(pick)?, small.figure(pick)?);
            large.ratio_to(&small).ok_or_else(|| peer("a hit took no time"))
        };
        document.figure("hit_growth", &growth(|s| s.over_chase_ns)?);
        document.figure("hit_growth_over_reads", &growth(|s| s.over_read_ns)?);
    }
    Ok(table.unwrap_or_default())
}
