//! `ucm inspect`.
//!
//! **Invariant:** a cache with contradictions ends with a non-zero exit code.

use std::{fmt::Write as _, process::ExitCode};

use serde_json::{Value, json};
use ucm::{Config, Error, Inspected, Inspection};

pub(crate) fn run(config: &Config, as_json: bool) -> Result<ExitCode, Error> {
    let inspected = ucm::inspect(config, crate::PATIENCE)?;
    if as_json {
        crate::print(&format!("{:#}\n", document(&inspected.inspection)));
    } else {
        crate::print(&text(config, &inspected));
    }
    let healthy = inspected.inspection.problems.is_empty();
    Ok(if healthy { ExitCode::SUCCESS } else { ExitCode::from(5) })
}

fn document(inspection: &Inspection) -> Value {
    let pools = inspection.pools.iter().map(|p| {
        json!({
            "slots": p.slots, "reserved": p.reserved, "free": p.free, "moving": p.moving, "idle": p.idle,
            "filling": p.filling, "ready": p.ready, "failed": p.failed, "draining": p.draining,
            "pinned": p.pinned, "accessed": p.accessed, "cursor": p.cursor,
            "oldest_fill_ms": p.oldest_fill_ms, "longest_bucket": p.longest_bucket,
        })
    });
    let members = inspection.members.iter().map(|m| {
        json!({
            "seat": m.index, "state": format!("{:?}", m.state), "generation": m.generation, "pid": m.pid,
            "device_id": m.device_id, "pinned_slots": m.pins, "filling": m.filling,
        })
    });
    let statistics: serde_json::Map<String, Value> = inspection
        .statistics
        .list()
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value.into()))
        .collect();
    let groups = &inspection.groups;
    json!({
        "pools": pools.collect::<Vec<_>>(),
        "members": members.collect::<Vec<_>>(),
        "groups": {
            "records": groups.records, "open": groups.open, "decided": groups.decided,
            "oldest_ms": groups.oldest_ms,
        },
        "statistics": statistics,
        "problems": inspection.problems,
    })
}

/// What a member is.
pub(crate) fn role(device_id: i32) -> String {
    match device_id {
        ucm::OBSERVER => "observer".into(),
        negative if negative < 0 => "scheduler".into(),
        device => format!("device {device}"),
    }
}

fn text(config: &Config, inspected: &Inspected) -> String {
    let inspection = &inspected.inspection;
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(out, "cache in {}", config.instance_dir().display());
    let facts = inspected.shard_bytes.iter().zip(&inspected.pages);
    for (index, (pool, (shard_bytes, pages))) in inspection.pools.iter().zip(facts).enumerate() {
        let name = config.pool.get(index).map_or("", |pool| pool.name.as_str());
        let _ = writeln!(
            out,
            "\npool {index} {name}: {} + {} slots of {shard_bytes} bytes on {pages}\n  ready {}  filling {}  \
             failed {}  idle {}  free {}  moving {}  draining {}\n  pinned {}  accessed {}  hand at {}  \
             oldest fill {} ms  longest bucket {}",
            pool.slots,
            pool.reserved,
            pool.ready,
            pool.filling,
            pool.failed,
            pool.idle,
            pool.free,
            pool.moving,
            pool.draining,
            pool.pinned,
            pool.accessed,
            pool.cursor,
            pool.oldest_fill_ms,
            pool.longest_bucket,
        );
    }
    let _ = writeln!(out, "\nmembers (seat, process, device, pinned slots, fills)");
    for member in &inspection.members {
        let device = role(member.device_id);
        let _ = writeln!(
            out,
            "  {:>3}  {:>8}  {device:<12}  {:>8}  {:>5}  {:?}{}",
            member.index,
            member.pid,
            member.pins,
            member.filling,
            member.state,
            if member.index == inspected.observer { "  (this command)" } else { "" }
        );
    }
    let groups = &inspection.groups;
    let _ = writeln!(
        out,
        "\ngroup commits: open {}  decided, not noted by all {}  of {}  oldest {} ms",
        groups.open, groups.decided, groups.records, groups.oldest_ms
    );
    let _ = writeln!(out, "\nevents since creation");
    for (name, value) in inspection.statistics.list() {
        let _ = writeln!(out, "  {name:<20} {value:>14}");
    }
    if inspection.problems.is_empty() {
        let _ = writeln!(out, "\nno contradictions");
    } else {
        let _ = writeln!(
            out,
            "\n{} contradictions (on a busy cache a few may be passing states):",
            inspection.problems.len()
        );
        for problem in &inspection.problems {
            let _ = writeln!(out, "  {problem}");
        }
    }
    out
}
