//! Peers that are other processes: killed, and restarted at the same address.

use std::{
    io::{BufRead, BufReader, Write},
    net::SocketAddr,
    process::{Child, Command, Stdio},
    sync::mpsc::{self, Receiver},
    time::Instant,
};

use ucm_data::Token;
use ucm_transport::{
    Access, ErrorKind, Quiesce, RdmaEngine, TransferEngine, TransferPlan, testing::WATCHDOG,
};

use crate::kit::{Far, Near, device, filled, item, pattern, read, soon};

/// Set for children: the address to serve at, and the seed of the bytes.
const MARK: &str = "UCM_RDMA_CHILD";
const LEN: usize = 8 << 20;

#[test]
#[ignore = "entry of child processes"]
fn entry() {
    let Ok(mark) = std::env::var(MARK) else { return };
    let (address, seed) = mark.split_once(' ').unwrap();
    let device = device().unwrap();
    let far = Far::at(&device, address.parse().unwrap());
    let bytes = pattern(seed.parse().unwrap(), LEN);
    let token = far.owner.export(filled(&bytes), Access::Read).unwrap();
    let hex: String = token.0.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut out = std::io::stdout().lock();
    out.write_all(format!("@@{} {hex}\n", far.server.address()).as_bytes()).unwrap();
    out.flush().unwrap();
    drop(out);
    // Until the parent is gone.
    let _ = std::io::stdin().lock().lines().count();
    std::process::exit(0);
}

struct Other {
    child: Child,
    address: SocketAddr,
    token: Token,
}

impl Other {
    fn start(address: &str, seed: u8) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["peer::entry", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env(MARK, format!("{address} {seed}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = child.stdout.take().unwrap();
        let (tx, lines): (_, Receiver<String>) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                // The harness prints "test … " without a line end before.
                if let Some((_, text)) = line.split_once("@@") {
                    let _ = tx.send(text.to_owned());
                }
            }
        });
        let said = lines.recv_timeout(WATCHDOG).unwrap();
        let (address, hex) = said.split_once(' ').unwrap();
        let byte = |at: usize| u8::from_str_radix(&hex[at * 2..at * 2 + 2], 16).unwrap();
        let token = Token(std::array::from_fn(byte));
        Self { child, address: address.parse().unwrap(), token }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Mutants seen to fail: a boot token that is not compared.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn a_killed_peer_is_typed_and_its_successor_is_another() {
    let Some(device) = device() else { return };
    let other = Other::start("127.0.0.1:0", 1);
    // Few places and many pieces: a plan is under way for a while.
    let builder = RdmaEngine::builder(&device).queue(8).pieces(1);
    let near = Near::with(builder, other.address);
    let from = near.attach(other.token);
    let (ours, to) = near.local(LEN);
    let all = || vec![item((from, 0), (to, 0), LEN)];
    assert_eq!(near.run(all()).unwrap(), LEN as u64);
    assert!(read(&ours) == pattern(1, LEN));
    let address = other.address.to_string();
    // Killed while reads are under way.
    let tickets: Vec<_> = (0..3)
        .map(|_| {
            let (_, own) = near.local(LEN);
            let items = (0..10_000).map(|i| item((from, i * 800), (own, i * 800), 700)).collect();
            near.engine.submit(TransferPlan { items, holds: vec![] }).unwrap()
        })
        .collect();
    other.kill();
    let begin = Instant::now();
    near.engine.quiesce(Quiesce::All, soon()).unwrap();
    println!("a killed peer is typed after {:?}", begin.elapsed());
    let mut ends = Vec::new();
    near.engine.poll(&mut ends);
    assert_eq!(ends.len(), tickets.len());
    for end in &ends {
        match &end.result {
            Ok(bytes) => assert_eq!(*bytes, 7_000_000),
            Err(error) => assert_eq!(error.kind(), ErrorKind::PeerDown, "{error}"),
        }
    }
    assert!(ends.iter().any(|end| end.result.is_err()), "it was killed too late");
    assert_eq!(near.run(all()).unwrap_err().kind(), ErrorKind::PeerDown);
    // Another run at the same address, with other bytes: never taken for the first.
    let other = Other::start(&address, 2);
    let until = soon();
    let seen = loop {
        let seen = near.run(all()).unwrap_err().kind();
        // The circuit is open for a while.
        if seen != ErrorKind::PeerDown || Instant::now() > until {
            break seen;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    assert_eq!(seen, ErrorKind::Stale);
    let again = near.engine.attach(&near.peer, other.token, soon()).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::Stale);
    assert!(near.engine.peer_state(&near.peer).unwrap().gone);
    near.engine.disconnect(near.peer);
    assert!(near.engine.peer_state(&near.peer).is_none());
    let anew = Near::new(&device, other.address);
    let from = anew.attach(other.token);
    let (ours, to) = anew.local(LEN);
    assert_eq!(anew.run(vec![item((from, 0), (to, 0), LEN)]).unwrap(), LEN as u64);
    assert!(read(&ours) == pattern(2, LEN));
}
