//! Named points between the stores of every multi-step change of the region, where a test stops or
//! kills the process. Without the feature `failpoints` they do not exist.
//!
//! **Invariant:** [`NAMES`] is the list of all points in this crate's source; a test compares them.

/// A named point. Expands to nothing without the feature, but for this crate's own tests.
macro_rules! failpoint {
    ($name:literal) => {
        #[cfg(feature = "failpoints")]
        ucm_failpoint::hit($name);
        #[cfg(all(test, not(ucm_loom)))]
        $crate::failpoint::visit::hit($name);
    };
}
pub(crate) use failpoint;

#[cfg(all(test, not(ucm_loom)))]
pub(crate) mod visit {
    //! A test looks at the world from a point on its own thread's way.

    use std::cell::RefCell;

    type Visitor = Box<dyn FnOnce()>;

    thread_local! {
        static NEXT: RefCell<Option<(&'static str, Visitor)>> = const { RefCell::new(None) };
    }

    /// Called once, when this thread passes the point for the next time.
    pub(crate) fn at(name: &'static str, visitor: impl FnOnce() + 'static) {
        NEXT.set(Some((name, Box::new(visitor))));
    }

    pub(crate) fn hit(name: &str) {
        let here = |next: &mut (&str, Visitor)| next.0 == name;
        if let Some((_, visitor)) = NEXT.with_borrow_mut(|next| next.take_if(here)) {
            visitor();
        }
    }
}

/// All points of this crate, by operation.
#[cfg(any(test, feature = "failpoints"))]
pub const NAMES: &[&str] = &[
    "drain.free.before",
    "drain.tell.after",
    "drain.unlink.after",
    "end.word.after",
    "end.word.before",
    "evict.claim.after",
    "evict.claim.before",
    "evict.detach.after",
    "evict.entry.after",
    "evict.lock.after",
    "evict.undo.after",
    "expel.mark.after",
    "expel.mark.before",
    "expel.slot.after",
    "expel.tell.after",
    "expel.unlink.after",
    "free.hint.after",
    "full.clear.before",
    "full.set.after",
    "giveback.free.after",
    "giveback.unlink.after",
    "group.claim.after",
    "group.decide.after",
    "group.fields.after",
    "group.free.after",
    "group.full.after",
    "group.letgo.after",
    "group.letgo.before",
    "group.open.after",
    "group.ready.after",
    "group.settled.after",
    "group.tell.after",
    "hit.mark.after",
    "insert.key.after",
    "insert.link.after",
    "insert.pin.after",
    "insert.slot.after",
    "join.fields.after",
    "join.joined.after",
    "join.word.after",
    "key.hi.after",
    "key.lo.after",
    "lease.fields.after",
    "lease.kept.after",
    "lease.pins.after",
    "lease.pins.before",
    "lease.record.after",
    "leave.gone.after",
    "leave.word.after",
    "leave.word.before",
    "link.chain.after",
    "link.entry.after",
    "link.lock.after",
    "link.mark.after",
    "link.word.after",
    "lock.break.after",
    "lock.sleep.before",
    "pin.bit.after",
    "pin.bit.before",
    "prealloc.key.after",
    "prealloc.link.after",
    "prealloc.slot.after",
    "publish.tell.after",
    "reap.clear.after",
    "reap.free.after",
    "reap.groups.after",
    "reap.inherit.after",
    "reap.leases.after",
    "reap.lock.after",
    "reap.pin.after",
    "reap.slot.after",
    "reap.slots.after",
    "reap.take.after",
    "reap.tell.after",
    "reap.word.after",
    "reap.word.before",
    "redeem.bell.after",
    "redeem.word.after",
    "release.word.after",
    "relieve.slot.after",
    "relieve.tell.after",
    "remove.evict.after",
    "ring.bump.after",
    "takeover.mark.after",
    "takeover.word.after",
    "takeover.word.before",
    "tell.version.after",
    "tell.wake.after",
    "ungroup.seat.after",
    "ungroup.tell.after",
    "ungroup.word.after",
    "unlease.record.after",
    "unlink.chain.after",
    "unlock.wake.before",
    "unlock.word.before",
    "unpin.bit.after",
    "unpin.bit.before",
];

#[cfg(all(test, not(ucm_loom)))]
mod tests {
    #[test]
    fn d1_the_list_names_all_points_once() {
        let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        assert_eq!(ucm_failpoint::names_in(&source).unwrap(), super::NAMES);
    }
}
