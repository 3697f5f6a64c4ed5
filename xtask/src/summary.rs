//! Counting tests: what passed, failed and was skipped, and why.
//!
//! Owns: the parsers of what test runners print, and the closing line.
//! **Invariant:** a test that printed `SKIP <reason>` is counted as skipped, never as passed.

use std::{collections::BTreeMap, fmt, fs, path::Path};

/// Counts over all test runs of one command.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Summary {
    passed: u64,
    failed: u64,
    skipped: u64,
    reasons: BTreeMap<String, u64>,
}

impl Summary {
    /// Adds the counts of another run.
    pub(crate) fn add(&mut self, other: &Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        for (reason, count) in &other.reasons {
            *self.reasons.entry(reason.clone()).or_default() += count;
        }
    }

    /// Notes a run that ended badly without any failed test (for example, it did not build).
    pub(crate) fn broken_run(&mut self) {
        if self.failed == 0 {
            self.failed = 1;
        }
    }

    /// Reads a closing line.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        line.contains(" passed, ").then(|| Self {
            passed: count_before(line, " passed"),
            failed: count_before(line, " failed"),
            skipped: count_before(line, " skipped"),
            reasons: BTreeMap::new(),
        })
    }

    /// Notes steps other than tests that failed or could not run.
    pub(crate) fn add_steps(&mut self, failed: u64, skipped: u64) {
        self.failed += failed;
        self.skipped += skipped;
    }

    /// How many tests ran or were skipped.
    pub(crate) fn total(&self) -> u64 {
        self.passed + self.failed + self.skipped
    }

    /// How many failed.
    pub(crate) fn failed(&self) -> u64 {
        self.failed
    }

    /// How many were skipped.
    pub(crate) fn skipped(&self) -> u64 {
        self.skipped
    }

    /// One line for each reason to skip, with its count.
    pub(crate) fn reasons(&self) -> impl Iterator<Item = String> + '_ {
        self.reasons.iter().map(|(reason, count)| format!("skipped {count}: {reason}"))
    }

    /// Keeps the closing line in a file, for the end of a longer run.
    pub(crate) fn store(&self, file: &Path) -> std::io::Result<()> {
        if let Some(dir) = file.parent() {
            fs::create_dir_all(dir)?;
        }
        fs::write(file, format!("{self}\n"))
    }

    /// Moves a test with these reasons from passed to skipped.
    fn skip(&mut self, reasons: &[String]) {
        if reasons.is_empty() {
            return;
        }
        self.passed = self.passed.saturating_sub(1);
        self.skipped += 1;
        for reason in reasons {
            *self.reasons.entry(reason.clone()).or_default() += 1;
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// Reads the output of `cargo test -- --show-output`, line by line.
#[derive(Debug, Default)]
pub(crate) struct LibtestReader {
    summary: Summary,
    reasons: Vec<String>,
    skipped: Vec<Vec<String>>,
    failures: bool,
}

impl LibtestReader {
    /// Takes one line of stdout.
    pub(crate) fn line(&mut self, line: &str) {
        if line.starts_with("---- ") && line.ends_with(" ----") {
            self.end_section();
        } else if line == "failures:" || line == "successes:" {
            self.end_section();
            self.failures = line == "failures:";
        } else if let Some(counts) = line.strip_prefix("test result: ") {
            self.end_section();
            self.failures = false;
            self.summary.passed += count_before(counts, " passed");
            self.summary.failed += count_before(counts, " failed");
            for reasons in std::mem::take(&mut self.skipped) {
                self.summary.skip(&reasons);
            }
        } else if let Some(reason) = skip_reason(line) {
            self.reasons.push(reason);
        }
    }

    /// The counts of all finished test binaries.
    pub(crate) fn finish(self) -> Summary {
        self.summary
    }

    fn end_section(&mut self) {
        let reasons = std::mem::take(&mut self.reasons);
        if !self.failures && !reasons.is_empty() {
            self.skipped.push(reasons);
        }
    }
}

/// Reads a JUnit file as nextest writes it (with the output of passed tests kept).
pub(crate) fn from_junit(xml: &str) -> Summary {
    let mut summary = Summary::default();
    for case in xml.split("<testcase ").skip(1) {
        let case = case.split("</testcase>").next().unwrap_or(case);
        let head = case.split('>').next().unwrap_or(case);
        let case = if head.ends_with('/') { head } else { case };
        if case.contains("<failure") || case.contains("<error") {
            summary.failed += 1;
            continue;
        }
        summary.passed += 1;
        let output = case
            .split_once("<system-out>")
            .map_or("", |(_, rest)| rest.split("</system-out>").next().unwrap_or(rest));
        let reasons: Vec<String> = unescape(output).lines().filter_map(skip_reason).collect();
        summary.skip(&reasons);
    }
    summary
}

fn skip_reason(line: &str) -> Option<String> {
    // Under libtest the line may follow "test name ... " when output is not captured.
    let at = if line.starts_with("test ") { line.find("... SKIP ").map(|at| at + 4)? } else { 0 };
    let reason = line.get(at..)?.strip_prefix("SKIP ")?.trim();
    (!reason.is_empty()).then(|| reason.to_owned())
}

fn count_before(line: &str, word: &str) -> u64 {
    let before = line.find(word).and_then(|at| line.get(..at)).unwrap_or("");
    before.rsplit(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn unescape(xml: &str) -> String {
    xml.replace("<![CDATA[", "")
        .replace("]]>", "")
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&quot;", "\"")
        .replace("&apos;", "'")
        .replace("&#10;", "\n")
        .replace("&amp;", "&")
}

#[cfg(test)]
mod tests {
    use super::{LibtestReader, Summary, from_junit};

    fn libtest(text: &str) -> Summary {
        let mut reader = LibtestReader::default();
        text.lines().for_each(|line| reader.line(line));
        reader.finish()
    }

    #[test]
    fn libtest_output_is_counted_and_skips_are_no_passes() {
        let summary = libtest(
            "running 4 tests\n\
             test a ... ok\ntest b ... ok\ntest c ... ok\ntest d ... FAILED\n\n\
             successes:\n\n---- a stdout ----\nSKIP no GPU\nSKIP no RDMA\n\n\
             ---- b stdout ----\nhello\n\n---- c stdout ----\nSKIP no GPU\n\n\n\
             successes:\n    a\n    b\n    c\n\n\
             failures:\n\n---- d stdout ----\nSKIP never mind\npanicked\n\n\
             failures:\n    d\n\n\
             test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out\n\
             running 1 test\ntest e ... ok\n\n\
             test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n",
        );
        assert_eq!(summary.to_string(), "2 passed, 1 failed, 2 skipped");
        let reasons: Vec<String> = summary.reasons().collect();
        assert_eq!(reasons, ["skipped 2: no GPU", "skipped 1: no RDMA"]);
    }

    #[test]
    fn junit_is_counted_and_skips_are_no_passes() {
        let summary = from_junit(
            r#"<testsuites tests="4" failures="1"><testsuite name="x">
            <testcase name="a" classname="x" time="0.1"><system-out>
SKIP no &quot;huge&quot; pages
</system-out><system-err></system-err></testcase>
            <testcase name="b" classname="x" time="0.1"/>
            <testcase name="c" classname="x"><failure type="f">SKIP no</failure></testcase>
            <testcase name="d" classname="x"><system-out>not a SKIP line</system-out></testcase>
            </testsuite></testsuites>"#,
        );
        assert_eq!(summary.to_string(), "2 passed, 1 failed, 1 skipped");
        assert_eq!(summary.reasons().collect::<Vec<_>>(), ["skipped 1: no \"huge\" pages"]);
    }

    #[test]
    fn a_run_that_did_not_build_is_a_failure() {
        let mut summary = Summary::default();
        summary.broken_run();
        assert_eq!(summary.to_string(), "0 passed, 1 failed, 0 skipped");
        let mut all = libtest("test result: ok. 2 passed; 0 failed; 0 ignored\n");
        all.add(&summary);
        assert_eq!((all.total(), all.failed()), (3, 1));
        let mut read = Summary::parse("2 passed, 1 failed, 0 skipped\n").unwrap();
        assert_eq!(read, all);
        read.add_steps(2, 1);
        assert_eq!(read.to_string(), "2 passed, 3 failed, 1 skipped");
    }
}
