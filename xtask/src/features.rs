//! `cargo xtask features`: every feature of every package builds alone, and all together.
//!
//! Owns: the list of feature sets to try.
//! **Invariant:** the sets come from `cargo metadata`, so a new feature cannot be forgotten. A random
//! choice names its seed.

use std::time::SystemTime;

use crate::{
    shell::{Failure, Shell, fail, say},
    workspace::Workspace,
};

/// Up to this many features all pairs are tried as well.
const PAIRS_UP_TO: usize = 6;

/// Features that only tests use.
const FOR_TESTS: [&str; 2] = ["failpoints", "testing"];

/// Options of `cargo xtask features`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Only these packages (default: all)
    #[arg(short, long = "package", value_name = "NAME")]
    packages: Vec<String>,
    /// Print the feature sets, build nothing
    #[arg(long)]
    list: bool,
    /// At most this many pairs of each package, chosen at random
    #[arg(long, value_name = "N")]
    pairs: Option<usize>,
    /// Repeat the choice of an earlier run
    #[arg(long)]
    seed: Option<u64>,
}

impl Args {
    /// What continuous integration runs: over some runs, all pairs.
    pub(crate) fn standard() -> Self {
        Self { pairs: Some(4), ..Self::default() }
    }
}

/// Is clippy installed for this toolchain?
pub(crate) fn has_clippy() -> bool {
    Shell::cargo(&["clippy", "--version"]).quiet().is_some()
}

/// Checks each package with each of its feature sets, warnings are errors; of pairs the library.
pub(crate) fn run(args: &Args, workspace: &Workspace) -> Result<(), Failure> {
    let clippy = has_clippy();
    if !clippy {
        say("clippy is not installed: the feature sets are only built");
    }
    let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let seed = args.seed.unwrap_or_else(|| u64::from(now().subsec_nanos()));
    if let Some(pairs) = args.pairs {
        say(&format!("features: --pairs {pairs} --seed {seed}"));
    }
    let mut failed = Vec::new();
    for package in workspace.packages() {
        let name = package.name.as_str();
        if !args.packages.is_empty() && !args.packages.iter().any(|p| p == name) {
            continue;
        }
        let features: Vec<&str> = package
            .features
            .keys()
            .map(String::as_str)
            .filter(|feature| *feature != "default" && !feature.starts_with("__"))
            .collect();
        for set in feature_sets(&features, args.pairs.unwrap_or(usize::MAX), seed) {
            let what = format!("{name} [{}]", set.join(","));
            if args.list {
                crate::shell::print(&what);
                continue;
            }
            let command = if clippy { "clippy" } else { "check" };
            let mut shell = Shell::cargo(&[command, "--quiet", "-p", name]).args(&[
                "--no-default-features",
                "--features",
                &set.join(","),
            ]);
            // Tests differ with each feature, and with all of them; pairs meet in the library.
            if set.len() != 2 || set.len() == features.len() {
                shell = shell.args(&["--all-targets"]);
            }
            shell = if clippy {
                shell.args(&["--", "-D", "warnings"])
            } else {
                shell.env("RUSTFLAGS", "-D warnings")
            };
            if !shell.status()? {
                failed.push(what);
            }
        }
    }
    if !args.list && args.packages.is_empty() {
        // The checks above do not link; this does, with every engine.
        let build = Shell::cargo(&["build", "-p", "ucm", "--all-features"]);
        if !build.status()? {
            failed.push("ucm [all features], linked".to_owned());
        }
    }
    if failed.is_empty() {
        Ok(())
    } else {
        fail(format!("feature sets that do not build cleanly: {}", failed.join("; ")))
    }
}

/// None, each alone, pairs where they are few and no tests' own (at most so many), all.
fn feature_sets<'a>(features: &[&'a str], most_pairs: usize, mut seed: u64) -> Vec<Vec<&'a str>> {
    let mut sets = vec![Vec::new()];
    sets.extend(features.iter().map(|feature| vec![*feature]));
    // What only tests use changes nothing of how the others fit together.
    let used: Vec<_> = features.iter().filter(|feature| !FOR_TESTS.contains(feature)).collect();
    if used.len() <= PAIRS_UP_TO {
        let mut pairs = Vec::new();
        for (at, first) in used.iter().enumerate() {
            pairs.extend(used.iter().skip(at + 1).map(|second| vec![**first, **second]));
        }
        while pairs.len() > most_pairs {
            // Knuth's multiplicative generator; its low bits are poor.
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = usize::try_from(seed >> 33).unwrap_or(0) % pairs.len();
            pairs.swap_remove(at);
        }
        sets.extend(pairs);
    }
    let all = features.to_vec();
    if !sets.contains(&all) {
        sets.push(all);
    }
    sets
}

#[cfg(test)]
mod tests {
    #[test]
    fn sets_are_none_each_pairs_and_all_without_repeats() {
        let feature_sets = |features| super::feature_sets(features, usize::MAX, 0);
        assert_eq!(feature_sets(&[]), [Vec::<&str>::new()]);
        assert_eq!(feature_sets(&["a"]), [vec![], vec!["a"]]);
        assert_eq!(
            feature_sets(&["a", "b", "c"]),
            [
                vec![],
                vec!["a"],
                vec!["b"],
                vec!["c"],
                vec!["a", "b"],
                vec!["a", "c"],
                vec!["b", "c"],
                vec!["a", "b", "c"],
            ]
        );
        let sets = feature_sets(&["a", "testing"]);
        assert_eq!(sets, [vec![], vec!["a"], vec!["testing"], vec!["a", "testing"]]);
        assert_eq!(feature_sets(&["a", "b", "testing"]).len(), 1 + 3 + 1 + 1);
        let many = ["a", "b", "c", "d", "e", "f", "g"];
        assert_eq!(feature_sets(&many).len(), 1 + 7 + 1);
    }

    /// Mutant: always the same ones.
    #[test]
    fn over_some_seeds_all_pairs_are_chosen() {
        let features = ["a", "b", "c", "d", "e", "f"];
        let chosen = |seed| super::feature_sets(&features, 4, seed);
        assert!((0..50).all(|seed| chosen(seed).len() == 1 + 6 + 4 + 1));
        let mut all: Vec<_> = (0..50).flat_map(chosen).filter(|set| set.len() == 2).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 15);
    }
}
