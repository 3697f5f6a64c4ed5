//! What cargo says about this workspace.
//!
//! Owns: the parsed `cargo metadata` and the list of source files.
//! **Invariant:** paths handed out are relative to the workspace root, with `/`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use cargo_metadata::{Metadata, MetadataCommand, Package};

use crate::shell::{Failure, Shell};

/// The workspace this xtask belongs to.
#[derive(Debug)]
pub(crate) struct Workspace {
    metadata: Metadata,
}

impl Workspace {
    /// Asks cargo. Needs neither network nor a built workspace.
    pub(crate) fn load() -> Result<Self, Failure> {
        // `cargo run` tells where it was called: a target folder shared by two checkouts may hold
        // the program of the other one.
        let package = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let metadata = MetadataCommand::new()
            .manifest_path(package.join("Cargo.toml"))
            .no_deps()
            .exec()
            .map_err(|error| Failure::new(format!("cargo metadata: {error}")))?;
        Ok(Self { metadata })
    }

    /// The folder of the root `Cargo.toml`.
    pub(crate) fn root(&self) -> &Path {
        self.metadata.workspace_root.as_std_path()
    }

    /// The build folder (`target`, or what `CARGO_TARGET_DIR` says).
    pub(crate) fn target(&self) -> &Path {
        self.metadata.target_directory.as_std_path()
    }

    /// All packages, in the order of the root `Cargo.toml`.
    pub(crate) fn packages(&self) -> Vec<&Package> {
        self.metadata.workspace_packages()
    }

    /// Does this package have a library (and so can have doctests)?
    pub(crate) fn has_library(&self, name: &str) -> bool {
        self.packages()
            .iter()
            .filter(|package| package.name.as_str() == name)
            .flat_map(|package| &package.targets)
            .any(|target| target.is_lib())
    }

    /// Files under version control, and new ones that git does not ignore. Without git: all files
    /// outside `target` and hidden folders.
    pub(crate) fn files(&self) -> Result<Vec<String>, Failure> {
        let git = Shell::program("git")
            .args(&["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .dir(self.root());
        let mut files: Vec<String> = match git.quiet() {
            Some(list) => list.split('\0').filter(|f| !f.is_empty()).map(str::to_owned).collect(),
            None => {
                let mut found = Vec::new();
                walk(self.root(), Path::new(""), &mut found)?;
                found
            }
        };
        files.retain(|file| self.root().join(file).is_file());
        files.sort();
        files.dedup();
        Ok(files)
    }

    /// Reads a file of the workspace as text.
    pub(crate) fn read(&self, file: &str) -> Result<String, Failure> {
        let path = self.root().join(file);
        fs::read(&path)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .map_err(|error| Failure::new(format!("cannot read {}: {error}", path.display())))
    }
}

fn walk(root: &Path, under: &Path, found: &mut Vec<String>) -> Result<(), Failure> {
    let dir = root.join(under);
    let list = fs::read_dir(&dir)
        .map_err(|error| Failure::new(format!("cannot list {}: {error}", dir.display())))?;
    for entry in list.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path: PathBuf = under.join(&name);
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && name != "target" && name != ".git" => {
                walk(root, &path, found)?;
            }
            Ok(kind) if kind.is_file() => found.push(path.to_string_lossy().replace('\\', "/")),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Workspace, walk};

    #[test]
    fn git_and_the_plain_walk_agree_on_sources() {
        let workspace = Workspace::load().unwrap();
        let mut walked = Vec::new();
        walk(workspace.root(), Path::new(""), &mut walked).unwrap();
        let ours = |files: &[String]| -> Vec<String> {
            let mut some: Vec<String> =
                files.iter().filter(|f| f.starts_with("xtask/src/")).cloned().collect();
            some.sort();
            some
        };
        let known = ours(&workspace.files().unwrap());
        assert!(known.iter().any(|file| file == "xtask/src/workspace.rs"));
        assert_eq!(ours(&walked), known);
    }
}
