//! The child side: one peer process that owns memory, and does with it what its parent says.
//!
//! Every answer is one line that starts with `@@`; the parent ignores everything else, such as the
//! test harness's own output.

use std::io::{BufRead, Write};

/// Set for children: the kind of peer, and its argument.
pub(crate) const MARK: &str = "UCM_TRANSPORT_CHILD";

pub(crate) fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    let line = format!("@@{text}\n");
    if out.write_all(line.as_bytes()).and_then(|()| out.flush()).is_err() {
        std::process::exit(3);
    }
}

#[test]
#[ignore = "entry of child processes"]
fn entry() {
    let Ok(mark) = std::env::var(MARK) else { return };
    let (kind, argument) = mark.split_once(' ').unwrap();
    let mut obey: Box<dyn FnMut(&str)> = match kind {
        "shm" => Box::new(crate::shm::peer(argument)),
        "tcp" => Box::new(crate::tcp::peer(argument)),
        other => panic!("no peer of kind {other}"),
    };
    say("ready");
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        obey(&line);
    }
    // The parent closed the pipe (or is gone): end at once.
    std::process::exit(0);
}
