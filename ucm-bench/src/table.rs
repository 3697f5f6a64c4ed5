//! Tables and numbers for a person.
//!
//! Owns: column alignment and units in words.
//! **Invariant:** a number keeps at least three significant digits.

use std::fmt;

use serde_json::Value;

/// A table with a header row. Prints with aligned columns, numbers to the right.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
    text: bool,
}

impl Table {
    /// An empty table with these columns.
    pub fn new<S: Into<String>>(head: impl IntoIterator<Item = S>) -> Self {
        Self { head: head.into_iter().map(Into::into).collect(), rows: Vec::new(), text: false }
    }

    /// An empty table of words: all columns to the left.
    pub fn text<S: Into<String>>(head: impl IntoIterator<Item = S>) -> Self {
        Self { text: true, ..Self::new(head) }
    }

    /// Is it a table of words?
    pub fn is_text(&self) -> bool {
        self.text
    }

    /// Adds a row; missing cells are empty, further ones are cut.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let mut row: Vec<String> = cells.into_iter().map(Into::into).collect();
        row.resize(self.head.len(), String::new());
        self.rows.push(row);
    }

    /// The column names.
    pub fn head(&self) -> &[String] {
        &self.head
    }

    /// The rows.
    pub fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }

    /// A value as a person reads it; the unit comes from the field's name.
    pub fn human(name: &str, value: &Value) -> String {
        match value {
            Value::Number(number) => {
                human_number(name, number.as_f64().unwrap_or(f64::NAN), number.is_f64())
            }
            Value::String(text) => text.clone(),
            Value::Array(list) if list.iter().all(|item| !item.is_object()) => {
                list.iter().map(|item| Self::human(name, item)).collect::<Vec<_>>().join(", ")
            }
            Value::Array(list) => format!("{} entries", list.len()),
            Value::Object(map) if map.values().all(|item| item.is_number()) => {
                let item =
                    |(name, item): (&String, &Value)| format!("{name} {}", Self::human(name, item));
                map.iter().map(item).collect::<Vec<_>>().join(", ")
            }
            Value::Object(map) => format!("{} fields", map.len()),
            other => other.to_string(),
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |at: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(at));
            cells.chain(self.head.get(at)).map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.head.len()).map(width).collect();
        for row in std::iter::once(&self.head).chain(&self.rows) {
            let mut line = String::new();
            for (at, (cell, width)) in row.iter().zip(&widths).enumerate() {
                let gap = " ".repeat(width - cell.chars().count());
                let between = if at == 0 { "" } else { "  " };
                line.push_str(&if at == 0 || self.text {
                    format!("{between}{cell}{gap}")
                } else {
                    format!("{between}{gap}{cell}")
                });
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

fn human_number(name: &str, number: f64, fraction: bool) -> String {
    let scaled = |units: &[&str], step: f64| {
        let mut value = number;
        let mut units = units.iter();
        let mut unit = units.next().copied().unwrap_or("");
        for larger in units {
            if value.abs() < step {
                break;
            }
            value /= step;
            unit = larger;
        }
        format!("{} {unit}", digits(value))
    };
    // Three digits with a unit say more than many without.
    if name.ends_with("bytes_per_s") {
        scaled(&["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], 1000.0)
    } else if name.ends_with("_bytes") || name.starts_with("bytes_") {
        scaled(&["B", "KiB", "MiB", "GiB", "TiB"], 1024.0)
    } else if has_unit(name, "_ns") {
        scaled(&["ns", "us", "ms", "s"], 1000.0)
    } else if has_unit(name, "_us") {
        scaled(&["us", "ms", "s"], 1000.0)
    } else if has_unit(name, "_ms") {
        scaled(&["ms", "s"], 1000.0)
    } else if name.ends_with("_s") {
        scaled(&["s"], 1000.0)
    } else if fraction && number.fract() != 0.0 {
        digits(number)
    } else {
        format!("{number}")
    }
}

/// Does the name end in this unit, also before a percentile or a "per" (`_us_p99`)?
fn has_unit(name: &str, unit: &str) -> bool {
    let after = name.rfind(unit).and_then(|at| name.get(at + unit.len()..));
    after.is_some_and(|rest| {
        rest.is_empty() || rest.starts_with("_p") || matches!(rest, "_max" | "_min" | "_mean")
    })
}

/// At least three significant digits, without an exponent.
fn digits(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 || size == 0.0 => format!("{value:.2}"),
        size if size >= 0.01 => format!("{value:.4}"),
        _ => format!("{value:.3e}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::Table;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(["policy", "1 %"]);
        table.row(["clock", "5.29"]);
        table.row(["optimal", "24.64"]);
        table.row(["x"]);
        assert_eq!(table.to_string(), "policy     1 %\nclock     5.29\noptimal  24.64\nx\n");
    }

    #[test]
    fn words_stand_to_the_left() {
        let mut table = Table::text(["what", "value"]);
        table.row(["cache", "73 blocks"]);
        table.row(["long name", "x"]);
        assert_eq!(table.to_string(), "what       value\ncache      73 blocks\nlong name  x\n");
    }

    #[test]
    fn units_come_from_names() {
        let cases = [
            ("hit_ns", json!(58.25), "58.2 ns"),
            ("cold_wall_us", json!(92_500), "92.5 ms"),
            ("wake_us_p99", json!(35.0), "35.0 us"),
            ("warm_bytes_per_s", json!(11_400_000_000_u64), "11.4 GB/s"),
            ("shard_bytes", json!(1_048_576), "1.00 MiB"),
            ("backend_loads", json!(256), "256"),
            ("backend_loads", json!(256.0), "256"),
            ("cpu_s", json!(0.25), "0.2500 s"),
            ("hit_ratio", json!(0.2028), "0.2028"),
            ("owner_share", json!([0.25, 0.26]), "0.2500, 0.2600"),
            ("name", json!("x"), "x"),
            ("scaling", json!([{"a": 1}]), "1 entries"),
            ("shards", json!({"hit": 7, "owned": 3}), "hit 7, owned 3"),
            ("policies", json!({"lru": [1]}), "1 fields"),
        ];
        for (name, value, text) in cases {
            assert_eq!(Table::human(name, &value), text, "{name}");
        }
    }
}
