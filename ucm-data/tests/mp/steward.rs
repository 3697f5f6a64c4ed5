//! The steward thread: silence when idle, deadlines, poison.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ucm_data::{
    Admission, Admitted, DataError, Enter, ErrorKind, LayoutTag, Membership, Offer, Rendezvous,
    RendezvousConfig, StewardHooks, Token,
};

use crate::parent::{Instance, Proc};

#[test]
fn ten_idle_seconds_wake_no_steward() {
    let instance = Instance::new();
    let mut procs: Vec<_> = (0..3).map(|_| Proc::start()).collect();
    for proc in &mut procs {
        proc.enter(&instance.dir());
    }
    // Everybody has heard of everybody when the first knows of the last.
    procs[0].expect("event joined 2");
    procs[1].expect("event joined 2");
    let before: Vec<_> = procs.iter_mut().map(|p| p.ask("switches", "switches")).collect();
    // The measurement is the passing of time itself.
    std::thread::sleep(Duration::from_secs(10));
    let after: Vec<_> = procs.iter_mut().map(|p| p.ask("switches", "switches")).collect();
    assert_eq!(before, after);
}

#[test]
fn a_panicking_hook_poisons_the_member_and_joiners_are_still_answered() {
    let instance = Instance::new();
    let mut host = Proc::start();
    host.enter_with(&instance.dir(), "panic=1");
    assert_eq!(host.ask("check", "check"), "ok");
    let mut victim = Proc::start();
    let stay = victim.enter(&instance.dir()).stay;
    victim.kill();
    host.expect("event died");
    // The next event is handled after the panic was recorded. What the hook has not done falls to the joiner.
    let mut joiner = Proc::start();
    let entered = joiner.enter(&instance.dir());
    assert!(!entered.created);
    assert_eq!(joiner.expect("event died 1"), stay);
    host.expect("event joined 1");
    assert_eq!(host.expect("event joined 2"), entered.stay);
    let check = host.ask("check", "check");
    assert!(check.contains("Poisoned") && check.contains("hook gives up"), "{check}");
    assert!(host.ask("stats", "stats").contains("hook_panics: 1"));
}

struct Timer {
    next: Mutex<Option<Instant>>,
    fired: Sender<Instant>,
}

impl StewardHooks for Timer {
    fn on_death(&self, _seat: u16, _stay: Token) -> bool {
        true
    }

    fn on_leave(&self, _seat: u16, _stay: Token) {}

    fn next_deadline(&self) -> Option<Instant> {
        *self.next.lock().unwrap()
    }

    fn on_deadline(&self) {
        *self.next.lock().unwrap() = None;
        self.fired.send(Instant::now()).unwrap();
    }
}

struct Alone(Arc<Timer>);

impl Enter for Alone {
    type Error = DataError;

    fn create(&mut self) -> Result<Offer, DataError> {
        Ok(Offer::default())
    }

    fn admit(&mut self, _admission: &Admission<'_>) -> Result<Admitted, DataError> {
        Ok(Admitted { seat: 5, hooks: Arc::clone(&self.0) as _ })
    }
}

fn alone(dir: &Path) -> (Membership, Arc<Timer>, Receiver<Instant>) {
    let (fired, heard) = channel();
    let timer = Arc::new(Timer { next: Mutex::new(None), fired });
    let layout =
        LayoutTag { protocol: 1, layout_version: 1, fingerprint: [0; 32], text: String::new() };
    let config = RendezvousConfig::new(dir, layout);
    let membership = Rendezvous::enter(&config, &mut Alone(Arc::clone(&timer))).unwrap();
    (membership, timer, heard)
}

#[test]
fn a_poke_makes_the_steward_keep_a_new_deadline() {
    let instance = Instance::new();
    let (membership, timer, heard) = alone(&instance.dir());
    for delay in [0, 30] {
        let due = Instant::now() + Duration::from_millis(delay);
        *timer.next.lock().unwrap() = Some(due);
        membership.poke().unwrap();
        let fired = heard.recv_timeout(Duration::from_secs(30)).unwrap();
        assert!(fired >= due, "fired {:?} early", due - fired);
    }
    assert_eq!(membership.seat(), 5);
    assert!(membership.is_alive(5) && !membership.is_alive(6));
    membership.leave();
    assert!(heard.try_recv().is_err());
}

#[test]
fn a_poke_far_ahead_of_its_time_is_replaced_by_an_earlier_one() {
    let instance = Instance::new();
    let (membership, timer, heard) = alone(&instance.dir());
    *timer.next.lock().unwrap() = Some(Instant::now() + Duration::from_secs(3600));
    membership.poke().unwrap();
    *timer.next.lock().unwrap() = Some(Instant::now());
    membership.poke().unwrap();
    heard.recv_timeout(Duration::from_secs(30)).unwrap();
}

#[test]
fn bad_settings_are_refused_before_anything_is_touched() {
    let instance = Instance::new();
    let (fired, _heard) = channel();
    let mut caller = Alone(Arc::new(Timer { next: Mutex::new(None), fired }));
    let layout =
        LayoutTag { protocol: 1, layout_version: 1, fingerprint: [0; 32], text: "x".repeat(513) };
    let config = RendezvousConfig::new(instance.dir(), layout.clone());
    let error = Rendezvous::enter(&config, &mut caller).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("513"), "{error}");
    for max_seats in [0, 129] {
        let layout = LayoutTag { text: String::new(), ..layout.clone() };
        let config =
            RendezvousConfig { max_seats, ..RendezvousConfig::new(instance.dir(), layout) };
        let error = Rendezvous::enter(&config, &mut caller).unwrap_err();
        assert!(error.to_string().contains(&max_seats.to_string()), "{error}");
    }
    assert!(!instance.dir().exists());
}
