//! Plots as data.
//!
//! Owns: what a workload says about a picture; `report` draws it.
//! **Invariant:** a plot can be written to and read from a run's file.

use serde::{Deserialize, Serialize};

/// How the points are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlotKind {
    /// Points joined by lines.
    Lines,
    /// One bar for each point; several lines stand side by side.
    Bars,
}

/// One picture of the report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plot {
    /// What it shows.
    pub title: String,
    /// The horizontal axis with its unit.
    pub x_label: String,
    /// The vertical axis with its unit.
    pub y_label: String,
    /// How the points are shown.
    pub kind: PlotKind,
    /// Logarithmic horizontal axis (all x must be positive).
    pub x_log: bool,
    /// Names instead of numbers on the horizontal axis: point x = n stands at name n.
    pub x_names: Vec<String>,
    /// What is drawn.
    pub lines: Vec<Line>,
}

/// One named row of points.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Its name in the legend.
    pub name: String,
    /// (x, y).
    pub points: Vec<(f64, f64)>,
}

impl Plot {
    /// An empty plot of lines.
    pub fn lines(title: &str, x_label: &str, y_label: &str) -> Self {
        Self {
            title: title.to_owned(),
            x_label: x_label.to_owned(),
            y_label: y_label.to_owned(),
            kind: PlotKind::Lines,
            x_log: false,
            x_names: Vec::new(),
            lines: Vec::new(),
        }
    }

    /// An empty plot of bars, one group for each name.
    pub fn bars<S: Into<String>>(
        title: &str,
        y_label: &str,
        names: impl IntoIterator<Item = S>,
    ) -> Self {
        Self {
            kind: PlotKind::Bars,
            x_names: names.into_iter().map(Into::into).collect(),
            ..Self::lines(title, "", y_label)
        }
    }

    /// Makes the horizontal axis logarithmic.
    #[must_use]
    pub fn x_log(mut self) -> Self {
        self.x_log = true;
        self
    }

    /// Adds a line.
    pub fn line(&mut self, name: &str, points: impl IntoIterator<Item = (f64, f64)>) {
        self.lines.push(Line { name: name.to_owned(), points: points.into_iter().collect() });
    }

    /// Adds the heights of bars, in the order of the names.
    pub fn heights(&mut self, name: &str, heights: impl IntoIterator<Item = f64>) {
        let points = heights.into_iter().scan(0.0, |x, y| {
            let at = *x;
            *x += 1.0;
            Some((at, y))
        });
        self.line(name, points);
    }
}
