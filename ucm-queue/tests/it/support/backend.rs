//! A backend whose operations end when and how the test says.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use ucm_ctrl::Key;
use ucm_store::{Backend, BackendCapabilities, ErrorKind, Op, Presence, StoreError, fill_pattern};

use super::WATCHDOG;

/// Every object exists and has the payload of its key, unless the script says otherwise.
#[derive(Debug, Default)]
pub(crate) struct Script {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    hold: bool,
    held: VecDeque<(bool, Op)>,
    loads: HashMap<Key, u64>,
    load_calls: u64,
    in_flight: usize,
    in_flight_max: usize,
    failures: HashMap<Key, VecDeque<ErrorKind>>,
    always: Option<ErrorKind>,
    panics: u32,
    stored: HashMap<Key, Vec<u8>>,
    dumps: HashSet<Key>,
}

pub(crate) fn key_of(op: &Op) -> Key {
    Key::new(*op.block(), op.shard())
}

impl Script {
    /// Ends operations inside the call.
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Holds operations until they are released.
    pub(crate) fn holding() -> Arc<Self> {
        let script = Self::new();
        script.hold();
        script
    }

    pub(crate) fn hold(&self) {
        self.lock().hold = true;
    }

    /// The next operations on `key` end with these errors.
    pub(crate) fn fail(&self, key: Key, kinds: impl IntoIterator<Item = ErrorKind>) {
        self.lock().failures.entry(key).or_default().extend(kinds);
    }

    pub(crate) fn fail_always(&self, kind: Option<ErrorKind>) {
        self.lock().always = kind;
    }

    /// The next `count` calls panic, half of their operations taken.
    pub(crate) fn panic_next(&self, count: u32) {
        self.lock().panics = count;
    }

    /// Sleeps until `count` operations are held.
    #[track_caller]
    pub(crate) fn wait_held(&self, count: usize) {
        let deadline = Instant::now() + WATCHDOG;
        let mut state = self.lock();
        while state.held.len() < count {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{} of {count} operations held", state.held.len());
            state = self.changed.wait_timeout(state, left).unwrap().0;
        }
    }

    pub(crate) fn held(&self) -> Vec<Key> {
        self.lock().held.iter().map(|(_, op)| key_of(op)).collect()
    }

    /// Ends the held operation on `key`.
    #[track_caller]
    pub(crate) fn release(&self, key: Key) {
        let mut state = self.lock();
        let at = state.held.iter().position(|(_, op)| key_of(op) == key);
        let (load, op) = state.held.remove(at.expect("the operation is held")).unwrap();
        drop(state);
        self.end(load, op);
    }

    /// Drops the held operation on `key` without an end.
    pub(crate) fn lose(&self, key: Key) {
        let mut state = self.lock();
        let at = state.held.iter().position(|(_, op)| key_of(op) == key);
        let lost = state.held.remove(at.expect("the operation is held"));
        state.in_flight -= 1;
        drop(state);
        drop(lost);
    }

    /// Ends the oldest held operations.
    pub(crate) fn release_some(&self, count: usize) {
        for _ in 0..count {
            let Some((load, op)) = self.lock().held.pop_front() else { return };
            self.end(load, op);
        }
    }

    /// Ends all held operations, and later ones at once.
    pub(crate) fn open(&self) {
        self.lock().hold = false;
        self.release_some(usize::MAX);
    }

    pub(crate) fn loads_of(&self, key: Key) -> u64 {
        self.lock().loads.get(&key).copied().unwrap_or(0)
    }

    /// All loads, and different keys among them.
    pub(crate) fn loads(&self) -> (u64, usize) {
        let state = self.lock();
        (state.loads.values().sum(), state.loads.len())
    }

    pub(crate) fn load_calls(&self) -> u64 {
        self.lock().load_calls
    }

    pub(crate) fn in_flight_max(&self) -> usize {
        self.lock().in_flight_max
    }

    /// Bytes a dump has stored.
    pub(crate) fn stored(&self, key: Key) -> Option<Vec<u8>> {
        self.lock().stored.get(&key).cloned()
    }

    fn take(&self, load: bool, ops: Vec<Op>) {
        let mut state = self.lock();
        state.load_calls += u64::from(load);
        if state.panics > 0 {
            state.panics -= 1;
            drop(state);
            panic!("injected panic in the backend");
        }
        state.in_flight += ops.len();
        state.in_flight_max = state.in_flight_max.max(state.in_flight);
        for op in &ops {
            if load {
                *state.loads.entry(key_of(op)).or_default() += 1;
            } else {
                state.dumps.insert(key_of(op));
            }
        }
        if state.hold {
            state.held.extend(ops.into_iter().map(|op| (load, op)));
            drop(state);
            self.changed.notify_all();
            return;
        }
        drop(state);
        for op in ops {
            self.end(load, op);
        }
    }

    fn end(&self, load: bool, op: Op) {
        let key = key_of(&op);
        let mut state = self.lock();
        state.in_flight -= 1;
        let failure = state.failures.get_mut(&key).and_then(VecDeque::pop_front).or(state.always);
        let mut bytes = vec![0; op.memory().len()];
        if load {
            match state.stored.get(&key) {
                Some(stored) => bytes.clone_from(stored),
                None => fill_pattern(&mut bytes, op.block(), op.shard(), 0, 0),
            }
            if failure.is_some() {
                // Half of the object, and then the failure.
                bytes.truncate(bytes.len() / 2);
                bytes.fill(0xee);
            }
            op.memory().write(0, &bytes).unwrap();
        } else if failure.is_none() {
            op.memory().read(0, &mut bytes).unwrap();
            state.stored.insert(key, bytes);
        }
        drop(state);
        op.finish(failure.map_or(Ok(()), |kind| Err(StoreError::new(kind, "injected"))));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backend for Script {
    fn capabilities(&self) -> BackendCapabilities {
        BackendCapabilities::new("script", 4, true)
    }

    fn load(&self, ops: Vec<Op>) {
        self.take(true, ops);
    }

    fn dump(&self, ops: Vec<Op>) {
        self.take(false, ops);
    }

    fn contains(&self, keys: &[([u8; 16], u32)]) -> Vec<Presence> {
        keys.iter().map(|_| Presence::There).collect()
    }

    fn touch(&self, _blocks: &[[u8; 16]]) -> Result<(), StoreError> {
        Ok(())
    }

    fn remove(&self, keys: &[([u8; 16], u32)]) -> Vec<Result<(), StoreError>> {
        keys.iter().map(|_| Ok(())).collect()
    }
}
