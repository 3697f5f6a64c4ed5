//! A peer as the engine knows it: what waits for it, and the lanes to it.
//!
//! **Invariant:** everything of a connection is owned by its lane; a peer that restarted is another
//! peer, for good.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use ucm_data::Token;

use super::{job::Exchange, lane::Lane};
use crate::{
    ErrorKind, TransferError,
    tcp::{Secret, breaker::Breaker, tls::TlsClient},
};

/// Lanes that were never used are not replaced before this age.
const FRESH: Duration = Duration::from_secs(1);
/// Idle lanes older than this are asked whether the peer has closed them.
const ASK_AFTER: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct Peer {
    pub(super) address: SocketAddr,
    pub(super) secret: Secret,
    pub(super) tls: Option<TlsClient>,
    /// The run of the peer that this is.
    pub(super) boot: Token,
    state: Mutex<State>,
}

#[derive(Debug)]
pub(super) struct State {
    /// Exchanges that no lane has taken yet.
    pub(super) queue: VecDeque<Exchange>,
    pub(super) lanes: Vec<Arc<Lane>>,
    pub(super) connecting: bool,
    pub(super) breaker: Breaker,
    /// Another run answers at its address, or it was let go.
    pub(super) gone: Option<TransferError>,
}

/// What comes out of looking through a peer's queue.
#[derive(Debug, Default)]
pub(super) struct Moves {
    /// Lanes that got something to send.
    pub(super) flush: Vec<Arc<Lane>>,
    /// Lanes to close: idle for too long.
    pub(super) stale: Vec<Arc<Lane>>,
    pub(super) failed: Vec<(Exchange, TransferError)>,
    /// A connection should be made.
    pub(super) connect: bool,
}

/// Rules for lanes.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneRules {
    pub(super) max_lanes: usize,
    /// A further lane is opened when every lane has so much to do.
    pub(super) spread_bytes: u64,
    pub(super) max_idle: Duration,
}

impl Peer {
    pub(super) fn new(
        address: SocketAddr,
        secret: Secret,
        tls: Option<TlsClient>,
        boot: Token,
        breaker: Breaker,
    ) -> Arc<Self> {
        let state = State {
            queue: VecDeque::new(),
            lanes: Vec::new(),
            connecting: false,
            breaker,
            gone: None,
        };
        Arc::new(Self { address, secret, tls, boot, state: Mutex::new(state) })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Gives waiting exchanges to lanes as far as credits go.
    pub(super) fn deal(&mut self, now: Instant, rules: LaneRules) -> Moves {
        let mut moves = Moves::default();
        if let Some(error) = &self.gone {
            moves.failed.extend(self.queue.drain(..).map(|exchange| (exchange, error.clone())));
            return moves;
        }
        if self.queue.is_empty() {
            return moves;
        }
        self.lanes.retain(|lane| {
            let idle = lane.idle_since().map_or(Duration::ZERO, |since| now - since);
            // One that was made for what waits now is not thrown away before it is used.
            let limit = if lane.is_fresh() { rules.max_idle.max(FRESH) } else { rules.max_idle };
            let old = idle > limit || (idle > ASK_AFTER && lane.has_ended());
            if old {
                moves.stale.push(Arc::clone(lane));
            }
            !old && !lane.is_dead()
        });
        let mut least = u64::MAX;
        while let Some(exchange) = self.queue.pop_front() {
            if let Some(error) = exchange.job.over(now) {
                moves.failed.push((exchange, error));
                continue;
            }
            let fits = self.lanes.iter().filter(|lane| lane.admits(exchange.payload));
            let Some(lane) = fits.min_by_key(|lane| lane.load()).cloned() else {
                self.queue.push_front(exchange);
                break;
            };
            match lane.begin(exchange) {
                Ok(()) => {
                    least = lane.load().0;
                    if !moves.flush.iter().any(|known| known.id == lane.id) {
                        moves.flush.push(lane);
                    }
                }
                Err(exchange) => {
                    self.lanes.retain(|known| known.id != lane.id);
                    self.queue.push_front(*exchange);
                }
            }
        }
        let crowded = least != u64::MAX
            && self.lanes.iter().all(|lane| {
                let (bytes, requests) = lane.load();
                requests > 1 && bytes > rules.spread_bytes
            });
        let wanted = !self.queue.is_empty() || crowded;
        if wanted && !self.connecting && self.lanes.len() < rules.max_lanes {
            match self.breaker.admit(now) {
                Ok(()) => {
                    self.connecting = true;
                    moves.connect = true;
                }
                Err(left) if self.lanes.is_empty() => {
                    let error = TransferError::new(
                        ErrorKind::PeerDown,
                        format!(
                            "the peer failed before; it is tried again in {} ms",
                            left.as_millis()
                        ),
                    );
                    moves.failed.extend(self.queue.drain(..).map(|e| (e, error.clone())));
                }
                Err(_) => {}
            }
        }
        moves
    }
}
