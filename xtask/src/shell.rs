//! Running programs: prints each command line, then runs it.
//!
//! Owns: child processes and everything xtask prints itself.
//! **Invariant:** a command is printed before it runs, exactly as a person could type it.

use std::{
    ffi::OsString,
    fmt, io,
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Command, Stdio},
};

/// Why a command of xtask failed.
#[derive(Debug)]
pub(crate) struct Failure {
    /// For a person; empty when all was said before.
    pub(crate) message: String,
    /// The exit code of xtask, never 0.
    pub(crate) code: u8,
}

impl Failure {
    /// A failure with exit code 1.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 1 }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Shorthand for a failure with this message.
pub(crate) fn fail<T>(message: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::new(message))
}

/// Prints one line on stderr. A closed stderr is no reason to stop.
pub(crate) fn say(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Prints one line on stdout. A closed stdout is no reason to stop.
pub(crate) fn print(line: &str) {
    let _ = writeln!(io::stdout().lock(), "{line}");
}

/// A program with its arguments and environment.
#[derive(Debug)]
pub(crate) struct Shell {
    program: OsString,
    args: Vec<String>,
    env: Vec<(String, String)>,
    dir: Option<OsString>,
}

impl Shell {
    /// The cargo that runs this xtask, so that the pinned toolchain stays in use.
    pub(crate) fn cargo(args: &[&str]) -> Self {
        Self::program(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())).args(args)
    }

    /// Any program, found in `PATH` or by path.
    pub(crate) fn program(program: impl Into<OsString>) -> Self {
        Self { program: program.into(), args: Vec::new(), env: Vec::new(), dir: None }
    }

    /// Appends arguments.
    pub(crate) fn args<S: AsRef<str>>(mut self, args: &[S]) -> Self {
        self.args.extend(args.iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable for the child.
    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Runs the child in this directory.
    pub(crate) fn dir(mut self, dir: &Path) -> Self {
        self.dir = Some(dir.into());
        self
    }

    /// Runs it; output goes straight to the terminal. The failure has its exit code.
    pub(crate) fn run(&self) -> Result<(), Failure> {
        match self.code()? {
            0 => Ok(()),
            code => Err(Failure { code, ..Failure::new(format!("failed: {self}")) }),
        }
    }

    /// Runs it; tells whether it ended with code 0.
    pub(crate) fn status(&self) -> Result<bool, Failure> {
        Ok(self.code()? == 0)
    }

    /// Runs it; its exit code, 1 when a signal ended it.
    fn code(&self) -> Result<u8, Failure> {
        say(&format!("$ {self}"));
        let status = self.command().status().map_err(|error| self.cannot_start(&error))?;
        Ok(status.code().map_or(1, |code| u8::try_from(code).unwrap_or(1)))
    }

    /// Runs it, shows its stdout line by line and hands each line to `line` as well. Tells whether
    /// it ended with code 0.
    pub(crate) fn watch(&self, mut line: impl FnMut(&str)) -> Result<bool, Failure> {
        say(&format!("$ {self}"));
        let mut child = self
            .command()
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| self.cannot_start(&error))?;
        if let Some(stdout) = child.stdout.take() {
            for bytes in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
                let text = String::from_utf8_lossy(&bytes);
                print(&text);
                line(text.trim_end_matches('\r'));
            }
        }
        let status = child.wait().map_err(|error| self.cannot_start(&error))?;
        Ok(status.success())
    }

    /// Runs it quietly; its stdout when it ended with code 0, else `None`.
    pub(crate) fn quiet(&self) -> Option<String> {
        let output = self.command().stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs it with its messages on the terminal; its stdout. The failure has its exit code.
    pub(crate) fn stdout(&self) -> Result<String, Failure> {
        say(&format!("$ {self}"));
        let mut command = self.command();
        command.stdin(Stdio::null()).stderr(Stdio::inherit());
        let output = command.output().map_err(|error| self.cannot_start(&error))?;
        if !output.status.success() {
            let code = output.status.code().map_or(1, |code| u8::try_from(code).unwrap_or(1));
            return Err(Failure { code, ..Failure::new(format!("failed: {self}")) });
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args).envs(self.env.iter().map(|(name, value)| (name, value)));
        if let Some(dir) = &self.dir {
            command.current_dir(dir);
        }
        command
    }

    fn cannot_start(&self, error: &io::Error) -> Failure {
        Failure::new(format!("cannot run `{self}`: {error}"))
    }
}

impl fmt::Display for Shell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in &self.env {
            write!(f, "{name}={} ", quoted(value))?;
        }
        let name = Path::new(&self.program).file_name().unwrap_or(&self.program);
        f.write_str(&name.to_string_lossy())?;
        for arg in &self.args {
            write!(f, " {}", quoted(arg))?;
        }
        Ok(())
    }
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::Shell;

    #[test]
    fn prints_what_a_person_could_type() {
        let shell = Shell::program("/usr/bin/cargo")
            .args(&["test", "a b", "it's"])
            .env("RUSTFLAGS", "-D w");
        assert_eq!(shell.to_string(), r"RUSTFLAGS='-D w' cargo test 'a b' 'it'\''s'");
    }

    #[test]
    fn watch_hands_over_every_line_and_the_exit_state() {
        let mut lines = Vec::new();
        let good = Shell::program("sh").args(&["-c", "printf 'one\\ntwo'; exit 3"]);
        let ok = good.watch(|line| lines.push(line.to_owned())).unwrap();
        assert_eq!((ok, lines), (false, vec!["one".to_owned(), "two".to_owned()]));
        assert!(Shell::program("no-such-program-here").run().is_err());
    }

    #[test]
    fn a_failure_keeps_the_exit_code() {
        let code = |script: &str| {
            Shell::program("sh").args(&["-c", script]).run().map_err(|failure| failure.code)
        };
        assert_eq!(code("exit 0"), Ok(()));
        assert_eq!(code("exit 5"), Err(5));
        assert_eq!(code("kill -9 $$"), Err(1));
    }
}
