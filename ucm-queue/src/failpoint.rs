//! Named points on a shard's way through the queue, where a test stops or kills the process. Without
//! the feature `failpoints` they do not exist.
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
    "copy.ended.before",
    "copy.guard.after",
    "copy.submit.after",
    "copy.submit.before",
    "dump.ended.before",
    "dump.own.after",
    "dump.publish.after",
    "dump.publish.before",
    "dump.submit.after",
    "dump.submit.before",
    "load.ended.before",
    "load.own.after",
    "load.publish.after",
    "load.submit.after",
    "load.submit.before",
];

#[cfg(test)]
mod tests {
    #[test]
    fn d1_the_list_names_all_points_once() {
        let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        assert_eq!(ucm_failpoint::names_in(&source).unwrap(), super::NAMES);
    }
}
