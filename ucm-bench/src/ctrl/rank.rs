//! A process of a control-plane measurement.
//!
//! Owns: what it has made or joined so far.
//! **Invariant:** an order that needs something not made yet is an error.

use serde::Serialize;
use serde_json::Value;

use super::{
    peer,
    pressure::Pressure,
    shared::Shared,
    spec::{Order, Size, TASK_BLOCKS},
    tables::Tables,
    whole::Whole,
};
use crate::{error::BenchError, ranks};

#[derive(Default)]
struct Process {
    tables: Vec<Tables>,
    miss: Option<Pressure>,
    prealloc: Option<Pressure>,
    shared: Option<Shared>,
    whole: Option<Whole>,
}

/// Serves orders until the parent leaves.
pub(crate) fn run() -> Result<(), BenchError> {
    let mut process = Process::default();
    ranks::serve(|order| process.obey(order))
}

impl Process {
    fn obey(&mut self, order: Order) -> Result<Value, BenchError> {
        match order {
            Order::Make(size) => {
                let made = Tables::make(size)?;
                let bytes = made.bytes();
                self.tables.push(made);
                answer(bytes)
            }
            Order::Measure { size, seed } => answer(self.tables(size)?.measure(seed)?),
            Order::Miss { slots } => {
                let miss = match &mut self.miss {
                    Some(miss) => miss,
                    empty => empty.insert(Pressure::make(slots, 0, 1)?),
                };
                answer(miss.miss()?)
            }
            Order::Prealloc { slots } => {
                let prealloc = match &mut self.prealloc {
                    Some(prealloc) => prealloc,
                    empty => empty.insert(Pressure::make(slots, 2 * TASK_BLOCKS, 2)?),
                };
                answer(prealloc.prealloc()?)
            }
            Order::Join { region, futex } => {
                self.shared = Some(Shared::join(&region, &futex)?);
                answer(())
            }
            Order::Fill { keys } => answer(self.shared()?.fill(keys)?),
            Order::Together { keys, at_ns, seed } => {
                answer(self.shared()?.together(keys, at_ns, seed)?)
            }
            Order::Rest => answer(()),
            Order::Own { key } => answer(self.shared()?.own(key)?),
            Order::Await { key } => answer(self.shared()?.wait(key)?),
            Order::Publish => answer(self.shared()?.publish()?),
            Order::Listen { first, count } => answer(self.shared()?.listen(first, count)?),
            Order::Ring { first, count, listener } => {
                answer(self.shared()?.ring(first, count, listener)?)
            }
            Order::Awaited | Order::Heard => answer(self.shared()?.waited()?),
            Order::Start { rank, config } => {
                self.whole = Some(Whole::start(rank, &config)?);
                answer(std::process::id())
            }
            Order::Hold => answer(self.whole()?.hold()?),
            Order::Load => answer(self.whole()?.load()?),
            Order::GiveUp => answer(self.whole()?.give_up()?),
            Order::Loaded => answer(self.whole()?.loaded()?),
        }
    }

    fn tables(&self, size: Size) -> Result<&Tables, BenchError> {
        let found = self.tables.iter().find(|tables| tables.size() == size);
        found.ok_or_else(|| peer(format!("there is no table of {} slots", size.slots)))
    }

    fn shared(&mut self) -> Result<&mut Shared, BenchError> {
        self.shared.as_mut().ok_or_else(|| peer("not joined yet"))
    }

    fn whole(&mut self) -> Result<&mut Whole, BenchError> {
        self.whole.as_mut().ok_or_else(|| peer("the rank was not started yet"))
    }
}

fn answer(value: impl Serialize) -> Result<Value, BenchError> {
    serde_json::to_value(value).map_err(|error| BenchError::io("form a reply", error.into()))
}
