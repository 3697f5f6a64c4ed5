//! Lookups of many keys at once: what a scheduler asks.
//!
//! **Invariant:** each answer is what [`PoolTables::find`] says; keys are only grouped so that the
//! processor waits for the memory of a whole group at once.

use crate::{
    CtrlError, Key, Pool,
    bucket::RawKey,
    region::PoolTables,
    slot::{Phase, SlotWord},
};

/// Keys whose memory is fetched together: as many reads as a core has in flight.
const GROUP: usize = 16;

/// What a lookup says about a key. Lookups pin nothing and set no accessed bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Presence {
    /// Not resident, or resident without bytes.
    #[default]
    Absent,
    /// Being filled.
    Filling,
    /// Resident and ready.
    Ready,
}

impl Presence {
    fn of(word: SlotWord) -> Self {
        match word.phase() {
            Phase::Ready => Self::Ready,
            Phase::Filling => Self::Filling,
            _ => Self::Absent,
        }
    }
}

impl Pool {
    /// Says for each key whether it is there; `out` beyond the keys stays as it is.
    ///
    /// # Errors
    /// `Invalid` when `out` is shorter than `keys`; `Fenced`.
    pub fn lookup(&self, keys: &[Key], out: &mut [Presence]) -> Result<(), CtrlError> {
        self.member.check()?;
        if out.len() < keys.len() {
            return Err(CtrlError::Invalid(format!(
                "{} answers do not fit into {}",
                keys.len(),
                out.len()
            )));
        }
        let tables = self.tables()?;
        for (keys, out) in keys.chunks(GROUP).zip(out.chunks_mut(GROUP)) {
            for (answer, out) in self.presences(tables, keys).into_iter().zip(out).take(keys.len())
            {
                *out = answer;
            }
        }
        Ok(())
    }

    /// Length of the longest prefix of keys that are all `Ready`.
    ///
    /// # Errors
    /// `Fenced`.
    pub fn prefix_lookup(&self, keys: &[Key]) -> Result<usize, CtrlError> {
        self.member.check()?;
        let tables = self.tables()?;
        let mut length = 0;
        for keys in keys.chunks(GROUP) {
            let answers = self.presences(tables, keys);
            let ready = answers.iter().take(keys.len()).take_while(|a| **a == Presence::Ready);
            let ready = ready.count();
            length += ready;
            if ready < keys.len() {
                break;
            }
        }
        Ok(length)
    }

    /// Answers for at most [`GROUP`] keys.
    fn presences(&self, tables: &PoolTables, keys: &[Key]) -> [Presence; GROUP] {
        let mut raws = [RawKey::default(); GROUP];
        let mut slots = [0; GROUP];
        let mut answers = [Presence::Absent; GROUP];
        for (raw, key) in raws.iter_mut().zip(keys) {
            *raw = self.raw(key);
            tables.fetch_bucket(raw);
        }
        for (slot, raw) in slots.iter_mut().zip(&raws).take(keys.len()) {
            *slot = tables.fetch_slot(raw);
        }
        for ((answer, slot), raw) in answers.iter_mut().zip(slots).zip(&raws).take(keys.len()) {
            let found = tables.candidate(slot, raw).or_else(|| tables.find(raw));
            *answer = found.map_or(Presence::Absent, |(_, _, word)| Presence::of(word));
        }
        answers
    }
}
