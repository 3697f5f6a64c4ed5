//! Progress on a terminal.
//!
//! Owns: the bar on stderr.
//! **Invariant:** nothing is drawn when stderr is no terminal or the caller asked for quiet, so
//! logs stay clean; results never depend on it.

use std::io::IsTerminal as _;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A progress bar that vanishes when it is dropped. May be shared between threads by reference.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar of `steps` steps.
    pub fn new(label: &str, steps: u64, quiet: bool) -> Self {
        let shown = !quiet && std::io::stderr().is_terminal();
        let target =
            if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(steps), target);
        let form = "{msg:24} [{bar:32}] {pos}/{len} {elapsed_precise} eta {eta}";
        if let Ok(style) = ProgressStyle::with_template(form) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(label.to_owned());
        Self(bar)
    }

    /// Says what is going on now.
    pub fn label(&self, label: &str) {
        self.0.set_message(label.to_owned());
    }

    /// `steps` more are done.
    pub fn advance(&self, steps: u64) {
        self.0.inc(steps);
    }

    /// How many steps are done.
    pub fn done(&self) -> u64 {
        self.0.position()
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::Progress;

    #[test]
    fn steps_are_counted_even_when_hidden() {
        let progress = Progress::new("x", 3, true);
        progress.advance(2);
        progress.label("y");
        assert_eq!(progress.done(), 2);
    }
}
