//! The one JSON document that every measurement becomes.
//!
//! Owns: its fields and their order.
//! **Invariant:** a document read back from a file equals the one written.

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{MapAccess, Visitor},
    ser::SerializeMap as _,
};
use serde_json::Value;

use crate::{env::Env, figure::Figure, plot::Plot, table::Table};

/// One measurement: where it was made, how, and what came out. Besides the fields promised to
/// readers it keeps the samples of all figures (for comparisons) and the plots of the report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Document {
    schema_version: u32,
    command: String,
    env: Env,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    title: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    about: String,
    config: Fields,
    results: Fields,
    #[serde(default)]
    samples: BTreeMap<String, Vec<f64>>,
    #[serde(default)]
    plots: Vec<Plot>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    highlights: Vec<String>,
    #[serde(skip)]
    tables: Vec<Table>,
}

impl Document {
    /// The version of this form.
    pub const SCHEMA_VERSION: u32 = 1;

    /// An empty document of a subcommand.
    pub fn new(command: &str, env: Env) -> Self {
        Self {
            schema_version: Self::SCHEMA_VERSION,
            command: command.to_owned(),
            env,
            title: String::new(),
            about: String::new(),
            config: Fields::default(),
            results: Fields::default(),
            samples: BTreeMap::new(),
            plots: Vec::new(),
            highlights: Vec::new(),
            tables: Vec::new(),
        }
    }

    /// Says what was measured, for a reader of the report: a title and a sentence or two.
    pub fn about(&mut self, title: &str, text: &str) {
        title.clone_into(&mut self.title);
        text.clone_into(&mut self.about);
    }

    /// Notes one setting of the run.
    pub fn config(&mut self, name: &str, value: impl Into<Value>) {
        self.config.set(name, value.into());
    }

    /// Notes one result that is no measured figure (a count, a list, an object).
    pub fn result(&mut self, name: &str, value: impl Into<Value>) {
        self.results.set(name, value.into());
    }

    /// Notes one measured figure: `name` is its median, `name_min` and `name_max` stand beside it,
    /// and its samples are kept.
    pub fn figure(&mut self, name: &str, figure: &Figure) {
        self.result(name, figure.median());
        self.result(&format!("{name}_min"), figure.min());
        self.result(&format!("{name}_max"), figure.max());
        self.samples.insert(name.to_owned(), figure.samples().to_vec());
    }

    /// Adds a plot to the report.
    pub fn plot(&mut self, plot: Plot) {
        self.plots.push(plot);
    }

    /// Names the results that a reader should see first.
    pub fn highlight<'a>(&mut self, names: impl IntoIterator<Item = &'a str>) {
        self.highlights.extend(names.into_iter().map(str::to_owned));
    }

    /// Adds a table for a person; without any, all results are listed.
    pub fn table(&mut self, table: Table) {
        self.tables.push(table);
    }

    /// The subcommand that made it.
    pub fn command(&self) -> &str {
        &self.command
    }

    /// Its title in the report; the subcommand when none was given.
    pub fn title(&self) -> &str {
        if self.title.is_empty() { &self.command } else { &self.title }
    }

    /// What was measured, in words; may be empty.
    pub fn explanation(&self) -> &str {
        &self.about
    }

    /// The version of the form it was written in.
    pub fn schema_version(&self) -> u32 {
        self.schema_version
    }

    /// Where it was made.
    pub fn env(&self) -> &Env {
        &self.env
    }

    /// What the workload learned about its environment (page tier, engine, features).
    pub fn env_mut(&mut self) -> &mut Env {
        &mut self.env
    }

    /// The settings.
    pub fn configuration(&self) -> &Fields {
        &self.config
    }

    /// The results.
    pub fn results(&self) -> &Fields {
        &self.results
    }

    /// The samples of each figure.
    pub fn samples(&self) -> &BTreeMap<String, Vec<f64>> {
        &self.samples
    }

    /// The plots.
    pub fn plots(&self) -> &[Plot] {
        &self.plots
    }

    /// Names of the results that a reader should see first.
    pub fn highlights(&self) -> &[String] {
        &self.highlights
    }

    /// The tables for a person.
    pub fn tables(&self) -> Vec<Table> {
        if self.tables.is_empty() { vec![self.results_table()] } else { self.tables.clone() }
    }

    /// All results, one a line; figures with their range.
    pub fn results_table(&self) -> Table {
        let mut table = Table::new(["result", "median", "min", "max"]);
        for (name, value) in self.results.iter() {
            let base = name.strip_suffix("_min").or_else(|| name.strip_suffix("_max"));
            if base.is_some_and(|base| self.samples.contains_key(base)) {
                continue;
            }
            let part = |suffix: &str| {
                let value = self.results.field(&format!("{name}{suffix}"));
                value.map_or_else(String::new, |value| Table::human(name, value))
            };
            let median = Table::human(name, value);
            if self.samples.contains_key(name) {
                table.row([name.to_owned(), median, part("_min"), part("_max")]);
            } else {
                table.row([name.to_owned(), median, String::new(), String::new()]);
            }
        }
        table
    }
}

/// Named values in the order they were set.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Fields(Vec<(String, Value)>);

impl Fields {
    /// Sets a field; a second value replaces the first in its place.
    pub fn set(&mut self, name: &str, value: Value) {
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, old)) => *old = value,
            None => self.0.push((name.to_owned(), value)),
        }
    }

    /// The value of a field.
    pub fn field(&self, name: &str) -> Option<&Value> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }

    /// The value at a dotted path; numbers select elements of lists (`scaling.0.hit_ns`).
    pub fn path(&self, path: &str) -> Option<&Value> {
        let (first, rest) = path.split_once('.').unwrap_or((path, ""));
        let start = self.field(first)?;
        rest.split('.').filter(|part| !part.is_empty()).try_fold(start, |value, part| match value {
            Value::Object(map) => map.get(part),
            Value::Array(list) => list.get(part.parse::<usize>().ok()?),
            _ => None,
        })
    }

    /// All numbers, also those inside lists and objects, with their dotted paths.
    pub fn numbers(&self) -> Vec<(String, f64)> {
        let mut found = Vec::new();
        for (name, value) in self.iter() {
            collect_numbers(name, value, &mut found);
        }
        found
    }

    /// All fields in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }
}

fn collect_numbers(path: &str, value: &Value, found: &mut Vec<(String, f64)>) {
    match value {
        Value::Array(list) => {
            for (at, element) in list.iter().enumerate() {
                collect_numbers(&format!("{path}.{at}"), element, found);
            }
        }
        Value::Object(map) => {
            for (name, element) in map {
                collect_numbers(&format!("{path}.{name}"), element, found);
            }
        }
        other => found.extend(other.as_f64().map(|number| (path.to_owned(), number))),
    }
}

impl Serialize for Fields {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields = Fields::default();
                while let Some((name, value)) = map.next_entry::<String, Value>()? {
                    fields.set(&name, value);
                }
                Ok(fields)
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::Document;
    use crate::{env::Env, figure::Figure, plot::Plot};

    fn sample() -> Document {
        let mut document = Document::new("load", Env::default());
        document.config("ranks", 4);
        document.figure("cold_wall_us", &Figure::of([3.0, 1.0, 2.0]).unwrap());
        document.result("backend_loads", 256);
        document.result("owner_share", json!([0.25, 0.26]));
        document.result("scaling", json!([{"slots": 1000, "hit_ns": 40.5}]));
        document.plot(Plot::lines("hits", "slots", "ns"));
        document
    }

    #[test]
    fn fields_are_as_promised_and_in_order() {
        let text = serde_json::to_string(&sample()).unwrap();
        assert!(text.starts_with(r#"{"schema_version":1,"command":"load","env":{"#), "{text}");
        let results = r#""results":{"cold_wall_us":2.0,"cold_wall_us_min":1.0,"cold_wall_us_max":3.0,"backend_loads":256,"#;
        assert!(text.contains(results), "{text}");
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["samples"]["cold_wall_us"], json!([3.0, 1.0, 2.0]));
    }

    #[test]
    fn reading_back_gives_the_same_document() {
        let document = sample();
        let text = serde_json::to_string_pretty(&document).unwrap();
        let read: Document = serde_json::from_str(&text).unwrap();
        assert_eq!(read, document);
        assert!(serde_json::from_str::<Document>(r#"{"schema_version":1}"#).is_err());
    }

    #[test]
    fn paths_reach_into_lists_and_objects() {
        let document = sample();
        let results = document.results();
        assert_eq!(results.path("owner_share.1"), Some(&json!(0.26)));
        assert_eq!(results.path("scaling.0.hit_ns"), Some(&json!(40.5)));
        assert_eq!(results.path("scaling.1.hit_ns"), None);
        assert_eq!(results.path("backend_loads.0"), None);
        assert_eq!(results.path("nothing"), None);
        let numbers = results.numbers();
        assert_eq!(numbers.len(), 3 + 1 + 2 + 2);
        for (path, number) in numbers {
            assert_eq!(results.path(&path).and_then(Value::as_f64), Some(number), "{path}");
        }
    }

    #[test]
    fn the_results_table_folds_ranges_into_their_figure() {
        let text = sample().results_table().to_string();
        assert_eq!(text.matches("cold_wall_us").count(), 1, "{text}");
        assert!(text.contains("owner_share"), "{text}");
    }
}
