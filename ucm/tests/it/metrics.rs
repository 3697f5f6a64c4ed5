//! What can be watched: each value is documented, and each that is documented is there.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use ucm::{
    AgentStats, Key, Memory, Node, Outcome, PoolId, Rank,
    metrics::{Metric, MetricKind},
};

fn node(dir: &std::path::Path, metrics: &str) -> Node {
    Node::builder("metrics")
        .dir(dir.join("cache"))
        .pool(4096, 1, 4)
        .configure(|config| {
            config.cache.pages = ucm::Pages::Small;
            config.cache.metrics = metrics.into();
            config.backend.kind = ucm::BackendKind::Memory;
        })
        .build()
        .unwrap()
}

/// Dumps and loads some keys, one of them twice.
fn work(rank: &Rank) {
    let memory = Memory::host(3 * 4096).unwrap();
    let region = rank.register(memory).unwrap();
    let at = |n: u64| ucm::Addr { region, offset: n * 4096 };
    let key = |n: u64| Key::new(u128::from(n).to_le_bytes(), 0);
    let shards: Vec<_> = (0..3).map(|n| (key(n), at(n))).collect();
    rank.dump(PoolId(0), &shards, true).unwrap().wait_durable(None).unwrap();
    assert_eq!(rank.load(PoolId(0), &shards[..2]).unwrap().wait(None), Some(vec![Outcome::Loaded]));
}

fn http(address: SocketAddr, ask: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(ask).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// As Prometheus shows it.
fn full_name(name: &str, kind: MetricKind) -> String {
    match kind {
        MetricKind::Counter => format!("{name}_total"),
        MetricKind::Gauge => name.to_owned(),
    }
}

/// The table of `docs/metrics.md`.
fn table(rank: &Rank) -> String {
    let mut rows = BTreeMap::new();
    for metric in rank.meter().read() {
        let labels: Vec<_> = metric.labels.iter().map(|(label, _)| format!("`{label}`")).collect();
        let name = full_name(&metric.name, metric.kind);
        rows.insert(name, (labels.join(" "), metric.help));
    }
    for (name, help, falls, _) in AgentStats::default().list() {
        let kind = if falls { MetricKind::Gauge } else { MetricKind::Counter };
        let name = full_name(&format!("ucm_remote_{}", name.replace("_ns", "_seconds")), kind);
        rows.insert(name, (String::new(), help));
    }
    let mut table = String::from("| metric | labels | meaning |\n|---|---|---|\n");
    for (name, (labels, help)) in rows {
        assert!(help.ends_with('.'), "{name}: {help}");
        writeln!(table, "| `{name}` | {labels} | {help} |").unwrap();
    }
    table
}

/// Mutants: a counter without its line; a line without its counter. To write the table anew: run with
/// `UCM_BLESS=1`.
#[test]
fn a39_each_metric_is_documented_and_each_that_is_documented_exists() {
    let dir = tempfile::tempdir().unwrap();
    let rank = node(dir.path(), "").rank(0).start().unwrap();
    let book = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
    let text = std::fs::read_to_string(&book).unwrap();
    let (before, rest) = text.split_once("| metric |").unwrap();
    let end = rest.find("\n\n").map_or(rest.len(), |at| at + 1);
    let whole = format!("{before}{}{}", table(&rank), &rest[end..]);
    if std::env::var_os("UCM_BLESS").is_some() {
        std::fs::write(&book, &whole).unwrap();
    }
    assert_eq!(whole, std::fs::read_to_string(&book).unwrap());
}

/// Over HTTP: the numbers of what was done, each family once, and an end.
#[test]
fn a39_a_rank_says_over_http_what_it_has_done() {
    let dir = tempfile::tempdir().unwrap();
    let rank = node(dir.path(), "127.0.0.1:0").rank(3).start().unwrap();
    let address = rank.metrics_address().unwrap();
    work(&rank);
    let answer = http(address, b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n");
    let (head, text) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("application/openmetrics-text"), "{head}");
    assert!(text.ends_with("# EOF\n"), "{text}");
    for line in [
        "ucm_queue_dump_durable_total{device=\"3\",pool=\"0\"} 3",
        "ucm_queue_hit_shards_total{device=\"3\",pool=\"0\"} 2",
        "ucm_queue_rejected_total{device=\"3\",pool=\"0\",kind=\"Busy\"} 0",
        "ucm_cache_slots{pool=\"0\",state=\"ready\"} 3",
        "ucm_cache_members{state=\"joined\"} 1",
        "ucm_cache_deaths_total 0",
        "# TYPE ucm_queue_backend_seconds counter",
    ] {
        assert!(text.lines().any(|there| there == line), "no {line} in {text}");
    }
    let mut families: Vec<_> = text.lines().filter(|line| line.starts_with("# TYPE")).collect();
    let all = families.len();
    families.sort_unstable();
    families.dedup();
    assert_eq!(families.len(), all, "each family once");
    // Who asks for nonsense, or for nothing and goes away, is no reason to stop.
    drop(TcpStream::connect(address).unwrap());
    assert!(http(address, b"\r\n").ends_with("# EOF\n"));
    drop(rank);
    assert!(TcpStream::connect(address).is_err(), "it ends with the rank");
}

/// A meter keeps no rank, and says what a queue had done when it has ended.
#[test]
fn a39_a_meter_outlives_its_rank() {
    let dir = tempfile::tempdir().unwrap();
    let rank = node(dir.path(), "").rank(0).start().unwrap();
    let meter = rank.meter();
    work(&rank);
    let count = |metrics: &[Metric], name: &str| metrics.iter().filter(|m| m.name == name).count();
    assert_eq!(count(&meter.read(), "ucm_cache_deaths"), 1);
    drop(rank);
    let after = meter.read();
    assert_eq!(count(&after, "ucm_cache_deaths"), 0);
    let durable = after.iter().find(|m| m.name == "ucm_queue_dump_durable").unwrap();
    assert_eq!(durable.value, ucm::metrics::MetricValue::Count(3));
}

/// A bad address is refused before the cache is touched.
#[test]
fn a39_an_address_that_cannot_be_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (address, device) in [("nonsense", 0), ("127.0.0.1:65535", 1)] {
        let error = node(dir.path(), address).rank(device).start().unwrap_err();
        assert!(error.to_string().contains("cache.metrics"), "{error}");
        assert!(!dir.path().join("cache").exists(), "the cache was touched");
    }
}
