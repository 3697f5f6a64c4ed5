//! `--assert 'field<=value'`: turning a result into an exit code.
//!
//! Owns: the small language of bounds.
//! **Invariant:** an assertion about a field that does not exist is an error, never a pass.

use std::{fmt, str::FromStr};

use serde_json::Value;

use crate::{document::Fields, error::BenchError};

/// A bound on one result. On a list it must hold for every element.
#[derive(Debug, Clone, PartialEq)]
pub struct Assertion {
    path: String,
    op: Op,
    bound: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Op {
    LessOrEqual,
    GreaterOrEqual,
    Equal,
    NotEqual,
    Less,
    Greater,
}

/// Longest first, so that `<=` is not read as `<`.
const OPS: [(&str, Op); 6] = [
    ("<=", Op::LessOrEqual),
    (">=", Op::GreaterOrEqual),
    ("==", Op::Equal),
    ("!=", Op::NotEqual),
    ("<", Op::Less),
    (">", Op::Greater),
];

impl Assertion {
    /// Checks it against the results.
    ///
    /// # Errors
    /// [`BenchError::Assertion`] with field, value and bound when it does not hold;
    /// [`BenchError::Usage`] when the field does not exist or is no number.
    pub fn check(&self, results: &Fields) -> Result<(), BenchError> {
        let Some(value) = results.path(&self.path) else {
            let known: Vec<&str> = results.iter().map(|(name, _)| name).collect();
            let text = format!("--assert {self}: no field `{}`; there are: ", self.path);
            return Err(BenchError::Usage(text + &known.join(", ")));
        };
        match value {
            Value::Array(list) if !list.is_empty() => {
                list.iter().enumerate().try_for_each(|(at, element)| {
                    self.check_number(&format!("{}.{at}", self.path), element)
                })
            }
            value => self.check_number(&self.path, value),
        }
    }

    fn check_number(&self, path: &str, value: &Value) -> Result<(), BenchError> {
        let Some(number) = value.as_f64() else {
            let text = format!("--assert {self}: `{path}` is {value}, not a number");
            return Err(BenchError::Usage(text));
        };
        if self.op.holds(number, self.bound) {
            return Ok(());
        }
        Err(BenchError::Assertion(format!("assertion {self} failed: {path} is {number}")))
    }
}

impl Op {
    #[expect(clippy::float_cmp, reason = "== and != are asked for, mostly on counts")]
    fn holds(self, value: f64, bound: f64) -> bool {
        match self {
            Self::LessOrEqual => value <= bound,
            Self::GreaterOrEqual => value >= bound,
            Self::Equal => value == bound,
            Self::NotEqual => value != bound,
            Self::Less => value < bound,
            Self::Greater => value > bound,
        }
    }
}

impl FromStr for Assertion {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let at = text.find(['<', '>', '=', '!']).unwrap_or(text.len());
        let (path, rest) = text.split_at(at);
        let found = OPS.iter().find_map(|(sign, op)| Some((rest.strip_prefix(sign)?, *op)));
        let Some((bound, op)) = found.filter(|_| !path.trim().is_empty()) else {
            return Err("expected FIELD OP VALUE with OP one of <= >= == != < >".to_owned());
        };
        match bound.trim().parse::<f64>() {
            Ok(bound) if bound.is_finite() => Ok(Self { path: path.trim().to_owned(), op, bound }),
            _ => Err(format!("`{}` is not a number", bound.trim())),
        }
    }
}

impl fmt::Display for Assertion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = OPS.iter().find(|(_, op)| *op == self.op).map_or("", |(sign, _)| sign);
        write!(f, "{}{sign}{}", self.path, self.bound)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::Assertion;
    use crate::{document::Fields, error::BenchError};

    fn results() -> Fields {
        let mut fields = Fields::default();
        fields.set("hit_ns", json!(58.5));
        fields.set("wrong_bytes", json!(0));
        fields.set("owner_share", json!([0.24, 0.26]));
        fields.set("name", json!("x"));
        fields
    }

    fn check(text: &str) -> Result<(), BenchError> {
        text.parse::<Assertion>().unwrap().check(&results())
    }

    #[test]
    fn each_operator_holds_and_fails() {
        for good in ["hit_ns<=58.5", "hit_ns >= 58.5", "wrong_bytes==0", "hit_ns!=1", "hit_ns<59"] {
            check(good).unwrap();
        }
        check("hit_ns>58").unwrap();
        for bad in ["hit_ns<=58", "hit_ns>=59", "wrong_bytes==1", "wrong_bytes!=0", "hit_ns<58.5"] {
            assert_eq!(check(bad).unwrap_err().exit_code(), 1, "{bad}");
        }
        assert_eq!(check("hit_ns>58.5").unwrap_err().exit_code(), 1);
    }

    #[test]
    fn a_failure_names_field_value_and_bound() {
        let message = check("owner_share<=0.25").unwrap_err().to_string();
        assert_eq!(message, "assertion owner_share<=0.25 failed: owner_share.1 is 0.26");
    }

    #[test]
    fn lists_hold_for_every_element_and_unknown_fields_are_errors() {
        check("owner_share>=0.225").unwrap();
        check("owner_share.0<=0.25").unwrap();
        for usage in ["nothing<=1", "name<=1", "owner_share.7<=1"] {
            assert_eq!(check(usage).unwrap_err().exit_code(), 2, "{usage}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "hit_ns", "<=1", "hit_ns<=", "hit_ns<=x", "hit_ns=1", "hit_ns<=nan"] {
            assert!(text.parse::<Assertion>().is_err(), "{text}");
        }
    }
}
