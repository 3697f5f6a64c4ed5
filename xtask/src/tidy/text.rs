//! Rules about the text of files.
//!
//! Owns: module headers, file length, words that must not appear, the changelog's open section.
//! **Invariant:** each rule names the line it dislikes.

use super::Files;

const MAX_LINES: usize = 1000;

/// Texts that name one machine or one registry. Split, so that this file does not contain them.
const DENIED: &[(&str, &str)] = &[
    (concat!("/wo", "rk/"), "a path of one machine"),
    (concat!("/ro", "ot/"), "a path of one machine"),
    (concat!("crates.io", "/api"), "a registry host"),
    (concat!("index.", "crates.io"), "a registry host"),
    (concat!("static.", "crates.io"), "a registry host"),
];

/// Checks every text file.
pub(super) fn check(files: &Files) -> Vec<String> {
    let mut problems = Vec::new();
    for (file, text) in files.rust() {
        problems.extend(header(file, text));
        let lines = text.lines().count();
        if lines > MAX_LINES {
            problems.push(format!("{file}: {lines} lines, more than {MAX_LINES}: split it"));
        }
    }
    for (file, text) in files.iter() {
        for (number, line) in text.lines().enumerate() {
            for (denied, what) in DENIED {
                if line.contains(denied) {
                    problems.push(format!("{file}:{}: {what}: {denied}", number + 1));
                }
            }
        }
    }
    match files.text("CHANGELOG.md") {
        Some(text) if text.lines().any(|line| line == "## [Unreleased]") => {}
        _ => problems.push("CHANGELOG.md: needs a line `## [Unreleased]`".to_owned()),
    }
    problems
}

fn header(file: &str, text: &str) -> Option<String> {
    if !text.starts_with("//!") {
        return Some(format!("{file}: does not start with `//!`: say what it owns"));
    }
    let docs = text.lines().take_while(|line| line.starts_with("//!"));
    let states = docs.into_iter().any(|line| line.contains("**Invariant"));
    let is_module =
        file.contains("/src/") && !file.ends_with("/tests.rs") && !file.contains("/bin/");
    (is_module && !states).then(|| format!("{file}: its `//!` header names no **Invariant:**"))
}

#[cfg(test)]
mod tests {
    use super::{DENIED, Files, MAX_LINES, check};

    const CHANGELOG: (&str, &str) = ("CHANGELOG.md", "# Changelog\n\n## [Unreleased]\n");

    #[test]
    fn good_files_pass() {
        let files = Files::of(&[
            CHANGELOG,
            ("a/src/b.rs", "//! Owns b.\n//! **Invariant:** b is b.\nfn f() {}\n"),
            ("a/src/b/tests.rs", "//! Tests of b.\n"),
            ("a/tests/it/main.rs", "//! Tests of a.\n"),
        ]);
        assert_eq!(check(&files), Vec::<String>::new());
    }

    #[test]
    fn bad_files_are_found() {
        let long = format!("//! **Invariant:** long.\n{}", "\n".repeat(MAX_LINES));
        let denied = format!("ok\nsee {}x\n", DENIED[0].0);
        let files = Files::of(&[
            ("CHANGELOG.md", "## 0.1\n"),
            ("a/src/none.rs", "fn f() {}\n"),
            ("a/src/no_invariant.rs", "//! Owns.\n\n// **Invariant:** too late\n"),
            ("a/src/long.rs", &long),
            ("docs/x.md", &denied),
        ]);
        let problems = check(&files);
        let parts = ["none.rs", "no_invariant.rs", "1001 lines", "docs/x.md:2:", "CHANGELOG"];
        assert_eq!(problems.len(), parts.len(), "{problems:#?}");
        for (problem, part) in problems.iter().zip(parts) {
            assert!(problem.contains(part), "{problem}");
        }
    }
}
