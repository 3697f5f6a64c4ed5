//! Progress on a terminal.
//!
//! Owns: the bars on stderr; those alive at once stand below each other.
//! **Invariant:** nothing is drawn when stderr is no terminal or the caller asked for quiet, so
//! logs stay clean; results never depend on it.

use std::{io::IsTerminal as _, sync::LazyLock, time::Duration};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The clock of a bar runs on while a step takes long.
const TICK: Duration = Duration::from_secs(1);

/// All bars of the process.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// A progress bar that vanishes when it is dropped. May be shared between threads by reference.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar of `steps` steps.
    pub fn new(label: &str, steps: u64, quiet: bool) -> Self {
        let shown = !quiet && std::io::stderr().is_terminal();
        let bar = if shown {
            BARS.add(ProgressBar::new(steps))
        } else {
            ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::hidden())
        };
        let form = "{msg:28} [{bar:32}] {percent:>3} % {elapsed_precise} eta {eta}";
        if shown {
            bar.enable_steady_tick(TICK);
        }
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

    /// Takes all bars away while something is printed.
    pub fn suspend<T>(print: impl FnOnce() -> T) -> T {
        BARS.suspend(print)
    }

    /// How many steps are done.
    pub fn done(&self) -> u64 {
        self.0.position()
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
        BARS.remove(&self.0);
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
