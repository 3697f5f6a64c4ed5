//! A read-only walk over the region: occupancy, members, counters, and a consistency check.
//!
//! **Invariant:** inspection writes nothing, so it may be run against a live cache; on a cache at
//! rest `problems` is empty.

use std::collections::HashMap;

use crate::{
    BlockId, Control, MemberState,
    bucket::for_each_linked,
    key::Hasher,
    layout::{Counters, MAX_MEMBERS, MemberRecord},
    member::MemberWord,
    region::PoolTables,
    slot::Phase,
    sync::{Counter, Ordering},
};

macro_rules! statistics {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Event counts since the region was created, summed over all members.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Statistics {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl Statistics {
            fn add(&mut self, counters: &Counters) {
                let get = |c: &Counter| c.load(Ordering::Relaxed);
                $(self.$name = self.$name.wrapping_add(get(&counters.$name));)+
                self.hits = self.hits.wrapping_add(get(&counters.further_hits));
            }

            /// Names and what they count, in the order of [`list`](Self::list).
            pub const MEANINGS: &[(&str, &str)] =
                &[$((stringify!($name), concat!($($doc),+)),)+];

            /// Names and values, in a fixed order.
            #[must_use]
            pub fn list(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)+]
            }
        }
    };
}

statistics! {
    /// Acquires of ready keys.
    hits,
    /// Acquires that made the caller the owner.
    owners,
    /// Of these: without a victim search, on a slot that was linked already.
    takeovers,
    /// Acquires that found somebody filling.
    waiters,
    /// Acquires that found no slot.
    fulls,
    /// Keys that lost their slot.
    evictions,
    /// Searches for a slot.
    victim_searches,
    /// Steps of the CLOCK hand.
    victim_steps,
    /// Fills that became ready.
    publishes,
    /// Fills that failed.
    failures,
    /// Fills that were given up with operations in flight.
    drains,
    /// Slots preallocated.
    preallocs,
    /// Of these: reserved slots.
    prealloc_reserved,
    /// Preallocations that found no slot.
    prealloc_nothing,
    /// Shards renewed by touch.
    touched,
    /// Leases made.
    leases,
    /// Members found dead.
    deaths,
    /// Slots recovered from dead members.
    slots_recovered,
    /// Pins recovered from dead members.
    pins_recovered,
    /// Bucket locks recovered from dead members.
    locks_recovered,
    /// Impossible contents met.
    corruptions,
    /// Recoveries carried out, also those that a reaper had begun which died itself.
    recoveries,
    /// Structures put right: locks freed, slots unlinked that had to wait for a stopped member.
    repairs,
    /// Members that an operator declared gone.
    expelled,
}

/// One member as the region records it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemberInspection {
    /// Seat.
    pub index: u8,
    /// State of the record.
    pub state: MemberState,
    /// How often the seat was taken.
    pub generation: u32,
    /// Process id as the member saw it (its own namespace).
    pub pid: u32,
    /// Device id; negative for schedulers.
    pub device_id: i32,
    /// Names the stay.
    pub incarnation: [u8; 16],
    /// Slots it pins.
    pub pins: u64,
    /// Slots it fills.
    pub filling: u64,
}

/// One pool at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolInspection {
    /// Regular slots.
    pub slots: u32,
    /// Reserved slots.
    pub reserved: u32,
    /// Slots on no chain.
    pub free: u64,
    /// Slots being taken from one key to another.
    pub moving: u64,
    /// Preallocated slots.
    pub idle: u64,
    /// Slots being filled.
    pub filling: u64,
    /// Slots with valid bytes.
    pub ready: u64,
    /// Slots whose last fill failed.
    pub failed: u64,
    /// Slots in quarantine.
    pub draining: u64,
    /// Slots somebody pins.
    pub pinned: u64,
    /// Slots with the accessed bit.
    pub accessed: u64,
    /// Position of the CLOCK hand.
    pub cursor: u64,
    /// Age of the oldest fill in milliseconds, 0 without one.
    pub oldest_fill_ms: u64,
    /// Most entries in one bucket.
    pub longest_bucket: usize,
}

/// Group votes at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupsInspection {
    /// Records there are: more groups have to wait.
    pub records: u64,
    /// Groups that some of their members have not voted in.
    pub open: u64,
    /// Decided groups that some of their members have not taken note of.
    pub decided: u64,
    /// Age of the oldest of both in milliseconds, 0 without one.
    pub oldest_ms: u64,
}

/// The whole region at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// Pools, in order.
    pub pools: Vec<PoolInspection>,
    /// Member records in use.
    pub members: Vec<MemberInspection>,
    /// Group votes.
    pub groups: GroupsInspection,
    /// Event counts.
    pub statistics: Statistics,
    /// Contradictions found; empty on a healthy cache at rest.
    pub problems: Vec<String>,
}

impl Control {
    /// Event counts, summed over all members. Cheap.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let mut sum = Statistics::default();
        for member in self.region.members() {
            sum.add(&member.counters);
        }
        sum
    }

    /// Walks the whole region. Takes milliseconds per million slots.
    #[must_use]
    pub fn inspect(&self) -> Inspection {
        let mut out = Inspection { statistics: self.statistics(), ..Inspection::default() };
        if !self.region.is_ours() {
            out.problems.push("this process was forked from a member and has no mapping".into());
            return out;
        }
        let mut problems = Problems::default();
        let mut pins = [0_u64; MAX_MEMBERS];
        let mut filling = [0_u64; MAX_MEMBERS];
        for (pool, geometry) in self.geometry().pools.iter().enumerate() {
            let Some(tables) = self.region.pool(pool) else { continue };
            let mut inspection = PoolInspection {
                slots: geometry.slots,
                reserved: geometry.reserved,
                ..PoolInspection::default()
            };
            walk_slots(tables, &mut inspection, &mut pins, &mut filling, &mut problems);
            walk_buckets(tables, self.region.hasher(), &mut inspection, &mut problems);
            let cursor = tables.hot().cursor.0.load(Ordering::Relaxed);
            inspection.cursor = cursor % u64::from(geometry.slots);
            out.pools.push(inspection);
        }
        for (index, record) in self.region.members().iter().enumerate() {
            let (Some(&pins), Some(&filling), Ok(index)) =
                (pins.get(index), filling.get(index), u8::try_from(index))
            else {
                continue;
            };
            let member = MemberInspection { pins, filling, ..inspect_member(record, index) };
            if member.state != MemberState::Free {
                out.members.push(member);
            } else if pins != 0 || filling != 0 {
                problems.add(|| {
                    format!("member {index} is gone but has {pins} pins and {filling} fills")
                });
            }
        }
        #[cfg(not(ucm_loom))]
        walk_groups(self, &mut out.groups, &mut problems);
        out.problems = problems.into_texts();
        out
    }

    /// Member records in use, without counting what they pin and fill. Cheap.
    #[must_use]
    pub fn inspect_members(&self) -> Vec<MemberInspection> {
        let records = (0..).zip(self.region.members());
        let members = records.map(|(index, record)| inspect_member(record, index));
        members.filter(|member| member.state != MemberState::Free).collect()
    }
}

/// Texts of contradictions: of the first, so that a region full of noise does not fill the memory.
#[derive(Default)]
struct Problems {
    texts: Vec<String>,
    more: usize,
}

impl Problems {
    const MOST: usize = 1000;

    fn add(&mut self, text: impl FnOnce() -> String) {
        if self.texts.len() < Self::MOST {
            self.texts.push(text());
        } else {
            self.more += 1;
        }
    }

    fn into_texts(mut self) -> Vec<String> {
        if self.more > 0 {
            self.texts.push(format!("and {} more", self.more));
        }
        self.texts
    }
}

fn inspect_member(record: &MemberRecord, index: u8) -> MemberInspection {
    let word = MemberWord(record.word.load(Ordering::SeqCst));
    let half = |i: usize| record.incarnation.get(i).map_or(0, |half| half.load(Ordering::SeqCst));
    MemberInspection {
        index,
        state: word.state(),
        generation: word.generation(),
        pid: record.pid.load(Ordering::Relaxed),
        device_id: record.device.load(Ordering::Relaxed).cast_signed(),
        incarnation: BlockId::from_halves(half(0), half(1)).0,
        pins: 0,
        filling: 0,
    }
}

#[cfg(not(ucm_loom))]
fn walk_groups(control: &Control, out: &mut GroupsInspection, problems: &mut Problems) {
    use crate::group::GroupState;
    let (region, now) = (&control.region, crate::clock_ms());
    for (index, record) in region.groups().iter().enumerate() {
        out.records += 1;
        match record.load().state() {
            GroupState::Free | GroupState::Opening => continue,
            GroupState::Open => out.open += 1,
            GroupState::Committed | GroupState::Aborted => out.decided += 1,
            GroupState::Invalid => {
                problems.add(|| format!("group record {index} is in an impossible state"));
                continue;
            }
        }
        let age = now.saturating_sub(record.since_ms.load(Ordering::Relaxed));
        out.oldest_ms = out.oldest_ms.max(age);
        for seat in record.holders().iter() {
            let word = region.member(seat).map_or(0, |m| m.word.load(Ordering::SeqCst));
            if MemberWord(word).state() == MemberState::Free {
                problems
                    .add(|| format!("group record {index} waits for member {seat}, which is gone"));
            }
        }
    }
}

fn walk_slots(
    tables: &PoolTables,
    out: &mut PoolInspection,
    pins: &mut [u64],
    filling: &mut [u64],
    problems: &mut Problems,
) {
    let now = crate::clock_ms();
    for (index, slot) in tables.slots.iter().enumerate() {
        let word = slot.load();
        let counter = match word.phase() {
            Phase::Free => &mut out.free,
            Phase::Claimed | Phase::ClaimedReady | Phase::Detached => &mut out.moving,
            Phase::Idle => &mut out.idle,
            Phase::Filling => &mut out.filling,
            Phase::Ready => &mut out.ready,
            Phase::Failed => &mut out.failed,
            Phase::Draining => &mut out.draining,
            Phase::Invalid => {
                problems.add(|| format!("slot {index} has an impossible state {word:?}"));
                continue;
            }
        };
        *counter += 1;
        if matches!(word.phase(), Phase::Filling | Phase::Draining) {
            let age = now.saturating_sub(slot.since_ms.load(Ordering::Relaxed));
            out.oldest_fill_ms = out.oldest_fill_ms.max(age);
            match word.owner().and_then(|owner| filling.get_mut(usize::from(owner))) {
                Some(count) => *count += 1,
                None => {
                    problems.add(|| format!("slot {index} is being filled by nobody: {word:?}"));
                }
            }
        }
        out.pinned += u64::from(!slot.unpinned());
        out.accessed += u64::from(u32::try_from(index).is_ok_and(|index| tables.is_marked(index)));
        for (word_index, word) in slot.pins.iter().enumerate() {
            let mut bits = word.load(Ordering::Relaxed);
            while bits != 0 {
                if let Some(count) = pins.get_mut(word_index * 64 + bits.trailing_zeros() as usize)
                {
                    *count += 1;
                }
                bits &= bits - 1;
            }
        }
    }
}

fn walk_buckets(
    tables: &PoolTables,
    hasher: Hasher,
    out: &mut PoolInspection,
    problems: &mut Problems,
) {
    let mut seen: HashMap<u32, usize> = HashMap::new();
    for (bucket_index, bucket) in tables.buckets.iter().enumerate() {
        let mut length = 0;
        for_each_linked(tables, bucket, |index, tag| {
            length += 1;
            let Some(slot) = tables.slot(index) else {
                problems.add(|| {
                    format!("bucket {bucket_index} names slot {index}, which does not exist")
                });
                return false;
            };
            if let Some(other) = seen.insert(index, bucket_index) {
                problems.add(|| {
                    format!("slot {index} is linked in bucket {other} and in bucket {bucket_index}")
                });
                // The chain may be a ring.
                return false;
            }
            let phase = slot.load().phase();
            if !phase.is_resident() {
                problems.add(|| {
                    format!("bucket {bucket_index} links slot {index}, which is {phase:?}")
                });
            }
            let key = slot.key(hasher);
            if tables.bucket_index(key.hashed) != bucket_index
                || tag.is_some_and(|tag| tag != key.hashed.tag)
            {
                problems.add(|| {
                    let block = slot.block();
                    format!("slot {index} ({block:?}) is linked in the wrong bucket {bucket_index}")
                });
            }
            true
        });
        out.longest_bucket = out.longest_bucket.max(length);
    }
    for (index, slot) in tables.slots.iter().enumerate() {
        let phase = slot.load().phase();
        if phase.is_resident() && !u32::try_from(index).is_ok_and(|index| seen.contains_key(&index))
        {
            problems.add(|| format!("slot {index} is {phase:?} but linked nowhere"));
        }
    }
    let used: u64 = out.moving + out.idle + out.filling + out.ready + out.failed + out.draining;
    if used + out.free != tables.slots.len() as u64 {
        problems.add(|| {
            format!("{used} used and {} free slots do not make {}", out.free, tables.slots.len())
        });
    }
}
