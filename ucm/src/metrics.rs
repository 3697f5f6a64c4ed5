//! Metrics: what ranks, caches and peers have done, for those who watch them.
//!
//! Three ways to them: values with names ([`RankMeter::read`]), a collector for a registry of
//! `prometheus-client`, and a text that Prometheus reads, over HTTP. `docs/metrics.md` lists all.
//!
//! **Invariant:** reading writes nothing and takes no lock of the load path. A counter never falls while
//! its source lives.

mod server;

use std::{fmt, time::Duration};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _, text},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Registry,
};
use ucm_ctrl::{Control, MemberState, PoolInspection, Statistics, WeakMember};
use ucm_data::PeerWatch;
use ucm_queue::{ErrorKind, QueueMeter, QueueStats};
use ucm_remote::AgentStats;

pub(crate) use self::server::MetricsServer;

/// Whether a value may fall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// It only grows, until its process ends.
    Counter,
    /// It goes up and down.
    Gauge,
}

/// One value at one moment.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Metric {
    /// `ucm_<part>_<what>_<unit>`; a counter's name ends in `_total` besides, in texts for Prometheus.
    pub name: String,
    /// What it says.
    pub help: &'static str,
    /// Whether it may fall.
    pub kind: MetricKind,
    /// What it is about. Values of one name have the same keys.
    pub labels: Vec<(&'static str, String)>,
    /// How much.
    pub value: MetricValue,
}

/// A number with or without a fraction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MetricValue {
    /// Events, things or bytes.
    Count(u64),
    /// Times in seconds.
    Seconds(f64),
}

/// Collects values; those of one name one after another, as the text format wants them.
#[derive(Default)]
struct Sheet(Vec<Metric>);

impl Sheet {
    fn add(
        &mut self,
        (name, help, kind): (String, &'static str, MetricKind),
        labels: &[(&'static str, String)],
        value: MetricValue,
    ) {
        let help = help.trim_start();
        let metric = Metric { name, help, kind, labels: labels.to_vec(), value };
        let after = self.0.iter().rposition(|other| other.name == metric.name);
        self.0.insert(after.map_or(self.0.len(), |at| at + 1), metric);
    }

    /// A value whose name tells its unit; nanoseconds become seconds.
    fn count(
        &mut self,
        part: &str,
        (name, help, kind): (&str, &'static str, MetricKind),
        labels: &[(&'static str, String)],
        value: u64,
    ) {
        let (name, value) = match name.strip_suffix("_ns") {
            Some(what) => (
                format!("ucm_{part}_{what}_seconds"),
                MetricValue::Seconds(Duration::from_nanos(value).as_secs_f64()),
            ),
            None => (format!("ucm_{part}_{name}"), MetricValue::Count(value)),
        };
        self.add((name, help, kind), labels, value);
    }
}

/// Reads the metrics of a rank, and of the cache it is in. It keeps neither alive: when the rank has
/// left, only what its queues had done is left. Thread-safe, cheap to clone.
///
/// What is said of the cache is the same in all ranks of a node.
#[derive(Clone, Debug)]
pub struct RankMeter {
    pub(crate) device: u32,
    pub(crate) engine: String,
    pub(crate) backend: String,
    pub(crate) member: WeakMember,
    pub(crate) watch: PeerWatch,
    pub(crate) lanes: Vec<LaneMeter>,
}

/// The part of one pool.
#[derive(Clone, Debug)]
pub(crate) struct LaneMeter {
    pub(crate) queue: QueueMeter,
    pub(crate) page_bytes: u64,
    pub(crate) degraded_bytes: u64,
    pub(crate) unreachable_bytes: u64,
}

impl RankMeter {
    /// All values now. Walks the control region: milliseconds per million slots.
    #[must_use]
    pub fn read(&self) -> Vec<Metric> {
        let mut sheet = Sheet::default();
        if let Some(member) = self.member.upgrade() {
            cache(&mut sheet, member.control());
        }
        let rank = [("device", self.device.to_string())];
        let mut labels = rank.to_vec();
        labels.extend([("engine", self.engine.clone()), ("backend", self.backend.clone())]);
        let what = ("info", "What the rank runs on; always 1.", MetricKind::Gauge);
        sheet.count("rank", what, &labels, 1);
        let seen = self.watch.stats();
        for (name, help, value) in [
            ("served", "Joiners that were given the cache's descriptors.", seen.served),
            (
                "refused_credentials",
                "Connections of other users, refused.",
                seen.refused_credentials,
            ),
            ("refused_layout", "Connections of another layout, refused.", seen.refused_layout),
            (
                "refused_descriptors",
                "Connections refused because this process is out of descriptors.",
                seen.refused_descriptors,
            ),
            ("foreign_seats", "Strangers found listening at a member's seat.", seen.foreign_seats),
            ("deaths", "Deaths of members seen.", seen.deaths),
            ("leaves", "Orderly leaves seen.", seen.leaves),
            ("hook_panics", "Panics while a member's end was dealt with.", seen.hook_panics),
        ] {
            sheet.count("rank", (name, help, MetricKind::Counter), &rank, value);
        }
        for (pool, lane) in self.lanes.iter().enumerate() {
            let labels = [("device", self.device.to_string()), ("pool", pool.to_string())];
            for (name, help, value) in [
                ("page_bytes", "Size of the pages that all of the pool lies on.", lane.page_bytes),
                (
                    "degraded_bytes",
                    "Bytes of the pool on smaller pages than asked for.",
                    lane.degraded_bytes,
                ),
                (
                    "unreachable_bytes",
                    "Bytes of the pool that the engine cannot reach; the processor copies them.",
                    lane.unreachable_bytes,
                ),
            ] {
                sheet.count("rank", (name, help, MetricKind::Gauge), &labels, value);
            }
            queue(&mut sheet, &labels, &lane.queue.stats());
        }
        sheet.0
    }

    /// The values as a text that Prometheus reads (OpenMetrics 1.0).
    #[must_use]
    pub fn text(&self) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self.clone()));
        encode(&registry)
    }
}

/// For a registry of `prometheus-client`: one rank for each registry, as what is said of the cache may
/// stand there once.
impl Collector for RankMeter {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        write(&self.read(), encoder)
    }
}

fn cache(sheet: &mut Sheet, control: &Control) {
    let seen = control.inspect();
    let counters = Statistics::MEANINGS.iter().zip(seen.statistics.list());
    for ((name, help), (_, value)) in counters {
        sheet.count("cache", (name, help, MetricKind::Counter), &[], value);
    }
    for (pool, seen) in seen.pools.iter().enumerate() {
        slots(sheet, &pool.to_string(), seen);
    }
    for state in
        [MemberState::Joining, MemberState::Joined, MemberState::Reaping, MemberState::Expelled]
    {
        let members = seen.members.iter().filter(|member| member.state == state).count();
        let labels = [("state", format!("{state:?}").to_lowercase())];
        let what = ("members", "Member records by their state.", MetricKind::Gauge);
        sheet.count("cache", what, &labels, members as u64);
    }
    for (name, help, value) in [
        ("groups_open", "Groups that some member has not voted in.", seen.groups.open),
        ("groups_decided", "Groups whose decision some member has not heard.", seen.groups.decided),
        ("problems", "Contradictions found in the control region now.", seen.problems.len() as u64),
    ] {
        sheet.count("cache", (name, help, MetricKind::Gauge), &[], value);
    }
}

fn slots(sheet: &mut Sheet, pool: &str, seen: &PoolInspection) {
    for (state, slots) in [
        ("free", seen.free),
        ("moving", seen.moving),
        ("idle", seen.idle),
        ("filling", seen.filling),
        ("ready", seen.ready),
        ("failed", seen.failed),
        ("draining", seen.draining),
    ] {
        let labels = [("pool", pool.to_owned()), ("state", state.to_owned())];
        sheet.count("cache", ("slots", "Slots by their state.", MetricKind::Gauge), &labels, slots);
    }
    let labels = [("pool", pool.to_owned())];
    for (name, help, value) in [
        ("pinned_slots", "Slots that some member pins.", seen.pinned),
        ("accessed_slots", "Slots used since the CLOCK hand passed.", seen.accessed),
        (
            "longest_bucket_slots",
            "Slots in the fullest bucket of the index.",
            seen.longest_bucket as u64,
        ),
    ] {
        sheet.count("cache", (name, help, MetricKind::Gauge), &labels, value);
    }
    let oldest = seen.oldest_fill_ms.saturating_mul(1_000_000);
    let what = ("oldest_fill_ns", "Age of the oldest fill, 0 without one.", MetricKind::Gauge);
    sheet.count("cache", what, &labels, oldest);
}

fn queue(sheet: &mut Sheet, labels: &[(&'static str, String)], stats: &QueueStats) {
    for ((name, help, falls), (_, value)) in QueueStats::MEANINGS.iter().zip(stats.list()) {
        let kind = if *falls { MetricKind::Gauge } else { MetricKind::Counter };
        sheet.count("queue", (name, help, kind), labels, value);
    }
    for kind in ErrorKind::ALL {
        let mut labels = labels.to_vec();
        labels.push(("kind", format!("{kind:?}")));
        let what = ("rejected", "Submissions refused, by the kind of error.", MetricKind::Counter);
        sheet.count("queue", what, &labels, stats.rejected(kind));
    }
}

/// The values of a peer of the remote pool.
pub(crate) fn of_agent(stats: &AgentStats) -> Vec<Metric> {
    let mut sheet = Sheet::default();
    for (name, help, falls, value) in stats.list() {
        let kind = if falls { MetricKind::Gauge } else { MetricKind::Counter };
        sheet.count("remote", (name, help, kind), &[], value);
    }
    sheet.0
}

/// The values as a text that Prometheus reads (OpenMetrics 1.0).
pub(crate) fn text(metrics: Vec<Metric>) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Read(metrics)));
    encode(&registry)
}

#[derive(Debug)]
struct Read(Vec<Metric>);

impl Collector for Read {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        write(&self.0, encoder)
    }
}

fn encode(registry: &Registry) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = text::encode(&mut out, registry);
    out
}

fn write(metrics: &[Metric], mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
    for family in metrics.chunk_by(|a, b| a.name == b.name) {
        let Some(Metric { name, help, kind, .. }) = family.first() else { continue };
        let of_kind = match kind {
            MetricKind::Counter => MetricType::Counter,
            MetricKind::Gauge => MetricType::Gauge,
        };
        // The encoder adds a full stop.
        let help = help.trim_end_matches('.');
        let mut encoder = encoder.encode_descriptor(name, help, None, of_kind)?;
        for Metric { labels, value, .. } in family {
            let encoder = encoder.encode_family(labels)?;
            match (kind, *value) {
                (MetricKind::Counter, MetricValue::Count(n)) => {
                    ConstCounter::new(n).encode(encoder)
                }
                (MetricKind::Counter, MetricValue::Seconds(s)) => {
                    ConstCounter::new(s).encode(encoder)
                }
                (MetricKind::Gauge, MetricValue::Count(n)) => ConstGauge::new(n).encode(encoder),
                (MetricKind::Gauge, MetricValue::Seconds(s)) => ConstGauge::new(s).encode(encoder),
            }?;
        }
    }
    Ok(())
}
