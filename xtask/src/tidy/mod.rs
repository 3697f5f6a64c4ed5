//! `cargo xtask tidy`: house rules that a compiler cannot check.
//!
//! Owns: the list of checks. Each check returns problems as text with the file and the remedy.
//! **Invariant:** a check reads files and `cargo metadata` only; just `--bless` writes, and only
//! the layout hashes of `docs/format.md`.

mod dependencies;
mod failures;
mod layers;
mod layout;
mod source;
mod text;
mod unsafety;

use crate::{
    shell::{Failure, fail, print},
    workspace::Workspace,
};

/// Options of `cargo xtask tidy`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Write the present layout hashes into docs/format.md (after its tables were brought up to
    /// date)
    #[arg(long)]
    bless: bool,
}

/// Runs all checks and prints every problem.
pub(crate) fn run(args: &Args, workspace: &Workspace) -> Result<(), Failure> {
    if args.bless {
        layout::bless(workspace)?;
    }
    let problems = problems(workspace)?;
    problems.iter().for_each(|problem| print(problem));
    match problems.len() {
        0 => Ok(()),
        1 => fail("tidy: 1 problem"),
        more => fail(format!("tidy: {more} problems")),
    }
}

fn problems(workspace: &Workspace) -> Result<Vec<String>, Failure> {
    let files = Files::load(workspace)?;
    let mut problems = layers::check(workspace);
    problems.extend(dependencies::check(workspace, &files));
    problems.extend(failures::check(&files));
    problems.extend(unsafety::check(&files));
    problems.extend(text::check(&files));
    problems.extend(layout::check(&files));
    Ok(problems)
}

/// The text files of the workspace, read once.
#[derive(Debug, Default)]
struct Files(Vec<(String, String)>);

impl Files {
    fn load(workspace: &Workspace) -> Result<Self, Failure> {
        let mut files = Vec::new();
        for file in workspace.files()? {
            let text = workspace.read(&file)?;
            if !text.contains('\0') {
                files.push((file, text));
            }
        }
        Ok(Self(files))
    }

    fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(file, text)| (file.as_str(), text.as_str()))
    }

    fn rust(&self) -> impl Iterator<Item = (&str, &str)> {
        self.iter().filter(|(file, _)| file.ends_with(".rs"))
    }

    fn text(&self, wanted: &str) -> Option<&str> {
        self.iter().find(|(file, _)| *file == wanted).map(|(_, text)| text)
    }

    #[cfg(test)]
    fn of(files: &[(&str, &str)]) -> Self {
        Self(files.iter().map(|(file, text)| ((*file).to_owned(), (*text).to_owned())).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::{Workspace, problems};

    #[test]
    fn workspace_is_tidy() {
        let problems = problems(&Workspace::load().unwrap()).unwrap();
        assert!(problems.is_empty(), "{}", problems.join("\n"));
    }
}
