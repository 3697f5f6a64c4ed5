//! Two runs side by side.
//!
//! Owns: the pairing of figures, the verdict on each, and `ucm-bench compare`.
//! **Invariant:** a difference counts only when it is larger than the floor *and* significant.

use std::path::PathBuf;

use serde_json::Value;

use crate::{
    cli::{Common, print},
    document::Document,
    error::BenchError,
    run_file::RunFile,
    stats::rank_sum_p,
    table::Table,
};

/// Options of `ucm-bench compare`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The run to compare with (run.json)
    first: PathBuf,
    /// The run to judge (run.json)
    second: PathBuf,
    /// Differences up to this many percent are never called a change
    #[arg(long, value_name = "PCT", default_value_t = 5.0)]
    floor_pct: f64,
    /// Largest p-value of the rank-sum test that counts as significant
    #[arg(long, value_name = "P", default_value_t = 0.01)]
    alpha: f64,
    /// Exit with code 1 when something got worse
    #[arg(long)]
    fail_on_worse: bool,
}

/// What is said about one figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Noise, or too small to matter.
    Same,
    /// Significantly better.
    Better,
    /// Significantly worse.
    Worse,
    /// Significantly different, and the name does not say which way is good.
    Changed,
    /// Larger than the floor, but too few or too noisy samples to tell.
    Unclear,
}

/// One figure in both runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// Subcommand, with a number when it ran several times.
    pub document: String,
    /// The field.
    pub field: String,
    /// Median in the first run.
    pub first: f64,
    /// Median in the second run.
    pub second: f64,
    /// p-value of the rank-sum test; `None` for exact values without samples.
    pub p: Option<f64>,
    /// What it means.
    pub verdict: Verdict,
}

/// All paired figures, and what could not be paired.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Comparison {
    /// The figures that both runs have.
    pub changes: Vec<Change>,
    /// What stands in one run only, or was run with other settings.
    pub unpaired: Vec<String>,
}

/// Pairs the documents (by subcommand and settings) and their figures.
pub fn compare(first: &RunFile, second: &RunFile, floor: f64, alpha: f64) -> Comparison {
    let mut comparison = Comparison::default();
    let mut rest: Vec<&Document> = second.documents().iter().collect();
    for (number, before) in first.documents().iter().enumerate() {
        let pair = rest.iter().position(|after| {
            after.command() == before.command() && after.configuration() == before.configuration()
        });
        match pair {
            Some(at) => {
                let name = format!("{}#{number}", before.command());
                let after = rest.remove(at);
                comparison.changes.extend(compare_documents(&name, before, after, floor, alpha));
            }
            None => comparison.unpaired.push(format!("{} only in the first run", label(before))),
        }
    }
    let more = rest.into_iter().map(|after| format!("{} only in the second run", label(after)));
    comparison.unpaired.extend(more);
    comparison
}

/// Reads, compares, prints.
pub(crate) fn run(args: &Args, common: &Common) -> Result<(), BenchError> {
    let (first, second) = (RunFile::read(&args.first)?, RunFile::read(&args.second)?);
    let comparison = compare(&first, &second, args.floor_pct / 100.0, args.alpha);
    if common.json {
        print(&comparison.to_json().to_string())?;
    } else {
        print(&comparison.to_table().to_string())?;
        comparison.unpaired.iter().try_for_each(|line| print(line))?;
    }
    if comparison.changes.is_empty() {
        return Err(BenchError::Usage("the runs have no figure in common".to_owned()));
    }
    let worse: Vec<String> = comparison
        .changes
        .iter()
        .filter(|change| change.verdict == Verdict::Worse)
        .map(|change| format!("{}.{}", change.document, change.field))
        .collect();
    if args.fail_on_worse && !worse.is_empty() {
        return Err(BenchError::Assertion(format!("worse: {}", worse.join(", "))));
    }
    Ok(())
}

impl Comparison {
    fn to_table(&self) -> Table {
        let mut table = Table::new(["figure", "A", "B", "B/A", "p", "verdict"]);
        for change in &self.changes {
            let name = &change.field;
            table.row([
                format!("{}.{name}", change.document),
                Table::human(name, &Value::from(change.first)),
                Table::human(name, &Value::from(change.second)),
                format!("{:.3}", change.ratio()),
                change.p.map_or_else(|| "exact".to_owned(), |p| format!("{p:.4}")),
                change.verdict.name().to_owned(),
            ]);
        }
        table
    }

    fn to_json(&self) -> Value {
        let change = |change: &Change| {
            serde_json::json!({
                "document": change.document,
                "field": change.field,
                "first": change.first,
                "second": change.second,
                "ratio": change.ratio(),
                "p": change.p,
                "verdict": change.verdict.name(),
            })
        };
        let changes: Vec<Value> = self.changes.iter().map(change).collect();
        serde_json::json!({"schema_version": 1, "command": "compare", "changes": changes,
            "unpaired": self.unpaired})
    }
}

impl Change {
    /// Second by first; 1 when both are zero.
    #[expect(clippy::float_cmp, reason = "equal values, zeros above all, are exactly a ratio of 1")]
    pub fn ratio(&self) -> f64 {
        if self.first == self.second { 1.0 } else { self.second / self.first }
    }
}

impl Verdict {
    /// One word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Same => "same",
            Self::Better => "better",
            Self::Worse => "WORSE",
            Self::Changed => "changed",
            Self::Unclear => "unclear",
        }
    }
}

fn label(document: &Document) -> String {
    let settings: Vec<String> =
        document.configuration().iter().map(|(name, value)| format!("{name}={value}")).collect();
    format!("{} ({})", document.command(), settings.join(" "))
}

fn compare_documents(
    name: &str,
    before: &Document,
    after: &Document,
    floor: f64,
    alpha: f64,
) -> Vec<Change> {
    let mut changes = Vec::new();
    for (field, first) in before.results().numbers() {
        let base = field.strip_suffix("_min").or_else(|| field.strip_suffix("_max"));
        if base.is_some_and(|base| before.samples().contains_key(base)) {
            continue;
        }
        let Some(second) = after.results().path(&field).and_then(Value::as_f64) else { continue };
        let samples = before.samples().get(&field).zip(after.samples().get(&field));
        let p = samples.map(|(first, second)| rank_sum_p(first, second));
        let mut change =
            Change { document: name.to_owned(), field, first, second, p, verdict: Verdict::Same };
        change.verdict = verdict(&change, floor, alpha);
        changes.push(change);
    }
    changes
}

fn verdict(change: &Change, floor: f64, alpha: f64) -> Verdict {
    let ratio = change.ratio();
    if (ratio - 1.0).abs() <= floor {
        return Verdict::Same;
    }
    if change.p.is_some_and(|p| p > alpha) {
        return Verdict::Unclear;
    }
    match more_is_better(&change.field) {
        None => Verdict::Changed,
        Some(better) if better == (ratio > 1.0) => Verdict::Better,
        Some(_) => Verdict::Worse,
    }
}

/// Which way is good, as far as the name says.
fn more_is_better(field: &str) -> Option<bool> {
    let more = ["_per_s", "hit_ratio", "speedup", "warm_ratio"];
    let less = ["_ns", "_us", "_ms", "cpu_", "wake_ratio", "wrong_", "leaked_", "amplification"];
    let less_at_the_end = ["_s_per_gib", "_bytes_per_slot", "bytes_per_slot", "overlap_ratio"];
    if less_at_the_end.iter().any(|end| field.ends_with(end)) || field.ends_with("cpu_ms_per_s") {
        Some(false)
    } else if more.iter().any(|part| field.contains(part)) {
        Some(true)
    } else if less.iter().any(|part| field.contains(part)) {
        Some(false)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::{Document, RunFile, Verdict, compare};
    use crate::{env::Env, figure::Figure};

    const BASE: [f64; 5] = [100.0, 101.0, 102.0, 103.0, 104.0];

    fn document(command: &str, figures: &[(&str, &[f64])]) -> Document {
        let mut document = Document::new(command, Env::default());
        for (name, samples) in figures {
            document.figure(name, &Figure::of(samples.iter().copied()).unwrap());
        }
        document
    }

    fn verdict_of(field: &str, second: &[f64]) -> Verdict {
        let first = RunFile::new(vec![document("load", &[(field, &BASE)])]);
        let second = RunFile::new(vec![document("load", &[(field, second)])]);
        compare(&first, &second, 0.05, 0.01).changes[0].verdict
    }

    #[test]
    fn only_large_and_significant_differences_count() {
        let slower = BASE.map(|x| x * 1.2);
        let slightly = BASE.map(|x| x + 4.9);
        let noisy = [90.0, 95.0, 120.0, 130.0, 200.0];
        assert_eq!(verdict_of("hit_ns", &slower), Verdict::Worse);
        assert_eq!(verdict_of("hit_ns", &slightly), Verdict::Same);
        assert_eq!(verdict_of("hit_ns", &noisy), Verdict::Unclear);
        assert_eq!(verdict_of("hit_ns", &BASE.map(|x| x * 0.8)), Verdict::Better);
        assert_eq!(verdict_of("hit_ns", &BASE), Verdict::Same);
    }

    #[test]
    fn names_say_which_way_is_good() {
        let more = BASE.map(|x| x * 1.2);
        assert_eq!(verdict_of("warm_bytes_per_s", &more), Verdict::Better);
        assert_eq!(verdict_of("cpu_s_per_gib", &more), Verdict::Worse);
        assert_eq!(verdict_of("waiter_cpu_ms_per_s", &more), Verdict::Worse);
        assert_eq!(verdict_of("backend_loads", &more), Verdict::Changed);
    }

    #[test]
    fn documents_are_paired_by_command_and_settings() {
        let mut a = document("load", &[("cold_wall_us", &BASE)]);
        a.config("ranks", 4);
        let mut b = document("load", &[("cold_wall_us", &BASE)]);
        b.config("ranks", 2);
        let ctrl = document("ctrl", &[("hit_ns", &BASE)]);
        let first = RunFile::new(vec![a.clone(), ctrl.clone()]);
        let second = RunFile::new(vec![ctrl, b]);
        let comparison = compare(&first, &second, 0.05, 0.01);
        assert_eq!(comparison.changes.len(), 1);
        assert_eq!(comparison.changes[0].document, "ctrl#1");
        assert_eq!(
            comparison.unpaired,
            ["load (ranks=4) only in the first run", "load (ranks=2) only in the second run"]
        );
    }

    #[test]
    fn exact_values_need_no_test() {
        let mut first = document("trace", &[]);
        first.result("wrong_bytes", 0);
        first.result("hit_ratio", vec![0.1, 0.2]);
        let mut second = document("trace", &[]);
        second.result("wrong_bytes", 7);
        second.result("hit_ratio", vec![Value::Null, 0.3.into()]);
        let runs = [RunFile::new(vec![first]), RunFile::new(vec![second])];
        let changes = compare(&runs[0], &runs[1], 0.05, 0.01).changes;
        assert_eq!((changes[0].verdict, changes[0].p), (Verdict::Worse, None));
        assert_eq!(changes[1].field, "hit_ratio.1");
        assert_eq!((changes[1].verdict, changes.len()), (Verdict::Better, 2));
    }
}
