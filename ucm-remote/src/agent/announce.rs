//! What the directory is told: this peer, what it has, and what it has no longer.
//!
//! **Invariant:** what could not be told is made up for by telling everything again, and what has gone
//! meanwhile with it; nobody else waits for the directory.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use ucm_transport::{TcpServer, TcpServerConfig};

use super::{Inner, lock};
use crate::{
    DirectoryError, Epoch, Generation, Medium as _, Member, ObjectKey, PeerService, Record,
    core::Change,
};

/// Records of one message.
const BATCH: usize = 1024;
/// How long one message may take.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(super) struct Announcer {
    rung: Mutex<bool>,
    bell: Condvar,
    lost: AtomicU64,
}

impl Announcer {
    /// Something has changed.
    pub(super) fn ring(&self) {
        *self.lock() = true;
        self.bell.notify_all();
    }

    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    fn wait(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut rung = self.lock();
        while !std::mem::take(&mut *rung) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            rung = self.bell.wait_timeout(rung, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.rung.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the announcer's thread knows.
#[derive(Debug, Default)]
pub(super) struct Told {
    epoch: Option<Epoch>,
    registered: Option<Instant>,
    /// Something could not be told.
    behind: bool,
    /// What has gone and could not be withdrawn: telling everything that is there does not say it.
    gone: Vec<Change>,
    /// More has gone than is remembered: only another run takes all records of this one away.
    overflown: bool,
    /// Where another run is to be served, as long as that could not be done.
    serve_at: Option<SocketAddr>,
}

impl Told {
    /// These could not be told.
    fn keep(&mut self, changes: Vec<Change>, limit: usize) {
        self.behind |= !changes.is_empty();
        self.gone.extend(changes.into_iter().filter(|change| matches!(change, Change::Gone(..))));
        if self.gone.len() > limit {
            self.gone = Vec::new();
            self.overflown = true;
        }
    }
}

/// Body of the announcer's thread.
pub(super) fn run(inner: &Arc<Inner>, mut told: Told) {
    while !inner.stopping.load(Ordering::SeqCst) {
        inner.announce(&mut told);
        inner.give_back();
        inner.announcer.wait(inner.options.heartbeat);
    }
}

impl Inner {
    /// Registers this peer and tells what has changed.
    pub(super) fn announce(&self, told: &mut Told) {
        self.serve_again(told);
        let Some(member) = self.member() else {
            // A peer that serves nobody has nothing to tell.
            let changes = self.medium.medium().take_changes();
            if told.serve_at.is_some() {
                self.announcer.lost.fetch_add(changes.len() as u64, Ordering::Relaxed);
            }
            return;
        };
        let due = told.registered.is_none_or(|at| at.elapsed() >= self.options.heartbeat);
        if due {
            match self.routes.directory().register(&member, Instant::now() + PATIENCE) {
                Ok(epoch) if told.epoch.is_some_and(|known| epoch < known) => {
                    tracing::warn!(?epoch, "a directory that another one has replaced answers");
                    told.registered = None;
                    told.behind = true;
                }
                Ok(epoch) => {
                    told.behind |= told.epoch.replace(epoch) != Some(epoch);
                    told.registered = Some(Instant::now());
                }
                Err(DirectoryError::Refused(why)) => {
                    tracing::warn!(%why, "the directory refuses this run; it begins a new one");
                    self.begin_run(told);
                    return;
                }
                Err(error) => {
                    tracing::debug!(%error, "this peer could not be registered");
                    told.registered = None;
                    told.behind = true;
                }
            }
        }
        let medium = self.medium.medium();
        // In this order: what changes in between is told twice, not never.
        let mut changes = medium.take_changes();
        let limit = self.options.withdrawals;
        if told.registered.is_none() {
            self.announcer.lost.fetch_add(changes.len() as u64, Ordering::Relaxed);
            told.keep(changes, limit);
            return;
        }
        if told.overflown {
            tracing::warn!(
                limit,
                "more objects have gone untold than are remembered: another run begins"
            );
            self.begin_run(told);
            return;
        }
        if told.behind {
            told.behind = false;
            changes.retain(|change| matches!(change, Change::Gone(..)));
            changes.append(&mut told.gone);
            changes.extend(medium.all_stored());
        }
        if let Err(error) = self.tell(&member, &changes) {
            tracing::debug!(%error, "the directory did not take an announcement");
            self.announcer.lost.fetch_add(changes.len() as u64, Ordering::Relaxed);
            told.keep(changes, limit);
            told.behind = true;
            told.registered = None;
        }
    }

    fn tell(&self, member: &Member, changes: &[Change]) -> Result<(), DirectoryError> {
        // What came and went meanwhile need not be told.
        let mut last: HashMap<(ObjectKey, Generation), (bool, u64)> = HashMap::new();
        for change in changes {
            match *change {
                Change::Stored(key, generation, len) => {
                    last.insert((key, generation), (true, len));
                }
                Change::Gone(key, generation, len) => {
                    if !matches!(last.remove(&(key, generation)), Some((true, _))) {
                        last.insert((key, generation), (false, len));
                    }
                }
            }
        }
        let record =
            |generation, len| Record::new(member.peer.clone(), member.boot, generation, len);
        let (mut stored, mut gone) = (Vec::new(), Vec::new());
        for ((key, generation), (is_stored, len)) in last {
            let place = if is_stored { &mut stored } else { &mut gone };
            place.push((key, record(generation, len)));
        }
        let directory = self.routes.directory();
        for some in gone.chunks(BATCH) {
            directory.withdraw(some, Instant::now() + PATIENCE)?;
        }
        for some in stored.chunks(BATCH) {
            directory.announce(some, Instant::now() + PATIENCE)?;
        }
        Ok(())
    }

    fn member(&self) -> Option<Member> {
        let server = lock(&self.server);
        let server = server.as_ref()?;
        let address = self.options.advertise.clone();
        let address = address.unwrap_or_else(|| server.address().to_string());
        let mut member = Member::new(self.options.me.clone(), server.boot(), address);
        let usage = self.medium.medium().usage();
        let used = usage.pending_bytes + usage.quarantine_bytes;
        member.capacity_bytes = usage.capacity_bytes;
        // What is committed can be evicted, but is worth more than nothing.
        member.free_bytes = usage.capacity_bytes.saturating_sub(used + usage.committed_bytes);
        Some(member)
    }

    /// Ends this run, and serves at the same address as another one.
    fn begin_run(&self, told: &mut Told) {
        let old = lock(&self.server).take();
        // Another run has nothing to take back.
        let serve_at = old.as_ref().map(TcpServer::address);
        *told = Told { behind: true, serve_at, ..Told::default() };
        drop(old);
        self.serve_again(told);
        // It registers at once.
        self.announcer.ring();
    }

    /// Serves where that could not be done; tried again with every heartbeat.
    fn serve_again(&self, told: &mut Told) {
        let Some(address) = told.serve_at else { return };
        match self.serve(address) {
            Ok(server) => {
                *lock(&self.server) = Some(server);
                told.serve_at = None;
            }
            Err(error) => tracing::warn!(%error, %address, "this peer serves nobody for now"),
        }
    }

    pub(super) fn serve(
        &self,
        address: SocketAddr,
    ) -> Result<TcpServer, ucm_transport::TransferError> {
        let config: TcpServerConfig = self.options.server.clone();
        let announcer = Arc::clone(&self.announcer);
        let service = PeerService::new(self.medium.clone())
            .lend_for(self.options.lend)
            .notify(move || announcer.ring());
        TcpServer::bind(address, config, Arc::new(service))
    }
}
