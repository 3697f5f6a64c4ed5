//! Reasons for dependencies.
//!
//! Owns: the comparison of `cargo metadata` with `docs/dependencies.md`.
//! **Invariant:** no crate is depended on without a written reason, and no reason outlives its
//! crate (rows below "Chosen, not used yet" are plans).

use std::collections::BTreeSet;

use super::Files;
use crate::workspace::Workspace;

const DOCUMENT: &str = "docs/dependencies.md";

/// Looks for each foreign dependency's row.
pub(super) fn check(workspace: &Workspace, files: &Files) -> Vec<String> {
    let packages = workspace.packages();
    let used: BTreeSet<&str> = packages
        .iter()
        .flat_map(|package| &package.dependencies)
        .filter(|dependency| dependency.path.is_none())
        .map(|dependency| dependency.name.as_str())
        .collect();
    compare(&used, files.text(DOCUMENT).unwrap_or(""))
}

fn compare(used: &BTreeSet<&str>, document: &str) -> Vec<String> {
    let present = document.split("\n## Chosen").next().unwrap_or(document);
    // The first cell of a row names one or more crates in backticks.
    let documented: BTreeSet<&str> = present
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split(" | ").next())
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .collect();
    let missing = used.difference(&documented);
    let stale = documented.difference(used);
    missing
        .map(|name| format!("{DOCUMENT}: no row says why `{name}` is used"))
        .chain(stale.map(|name| format!("{DOCUMENT}: `{name}` is not used any more")))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::compare;

    #[test]
    fn missing_and_stale_rows_are_found() {
        let document = "| crate | why |\n|---|---|\n| `a`, `b` | not `c` |\n| `old` | gone |\n\
                        also `d`\n\n## Chosen, not used yet\n\n| `plan` | later |\n";
        let problems = compare(&BTreeSet::from(["a", "b", "c", "d"]), document);
        assert_eq!(problems.len(), 3, "{problems:?}");
        for (problem, name) in problems.iter().zip(["`c`", "`d`", "`old`"]) {
            assert!(problem.contains(name), "{problem}");
        }
    }
}
