//! Named points between the steps of entering, answering and leaving, where a test stops or kills the
//! process. Without the feature `failpoints` they do not exist.
//!
//! **Invariant:** [`NAMES`] is the list of all points in this crate's source; a test compares them.

/// A named point. Expands to nothing without the feature.
macro_rules! failpoint {
    ($name:literal) => {
        #[cfg(feature = "failpoints")]
        ucm_failpoint::hit($name);
    };
}
pub(crate) use failpoint;

/// All points of this crate, by operation.
#[cfg(any(test, feature = "failpoints"))]
pub const NAMES: &[&str] = &[
    "answer.accept.before",
    "answer.fds.after",
    "answer.fds.before",
    "answer.life.before",
    "answer.meta.before",
    "answer.welcome.before",
    "death.tell.after",
    "death.tell.before",
    "enter.admit.after",
    "enter.create.after",
    "enter.hello.after",
    "enter.listen.after",
    "enter.lock.after",
    "enter.meet.after",
    "enter.offer.after",
    "enter.seated.after",
    "enter.sign.after",
    "enter.thread.after",
    "enter.unlock.after",
    "enter.unlock.before",
    "leave.bye.after",
    "leave.listener.after",
    "leave.name.after",
    "sweep.hook.after",
    "sweep.hook.before",
];

#[cfg(test)]
mod tests {
    #[test]
    fn d1_the_list_names_all_points_once() {
        let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        assert_eq!(ucm_failpoint::names_in(&source).unwrap(), super::NAMES);
    }
}
