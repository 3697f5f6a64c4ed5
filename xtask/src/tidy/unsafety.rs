//! Where `unsafe` may stand.
//!
//! Owns: the comparison of the sources with `UNSAFE.md`, and the crates that forbid it.
//! **Invariant:** the list names exactly the files with unsafe code, each with a reason.

use super::{
    Files,
    source::{Keep, code, has_word},
};

const LIST: &str = "UNSAFE.md";
const WITHOUT: &[&str] = &["ucm-queue", "ucm-remote", "ucm-bench", "xtask"];
const FORBID: &str = "#![forbid(unsafe_code)]";

/// Compares sources and list, both ways.
pub(super) fn check(files: &Files) -> Vec<String> {
    let mut problems = Vec::new();
    let listed = match files.text(LIST) {
        Some(text) => entries(text),
        None => {
            problems.push(format!("{LIST}: missing"));
            Vec::new()
        }
    };
    for (file, text) in files.rust() {
        let uses = has_word(&code(text, Keep::CodeOnly), "unsafe");
        let known = listed.iter().any(|(listed, _)| *listed == file);
        if uses && !known {
            problems.push(format!("{file}: unsafe code; add to {LIST}: - `{file}`: <why>"));
        } else if known && !uses {
            problems.push(format!("{LIST}: {file} has no unsafe code any more, remove its line"));
        }
        if is_root_without(file) && !code(text, Keep::CodeOnly).contains(FORBID) {
            problems.push(format!("{file}: must say {FORBID}"));
        }
    }
    for (file, reason) in listed {
        if files.text(file).is_none() {
            problems.push(format!("{LIST}: {file} does not exist"));
        }
        if reason.len() < 10 {
            problems.push(format!("{LIST}: {file} has no reason"));
        }
    }
    problems
}

/// List lines: "- `path`: reason".
fn entries(text: &str) -> Vec<(&str, &str)> {
    text.lines()
        .filter_map(|line| line.trim_start().strip_prefix("- `")?.split_once('`'))
        .filter(|(file, _)| file.ends_with(".rs"))
        .map(|(file, reason)| (file, reason.trim_start_matches([':', ' '])))
        .collect()
}

fn is_root_without(file: &str) -> bool {
    WITHOUT.iter().any(|package| {
        file.strip_prefix(package)
            .is_some_and(|rest| rest == "/src/lib.rs" || rest == "/src/main.rs")
    })
}

#[cfg(test)]
mod tests {
    use super::{Files, check};

    #[test]
    fn unlisted_stale_and_unforbidden_are_found() {
        let good = Files::of(&[
            ("UNSAFE.md", "- `a/src/map.rs`: maps memory\n"),
            ("a/src/map.rs", "fn f() { unsafe { g() } }"),
            ("xtask/src/main.rs", "//! x\n#![forbid(unsafe_code)]\n"),
        ]);
        assert_eq!(check(&good), Vec::<String>::new());
        let bad = Files::of(&[
            ("UNSAFE.md", "- `a/src/old.rs`: maps memory\n- `a/src/gone.rs`: why\n"),
            ("a/src/old.rs", "//! no unsafe here\n"),
            ("a/src/new.rs", "unsafe impl Send for X {}"),
            ("xtask/src/main.rs", "//! `#![forbid(unsafe_code)]`\n"),
        ]);
        let problems = check(&bad);
        assert_eq!(problems.len(), 5, "{problems:#?}");
        for (problem, part) in problems.iter().zip(["old.rs", "new.rs", "must say", "gone", "gone"])
        {
            assert!(problem.contains(part), "{problem}");
        }
    }
}
