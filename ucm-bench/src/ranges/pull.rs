//! The baseline: what pools do that pull for each rank.
//!
//! One arena a client, under one lock that is held across resolving, wire and copying out; only the asked
//! ranges are read, and the whole object is pulled a second time in the background, so that the next reader
//! finds it.
//!
//! Owns: the arena, the objects that were pulled, the puller's thread.
//! **Invariant:** it moves the same bytes by the same engines as the pool; only the policy differs.

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Instant,
};

use ucm_transport::{
    Addr, HostEngine, Memory, RegionId, Secret, TcpEngine, TcpPeer, Transfer, TransferEngine,
    TransferPlan,
};

use super::{
    peer_error, soon,
    spec::{Part, Reply, Spec},
};
use crate::error::BenchError;

pub(crate) struct Pull {
    shared: Arc<Shared>,
    queue: mpsc::Sender<(u64, u64)>,
    prefetch: bool,
}

struct Shared {
    tcp: TcpEngine,
    peer: TcpPeer,
    host: Arc<HostEngine>,
    /// The export of all objects, and where each begins.
    source: RegionId,
    begins: Vec<u64>,
    arena: Mutex<Arena>,
    state: Mutex<State>,
    wire_bytes: AtomicU64,
    calls: AtomicU64,
    copied: AtomicU64,
    whole: AtomicU64,
    waited: AtomicU64,
}

struct Arena {
    bytes: u64,
    /// As each engine names it.
    tcp: RegionId,
    host: RegionId,
}

#[derive(Default)]
struct State {
    local: HashMap<u64, RegionId>,
    queued: HashSet<u64>,
    /// Counts the restores: what was asked for in an earlier one is not pulled.
    epoch: u64,
}

impl Pull {
    pub(crate) fn connect(
        spec: &Spec,
        host: Arc<HostEngine>,
        secret: &[u8],
        server: SocketAddr,
        token: [u8; 16],
    ) -> Result<Self, BenchError> {
        let tcp = TcpEngine::builder().build().map_err(peer_error)?;
        let secret = Secret::new(secret).map_err(peer_error)?;
        let peer = tcp.connect(server, &secret, soon()).map_err(peer_error)?;
        let mut total = 0;
        let begins = spec.all().into_iter().map(|(_, _, len)| {
            total += len;
            total - len
        });
        let begins = begins.collect();
        let source = tcp.attach(&peer, &token, total).map_err(peer_error)?;
        let largest = spec.all().iter().map(|(_, _, len)| *len).max().unwrap_or(1);
        let bytes = spec.arena_bytes.max(largest);
        let memory =
            Memory::host(usize::try_from(bytes).unwrap_or(usize::MAX)).map_err(peer_error)?;
        let arena = Arena {
            bytes,
            tcp: tcp.register(memory.clone()).map_err(peer_error)?,
            host: host.register(memory).map_err(peer_error)?,
        };
        let shared = Arc::new(Shared {
            tcp,
            peer,
            host,
            source,
            begins,
            arena: Mutex::new(arena),
            state: Mutex::default(),
            wire_bytes: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            whole: AtomicU64::new(0),
            waited: AtomicU64::new(0),
        });
        let (queue, work) = mpsc::channel::<(u64, u64)>();
        let of_thread = Arc::clone(&shared);
        let lengths: Vec<u64> = spec.all().iter().map(|(_, _, len)| *len).collect();
        thread::spawn(move || {
            for (epoch, number) in work {
                let len = usize::try_from(number).ok().and_then(|at| lengths.get(at));
                let pulled = of_thread.pull_whole(epoch, number, len.copied().unwrap_or(0));
                if pulled.is_err() {
                    return;
                }
            }
        });
        Ok(Self { shared, queue, prefetch: spec.prefetch })
    }

    pub(crate) fn get(&self, parts: &[Part], to: RegionId) -> Result<(), BenchError> {
        let shared = &self.shared;
        let mut remote = Vec::new();
        let mut copies = Vec::new();
        {
            let state = lock(&shared.state);
            for part in parts {
                match state.local.get(&part.number) {
                    Some(region) => {
                        copies.extend(part.ranges.iter().map(|(range, at)| Transfer {
                            src: Addr { region: *region, offset: range.offset },
                            dst: Addr { region: to, offset: *at },
                            len: range.len,
                        }));
                    }
                    None => remote.push(part),
                }
            }
        }
        shared.copy(copies)?;
        if remote.is_empty() {
            return Ok(());
        }
        let asked = Instant::now();
        let arena = lock(&shared.arena);
        let waited = u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX);
        shared.waited.fetch_add(waited, Ordering::Relaxed);
        shared.resolve(remote.len())?;
        let (mut wire, mut copies, mut used) = (Vec::new(), Vec::new(), 0);
        for part in &remote {
            for (range, at) in &part.ranges {
                if used + range.len > arena.bytes {
                    shared.bring(std::mem::take(&mut wire), used)?;
                    shared.copy(std::mem::take(&mut copies))?;
                    used = 0;
                }
                wire.push(Transfer {
                    src: Addr {
                        region: shared.source,
                        offset: shared.begin(part.number) + range.offset,
                    },
                    dst: Addr { region: arena.tcp, offset: used },
                    len: range.len,
                });
                copies.push(Transfer {
                    src: Addr { region: arena.host, offset: used },
                    dst: Addr { region: to, offset: *at },
                    len: range.len,
                });
                used += range.len;
            }
        }
        shared.bring(wire, used)?;
        shared.copy(copies)?;
        drop(arena);
        if self.prefetch {
            let mut state = lock(&shared.state);
            let epoch = state.epoch;
            for part in remote {
                if state.queued.insert(part.number) {
                    let _ = self.queue.send((epoch, part.number));
                }
            }
        }
        Ok(())
    }

    pub(crate) fn clear(&self) {
        // Whoever pulls now is waited for.
        let arena = lock(&self.shared.arena);
        let mut state = lock(&self.shared.state);
        for region in state.local.drain().map(|(_, region)| region) {
            let _ = self.shared.host.deregister(region);
        }
        state.queued.clear();
        state.epoch += 1;
        let counters = [
            &self.shared.wire_bytes,
            &self.shared.calls,
            &self.shared.copied,
            &self.shared.whole,
            &self.shared.waited,
        ];
        counters.iter().for_each(|counter| counter.store(0, Ordering::Relaxed));
        drop(state);
        drop(arena);
    }

    pub(crate) fn count(&self, reply: &mut Reply) {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        reply.wire_bytes = load(&self.shared.wire_bytes);
        reply.remote_calls = load(&self.shared.calls);
        reply.copy_bytes = load(&self.shared.copied);
        reply.whole_bytes = load(&self.shared.whole);
        reply.arena_wait_ns = load(&self.shared.waited);
    }
}

impl Shared {
    fn begin(&self, number: u64) -> u64 {
        usize::try_from(number).ok().and_then(|at| self.begins.get(at)).copied().unwrap_or(0)
    }

    fn resolve(&self, keys: usize) -> Result<(), BenchError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.tcp.call(&self.peer, &vec![0; keys * 48], soon()).map(drop).map_err(peer_error)
    }

    fn bring(&self, items: Vec<Transfer>, bytes: u64) -> Result<(), BenchError> {
        if items.is_empty() {
            return Ok(());
        }
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.wire_bytes.fetch_add(bytes, Ordering::Relaxed);
        let plan = TransferPlan { items, holds: Vec::new() };
        let ended = self.tcp.transfer(plan, soon()).map_err(|r| peer_error(r.error))?;
        ended.result.map(drop).map_err(peer_error)
    }

    /// The engine copies in the caller's thread.
    fn copy(&self, items: Vec<Transfer>) -> Result<(), BenchError> {
        if items.is_empty() {
            return Ok(());
        }
        let plan = TransferPlan { items, holds: Vec::new() };
        self.host.submit(plan).map_err(|rejected| peer_error(rejected.error))?;
        let mut ended = Vec::new();
        self.host.poll(&mut ended);
        for completion in ended {
            let bytes = completion.result.map_err(peer_error)?;
            self.copied.fetch_add(bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    fn pull_whole(&self, epoch: u64, number: u64, len: u64) -> Result<(), BenchError> {
        let memory =
            Memory::host(usize::try_from(len).unwrap_or(usize::MAX)).map_err(peer_error)?;
        let region = self.host.register(memory).map_err(peer_error)?;
        let arena = lock(&self.arena);
        if lock(&self.state).epoch != epoch {
            drop(arena);
            return self.host.deregister(region).map_err(peer_error);
        }
        self.resolve(1)?;
        let at = |region, offset| Addr { region, offset };
        let src = at(self.source, self.begin(number));
        self.bring(vec![Transfer { src, dst: at(arena.tcp, 0), len }], len)?;
        self.copy(vec![Transfer { src: at(arena.host, 0), dst: at(region, 0), len }])?;
        self.whole.fetch_add(len, Ordering::Relaxed);
        lock(&self.state).local.insert(number, region);
        drop(arena);
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
