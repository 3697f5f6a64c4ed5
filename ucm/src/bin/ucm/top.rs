//! `ucm top`.
//!
//! **Invariant:** it is no member of a cache in which there are only observers, but for one interval.

use std::{
    fmt::Write as _,
    io::{IsTerminal as _, Write as _},
    process::ExitCode,
    time::{Duration, Instant},
};

use ucm::{Config, Error, ErrorKind, Inspected, Inspection, Observer, Statistics};

use crate::inspect::role;

/// Longest bar, in characters.
const BAR: usize = 40;

pub(crate) fn run(
    config: &Config,
    interval: Duration,
    count: Option<u64>,
) -> Result<ExitCode, Error> {
    let clears = std::io::stdout().is_terminal();
    let mut there: Option<Watched> = None;
    let mut looks = 0;
    while count.is_none_or(|count| looks < count) {
        if looks > 0 {
            std::thread::sleep(interval);
        }
        looks += 1;
        there = there.filter(|watched| !watched.observer.is_alone());
        if there.is_none() {
            there = match Observer::join(config, crate::PATIENCE.min(interval)) {
                Ok(observer) if observer.is_alone() => None,
                Ok(observer) => Some(Watched { observer, before: None }),
                Err(error) if error.kind() == ErrorKind::Environment => None,
                Err(error) => return Err(error),
            };
        }
        let text = match &mut there {
            Some(watched) => watched.frame(config),
            None => format!("no cache lives in {}; waiting\n", config.instance_dir().display()),
        };
        // Home, and clear what was below.
        let text = if clears { format!("\x1b[H\x1b[J{text}") } else { format!("{text}\n") };
        if std::io::stdout().lock().write_all(text.as_bytes()).is_err() {
            // Nobody reads any more.
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}

struct Watched {
    observer: Observer,
    before: Option<(Instant, Statistics)>,
}

impl Watched {
    fn frame(&mut self, config: &Config) -> String {
        let now = Instant::now();
        let seen = self.observer.look();
        let rates = self.before.as_ref().map(|(then, statistics)| Rates {
            seconds: now.duration_since(*then).as_secs_f64().max(1e-3),
            before: statistics,
            now: &seen.inspection.statistics,
        });
        let mut out = format!("cache in {}\n", config.instance_dir().display());
        pools(&mut out, config, &seen);
        events(&mut out, rates.as_ref(), &seen.inspection.statistics);
        members(&mut out, &seen);
        trouble(&mut out, &seen.inspection);
        self.before = Some((now, seen.inspection.statistics));
        out
    }
}

fn pools(out: &mut String, config: &Config, seen: &Inspected) {
    let facts = seen.shard_bytes.iter().zip(&seen.pages);
    for (index, (pool, (shard_bytes, pages))) in seen.inspection.pools.iter().zip(facts).enumerate()
    {
        let name = config.pool.get(index).map_or("", |pool| pool.name.as_str());
        let slots = u64::from(pool.slots) + u64::from(pool.reserved);
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "\npool {index} {name}: {slots} slots of {shard_bytes} bytes on {pages}\n  ready    {}\n  \
             pinned   {}\n  filling {}  failed {}  draining {}  free {}  idle {}  oldest fill {} ms",
            bar(pool.ready, slots),
            bar(pool.pinned, slots),
            pool.filling,
            pool.failed,
            pool.draining,
            pool.free,
            pool.idle,
            pool.oldest_fill_ms,
        );
    }
}

/// A part of a whole, drawn and in per cent.
fn bar(part: u64, whole: u64) -> String {
    let share = |most: u64| part.saturating_mul(most).checked_div(whole).unwrap_or(0).min(most);
    let full = usize::try_from(share(BAR as u64)).unwrap_or(0);
    let permille = share(1000);
    format!(
        "[{}{}] {part} ({}.{} %)",
        "#".repeat(full),
        " ".repeat(BAR - full),
        permille / 10,
        permille % 10
    )
}

/// What happened between two looks.
struct Rates<'a> {
    seconds: f64,
    before: &'a Statistics,
    now: &'a Statistics,
}

impl Rates<'_> {
    #[expect(clippy::cast_precision_loss, reason = "shown with one digit")]
    fn of(&self, count: impl Fn(&Statistics) -> u64) -> f64 {
        // Another cache may live here by now.
        count(self.now).saturating_sub(count(self.before)) as f64 / self.seconds
    }
}

fn events(out: &mut String, rates: Option<&Rates<'_>>, total: &Statistics) {
    type Of = fn(&Statistics) -> u64;
    let shown: [(&str, Of); 7] = [
        ("hits", |s| s.hits),
        ("owners", |s| s.owners),
        ("waiters", |s| s.waiters),
        ("fulls", |s| s.fulls),
        ("publishes", |s| s.publishes),
        ("evictions", |s| s.evictions),
        ("failures", |s| s.failures),
    ];
    let _ = writeln!(out, "\n{:<10} {:>12} {:>16}", "event", "per second", "in all");
    for (name, of) in shown {
        let rate = rates.map_or_else(|| "-".to_owned(), |rates| format!("{:.1}", rates.of(of)));
        let _ = writeln!(out, "{name:<10} {rate:>12} {:>16}", of(total));
    }
    if let Some(rates) = rates {
        let asked = |s: &Statistics| s.hits + s.owners + s.waiters + s.fulls;
        let all = rates.of(asked);
        if all > 0.0 {
            let _ = writeln!(out, "hit ratio  {:>10.1} %", 100.0 * rates.of(|s| s.hits) / all);
        }
    }
}

fn members(out: &mut String, seen: &Inspected) {
    let _ = writeln!(
        out,
        "\n{:>4} {:>9} {:<12} {:>12} {:>6} state",
        "seat", "process", "role", "pinned slots", "fills"
    );
    for member in seen.inspection.members.iter().filter(|m| m.index != seen.observer) {
        let _ = writeln!(
            out,
            "{:>4} {:>9} {:<12} {:>12} {:>6} {:?}",
            member.index,
            member.pid,
            role(member.device_id),
            member.pins,
            member.filling,
            member.state,
        );
    }
}

fn trouble(out: &mut String, seen: &Inspection) {
    let total = &seen.statistics;
    let _ = writeln!(
        out,
        "\ndeaths {}  slots recovered {}  pins recovered {}  expelled {}  corruptions {}  contradictions {}",
        total.deaths,
        total.slots_recovered,
        total.pins_recovered,
        total.expelled,
        total.corruptions,
        seen.problems.len(),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_never_longer_than_full() {
        for (part, whole, full, share) in [
            (0, 8, 0, "0.0"),
            (3, 8, 15, "37.5"),
            (8, 8, 40, "100.0"),
            (9, 8, 40, "100.0"),
            (1, 0, 0, "0.0"),
        ] {
            let text = bar(part, whole);
            assert_eq!(text.matches('#').count(), full, "{text}");
            assert_eq!(text.find(']'), Some(BAR + 1), "{text}");
            assert!(text.ends_with(&format!("{part} ({share} %)")), "{text}");
        }
    }
}
