//! `ucm doctor`: what is there, what would be used, what to do.
//!
//! **Invariant:** every finding names its evidence; nothing on the machine is changed.

mod devices;
mod engines;
mod probes;

use std::process::ExitCode;

use serde_json::json;
use ucm::{Config, Error};

/// How a finding is to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// There, and used.
    Good,
    /// ucm works, but slower or with less protection.
    Degraded,
    /// Not there; only needed for what it names.
    Absent,
    /// The configuration cannot work like this.
    Broken,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Degraded => "degraded",
            Self::Absent => "absent",
            Self::Broken => "broken",
        }
    }
}

/// One thing looked at.
#[derive(Clone, Debug)]
pub(crate) struct Finding {
    pub(crate) what: &'static str,
    pub(crate) verdict: Verdict,
    /// What was seen.
    pub(crate) seen: String,
    /// What ucm does with it.
    pub(crate) used: String,
    /// What to do; empty when there is nothing to do.
    pub(crate) remedy: String,
}

pub(crate) fn run(config: &Config, as_json: bool) -> Result<ExitCode, Error> {
    let mut findings = probes::all(config);
    findings.extend(engines::all());
    let worst_is_broken = findings.iter().any(|f| f.verdict == Verdict::Broken);
    if as_json {
        let list = findings.iter().map(|f| {
            json!({"what": f.what, "verdict": f.verdict.word(), "seen": f.seen, "used": f.used, "remedy": f.remedy})
        });
        crate::print(&format!("{:#}\n", json!({ "findings": list.collect::<Vec<_>>() })));
    } else {
        for finding in &findings {
            crate::print(&format!(
                "{:<9} {}: {}\n",
                finding.verdict.word(),
                finding.what,
                finding.seen
            ));
            crate::print(&format!("          → {}\n", finding.used));
            if !finding.remedy.is_empty() {
                crate::print(&format!("          ! {}\n", finding.remedy));
            }
        }
    }
    Ok(ExitCode::from(if worst_is_broken { 3 } else { 0 }))
}
