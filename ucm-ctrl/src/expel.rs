//! Expels a member that is alive but gone for all purposes: an operator's decision, never ours.
//!
//! Nothing of the member can be proved quiet, so nothing of it is handed on: its fills go to
//! quarantine, where they stay until they end in its own process or that process ends. Its pins,
//! locks and half-done evictions stay with it as well.
//!
//! The member may end at any moment of it, be cleared up after, and another may sit down in its seat:
//! only what is found while the record names the expelled stay is touched.
//!
//! **Invariant:** once [`Member::expel`] has returned, no fill of the member can become ready. (A call
//! that had looked at the record before may still take a key: it fails as the owner's death does.)

use crate::{
    FailKind, Member, MemberId,
    failpoint::failpoint,
    handles::announce_anyway,
    layout::{MAX_MEMBERS, MAX_POOLS, MemberRecord},
    member::{MemberInner, MemberState, MemberWord},
    slot::Phase,
    sync::Ordering,
};

/// What [`Member::expel`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expelled {
    /// False when the stay was over already.
    pub done: bool,
    /// Fills put into quarantine by this call.
    pub fills: u64,
}

impl Member {
    /// Declares another member gone although its process lives: on an operator's word only. Waiters
    /// of its fills hear that the owner died; the keys can be loaded into other slots at once. When
    /// the process goes on, all it may still do is to let go: everything else fails as `Fenced`.
    /// May be repeated, also after a caller that died half-way.
    ///
    /// `generation` is the one the member joined with; another stay on its seat is left alone.
    pub fn expel(&self, id: MemberId, generation: u32) -> Expelled {
        let me = &*self.inner;
        let mut expelled = Expelled::default();
        if me.check().is_err() || id.0 == me.index {
            return expelled;
        }
        let Some(record) = me.control.region.member(id.0) else { return expelled };
        let joined = MemberWord::with(MemberState::Joined, 0, generation);
        let marked = MemberWord::with(MemberState::Expelled, 0, generation);
        failpoint!("expel.mark.before");
        let now =
            record.word.compare_exchange(joined.0, marked.0, Ordering::SeqCst, Ordering::SeqCst);
        expelled.done = now.is_ok() || now == Err(marked.0);
        if expelled.done {
            failpoint!("expel.mark.after");
            expelled.fills = quarantine_fills(me, id.0, record, marked);
            #[cfg(not(ucm_loom))]
            crate::group::count_out(&me.control.region, id.0, || {
                record.word.load(Ordering::SeqCst) == marked.0
            });
            // Others may wait for it to open a group.
            #[cfg(not(ucm_loom))]
            crate::group::ring_all(&me.control.region, true);
            me.count(|c| &c.expelled, u64::from(now.is_ok()));
        }
        expelled
    }
}

/// Completes expulsions whose caller may have died.
pub(crate) fn finish_expulsions(me: &MemberInner) {
    for (seat, record) in (0..).zip(me.control.region.members()).take(MAX_MEMBERS) {
        let word = MemberWord(record.word.load(Ordering::SeqCst));
        if word.state() == MemberState::Expelled && seat != me.index {
            quarantine_fills(me, seat, record, word);
            #[cfg(not(ucm_loom))]
            crate::group::count_out(&me.control.region, seat, || {
                record.word.load(Ordering::SeqCst) == word.0
            });
        }
    }
}

/// `marked` is the record's word while it names the expelled stay.
pub(crate) fn quarantine_fills(
    me: &MemberInner,
    gone: u8,
    record: &MemberRecord,
    marked: MemberWord,
) -> u64 {
    let region = &me.control.region;
    let mut fills = 0;
    for tables in (0..MAX_POOLS).filter_map(|pool| region.pool(pool)) {
        for (index, slot) in (0..).zip(tables.slots.iter()) {
            let word = slot.load();
            let phase = word.phase();
            let is_open = matches!(phase, Phase::Filling | Phase::Draining);
            if !is_open || word.owner() != Some(gone) {
                continue;
            }
            // After the slot: if the record is still the same, the fill is of that stay.
            if record.word.load(Ordering::SeqCst) != marked.0 {
                return fills;
            }
            let draining = word.failed_as(FailKind::OwnerDied).to(Phase::Draining, Some(gone));
            // One in quarantine already may be there by somebody who died before it told.
            if phase == Phase::Draining || slot.change(word, draining) {
                failpoint!("expel.slot.after");
                fills += u64::from(phase == Phase::Filling);
                announce_anyway(region, slot);
                failpoint!("expel.tell.after");
                // Should that not be possible now, the end of the quarantine does it.
                let now = if phase == Phase::Draining { word } else { draining };
                tables.vacate_while(me, region.hasher(), index, now);
                failpoint!("expel.unlink.after");
            }
        }
    }
    fills
}
