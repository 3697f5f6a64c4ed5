//! Plots as SVG.
//!
//! Owns: the drawing; axes and text take the colour of the page around them. Title and legend are
//! text of the page.
//! **Invariant:** a plot without a point gives an empty frame, never an error or a panic.

use std::ops::Range;

use plotters::{
    coord::{
        ranged1d::{DefaultFormatting, KeyPointHint, Ranged},
        types::RangedCoordf64,
    },
    prelude::*,
};

use crate::{
    error::BenchError,
    plot::{Plot, PlotKind},
};

const SIZE: (u32, u32) = (760, 300);
/// Font size; plotters writes about four fifths of it.
const LABEL: u32 = 16;
/// Fewer groups of bars than this do not get wider.
const LEAST_GROUPS: f64 = 4.0;
/// Points with up to this many different x are marked each.
const MARKED: usize = 16;

/// Readable on light and on dark ground.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0x3b, 0x82, 0xf6),
    RGBColor(0xf5, 0x9e, 0x0b),
    RGBColor(0x10, 0xb9, 0x81),
    RGBColor(0xef, 0x44, 0x44),
    RGBColor(0x8b, 0x5c, 0xf6),
    RGBColor(0x64, 0x74, 0x8b),
    RGBColor(0xec, 0x48, 0x99),
    RGBColor(0x14, 0xb8, 0xd6),
];

/// The colour of a plot's line, as the page writes it.
pub(super) fn colour(number: usize) -> String {
    let RGBColor(red, green, blue) = colour_of(number);
    format!("#{red:02x}{green:02x}{blue:02x}")
}

fn colour_of(number: usize) -> RGBColor {
    COLOURS.get(number % COLOURS.len()).copied().unwrap_or(BLACK)
}

/// Draws one plot.
pub(super) fn svg(plot: &Plot) -> Result<String, BenchError> {
    let mut svg = String::new();
    draw(plot, &mut svg)
        .map_err(|error| BenchError::Usage(format!("cannot draw `{}`: {error}", plot.title)))?;
    // The backend writes colours as attributes: black becomes the colour of the text around.
    Ok(svg
        .replace("\"#000000\"", "\"currentColor\"")
        .replacen("<svg ", "<svg role=\"img\" ", 1)
        .replace(&format!("width=\"{}\" height=\"{}\" viewBox", SIZE.0, SIZE.1), "viewBox"))
}

fn draw(plot: &Plot, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    let (x, y) = ranges(plot);
    let ticks = x_ticks(plot, x);
    let tick_count = ticks.len();
    let x_axis = Axis { numbers: (x.0..x.1).into(), ticks };
    let mut chart = ChartBuilder::on(&area)
        .margin(10)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(x_axis, y.0..y.1)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.15))
        .axis_style(BLACK.mix(0.5))
        .label_style(("sans-serif", LABEL).into_font().color(&BLACK))
        .axis_desc_style(("sans-serif", LABEL).into_font().color(&BLACK))
        .x_desc(&plot.x_label)
        .y_desc(&plot.y_label)
        .x_labels(tick_count)
        .x_label_formatter(&|x| x_label(plot, *x))
        .y_label_formatter(&|y| short(*y))
        .draw()?;

    let count = plot.lines.len().max(1) as f64;
    for (number, line) in plot.lines.iter().enumerate() {
        let colour = colour_of(number);
        let points = || line.points.iter().map(|(x, y)| (along(plot, *x), *y));
        match plot.kind {
            PlotKind::Lines => {
                chart.draw_series(LineSeries::new(points(), colour.stroke_width(2)))?;
                if line.points.len() <= MARKED {
                    chart.draw_series(points().map(|at| Circle::new(at, 3, colour.filled())))?;
                }
            }
            PlotKind::Bars => {
                let width = 0.8 / count;
                let left = -0.4 + width * number as f64;
                let bar = |(x, y): (f64, f64)| {
                    let corners = [(x + left, 0.0), (x + left + width * 0.92, y)];
                    Rectangle::new(corners, colour.filled())
                };
                chart.draw_series(points().map(bar))?;
            }
        }
    }
    area.present()?;
    drop(chart);
    Ok(())
}

fn along(plot: &Plot, x: f64) -> f64 {
    if plot.x_log { x.max(f64::MIN_POSITIVE).log10() } else { x }
}

/// The visible part of both axes; y starts at zero, so that heights can be compared.
fn ranges(plot: &Plot) -> ((f64, f64), (f64, f64)) {
    let points = || plot.lines.iter().flat_map(|line| &line.points);
    let x = bounds(points().map(|(x, _)| along(plot, *x)));
    let (low, high) = bounds(points().map(|(_, y)| *y));
    let y = (low.min(0.0), if high > 0.0 { high * 1.08 } else { 1.0 });
    if plot.kind == PlotKind::Bars {
        let groups = plot.x_names.len() as f64;
        let room = 0.5 + (LEAST_GROUPS - groups).max(0.0) / 2.0;
        return ((-room, groups - 1.0 + room), y);
    }
    let room = if x.1 > x.0 { (x.1 - x.0) * 0.04 } else { 0.5 };
    ((x.0 - room, x.1 + room), y)
}

/// Where the horizontal axis is labelled: at the points themselves while they are few.
fn x_ticks(plot: &Plot, (low, high): (f64, f64)) -> Vec<f64> {
    if !plot.x_names.is_empty() {
        return (0..plot.x_names.len()).map(|at| at as f64).collect();
    }
    let points = plot.lines.iter().flat_map(|line| &line.points);
    let mut ticks: Vec<f64> =
        points.map(|(x, _)| along(plot, *x)).filter(|x| x.is_finite()).collect();
    ticks.sort_by(f64::total_cmp);
    let apart = (high - low) * 0.05;
    ticks.dedup_by(|next, kept| *next - *kept < apart);
    if (1..=MARKED).contains(&ticks.len()) {
        return ticks;
    }
    RangedCoordf64::from(low..high).key_points(8)
}

/// Numbers with labels at chosen places.
struct Axis {
    numbers: RangedCoordf64,
    ticks: Vec<f64>,
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.numbers.map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, _hint: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.numbers.range()
    }
}

fn bounds(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let finite = values.filter(|value| value.is_finite());
    let found = finite.fold(None, |bounds, value| match bounds {
        None => Some((value, value)),
        Some((low, high)) => Some((f64::min(low, value), f64::max(high, value))),
    });
    found.unwrap_or((0.0, 1.0))
}

fn x_label(plot: &Plot, x: f64) -> String {
    if plot.x_names.is_empty() {
        return short(if plot.x_log { 10_f64.powf(x) } else { x });
    }
    let whole = x.round();
    if (x - whole).abs() > 0.01 || whole < 0.0 {
        return String::new();
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a small whole number that is not negative"
    )]
    let at = whole as usize;
    plot.x_names.get(at).cloned().unwrap_or_default()
}

/// A number of few characters.
fn short(value: f64) -> String {
    let (value, unit) = match value.abs() {
        size if size >= 1e9 => (value / 1e9, "G"),
        size if size >= 1e6 => (value / 1e6, "M"),
        size if size >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let text = if value.abs() >= 100.0 { format!("{value:.0}") } else { format!("{value:.2}") };
    let text =
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{unit}")
}

#[cfg(test)]
mod tests {
    use super::{short, svg};
    use crate::plot::Plot;

    #[test]
    fn odd_plots_are_drawn_too() {
        let mut empty = Plot::lines("none", "x", "y");
        assert!(svg(&empty).unwrap().contains("<svg"));
        empty.line("one point", [(5.0, 0.0)]);
        assert!(svg(&empty).unwrap().contains("<circle"));
        let mut strange = Plot::lines("strange", "x", "y").x_log();
        strange.line("zero", [(0.0, -1.0), (10.0, f64::NAN)]);
        svg(&strange).unwrap();
        svg(&Plot::bars("no bars", "y", Vec::<String>::new())).unwrap();
    }

    #[test]
    fn labels_are_short() {
        let texts =
            [(0.0, "0"), (0.25, "0.25"), (1000.0, "1000"), (65_536.0, "65.54k"), (1e7, "10M")];
        for (value, text) in texts {
            assert_eq!(short(value), text);
        }
    }
}
