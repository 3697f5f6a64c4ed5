//! Late writes: memory that was given back is never written by what it was given back from.
//!
//! **Invariant:** after the end of a plan its destination belongs to the caller alone.

use std::{sync::Arc, time::Duration};

use super::kit::{Client, Proxy, eventually, filled, one, pattern, read, serve, soon};
use crate::{
    ErrorKind, Exports, Memory, Quiesce, RegionId, TcpEngine, TcpServer, TransferEngine,
    testing::Bell,
};

const LEN: usize = 1 << 20;

/// A read that has brought half of its bytes and stands still.
struct Half {
    _server: TcpServer,
    exports: Exports,
    proxy: Proxy,
    client: Client,
    old: RegionId,
    target: Memory,
    to: RegionId,
}

fn half(threaded: bool, limit: Duration) -> (Half, crate::Ticket) {
    let exports = Exports::default();
    let server = serve(Arc::new(exports.clone()));
    let proxy = Proxy::new(server.address());
    let client = Client::with(proxy.address, TcpEngine::builder().max_lanes(2));
    if threaded {
        client.engine.set_waker(Some(Bell::new().waker()));
    }
    let old = client.remote(&exports, &filled(&pattern(1, LEN)));
    let (target, to) = client.local(LEN);
    proxy.hold_after(LEN / 2);
    let deadline = std::time::Instant::now() + limit;
    let ticket = client.engine.submit_until(one(old, to, LEN), deadline).unwrap();
    proxy.wait_held();
    let half = Half { _server: server, exports, proxy, client, old, target, to };
    // Bytes of the old read are in the destination: it is being written.
    eventually("the first bytes", || {
        half.client.engine.poll(&mut Vec::new());
        read(&half.target)[1000] == pattern(1, LEN)[1000]
    });
    (half, ticket)
}

impl Half {
    /// Uses the destination at once for something else, lets the peer go on, and looks.
    fn reuse(self, how: &str) {
        let fresh = pattern(77, LEN);
        self.target.write(0, &fresh).unwrap();
        self.proxy.let_go();
        let before = self.proxy.passed();
        // The peer says the rest of what it had to say, to whom it may concern.
        eventually("the rest", || {
            self.proxy.passed() > before || self.proxy.connections() > 1 || {
                self.client.engine.poll(&mut Vec::new());
                true
            }
        });
        for _ in 0..50 {
            self.client.engine.poll(&mut Vec::new());
            assert!(read(&self.target) == fresh, "{how}: a byte of the old read");
            std::thread::sleep(Duration::from_millis(1));
        }
        // And through the engine: another read into the same place brings its own bytes only.
        let other = pattern(42, LEN);
        let source = self.client.remote(&self.exports, &filled(&other));
        let end = self.client.engine.transfer(one(source, self.to, LEN), soon()).unwrap();
        assert_eq!(end.result.unwrap(), LEN as u64, "{how}");
        assert!(read(&self.target) == other, "{how}");
        self.client.engine.deregister(self.old).unwrap();
        self.client.engine.deregister(self.to).unwrap();
    }
}

/// Mutants seen to fail: `cancel` that ends the plan and leaves its lane reading ("a byte of the old
/// read"), `kill` that leaves a reply on the lane.
#[test]
fn a_cancelled_read_writes_nothing_any_more() {
    for threaded in [false, true] {
        let (half, ticket) = half(threaded, Duration::from_secs(60));
        assert_eq!(
            half.client.engine.deregister(half.to).unwrap_err().kind(),
            ErrorKind::Busy,
            "the memory belongs to the operation"
        );
        assert!(half.client.engine.cancel(ticket));
        assert!(!half.client.engine.cancel(ticket), "it has ended");
        let mut ends = Vec::new();
        half.client.engine.poll(&mut ends);
        assert_eq!(ends[0].result.as_ref().unwrap_err().kind(), ErrorKind::Cancelled);
        half.reuse(&format!("cancelled, threaded {threaded}"));
    }
}

#[test]
fn a_read_past_its_deadline_writes_nothing_any_more() {
    for threaded in [false, true] {
        let (half, ticket) = half(threaded, Duration::from_millis(300));
        half.client.engine.quiesce(Quiesce::Ticket(ticket), soon()).unwrap();
        let mut ends = Vec::new();
        half.client.engine.poll(&mut ends);
        assert_eq!(ends[0].result.as_ref().unwrap_err().kind(), ErrorKind::Timeout);
        half.reuse(&format!("timed out, threaded {threaded}"));
    }
}

/// Nobody waits and nobody polls: the engine's own thread keeps the deadline.
#[test]
fn deadlines_need_nobody() {
    let (half, _) = half(false, Duration::from_millis(200));
    eventually("the end of the plan", || {
        // Looks at the region only: no progress is made by that.
        half.client.engine.stats().timeouts == 1
    });
    eventually("the region's release", || half.client.engine.deregister(half.to).is_ok());
}

#[test]
fn dropping_the_engine_in_the_middle_of_a_read_ends_it() {
    let (half, _) = half(true, Duration::from_secs(60));
    let Half { client, target, proxy, _server, .. } = half;
    drop(client);
    let fresh = pattern(9, LEN);
    target.write(0, &fresh).unwrap();
    proxy.let_go();
    for _ in 0..50 {
        assert!(read(&target) == fresh, "a byte of the old read");
        std::thread::sleep(Duration::from_millis(1));
    }
}
