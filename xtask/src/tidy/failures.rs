//! The failure guide.
//!
//! Owns: the comparison of the libraries' kinds of errors with `docs/failures.md`.
//! **Invariant:** no kind is without a row that says what to do, and no row outlives its kind.

use std::collections::BTreeSet;

use super::Files;

const DOCUMENT: &str = "docs/failures.md";

/// Enums whose variants a user meets.
const ENUMS: [&str; 6] =
    ["ErrorKind", "FailKind", "DirectoryError", "AgentError", "RangeError", "PagedError"];

/// Looks for each variant's row.
pub(super) fn check(files: &Files) -> Vec<String> {
    let mut kinds = BTreeSet::new();
    for (file, text) in files.rust() {
        let Some((package, path)) = file.split_once('/') else { continue };
        if path.starts_with("src/") && (package == "ucm" || package.starts_with("ucm-")) {
            let library = package.replace('-', "_");
            let all = ENUMS.iter().flat_map(|name| {
                variants(text, name).into_iter().map(move |variant| format!("{name}::{variant}"))
            });
            kinds.extend(all.map(|kind| format!("{library}::{kind}")));
        }
    }
    let document = files.text(DOCUMENT).unwrap_or("");
    let rows: BTreeSet<String> = document
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(kind, _)| kind.to_owned())
        .collect();
    let missing = kinds.difference(&rows);
    missing
        .map(|kind| format!("{DOCUMENT}: no row says what to do about `{kind}`"))
        .chain(rows.difference(&kinds).map(|kind| format!("{DOCUMENT}: there is no `{kind}`")))
        .collect()
}

/// Names of the variants of a public enum, as this project's formatter leaves them.
fn variants<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let begin = format!("\npub enum {name} {{\n");
    let Some((_, rest)) = text.split_once(&begin) else { return Vec::new() };
    let body = rest.split("\n}").next().unwrap_or(rest);
    body.lines()
        .filter_map(|line| line.strip_prefix("    "))
        .filter(|line| line.starts_with(|first: char| first.is_ascii_uppercase()))
        .filter_map(|line| line.split([' ', ',', '(', '{']).next())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{Files, check};

    #[test]
    fn missing_and_stale_rows_are_found() {
        let source = "\n/// Why.\npub enum ErrorKind {\n    /// A.\n    Old = 1,\n    New {\n        \
                      At: u8,\n    },\n    Third(u8),\n}\npub enum Other {\n    Not,\n}\n";
        let files = Files::of(&[
            ("ucm-a/src/error.rs", source),
            ("ucm-a/tests/it.rs", "\npub enum ErrorKind {\n    Test,\n}\n"),
            (
                super::DOCUMENT,
                "| kind |\n| `ucm_a::ErrorKind::Old` | x |\n| `ucm_a::ErrorKind::Gone` | x |\n",
            ),
        ]);
        let problems = check(&files);
        assert_eq!(problems.len(), 3, "{problems:?}");
        for (problem, name) in problems.iter().zip(["::New`", "::Third`", "::Gone`"]) {
            assert!(problem.contains(name), "{problem}");
        }
    }
}
