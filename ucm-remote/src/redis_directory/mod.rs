//! A directory in Redis or Valkey, single or cluster.
//!
//! Records are hints with a time to live; members are kept by registering again before theirs has run
//! out, by the server's clock. Removing a peer takes one record away: what it announced is told no longer
//! because its run is over, and runs out by itself.
//!
//! **Invariant:** only records of members whose registration goes on are told, as far as this client
//! knows: what it knows is at most [`RedisOptions::members_for`] old.

mod link;
mod wire;

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use redis::{Cmd, Value};

use self::link::Link;
use crate::{
    Directory, DirectoryError, Epoch, Member, MostFree, ObjectKey, PeerId, Placement,
    PlacementStrategy, Record, Token,
};

/// Settings of a [`RedisDirectory`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RedisOptions {
    /// Keeps several pools apart on one server; at most 64 letters, digits, `-`, `_`, `.`.
    pub namespace: String,
    /// How long a record lasts if it is not announced again.
    pub record_ttl: Duration,
    /// How long a member lasts if it does not register again.
    pub member_ttl: Duration,
    /// How long the list of members is believed before it is read again, together with the next question.
    pub members_for: Duration,
    /// Longest wait for a connection to, or an answer from, a node of a cluster.
    pub cluster_patience: Duration,
    /// Candidates of a placement.
    pub candidates: usize,
}

impl RedisOptions {
    /// Records for an hour, members for 15 s, the list of members for half a second.
    #[must_use]
    pub fn new(namespace: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            record_ttl: Duration::from_secs(3600),
            member_ttl: Duration::from_secs(15),
            members_for: Duration::from_millis(500),
            cluster_patience: Duration::from_secs(1),
            candidates: 3,
        }
    }

    fn check(&self) -> Result<(), DirectoryError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let name = &self.namespace;
        if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
            return Err(DirectoryError::Refused(format!(
                "namespace {name:?}: 1 to 64 letters, digits, `-`, `_`, `.`"
            )));
        }
        let short = [self.record_ttl, self.member_ttl].into_iter().any(|ttl| ttl.as_millis() == 0);
        if short {
            return Err(DirectoryError::Refused("a time to live of less than 1 ms".into()));
        }
        Ok(())
    }
}

/// Field and content.
type Pair = (Vec<u8>, Vec<u8>);

type Members = HashMap<PeerId, Member>;

/// See the module description. Thread-safe; calls of several threads use connections of their own.
#[derive(Debug)]
pub struct RedisDirectory {
    link: Link,
    options: RedisOptions,
    strategy: Box<dyn PlacementStrategy>,
    /// As last read.
    members: Mutex<Option<(Instant, Arc<Members>)>>,
    unreadable: AtomicU64,
}

impl RedisDirectory {
    /// On one server, at `redis://[user:password@]host:port[/db]` or `unix:///path`. Connects with the
    /// first question.
    ///
    /// # Errors
    /// `Refused` for an address or options that make no sense.
    pub fn single(address: &str, options: RedisOptions) -> Result<Self, DirectoryError> {
        options.check()?;
        Ok(Self::with(Link::single(address)?, options))
    }

    /// On a cluster, of which some nodes are named.
    ///
    /// # Errors
    /// As [`single`](Self::single).
    pub fn cluster(addresses: &[String], options: RedisOptions) -> Result<Self, DirectoryError> {
        options.check()?;
        let link = Link::cluster(addresses, options.cluster_patience)?;
        Ok(Self::with(link, options))
    }

    fn with(link: Link, options: RedisOptions) -> Self {
        Self {
            link,
            options,
            strategy: Box::new(MostFree),
            members: Mutex::default(),
            unreadable: AtomicU64::new(0),
        }
    }

    /// With another strategy for new objects.
    #[must_use]
    pub fn with_strategy(self, strategy: impl PlacementStrategy + 'static) -> Self {
        Self { strategy: Box::new(strategy), ..self }
    }

    /// Records and members that could not be read and were left out.
    #[must_use]
    pub fn unreadable(&self) -> u64 {
        self.unreadable.load(Ordering::Relaxed)
    }

    fn tagged(&self, what: &str) -> String {
        format!("{{ucm:{}}}:{what}", self.options.namespace)
    }

    fn script(&self, script: &str, keys: &[&str]) -> Cmd {
        let mut command = Cmd::new();
        command.arg("EVAL").arg(script).arg(keys.len());
        for key in keys {
            command.arg(self.tagged(key));
        }
        command
    }

    fn object_script(&self, script: &str, key: &ObjectKey) -> Cmd {
        let mut command = Cmd::new();
        command.arg("EVAL").arg(script).arg(1).arg(wire::object_key(&self.options.namespace, key));
        command
    }

    fn ask_members(&self) -> Cmd {
        self.script(wire::MEMBERS, &["members", "ended"])
    }

    fn known_members(&self) -> Option<Arc<Members>> {
        let known = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = known.as_ref().filter(|(at, _)| at.elapsed() < self.options.members_for);
        fresh.map(|(_, members)| members.clone())
    }

    fn learn_members(&self, answer: Value) -> Result<Arc<Members>, DirectoryError> {
        let parse = |(peer, member): Pair| wire::parse_member(&peer, &member);
        let members = self.readable(pairs(answer)?, parse);
        let members: Members = members.into_iter().map(|m| (m.peer.clone(), m)).collect();
        let members = Arc::new(members);
        let mut known = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        *known = Some((Instant::now(), members.clone()));
        Ok(members)
    }

    fn forget_members(&self) {
        *self.members.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn readable<T>(&self, pairs: Vec<Pair>, parse: impl Fn(Pair) -> Option<T>) -> Vec<T> {
        let count = pairs.len();
        let good: Vec<T> = pairs.into_iter().filter_map(parse).collect();
        let bad = u64::try_from(count - good.len()).unwrap_or(u64::MAX);
        self.unreadable.fetch_add(bad, Ordering::Relaxed);
        good
    }

    /// Sends commands about records; refused if their runs are not registered. They may have been sent
    /// then: what an ended run announces is not told.
    fn about_records(
        &self,
        records: &[(ObjectKey, Record)],
        mut commands: Vec<Cmd>,
        deadline: Instant,
    ) -> Result<(), DirectoryError> {
        if records.is_empty() {
            return Ok(());
        }
        commands.push(self.ask_members());
        let mut answers = self.link.ask(commands, deadline)?;
        let members = self.learn_members(answers.pop().unwrap_or(Value::Nil))?;
        for (_, record) in records {
            let peer = &record.peer;
            if members.get(peer).is_none_or(|member| member.boot != record.boot) {
                return Err(DirectoryError::Refused(format!(
                    "peer {peer} is not registered with this boot token"
                )));
            }
        }
        Ok(())
    }
}

fn millis(ttl: Duration) -> u64 {
    // A year is for ever; the server refuses absurd values.
    u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX).min(365 * 86_400_000)
}

fn bytes(value: Value) -> Option<Vec<u8>> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        Value::SimpleString(text) => Some(text.into_bytes()),
        _ => None,
    }
}

/// The pairs of a hash, as protocol 2 or 3 write it.
fn pairs(value: Value) -> Result<Vec<Pair>, DirectoryError> {
    let nonsense = || DirectoryError::Corrupt("not a list of pairs".into());
    let flat: Vec<Value> = match value {
        Value::Array(all) => all,
        Value::Map(all) => all.into_iter().flat_map(|(key, value)| [key, value]).collect(),
        Value::Nil => Vec::new(),
        _ => return Err(nonsense()),
    };
    let mut found = Vec::with_capacity(flat.len() / 2);
    let mut rest = flat.into_iter();
    while let Some(key) = rest.next() {
        let pair = bytes(key).zip(rest.next().and_then(bytes));
        found.push(pair.ok_or_else(nonsense)?);
    }
    Ok(found)
}

impl Directory for RedisDirectory {
    fn epoch(&self, deadline: Instant) -> Result<Epoch, DirectoryError> {
        let mut command = Cmd::new();
        command.arg("GET").arg(self.tagged("epoch"));
        let answer = self.link.ask(vec![command], deadline)?.pop().unwrap_or(Value::Nil);
        // Nobody has registered since it started.
        if answer == Value::Nil { Ok(Epoch(0)) } else { parse_epoch(answer) }
    }

    fn locate(
        &self,
        keys: &[ObjectKey],
        deadline: Instant,
    ) -> Result<Vec<Vec<Record>>, DirectoryError> {
        let known = self.known_members();
        let mut commands = Vec::with_capacity(keys.len() + 1);
        for key in keys {
            let mut command = Cmd::new();
            command.arg("HGETALL").arg(wire::object_key(&self.options.namespace, key));
            commands.push(command);
        }
        if known.is_none() && !keys.is_empty() {
            commands.push(self.ask_members());
        }
        let mut answers = self.link.ask(commands, deadline)?;
        let members = match known {
            Some(members) => members,
            None if keys.is_empty() => return Ok(Vec::new()),
            None => self.learn_members(answers.pop().unwrap_or(Value::Nil))?,
        };
        let told = |answer| {
            let parse = |(field, record): Pair| wire::parse_record(&field, &record);
            let mut records = self.readable(pairs(answer)?, parse);
            records.retain(|r| members.get(&r.peer).is_some_and(|member| member.boot == r.boot));
            Ok(records)
        };
        answers.into_iter().map(told).collect()
    }

    fn announce(
        &self,
        records: &[(ObjectKey, Record)],
        deadline: Instant,
    ) -> Result<(), DirectoryError> {
        let ttl = millis(self.options.record_ttl);
        let command = |(key, record): &(ObjectKey, Record)| {
            let mut command = self.object_script(wire::ANNOUNCE, key);
            command.arg(wire::field(&record.peer, record.boot)).arg(wire::record(record)).arg(ttl);
            command
        };
        self.about_records(records, records.iter().map(command).collect(), deadline)
    }

    fn withdraw(
        &self,
        records: &[(ObjectKey, Record)],
        deadline: Instant,
    ) -> Result<(), DirectoryError> {
        let command = |(key, record): &(ObjectKey, Record)| {
            let mut command = self.object_script(wire::WITHDRAW, key);
            let generation = record.generation.0.to_be_bytes();
            command.arg(wire::field(&record.peer, record.boot)).arg(&generation[..]);
            command
        };
        self.about_records(records, records.iter().map(command).collect(), deadline)
    }

    fn register(&self, member: &Member, deadline: Instant) -> Result<Epoch, DirectoryError> {
        let mut command = self.script(wire::REGISTER, &["members", "ended", "epoch"]);
        let ttl = millis(self.options.member_ttl);
        command.arg(member.peer.as_str()).arg(wire::member(member)).arg(ttl);
        let answer = self.link.ask(vec![command], deadline)?.pop().unwrap_or(Value::Nil);
        self.forget_members();
        match answer {
            Value::Array(both) => match <[Value; 2]>::try_from(both) {
                Ok([Value::Int(1), epoch]) => parse_epoch(epoch),
                Ok([Value::Int(0), _]) => Err(DirectoryError::Refused(
                    "this run was removed or has run out: register with a new boot token".into(),
                )),
                _ => Err(DirectoryError::Corrupt("not the answer to a registration".into())),
            },
            _ => Err(DirectoryError::Corrupt("not the answer to a registration".into())),
        }
    }

    fn remove_peer(
        &self,
        peer: &PeerId,
        boot: Token,
        deadline: Instant,
    ) -> Result<(), DirectoryError> {
        let mut command = self.script(wire::REMOVE, &["members", "ended"]);
        command.arg(peer.as_str()).arg(&boot.0[..]);
        self.link.ask(vec![command], deadline)?;
        self.forget_members();
        Ok(())
    }

    fn members(&self, deadline: Instant) -> Result<Vec<Member>, DirectoryError> {
        let answer = self.link.ask(vec![self.ask_members()], deadline)?.pop().unwrap_or(Value::Nil);
        let mut members: Vec<Member> = self.learn_members(answer)?.values().cloned().collect();
        members.sort_by(|a, b| a.peer.cmp(&b.peer));
        Ok(members)
    }

    fn place(
        &self,
        objects: &[(ObjectKey, u64)],
        deadline: Instant,
    ) -> Result<Vec<Placement>, DirectoryError> {
        let members = match self.known_members() {
            Some(members) => members.values().cloned().collect(),
            None => self.members(deadline)?,
        };
        let place = |(key, len): &(ObjectKey, u64)| {
            self.strategy.place(key, *len, &members, self.options.candidates)
        };
        Ok(objects.iter().map(place).collect())
    }
}

fn parse_epoch(value: Value) -> Result<Epoch, DirectoryError> {
    let text = bytes(value).and_then(|bytes| String::from_utf8(bytes).ok());
    let number = text.and_then(|text| text.parse().ok());
    number.map(Epoch).ok_or_else(|| DirectoryError::Corrupt("not an epoch".into()))
}

impl fmt::Display for RedisDirectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "redis, namespace {}", self.options.namespace)
    }
}
