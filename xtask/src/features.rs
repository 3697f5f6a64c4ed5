//! `cargo xtask features`: every feature of every package builds alone, and all together.
//!
//! Owns: the list of feature sets to try.
//! **Invariant:** the sets come from `cargo metadata`, so a new feature cannot be forgotten.

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
        for set in feature_sets(&features) {
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

/// None, each alone, pairs where they are few and no tests' own, all.
fn feature_sets<'a>(features: &[&'a str]) -> Vec<Vec<&'a str>> {
    let mut sets = vec![Vec::new()];
    sets.extend(features.iter().map(|feature| vec![*feature]));
    // What only tests use changes nothing of how the others fit together.
    let used: Vec<_> = features.iter().filter(|feature| !FOR_TESTS.contains(feature)).collect();
    if used.len() <= PAIRS_UP_TO {
        for (at, first) in used.iter().enumerate() {
            sets.extend(used.iter().skip(at + 1).map(|second| vec![**first, **second]));
        }
    }
    let all = features.to_vec();
    if !sets.contains(&all) {
        sets.push(all);
    }
    sets
}

#[cfg(test)]
mod tests {
    use super::feature_sets;

    #[test]
    fn sets_are_none_each_pairs_and_all_without_repeats() {
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
}
