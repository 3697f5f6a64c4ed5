//! Shared layouts and their document.
//!
//! Owns: the hash that ties the sources of a shared memory layout to `docs/format.md`. A line
//! `<!-- layout-hash: <source file> <16 hex digits> -->` there says which source the tables
//! describe; comments and white space of the source do not count.
//! **Invariant:** a layout cannot change without somebody looking at its table.

use std::fs;

use super::{
    Files,
    source::{Keep, code},
};
use crate::{
    shell::{Failure, print},
    workspace::Workspace,
};

const DOCUMENT: &str = "docs/format.md";
const OPEN: &str = "<!-- layout-hash: ";
const CLOSE: &str = " -->";

/// Compares the hashes of the document with the sources.
pub(super) fn check(files: &Files) -> Vec<String> {
    let Some(document) = files.text(DOCUMENT) else {
        return vec![format!("{DOCUMENT}: missing")];
    };
    let mut problems = Vec::new();
    let mut lines = 0;
    for (file, hash) in document.lines().filter_map(marker) {
        lines += 1;
        match files.text(file) {
            None => problems.push(format!("{DOCUMENT}: {file} does not exist")),
            Some(text) if layout_hash(text) != hash => problems.push(format!(
                "{DOCUMENT}: {file} changed: bring the tables up to date, then run \
                 `cargo xtask tidy --bless`"
            )),
            Some(_) => {}
        }
    }
    if lines == 0 {
        problems.push(format!("{DOCUMENT}: no line `{OPEN}<source file> <hash>{CLOSE}`"));
    }
    problems
}

/// Rewrites the hashes of the document.
pub(super) fn bless(workspace: &Workspace) -> Result<(), Failure> {
    let before = workspace.read(DOCUMENT)?;
    let mut after = String::with_capacity(before.len());
    for line in before.lines() {
        match marker(line) {
            Some((file, _)) => {
                let hash = layout_hash(&workspace.read(file)?);
                after.push_str(&format!("{OPEN}{file} {hash}{CLOSE}"));
            }
            None => after.push_str(line),
        }
        after.push('\n');
    }
    if after != before {
        fs::write(workspace.root().join(DOCUMENT), after)
            .map_err(|error| Failure::new(format!("cannot write {DOCUMENT}: {error}")))?;
        print(&format!("{DOCUMENT}: layout hashes rewritten"));
    }
    Ok(())
}

fn marker(line: &str) -> Option<(&str, &str)> {
    let inside = line.trim().strip_prefix(OPEN)?.strip_suffix(CLOSE)?;
    inside.rsplit_once(' ').or(Some((inside, "")))
}

fn layout_hash(source: &str) -> String {
    let hash = blake3::hash(code(source, Keep::Literals).as_bytes());
    hash.to_hex().chars().take(16).collect()
}

#[cfg(test)]
mod tests {
    use super::{Files, check, layout_hash};

    #[test]
    fn a_changed_layout_is_noticed_and_a_changed_comment_is_not() {
        let source = "//! Layout.\nstruct A { a: u64 } // eight\n";
        let line = format!("<!-- layout-hash: a/src/layout.rs {} -->\n", layout_hash(source));
        let check = |source: &str| {
            check(&Files::of(&[("docs/format.md", &line), ("a/src/layout.rs", source)]))
        };
        assert_eq!(check(source), Vec::<String>::new());
        assert_eq!(check("//! Other words.\nstruct A {\n    a: u64 }"), Vec::<String>::new());
        assert_eq!(check("struct A { a: u32 }").len(), 1);
    }

    #[test]
    fn a_document_without_hashes_or_sources_is_a_problem() {
        assert_eq!(check(&Files::of(&[])).len(), 1);
        assert_eq!(check(&Files::of(&[("docs/format.md", "# Format\n")])).len(), 1);
        let gone = "<!-- layout-hash: a/src/gone.rs 00 -->\n";
        assert_eq!(check(&Files::of(&[("docs/format.md", gone)])).len(), 1);
    }
}
