//! Servers, clients, and a proxy between them that holds bytes back.
//!
//! **Invariant:** what waits, waits for an event or under the watchdog, never for a time.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex},
    thread,
    time::{Duration, Instant},
};

use crate::{
    Access, Addr, Exports, Memory, RegionId, Secret, Serve, TcpEngine, TcpEngineBuilder, TcpPeer,
    TcpServer, TcpServerConfig, Transfer, TransferEngine, TransferPlan, testing::WATCHDOG,
};

pub(super) fn secret() -> Secret {
    Secret::new(b"a secret for tests only").unwrap()
}

pub(super) fn soon() -> Instant {
    Instant::now() + WATCHDOG
}

pub(super) fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

pub(super) fn config() -> TcpServerConfig {
    TcpServerConfig::new(secret())
}

pub(super) fn serve(service: Arc<dyn Serve>) -> TcpServer {
    TcpServer::bind(loopback(), config(), service).unwrap()
}

/// Bytes that depend on their place.
pub(super) fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| u8::try_from((i * 7 + i / 251) % 251).unwrap().wrapping_add(seed)).collect()
}

pub(super) fn read(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

pub(super) fn filled(bytes: &[u8]) -> Memory {
    let memory = Memory::host(bytes.len()).unwrap();
    memory.write(0, bytes).unwrap();
    memory
}

pub(super) fn one(src: RegionId, dst: RegionId, len: usize) -> TransferPlan {
    let at = |region| Addr { region, offset: 0 };
    let items = vec![Transfer { src: at(src), dst: at(dst), len: len as u64 }];
    TransferPlan { items, holds: vec![] }
}

/// A client with one peer.
pub(super) struct Client {
    pub(super) engine: TcpEngine,
    pub(super) peer: TcpPeer,
}

impl Client {
    pub(super) fn new(address: SocketAddr) -> Self {
        Self::with(address, TcpEngine::builder())
    }

    pub(super) fn with(address: SocketAddr, builder: TcpEngineBuilder) -> Self {
        let engine = builder.build().unwrap();
        let peer = engine.connect(address, &secret(), soon()).unwrap();
        Self { engine, peer }
    }

    /// A destination of ours.
    pub(super) fn local(&self, len: usize) -> (Memory, RegionId) {
        let memory = Memory::host(len).unwrap();
        (memory.clone(), self.engine.register(memory).unwrap())
    }

    /// Exported bytes as a region of ours.
    pub(super) fn remote(&self, exports: &Exports, memory: &Memory) -> RegionId {
        let token = exports.export(memory.clone(), Access::ReadWrite).unwrap();
        self.engine.attach(&self.peer, &token.0, memory.len() as u64).unwrap()
    }
}

/// Passes bytes between clients and a server; what comes from the server can be held back.
pub(super) struct Proxy {
    pub(super) address: SocketAddr,
    gate: Arc<Gate>,
}

#[derive(Default)]
struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Bytes from the server that may still pass; `None`: all.
    allowance: Option<usize>,
    passed: usize,
    held: bool,
    streams: Vec<TcpStream>,
    refusing: bool,
    connections: usize,
}

impl Proxy {
    pub(super) fn new(server: SocketAddr) -> Self {
        let listener = TcpListener::bind(loopback()).unwrap();
        let address = listener.local_addr().unwrap();
        let gate = Arc::new(Gate::default());
        let of_thread = Arc::clone(&gate);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if of_thread.state.lock().unwrap().refusing {
                    continue;
                }
                let Ok(server) = TcpStream::connect(server) else { continue };
                let both = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let mut state = of_thread.state.lock().unwrap();
                state.connections += 1;
                state.streams.extend([client.try_clone().unwrap(), server.try_clone().unwrap()]);
                drop(state);
                thread::spawn(move || drop(std::io::copy(&mut &both.0, &mut &both.1)));
                let gate = Arc::clone(&of_thread);
                thread::spawn(move || gate.pass(&server, &client));
            }
        });
        Self { address, gate }
    }

    /// Lets this many more bytes of the server pass, then none.
    pub(super) fn hold_after(&self, bytes: usize) {
        let mut state = self.gate.state.lock().unwrap();
        (state.allowance, state.held) = (Some(bytes), false);
    }

    /// Sleeps until bytes are held back.
    pub(super) fn wait_held(&self) {
        let state = self.gate.state.lock().unwrap();
        let waited = self.gate.changed.wait_timeout_while(state, WATCHDOG, |s| !s.held).unwrap();
        assert!(waited.0.held, "nothing was held back");
    }

    pub(super) fn let_go(&self) {
        self.gate.state.lock().unwrap().allowance = None;
        self.gate.changed.notify_all();
    }

    /// Cuts all connections.
    pub(super) fn cut(&self) {
        for stream in self.gate.state.lock().unwrap().streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    pub(super) fn refuse(&self, refusing: bool) {
        self.gate.state.lock().unwrap().refusing = refusing;
    }

    pub(super) fn connections(&self) -> usize {
        self.gate.state.lock().unwrap().connections
    }

    /// Bytes of the server that have passed.
    pub(super) fn passed(&self) -> usize {
        self.gate.state.lock().unwrap().passed
    }
}

impl Gate {
    fn pass(&self, mut from: &TcpStream, mut to: &TcpStream) {
        let mut bytes = vec![0; 16 << 10];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            let mut rest = &bytes[..count];
            while !rest.is_empty() {
                let mut state = self.state.lock().unwrap();
                while state.allowance == Some(0) {
                    state.held = true;
                    self.changed.notify_all();
                    state = self.changed.wait(state).unwrap();
                }
                let now = state.allowance.map_or(rest.len(), |left| left.min(rest.len()));
                state.allowance = state.allowance.map(|left| left - now);
                state.passed += now;
                drop(state);
                if to.write_all(&rest[..now]).is_err() {
                    return;
                }
                rest = &rest[now..];
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.refuse(true);
        self.let_go();
        self.cut();
    }
}

/// Waits, looking now and then, until something is so.
pub(super) fn eventually(what: &str, so: impl Fn() -> bool) {
    let until = soon();
    while !so() {
        assert!(Instant::now() < until, "{what} does not come true");
        thread::sleep(Duration::from_millis(1));
    }
}
