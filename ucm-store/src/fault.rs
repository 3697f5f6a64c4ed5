//! A backend that fails on purpose, by script or at random.
//!
//! **Invariant:** whatever is injected, every operation ends at most once through its sink, and a
//! fault touches only the operation it was drawn for. Without rules this is the backend inside.

mod damage;
mod rule;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

pub use damage::Damage;
pub use rule::Rule;

use crate::{
    Backend, BackendCapabilities, ErrorKind, Gate, Op, Presence, StoreError, delay_line::DelayLine,
    meter::Direction, random::SplitMix,
};

type Key = ([u8; 16], u32);

/// What happens to an operation instead of what should.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// The backend gets the operation so much later.
    Delay(Duration),
    /// The backend gets the operation only when the gate lets it pass: nothing has been moved yet.
    StallBefore(Gate),
    /// The end is told only when the gate lets it pass: all bytes have been moved.
    StallAfter(Gate),
    /// Ends with this kind of error; the backend never sees the operation. `Io` stands for EIO,
    /// `NoSpace` for ENOSPC.
    Fail(ErrorKind),
    /// Damages the bytes, and notices it: a load ends as `Corrupt` with the damaged bytes in its
    /// memory, a dump ends as `Io` and stores nothing.
    Damaged(Damage),
    /// Damages the bytes and says `Ok`: what a backend without checksums does. A dump stores the
    /// damaged object.
    Silent(Damage),
    /// Drops the operation: it ends as `Lost`.
    Lose,
    /// Panics inside `load` or `dump`, after the other operations of the call were passed on.
    Panic,
}

/// Wraps a backend and injects faults.
///
/// Rules are tried in the order they were added; the first that applies decides. If none does, the
/// random faults are drawn. Part of the public interface, because whoever uses a backend wants to
/// test with a failing one:
///
/// ```
/// use ucm_store::{ErrorKind, Fault, FaultBackend, MemoryBackend, Rule};
///
/// let backend = FaultBackend::new(MemoryBackend::new());
/// // The third and fourth load of block 7… fail like a broken disk; everything else works.
/// backend.add(Rule::new(Fault::Fail(ErrorKind::Io)).loads().block([7; 16]).skip(2).times(2));
/// assert_eq!(backend.fired(), 0);
/// ```
pub struct FaultBackend<B> {
    inner: Arc<B>,
    state: Mutex<State>,
    delays: OnceLock<Option<DelayLine>>,
}

#[derive(Default)]
struct State {
    rules: Vec<Rule>,
    random: Option<(SplitMix, Vec<(f64, Fault)>)>,
    fired: u64,
    down: bool,
}

impl<B: Backend + 'static> FaultBackend<B> {
    /// Wraps `inner`, without faults.
    pub fn new(inner: B) -> Self {
        Self { inner: Arc::new(inner), state: Mutex::default(), delays: OnceLock::new() }
    }

    /// Adds a rule behind the others.
    pub fn add(&self, rule: Rule) {
        self.lock().rules.push(rule);
    }

    /// Draws faults with these probabilities (0 to 1, summing to at most 1) for operations to which
    /// no rule applies. The same seed and order of operations give the same faults.
    pub fn randomly(&self, seed: u64, faults: Vec<(f64, Fault)>) {
        self.lock().random = Some((SplitMix::new(seed), faults));
    }

    /// Removes all rules and random faults. What is stalled stays stalled.
    pub fn clear(&self) {
        let mut state = self.lock();
        let rules = std::mem::take(&mut state.rules);
        let random = state.random.take();
        drop(state);
        drop((rules, random));
    }

    /// While down, everything ends as `Unavailable` and nobody knows what is there.
    pub fn set_down(&self, down: bool) {
        self.lock().down = down;
    }

    /// Number of faults injected.
    pub fn fired(&self) -> u64 {
        self.lock().fired
    }

    /// The backend inside.
    pub fn inner(&self) -> &B {
        &self.inner
    }

    fn start(&self, direction: Direction, ops: Vec<Op>) {
        let mut good = Vec::with_capacity(ops.len());
        let mut bad = Vec::new();
        {
            let mut state = self.lock();
            for op in ops {
                match state.draw(direction, &op) {
                    None => good.push(op),
                    Some(fault) => bad.push((op, fault)),
                }
            }
        }
        if !good.is_empty() {
            direction.start(&*self.inner, good);
        }
        let mut panics = 0;
        for (op, fault) in bad {
            match fault {
                Fault::Panic => panics += 1,
                fault => self.inject(direction, op, fault),
            }
        }
        assert!(panics == 0, "injected: the backend panics");
    }

    fn inject(&self, direction: Direction, op: Op, fault: Fault) {
        let inner = Arc::clone(&self.inner);
        match fault {
            Fault::Delay(delay) => match self.delays() {
                Some(line) => {
                    line.after(delay, Box::new(move || direction.start(&*inner, vec![op])));
                }
                None => op.finish(Err(injected(ErrorKind::Io, "no thread for a delay"))),
            },
            Fault::StallBefore(gate) => {
                gate.pass(Box::new(move || direction.start(&*inner, vec![op])));
            }
            Fault::StallAfter(gate) => {
                let op = op.intercept(move |op, result| {
                    gate.pass(Box::new(move || op.finish(result)));
                });
                direction.start(&*inner, vec![op]);
            }
            Fault::Fail(kind) => op.finish(Err(injected(kind, "injected"))),
            Fault::Damaged(damage) => damage.apply(direction, &*inner, op, true),
            Fault::Silent(damage) => damage.apply(direction, &*inner, op, false),
            Fault::Lose | Fault::Panic => drop(op),
        }
    }

    fn delays(&self) -> Option<&DelayLine> {
        self.delays.get_or_init(|| DelayLine::new().ok()).as_ref()
    }
}

impl<B> FaultBackend<B> {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn draw(&mut self, direction: Direction, op: &Op) -> Option<Fault> {
        let fault = if self.down {
            Some(Fault::Fail(ErrorKind::Unavailable))
        } else {
            self.rules
                .iter_mut()
                .find_map(|rule| rule.draw(direction, op))
                .or_else(|| self.chance())
        };
        self.fired += u64::from(fault.is_some());
        fault
    }

    fn chance(&mut self) -> Option<Fault> {
        let (random, faults) = self.random.as_mut()?;
        let mut point = random.unit();
        for (share, fault) in faults {
            if point < *share {
                return Some(fault.clone());
            }
            point -= *share;
        }
        None
    }
}

impl<B: Backend + 'static> Backend for FaultBackend<B> {
    fn capabilities(&self) -> BackendCapabilities {
        let inner = self.inner.capabilities();
        BackendCapabilities { mode: format!("{} + faults", inner.mode), ..inner }
    }

    fn load(&self, ops: Vec<Op>) {
        self.start(Direction::Load, ops);
    }

    fn dump(&self, ops: Vec<Op>) {
        self.start(Direction::Dump, ops);
    }

    fn contains(&self, keys: &[Key]) -> Vec<Presence> {
        let down = self.lock().down;
        if down { vec![Presence::Unknown; keys.len()] } else { self.inner.contains(keys) }
    }

    fn touch(&self, blocks: &[[u8; 16]]) -> Result<(), StoreError> {
        let down = self.lock().down;
        if down { Err(is_down()) } else { self.inner.touch(blocks) }
    }

    fn remove(&self, keys: &[Key]) -> Vec<Result<(), StoreError>> {
        let down = self.lock().down;
        if down { keys.iter().map(|_| Err(is_down())).collect() } else { self.inner.remove(keys) }
    }
}

impl<B: fmt::Debug> fmt::Debug for FaultBackend<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("FaultBackend")
            .field("inner", &self.inner)
            .field("rules", &state.rules)
            .field("fired", &state.fired)
            .field("down", &state.down)
            .finish_non_exhaustive()
    }
}

fn injected(kind: ErrorKind, what: &str) -> StoreError {
    StoreError::new(kind, format!("{what} (by the fault backend)"))
}

fn is_down() -> StoreError {
    injected(ErrorKind::Unavailable, "the backend is down")
}

#[cfg(test)]
mod tests;
