//! D1, D6: a member of a whole node dies at each failpoint of the rendezvous and of its queue.
//!
//! **Invariant:** afterwards somebody can join at once, all keys are loadable with the right bytes, and
//! the cache knows only the living.

use rustix::process::Signal;
use serde_json::{Value, json};
use ucm_data::failpoint::NAMES;
use ucm_queue::failpoint::NAMES as QUEUE;

use crate::parent::{Instance, Proc};

const KEYS: [u64; 4] = [1, 2, 3, 4];

struct Scene {
    instance: Instance,
    ranks: Vec<Proc>,
}

impl Scene {
    fn new() -> Self {
        Self { instance: Instance::new(), ranks: Vec::new() }
    }

    fn order(&self, device: u32) -> Value {
        let mut join = self.instance.rank(device, 8, 4);
        join["backend"] = "pattern".into();
        join
    }

    fn order_to_join(&self, device: u32) -> Value {
        let mut order = self.order(device);
        order["do"] = "join".into();
        order
    }

    fn join(&mut self, count: u32) {
        for _ in 0..count {
            let device = u32::try_from(self.ranks.len()).unwrap();
            let mut rank = Proc::start();
            rank.join(&self.order(device));
            self.ranks.push(rank);
        }
    }

    /// A rank that will die at the point's nth hit, not joined yet.
    fn victim(point: &str, nth: u32) -> Proc {
        Proc::start_with(&[("UCM_FAILPOINT", &format!("{point}:{nth}"))])
    }

    /// Tells it to join, in vain.
    fn dies_joining(&self, mut victim: Proc, point: &str) {
        victim.tell(&self.order_to_join(7));
        victim.until_killed(point);
    }

    fn stop_all(&self) {
        for rank in &self.ranks {
            rank.signal(Signal::STOP);
            rank.until_stopped("stopped by a signal");
        }
    }

    /// Everybody alive loads everything, a newcomer as well; nothing else is left.
    fn check(mut self, point: &str) {
        self.join(1);
        for (task, rank) in (10..).zip(&mut self.ranks) {
            rank.load(task, &KEYS);
            rank.loaded(task);
        }
        self.settles(point);
    }

    /// The cache knows only the living, and nothing of the dead is left, without anybody's joining.
    fn settles(&mut self, point: &str) {
        let expected = (json!([]), json!(self.ranks.len()), json!([0, 0, 0]));
        let begun = std::time::Instant::now();
        loop {
            let seen = self.ranks[0].ask(&json!({"do": "inspect"}));
            let left = json!([seen["pinned"], seen["filling"], seen["draining"]]);
            let found = (seen["problems"].clone(), seen["members"].clone(), left);
            if found == expected {
                break;
            }
            // The living hear of a death a moment later.
            assert!(begun.elapsed() < std::time::Duration::from_secs(10), "{point}: {seen}");
        }
    }
}

/// Regression: the record of a joiner that died before it sat was found by the next joiner only, after that
/// had taken another: enough of them used up all records.
/// Mutant: nobody looks through the records.
#[test]
fn d1_death_at_every_point_of_entering() {
    let mut points = 0;
    for point in NAMES.iter().filter(|name| name.starts_with("enter.")) {
        // As the first, and as one of several. Only the first creates, only others are answered.
        let others = ["enter.offer.after", "enter.meet.after", "enter.seated.after"];
        let creates = !others.contains(point);
        let joins = *point != "enter.create.after";
        if creates {
            let scene = Scene::new();
            scene.dies_joining(Scene::victim(point, 1), point);
            scene.check(point);
        }
        if joins {
            let mut scene = Scene::new();
            scene.join(2);
            scene.ranks[0].load(1, &KEYS);
            scene.ranks[0].loaded(1);
            scene.dies_joining(Scene::victim(point, 1), point);
            // Nobody has to join for its record to be found.
            scene.settles(point);
            scene.check(point);
        }
        points += 1;
    }
    assert!(points > 8);
}

/// A joiner becomes another program; the next one dies while it clears up after it. The others have seen
/// that one. Mutant: the repair is made before the others know the joiner.
#[test]
fn d1_a_joiner_dies_while_it_clears_up_after_another() {
    for point in ["reap.word.after", "reap.clear.after", "reap.inherit.after", "reap.free.after"] {
        let mut scene = Scene::new();
        scene.join(2);
        scene.ranks[0].load(1, &KEYS);
        scene.ranks[0].loaded(1);
        // Its process goes on, so nobody looks for its record but who enters.
        let mut gone = Scene::victim("enter.admit.after:1:exec,none", 1);
        gone.tell(&scene.order_to_join(7));
        gone.until_another_program();
        scene.dies_joining(Scene::victim(point, 1), point);
        scene.settles(point);
        scene.check(point);
    }
}

/// A joiner died; while a member looks for its record, another has claimed its own, and is not known yet.
/// Mutants: a record that nobody lists is a dead one's; a seat is held after its record was claimed.
#[test]
fn d1_a_dead_joiner_s_record_is_found_while_another_joins() {
    let mut scene = Scene::new();
    let mut slow = Scene::victim("sweep.hook.after:1:stop,none", 1);
    slow.join(&scene.order(0));
    scene.ranks.push(slow);
    scene.join(1);
    scene.ranks[0].load(1, &KEYS);
    scene.ranks[0].loaded(1);
    scene.ranks[0].signal(Signal::STOP);
    scene.ranks[0].until_stopped("it hears of nothing");
    scene.dies_joining(Scene::victim("enter.admit.after", 1), "with a record");
    let mut entering = Scene::victim("enter.admit.after:1:stop,none", 1);
    entering.tell(&scene.order_to_join(2));
    entering.until_stopped("with a record");
    scene.ranks[0].signal(Signal::CONT);
    scene.ranks[0].until_stopped("it has looked");
    scene.ranks[0].signal(Signal::CONT);
    entering.signal(Signal::CONT);
    assert_eq!(entering.expect("answer")["error"], Value::Null);
    scene.ranks.push(entering);
    scene.settles("all");
    scene.check("all");
}

/// Whoever looks for it is stopped: others join all the same. Mutant: it looks under the directory's lock.
#[test]
fn d6_a_member_that_is_stopped_while_it_clears_up_holds_up_nobody() {
    for point in ["sweep.hook.before", "reap.word.after", "reap.free.after"] {
        let mut scene = Scene::new();
        scene.join(1);
        let mut stops = Scene::victim(&format!("{point}:1:stop,none"), 1);
        stops.join(&scene.order(1));
        // It is the only one that hears of the death at first.
        scene.stop_all();
        scene.dies_joining(Scene::victim("enter.admit.after", 1), point);
        stops.until_stopped(point);
        scene.ranks[0].signal(Signal::CONT);
        scene.ranks.push(stops);
        let mut third = Proc::start();
        third.join(&scene.order(2));
        third.load(1, &KEYS);
        third.loaded(1);
        scene.ranks.push(third);
        scene.ranks[1].signal(Signal::CONT);
        scene.settles(point);
        scene.check(point);
    }
}

/// Whoever looks for it dies meanwhile.
#[test]
fn d1_death_at_every_point_of_looking_for_a_dead_joiner_s_record() {
    for point in ["sweep.hook.before", "sweep.hook.after"] {
        let mut scene = Scene::new();
        scene.join(1);
        let mut victim = Scene::victim(point, 1);
        victim.join(&scene.order(6));
        scene.ranks[0].signal(Signal::STOP);
        let mut unseen = Scene::victim("enter.admit.after", 1);
        let order = scene.order_to_join(7);
        unseen.tell(&order);
        unseen.until_killed(point);
        victim.until_killed(point);
        scene.ranks[0].signal(Signal::CONT);
        scene.settles(point);
        scene.check(point);
    }
}

/// D6: the member that answers joiners dies while it answers; the joiner gets in all the same.
#[test]
fn d6_death_at_every_point_of_answering() {
    for point in NAMES.iter().filter(|name| name.starts_with("answer.")) {
        let mut scene = Scene::new();
        // It answers one joiner to the end. The next one can ask nobody else at first.
        // Somebody's process is passed on only if it has vanished.
        let vanished = (*point == "answer.life.before").then(Proc::start);
        let mut victim = Scene::victim(point, if vanished.is_some() { 1 } else { 2 });
        victim.join(&scene.order(7));
        scene.join(1);
        let vanished = vanished.map(|mut rank| {
            rank.join(&scene.order(5));
            rank.tell(&json!({"do": "exec"}));
            rank.until_another_program();
            rank
        });
        scene.ranks[0].signal(Signal::STOP);
        let mut joiner = Proc::start();
        let mut order = scene.order(6);
        order["do"] = "join".into();
        joiner.tell(&order);
        victim.until_killed(point);
        scene.ranks[0].signal(Signal::CONT);
        let answer = joiner.expect("answer");
        assert_eq!(answer["created"], false, "{point}: {answer}");
        scene.ranks.push(joiner);
        drop(vanished);
        scene.check(point);
    }
}

#[test]
fn d1_death_at_every_point_of_leaving() {
    for point in NAMES.iter().filter(|name| name.starts_with("leave.")) {
        let mut scene = Scene::new();
        scene.join(2);
        let mut victim = Scene::victim(point, 1);
        victim.join(&scene.order(7));
        victim.load(1, &KEYS);
        victim.loaded(1);
        victim.tell(&json!({"do": "leave"}));
        victim.until_killed(point);
        scene.check(point);
    }
}

/// Whoever hears of a death dies before or after it has cleared up; others do it.
#[test]
fn d1_death_at_every_point_of_hearing_of_a_death() {
    for point in NAMES.iter().filter(|name| name.starts_with("death.")) {
        let mut scene = Scene::new();
        scene.join(2);
        let mut first = Proc::start();
        let mut gated = scene.order(6);
        gated["backend"] = "gate".into();
        first.join(&gated);
        first.load(1, &[9]);
        assert_eq!(first.started(), 9);
        let mut victim = Scene::victim(point, 1);
        victim.join(&scene.order(7));
        first.signal(Signal::KILL);
        victim.until_killed(point);
        drop(first);
        scene.check(point);
    }
}

/// A rank that loads and dumps dies while another waits for the same keys.
#[test]
fn d1_death_at_every_point_of_the_queue() {
    for point in QUEUE {
        let mut scene = Scene::new();
        scene.join(2);
        let mut victim = Scene::victim(point, 1);
        victim.join(&scene.order(7));
        // What is there already is not dumped: nobody else may be faster.
        let dumps = point.starts_with("dump.");
        let what = if dumps { "dump" } else { "load" };
        // One key is its own.
        let keys: Vec<u64> = KEYS.into_iter().chain([100]).collect();
        victim.tell(&json!({"do": what, "task": 1, "keys": keys}));
        if !dumps {
            scene.ranks[0].load(1, &KEYS);
        }
        victim.until_killed(point);
        if !dumps {
            scene.ranks[0].loaded(1);
        }
        scene.check(point);
    }
}

/// Every point belongs to one of the tests above.
#[test]
fn d1_all_points_of_the_rendezvous_are_used() {
    let scenes = ["enter.", "answer.", "leave.", "death.", "sweep."];
    for name in NAMES {
        assert!(scenes.iter().any(|scene| name.starts_with(scene)), "{name}");
    }
}
