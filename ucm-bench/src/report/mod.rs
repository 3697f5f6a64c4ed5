//! One HTML page for a run.
//!
//! Owns: the page. Everything is inside it: style, tables, pictures as SVG.
//! **Invariant:** text from documents is escaped before it becomes part of the page.

mod draw;
mod meaning;

use std::{fmt::Write as _, fs, path::PathBuf};

use crate::{
    document::{Document, Fields},
    env::Env,
    error::BenchError,
    plot::Plot,
    run_file::RunFile,
    table::Table,
};

const STYLE: &str = include_str!("style.css");

/// Options of `ucm-bench report`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The run (run.json, or what --json printed)
    run: PathBuf,
    /// Where to write (default: report.html beside it)
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Reads a run, writes the page.
pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    let run = RunFile::read(&args.run)?;
    let beside = args.run.with_file_name("report.html");
    let out = args.out.as_ref().unwrap_or(&beside);
    fs::write(out, report_html(run.documents())?).map_err(|e| BenchError::path("write", out, e))?;
    crate::cli::print(&format!("{}", out.display()))
}

/// The page as text.
///
/// # Errors
/// A plot cannot be drawn.
pub fn report_html(documents: &[Document]) -> Result<String, BenchError> {
    let mut page =
        String::from("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n");
    page.push_str("<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n");
    let _ = write!(page, "<title>ucm-bench</title>\n<style>\n{STYLE}</style></head><body>\n");
    page.push_str("<header><h1>ucm-bench</h1>\n");
    page.push_str(&verdict(documents));
    if let Some(first) = documents.first() {
        page.push_str(&environment(first.env()));
    }
    page.push_str("<nav>");
    for (number, document) in documents.iter().enumerate() {
        let _ = write!(page, "<a href=\"#d{number}\">{}</a> ", escape(document.title()));
    }
    page.push_str("</nav></header>\n<main>\n");
    for (number, document) in documents.iter().enumerate() {
        section(&mut page, number, document)?;
    }
    page.push_str("</main></body></html>\n");
    Ok(page)
}

/// Wrong bytes are what a reader must not miss.
fn verdict(documents: &[Document]) -> String {
    let sum = |name: &str| -> Option<f64> {
        let values = documents.iter().filter_map(|document| document.results().field(name));
        values.filter_map(serde_json::Value::as_f64).reduce(|a, b| a + b)
    };
    let verified = sum("verified_bytes").unwrap_or(0.0);
    match sum("wrong_bytes") {
        None => String::new(),
        Some(0.0) if verified > 0.0 => format!(
            "<p class=\"good\">No wrong byte: {} were compared in the replays, and every verified \
             load.</p>\n",
            Table::human("verified_bytes", &verified.into())
        ),
        Some(0.0) => "<p class=\"good\">No wrong byte.</p>\n".to_owned(),
        Some(wrong) => format!("<p class=\"bad\">{wrong} wrong bytes.</p>\n"),
    }
}

fn environment(env: &Env) -> String {
    let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "–".to_owned());
    let load: Vec<String> = env.load_average.iter().map(|load| format!("{load:.2}")).collect();
    let memory = Table::human("memory_bytes", &env.memory_bytes.into());
    let facts = [
        ("cpu", format!("{} × {}", env.cores, env.cpu_model)),
        ("memory", memory),
        ("kernel", env.kernel.clone()),
        ("page tier", or_dash(&env.page_tier)),
        ("engine", or_dash(&env.engine)),
        ("features", env.features.join(", ")),
        ("revision", or_dash(&env.git_revision)),
        ("load average", load.join(" ")),
    ];
    let mut html = String::from("<dl class=\"env\">");
    for (name, value) in facts.iter().filter(|(_, value)| !value.is_empty()) {
        let _ = write!(html, "<div><dt>{name}</dt><dd>{}</dd></div>", escape(value));
    }
    html + "</dl>\n"
}

fn section(page: &mut String, number: usize, document: &Document) -> Result<(), BenchError> {
    let title = escape(document.title());
    let command = escape(document.command());
    let _ = write!(page, "<section id=\"d{number}\"><h2>{title}</h2>\n<p>");
    if !document.explanation().is_empty() {
        let _ = write!(page, "{} ", escape(document.explanation()));
    }
    let _ = writeln!(page, "<code>ucm-bench {command}</code></p>");
    page.push_str(&cards(document));
    for plot in document.plots() {
        page.push_str(&figure(plot)?);
    }
    page.push_str("<h3>Results</h3>\n");
    page.push_str(&results(document));
    page.push_str("<details><summary>Settings</summary>");
    page.push_str(&settings(document.configuration()));
    page.push_str("</details>\n");
    if !document.samples().is_empty() {
        page.push_str("<details><summary>Samples of each run</summary>");
        let mut samples = Table::new(["figure", "runs"]);
        for (name, values) in document.samples() {
            samples.row([name.clone(), Table::human(name, &values.clone().into())]);
        }
        page.push_str(&table(&samples));
        page.push_str("</details>\n");
    }
    page.push_str("</section>\n");
    Ok(())
}

/// The results that should be seen first.
fn cards(document: &Document) -> String {
    let results = document.results();
    let mut html = String::new();
    for name in document.highlights() {
        let Some(value) = results.field(name) else { continue };
        let value = escape(&Table::human(name, value));
        let _ = write!(html, "<div><b>{value}</b><span>{}</span>", escape(name));
        let text = meaning::meaning(name).unwrap_or_default();
        let _ = write!(html, "<small>{}</small></div>", escape(text));
    }
    if html.is_empty() { html } else { format!("<div class=\"cards\">{html}</div>\n") }
}

fn figure(plot: &Plot) -> Result<String, BenchError> {
    let mut html = format!("<figure><figcaption><b>{}</b>", escape(&plot.title));
    if plot.lines.len() > 1 {
        for (number, line) in plot.lines.iter().enumerate() {
            let (colour, name) = (draw::colour(number), escape(&line.name));
            let _ = write!(html, " <span><i style=\"background:{colour}\"></i>{name}</span>");
        }
    }
    let svg = draw::svg(plot)?;
    let _ = writeln!(html, "</figcaption>{svg}</figure>");
    Ok(html)
}

/// All results with their meaning.
fn results(document: &Document) -> String {
    let plain = document.results_table();
    let head = plain.head().iter().cloned().chain(["meaning".to_owned()]);
    let mut explained = Table::new(head);
    for row in plain.rows() {
        let text = row.first().and_then(|name| meaning::meaning(name)).unwrap_or_default();
        explained.row(row.iter().cloned().chain([text.to_owned()]));
    }
    table(&explained)
}

fn settings(config: &Fields) -> String {
    let mut html = String::from("<p class=\"config\">");
    for (name, value) in config.iter() {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let _ = write!(html, "<span><b>{}</b> {}</span> ", escape(name), escape(&value));
    }
    html + "</p>\n"
}

fn table(table: &Table) -> String {
    let mut html = String::from("<div class=\"scroll\"><table><thead><tr>");
    for cell in table.head() {
        let _ = write!(html, "<th>{}</th>", escape(cell));
    }
    html.push_str("</tr></thead><tbody>\n");
    for row in table.rows() {
        html.push_str("<tr>");
        for cell in row {
            let _ = write!(html, "<td>{}</td>", escape(cell));
        }
        html.push_str("</tr>\n");
    }
    html + "</tbody></table></div>\n"
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::report_html;
    use crate::{document::Document, env::Env, figure::Figure, plot::Plot};

    fn documents() -> Vec<Document> {
        let mut load = Document::new("load", Env::default());
        load.config("note", "<b>&");
        load.figure("cold_wall_us", &Figure::of([81_000.0, 80_000.0, 90_000.0]).unwrap());
        let mut plot = Plot::lines("Hits", "slots", "ns").x_log();
        plot.line("hit", [(1e3, 40.0), (1e5, 45.0), (1e7, 60.0)]);
        load.plot(plot);
        load.about("Loads <of> files", "Ranks load.");
        load.highlight(["cold_wall_us", "nothing"]);
        load.result("verified_bytes", 4096);
        load.result("wrong_bytes", 0);
        let mut bars = Plot::bars("Shares", "%", ["rank 0", "rank 1"]);
        bars.heights("owned", [24.0, 26.0]);
        bars.heights("waited", [76.0, 74.0]);
        load.plot(bars);
        vec![load, Document::new("ctrl", Env::default())]
    }

    #[test]
    fn page_holds_everything_and_loads_nothing() {
        let page = report_html(&documents()).unwrap();
        assert_eq!(page.matches("<section").count(), 2);
        assert_eq!(page.matches("<svg").count(), 2);
        for part in [
            "<span>cold_wall_us</span>",
            "<b>81.0 ms</b>",
            "rank 1",
            "owned</span>",
            "&lt;b&gt;&amp;",
            "Loads &lt;of&gt; files",
            "No wrong byte: 4.00 KiB",
            "prefers-color-scheme",
        ] {
            assert!(page.contains(part), "{part}");
        }
        for outside in ["src=", "href=\"http", "<script", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
    }

    #[test]
    fn wrong_bytes_are_said_first() {
        let mut documents = documents();
        documents[0].result("wrong_bytes", 7);
        let page = report_html(&documents).unwrap();
        assert!(page.contains("<p class=\"bad\">7 wrong bytes.</p>"), "{page}");
        let none = report_html(&[Document::new("ctrl", Env::default())]).unwrap();
        assert!(!none.contains("wrong byte"));
    }

    #[test]
    fn pictures_follow_the_page_colours() {
        let page = report_html(&documents()).unwrap();
        assert!(page.contains("currentColor"));
        assert!(!page.contains("#000000"));
    }
}
