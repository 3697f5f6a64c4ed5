//! The thread that tells when copies have ended.
//!
//! It asks the oldest event of each stream, and sleeps longer the longer nothing ends; a stream's
//! call to the host cuts that short where it is asked for. Without plans it sleeps until one comes.
//!
//! **Invariant:** only an event that the driver calls ended, after everything of its plan was given
//! to the stream, ends a plan; the thread never waits for a stream as a whole.

use std::{num::NonZeroU64, sync::Arc, time::Duration};

use super::{
    error::{Class, DriverError},
    handles::Event,
    shared::{Shared, Watch},
};
use crate::Ticket;

/// Failures in a row after which the device counts as lost.
const STRIKES: u32 = 16;
/// Sleep between questions: first, longest, and longest when the streams call the host.
const SHORTEST: Duration = Duration::from_micros(5);
const LONGEST: Duration = Duration::from_micros(200);
const WITH_CALLS: Duration = Duration::from_millis(10);
/// Sleep after a failed question; doubled with each failure in a row, up to 64 times.
const AFTER_FAILURE: Duration = Duration::from_micros(500);
/// Sleep between questions about plans in quarantine; they are asked about so often at the end.
const QUARANTINE: Duration = Duration::from_millis(100);
const LAST_QUESTIONS: u32 = 10;

/// Body of the thread.
pub(super) fn run(shared: &Arc<Shared>, calls: bool) {
    // Short sleeps are to be short; 50 µs are added otherwise.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1_000));
    let mut pace = SHORTEST;
    let longest = if calls { WITH_CALLS } else { LONGEST };
    let mut last_questions = 0;
    loop {
        let seen = shared.bell.rings();
        match shared.watch() {
            (Watch::Heads(heads), _) => {
                let looks = heads
                    .into_iter()
                    .map(|(lane, ticket, event)| look(shared, lane, ticket, event));
                match looks.max().unwrap_or(Seen::Running) {
                    Seen::Ended => pace = SHORTEST,
                    Seen::Running => {
                        shared.bell.wait(seen, Some(pace));
                        let rung = shared.bell.rings() != seen;
                        pace = if rung { SHORTEST } else { (pace * 2).min(longest) };
                    }
                    // A driver in trouble gets time, and nobody else's.
                    Seen::Failed(strikes) => {
                        std::thread::sleep(AFTER_FAILURE * 2_u32.pow(strikes.min(6)));
                    }
                }
            }
            (Watch::Quarantine(held), stop) => {
                for (ticket, event) in held {
                    if event.is_some_and(|event| matches!(event.has_ended(), Ok(true))) {
                        shared.acquit(ticket);
                    }
                }
                if stop {
                    last_questions += 1;
                    if last_questions > LAST_QUESTIONS {
                        shared.leak_quarantine();
                    }
                }
                shared.bell.wait(seen, Some(QUARANTINE));
            }
            (Watch::Nothing, true) => break,
            (Watch::Nothing, false) => {
                pace = SHORTEST;
                shared.bell.wait(seen, None);
            }
        }
    }
    shared.tender_goes();
}

/// What a question brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Seen {
    Running,
    Ended,
    /// So often in a row.
    Failed(u32),
}

/// Asks about the head of a lane, and ends it if it has ended.
fn look(shared: &Arc<Shared>, lane: usize, ticket: Ticket, event: Option<Arc<Event>>) -> Seen {
    let asked = match event {
        Some(event) => event.has_ended(),
        None => record(shared, lane, ticket).map(|()| false),
    };
    match asked {
        Ok(true) => {
            shared.end_head(lane, ticket);
            Seen::Ended
        }
        Ok(false) => {
            shared.forgive(lane, ticket);
            Seen::Running
        }
        Err(error) => {
            let strikes = shared.strike(lane, ticket, &error);
            if error.class == Class::Lost || strikes >= STRIKES {
                shared.poison(&error);
            }
            Seen::Failed(strikes)
        }
    }
}

/// Records the event that could not be recorded when the plan began. It comes after everything that
/// was given to the stream since, so it still proves the plan's end.
fn record(shared: &Shared, lane: usize, ticket: Ticket) -> Result<(), DriverError> {
    let Some(on) = shared.lanes.get(lane) else { return Ok(()) };
    let event = shared.event()?;
    let _order = on.order.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    event.record(&on.stream)?;
    shared.recorded(lane, ticket, event);
    Ok(())
}
