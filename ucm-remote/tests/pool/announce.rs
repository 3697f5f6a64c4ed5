//! What owners tell the directory, through its absences.
//!
//! Mutants, each seen to fail a test here: what has gone while the directory was away is not withdrawn
//! later; what has gone beyond the limit is forgotten without another run; a run that could not be served
//! once is not tried again; a directory that came back empty is not told everything.

use std::{
    sync::{
        Arc, Mutex, RwLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use ucm_remote::{
    ByHash, Directory, DirectoryError, EmbeddedDirectory, Epoch, GetOutcome, Member, ObjectKey,
    PeerId, Placement, PutOutcome, Record, RemotePool as _, Token,
};

use crate::kit::{Node, Setup, directory, eventually, key, range, soon};

/// A directory that can be away, and come back with nothing.
#[derive(Debug)]
struct Flaky {
    inner: RwLock<Arc<EmbeddedDirectory>>,
    away: AtomicBool,
    /// The next registration is refused after this.
    refuse: Mutex<Option<fn()>>,
    /// While it is held, nothing is located; how many wait.
    gate: Mutex<()>,
    waiting: AtomicUsize,
}

impl Default for Flaky {
    fn default() -> Self {
        let inner = RwLock::new(directory());
        Self { inner, away: false.into(), refuse: None.into(), gate: ().into(), waiting: 0.into() }
    }
}

impl Flaky {
    fn start(self: &Arc<Self>, pages: u64, withdrawals: usize) -> Node {
        let setup = Setup::new("owner", pages)
            .with(move |b| b.heartbeat(Duration::from_millis(2)).withdrawals(withdrawals));
        setup.start_with(Arc::clone(self) as _)
    }

    /// How many places of a key it tells.
    fn places(&self, number: u64) -> usize {
        let inner = self.inner.read().unwrap();
        inner.locate(&[key(number)], soon()).unwrap()[0].len()
    }

    fn now(&self) -> Result<Arc<EmbeddedDirectory>, DirectoryError> {
        if self.away.load(Ordering::SeqCst) {
            return Err(DirectoryError::Unavailable("the test says so".into()));
        }
        Ok(Arc::clone(&self.inner.read().unwrap()))
    }
}

impl Directory for Flaky {
    fn epoch(&self, deadline: Instant) -> Result<Epoch, DirectoryError> {
        self.now()?.epoch(deadline)
    }

    fn locate(
        &self,
        keys: &[ObjectKey],
        deadline: Instant,
    ) -> Result<Vec<Vec<Record>>, DirectoryError> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        drop(self.gate.lock().unwrap());
        self.now()?.locate(keys, deadline)
    }

    fn announce(
        &self,
        records: &[(ObjectKey, Record)],
        deadline: Instant,
    ) -> Result<(), DirectoryError> {
        self.now()?.announce(records, deadline)
    }

    fn withdraw(
        &self,
        records: &[(ObjectKey, Record)],
        deadline: Instant,
    ) -> Result<(), DirectoryError> {
        self.now()?.withdraw(records, deadline)
    }

    fn register(&self, member: &Member, deadline: Instant) -> Result<Epoch, DirectoryError> {
        if let Some(run) = self.refuse.lock().unwrap().take() {
            run();
            return Err(DirectoryError::Refused("the test says so".into()));
        }
        self.now()?.register(member, deadline)
    }

    fn remove_peer(
        &self,
        peer: &PeerId,
        boot: Token,
        deadline: Instant,
    ) -> Result<(), DirectoryError> {
        self.now()?.remove_peer(peer, boot, deadline)
    }

    fn members(&self, deadline: Instant) -> Result<Vec<Member>, DirectoryError> {
        self.now()?.members(deadline)
    }

    fn place(
        &self,
        objects: &[(ObjectKey, u64)],
        deadline: Instant,
    ) -> Result<Vec<Placement>, DirectoryError> {
        self.now()?.place(objects, deadline)
    }
}

#[test]
fn f5_without_a_directory_what_is_known_goes_on_and_later_all_is_told_again() {
    let flaky = Arc::new(Flaky::default());
    let start = |name, pages, placed: bool| {
        let setup = Setup::new(name, pages).with(move |b| {
            let b = b.prefetch(false).heartbeat(Duration::from_millis(2));
            if placed { b.placement(Arc::new(ByHash), 1) } else { b }
        });
        setup.start_with(Arc::clone(&flaky) as _)
    };
    let (owner, reader, placed) =
        (start("owner", 16, false), start("reader", 16, false), start("placed", 16, true));
    let first = Arc::clone(&flaky.inner.read().unwrap());
    owner.publish(&first, 1, 0, 8192);
    owner.publish(&first, 2, 0, 8192);
    assert!(reader.get(1, 0, 8192, &[range(0, 8192)]).is_served());
    assert!(reader.get(2, 0, 8192, &[range(0, 100)]).is_served());
    reader.agent.forget_parts();
    flaky.away.store(true, Ordering::SeqCst);
    assert_eq!(reader.get(1, 0, 8192, &[range(0, 8192)]), GetOutcome::Local);
    assert_eq!(reader.get(2, 0, 8192, &[range(50, 100)]), GetOutcome::Remote, "a cached route");
    assert_eq!(reader.get(3, 0, 8192, &[range(0, 1)]), GetOutcome::PeerDown, "not a miss");
    assert_eq!(placed.put(9, 0, 100), PutOutcome::PeerDown);
    // What is stored meanwhile is told later.
    assert_eq!(owner.put(3, 0, 8192), PutOutcome::Created);
    let second = directory();
    assert_ne!(second.epoch(soon()), first.epoch(soon()), "it has forgotten everything");
    *flaky.inner.write().unwrap() = Arc::clone(&second);
    flaky.away.store(false, Ordering::SeqCst);
    (1..=3).for_each(|number| owner.wait_told(&second, number));
    for number in 1..=3 {
        assert!(reader.get(number, 0, 8192, &[range(0, 8192)]).is_served());
    }
}

/// The directory was away, and has forgotten nothing: what went meanwhile goes from it as well.
#[test]
fn what_goes_while_the_directory_is_away_is_withdrawn_later() {
    let flaky = Arc::new(Flaky::default());
    let owner = flaky.start(16, 100);
    let boot = owner.agent.boot();
    let first = Arc::clone(&flaky.inner.read().unwrap());
    (1..=3).for_each(|number| owner.publish(&first, number, 0, 8192));
    flaky.away.store(true, Ordering::SeqCst);
    let lost = owner.agent.stats().lost_announcements;
    assert!(owner.client.remove(&[key(1)], soon()).len() == 1 && !owner.is_resident(1));
    eventually("it could not be told", || owner.agent.stats().lost_announcements > lost);
    // Stored after that: another message.
    assert_eq!(owner.put(4, 0, 8192), PutOutcome::Created);
    eventually("nor this", || owner.agent.stats().lost_announcements > lost + 1);
    assert_eq!(flaky.places(1), 1);
    flaky.away.store(false, Ordering::SeqCst);
    owner.wait_told(&first, 4);
    // What is withdrawn is told before what is announced.
    assert_eq!([1, 2, 3, 4].map(|number| flaky.places(number)), [0, 1, 1, 1]);
    assert_eq!(owner.agent.boot(), boot, "the same run");
}

#[test]
fn when_more_has_gone_than_is_remembered_another_run_begins() {
    let flaky = Arc::new(Flaky::default());
    let owner = flaky.start(16, 1);
    let boot = owner.agent.boot();
    let first = Arc::clone(&flaky.inner.read().unwrap());
    (1..=3).for_each(|number| owner.publish(&first, number, 0, 8192));
    flaky.away.store(true, Ordering::SeqCst);
    let lost = owner.agent.stats().lost_announcements;
    (1..=2).for_each(|number| {
        owner.client.remove(&[key(number)], soon());
    });
    eventually("they could not be told", || owner.agent.stats().lost_announcements >= lost + 2);
    flaky.away.store(false, Ordering::SeqCst);
    eventually("only what is there is told", || {
        [1, 2, 3].map(|number| flaky.places(number)) == [0, 0, 1] && owner.agent.boot() != boot
    });
    let reader = Setup::new("reader", 16).start_with(flaky);
    assert_eq!(reader.get(3, 0, 8192, &[range(0, 8192)]), GetOutcome::Remote);
}

fn limit_descriptors(to: u64) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(to), maximum }).unwrap();
}

/// A directory refuses the run when no descriptor is left for the next one.
#[test]
fn a_peer_that_could_not_serve_tries_again() {
    if std::env::var_os("NEXTEST_EXECUTION_MODE").is_none_or(|mode| mode != "process-per-test") {
        println!("SKIP the limit is the process's, which other tests share");
        return;
    }
    let flaky = Arc::new(Flaky::default());
    let owner = flaky.start(16, 100);
    let boot = owner.agent.boot();
    let first = Arc::clone(&flaky.inner.read().unwrap());
    owner.publish(&first, 1, 0, 8192);
    *flaky.refuse.lock().unwrap() = Some(|| limit_descriptors(3));
    eventually("it serves nobody", || owner.agent.boot().is_none());
    // Stored meanwhile; when that is lost, the next run could not be served.
    let lost = owner.agent.stats().lost_announcements;
    assert_eq!(owner.put(2, 0, 8192), PutOutcome::Created);
    eventually("nobody is told", || owner.agent.stats().lost_announcements > lost);
    limit_descriptors(1024);
    eventually("it serves again", || owner.agent.boot().is_some_and(|new| Some(new) != boot));
    (1..=2).for_each(|number| owner.wait_told(&first, number));
    let reader = Setup::new("reader", 16).start_with(flaky);
    for number in 1..=2 {
        assert_eq!(reader.get(number, 0, 8192, &[range(0, 8192)]), GetOutcome::Remote);
    }
}

/// A directory that does not answer holds up nobody who only says what has been used; when it answers, the
/// owner is told.
#[test]
fn who_touches_waits_for_nobody() {
    let flaky = Arc::new(Flaky::default());
    let owner = Setup::new("owner", 3).start_with(Arc::clone(&flaky) as _);
    let reader = Setup::new("reader", 16).start_with(Arc::clone(&flaky) as _);
    let first = Arc::clone(&flaky.inner.read().unwrap());
    (1..=3).for_each(|number| owner.publish(&first, number, 0, 4096));
    assert_eq!(reader.put(9, 0, 4096), PutOutcome::Created);
    let before = reader.agent.stats().exchanges;
    let gate = flaky.gate.lock().unwrap();
    std::thread::scope(|scope| {
        let (said, ends) = std::sync::mpsc::channel();
        let reader = &reader;
        scope.spawn(move || {
            reader.client.touch(&[key(1)]);
            said.send(reader.get(9, 0, 4096, &[range(0, 4096)])).unwrap();
        });
        eventually("it is asked for", || flaky.waiting.load(Ordering::SeqCst) > 0);
        let got = ends.recv_timeout(crate::kit::WATCHDOG);
        drop(gate);
        assert_eq!(got, Ok(GetOutcome::Local));
    });
    eventually("the owner is told", || reader.agent.stats().exchanges > before);
}
