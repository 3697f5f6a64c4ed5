//! Reasons for dependencies.
//!
//! Owns: the comparison of `cargo metadata` with `docs/dependencies.md`.
//! **Invariant:** no crate is depended on without a written reason.

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
    missing(used, files.text(DOCUMENT).unwrap_or(""))
}

fn missing<'a>(used: impl IntoIterator<Item = &'a str>, document: &str) -> Vec<String> {
    let rows: Vec<&str> =
        document.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next()).collect();
    used.into_iter()
        .filter(|name| !rows.iter().any(|row| row.contains(&format!("`{name}`"))))
        .map(|name| format!("{DOCUMENT}: no row says why `{name}` is used"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::missing;

    #[test]
    fn only_a_row_of_its_own_counts() {
        let document = "| crate | why |\n|---|---|\n| `a`, `b` | not `c` |\nalso `d`\n";
        let problems = missing(["a", "b", "c", "d"], document);
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].contains("`c`") && problems[1].contains("`d`"));
    }
}
