//! A rank: reads group after group of layers, by the pool or by itself.
//!
//! Owns: the destinations, the timing, and the comparison of every byte.
//! **Invariant:** what is compared was read in this restore: destinations are poisoned before.

use std::{path::Path, sync::Arc};

use ucm_remote::{Destination, GetRequest, PoolClient, RemotePool as _};
use ucm_transport::{Addr, HostEngine, Memory, RegionId, TransferEngine as _};

use super::{
    owner::Owner,
    peer_error,
    pull::Pull,
    soon,
    spec::{Order, Part, Reply, Spec, key, word},
};
use crate::{clock, error::BenchError, ranks};

const POISON: u8 = 0xee;

/// Serves orders until the parent leaves.
pub(crate) fn run() -> Result<(), BenchError> {
    let mut owner = None;
    let mut rank: Option<Rank> = None;
    let early = || BenchError::Peer("an order before the first".into());
    ranks::serve(|order: Order| match order {
        Order::Own { spec, secret, socket, baseline } => {
            let (opened, reply) = Owner::open(&spec, &secret, socket, baseline)?;
            owner = Some(opened);
            Ok(reply)
        }
        Order::Join { spec, socket } => {
            rank = Some(Rank::join(spec, &socket)?);
            Ok(Reply::default())
        }
        Order::Pull { spec, secret, server, token } => {
            rank = Some(Rank::pull(spec, &secret, server, token)?);
            Ok(Reply::default())
        }
        Order::Restore { at_ns, compute_ns } => {
            rank.as_mut().ok_or_else(early)?.restore(at_ns, compute_ns)
        }
        Order::Repeat => rank.as_mut().ok_or_else(early)?.repeat(),
        Order::Verify => rank.as_ref().ok_or_else(early)?.verify(),
        Order::Clear => {
            let rank = rank.as_mut().ok_or_else(early)?;
            rank.clear()?;
            Ok(Reply::default())
        }
    })?;
    drop(owner);
    Ok(())
}

enum Way {
    Pool(PoolClient),
    Pull(Pull),
}

struct Rank {
    spec: Spec,
    way: Way,
    /// One a request.
    destinations: Vec<(Memory, RegionId)>,
}

impl Rank {
    fn join(spec: Spec, socket: &Path) -> Result<Self, BenchError> {
        let engine = Arc::new(HostEngine::builder().build().map_err(peer_error)?);
        let destinations = destinations(&spec, &engine)?;
        let client = PoolClient::connect(socket, engine as _).map_err(peer_error)?;
        Ok(Self { spec, way: Way::Pool(client), destinations })
    }

    fn pull(
        spec: Spec,
        secret: &[u8],
        server: std::net::SocketAddr,
        token: [u8; 16],
    ) -> Result<Self, BenchError> {
        let engine = Arc::new(HostEngine::builder().build().map_err(peer_error)?);
        let destinations = destinations(&spec, &engine)?;
        let pull = Pull::connect(&spec, engine, secret, server, token)?;
        Ok(Self { spec, way: Way::Pull(pull), destinations })
    }

    fn restore(&mut self, at_ns: u64, compute_ns: u64) -> Result<Reply, BenchError> {
        let groups = self.spec.groups();
        let order: Vec<(u64, u32)> = if self.spec.interleave {
            (0..groups).flat_map(|g| (0..self.spec.requests).map(move |r| (r, g))).collect()
        } else {
            (0..self.spec.requests).flat_map(|r| (0..groups).map(move |g| (r, g))).collect()
        };
        // What an engine has at hand anyway is not timed.
        let plans: Vec<_> = order.iter().map(|(r, g)| (*r, *g, self.spec.parts(*r, *g))).collect();
        let requests: Vec<Vec<GetRequest>> =
            plans.iter().map(|(r, _, parts)| self.requests(*r, parts)).collect();
        let mut timed = vec![Timed::default(); usize::try_from(self.spec.requests).unwrap_or(0)];
        clock::wait_until(at_ns);
        let mut reply = Reply { began_ns: clock::now_ns(), ..Reply::default() };
        for ((request, group, parts), gets) in plans.iter().zip(&requests) {
            let begun = clock::now_ns();
            self.read(*request, parts, gets)?;
            let ready = clock::now_ns();
            let layers =
                u64::from(self.spec.layers_of(*group).end - self.spec.layers_of(*group).start);
            if let Some(timed) = timed.get_mut(usize::try_from(*request).unwrap_or(0)) {
                timed.add(begun, ready, layers * compute_ns);
            }
        }
        reply.ended_ns = clock::now_ns();
        for timed in timed {
            reply.restore_us.push((timed.ready - timed.begun) as f64 / 1e3);
            reply.ttfl_us.push((timed.first - timed.begun) as f64 / 1e3);
            reply.stall_us.push(timed.stall as f64 / 1e3);
        }
        self.count(&mut reply);
        Ok(reply)
    }

    fn repeat(&self) -> Result<Reply, BenchError> {
        for request in 0..self.spec.requests {
            let parts = self.spec.parts(request, 0);
            self.read(request, &parts, &self.requests(request, &parts))?;
        }
        let mut reply = Reply::default();
        self.count(&mut reply);
        Ok(reply)
    }

    fn count(&self, reply: &mut Reply) {
        match &self.way {
            Way::Pool(client) => reply.copy_bytes = client.copied_bytes(),
            Way::Pull(pull) => pull.count(reply),
        }
    }

    fn requests(&self, request: u64, parts: &[Part]) -> Vec<GetRequest> {
        let at = usize::try_from(request).unwrap_or(usize::MAX);
        let Some((_, region)) = self.destinations.get(at) else { return Vec::new() };
        parts
            .iter()
            .map(|part| GetRequest {
                key: key(part.number),
                len: self.spec.pools.get(part.pool).map_or(0, super::spec::Pool::object_bytes),
                ranges: part
                    .ranges
                    .iter()
                    .map(|(range, to)| Destination {
                        range: *range,
                        to: Addr { region: *region, offset: *to },
                    })
                    .collect(),
                will_read_all: false,
            })
            .collect()
    }

    fn read(&self, request: u64, parts: &[Part], gets: &[GetRequest]) -> Result<(), BenchError> {
        match &self.way {
            Way::Pool(client) => {
                let outcomes = client.get(gets, soon());
                match outcomes.iter().find(|outcome| !outcome.is_served()) {
                    None => Ok(()),
                    Some(outcome) => Err(BenchError::Peer(format!("a key ended as {outcome:?}"))),
                }
            }
            Way::Pull(pull) => {
                let at = usize::try_from(request).unwrap_or(usize::MAX);
                let region = self.destinations.get(at).map(|(_, region)| *region);
                pull.get(parts, region.ok_or_else(|| BenchError::Peer("no destination".into()))?)
            }
        }
    }

    fn verify(&self) -> Result<Reply, BenchError> {
        let mut reply = Reply::default();
        for (request, (memory, _)) in (0..).zip(&self.destinations) {
            let mut seen = vec![0; memory.len()];
            memory.read(0, &mut seen).map_err(peer_error)?;
            for group in 0..self.spec.groups() {
                for part in self.spec.parts(request, group) {
                    for (range, to) in &part.ranges {
                        let from = usize::try_from(*to).unwrap_or(usize::MAX);
                        let until = from + usize::try_from(range.len).unwrap_or(0);
                        let bytes = seen.get(from..until).unwrap_or_default();
                        for (at, bytes) in (range.offset / 8..).zip(bytes.chunks(8)) {
                            let want = word(part.number, at);
                            let wrong = bytes.iter().zip(want).filter(|(a, b)| **a != *b).count();
                            if wrong > 0 {
                                reply.wrong_bytes += wrong as u64;
                                reply.first_wrong.get_or_insert_with(|| {
                                    format!("object {}, byte {}", part.number, at * 8)
                                });
                            }
                        }
                    }
                }
            }
        }
        Ok(reply)
    }

    fn clear(&mut self) -> Result<(), BenchError> {
        for (memory, _) in &self.destinations {
            let poison = vec![POISON; memory.len().min(1 << 20)];
            for at in (0..memory.len()).step_by(poison.len().max(1)) {
                let len = poison.len().min(memory.len() - at);
                memory.write(at, poison.get(..len).unwrap_or_default()).map_err(peer_error)?;
            }
        }
        if let Way::Pull(pull) = &mut self.way {
            pull.clear();
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Timed {
    begun: u64,
    first: u64,
    ready: u64,
    /// When the computation of the last group ends.
    computed: u64,
    stall: u64,
}

impl Timed {
    fn add(&mut self, begun: u64, ready: u64, compute: u64) {
        if self.begun == 0 {
            (self.begun, self.first, self.computed) = (begun, ready, begun);
        }
        self.ready = ready;
        self.stall += ready.saturating_sub(self.computed);
        self.computed = self.computed.max(ready) + compute;
    }
}

fn destinations(spec: &Spec, engine: &HostEngine) -> Result<Vec<(Memory, RegionId)>, BenchError> {
    (0..spec.requests)
        .map(|_| {
            let bytes = usize::try_from(spec.request_bytes()).unwrap_or(usize::MAX);
            let memory = Memory::host(bytes).map_err(peer_error)?;
            let region = engine.register(memory.clone()).map_err(peer_error)?;
            Ok((memory, region))
        })
        .collect()
}
