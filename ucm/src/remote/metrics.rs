//! Metrics of a peer, as text that Prometheus reads.
//!
//! **Invariant:** one reader is answered at a time, each within a second or two.

use std::{
    fmt::Write as _,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use ucm_remote::{Agent, AgentStats};

use crate::Error;

/// How long a reader may take to ask, and to take the answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Answers every request with the metrics.
pub(super) struct MetricsServer {
    address: SocketAddr,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    pub(super) fn start(address: SocketAddr, agent: Weak<Agent>) -> Result<Self, Error> {
        let failed = |source| Error::os(format!("listen at remote.metrics {address}"), source);
        let listener = TcpListener::bind(address).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let over = Arc::new(AtomicBool::new(false));
        let of_thread = Arc::clone(&over);
        let run = move || {
            for stream in listener.incoming() {
                let agent = agent.upgrade().filter(|_| !of_thread.load(Ordering::SeqCst));
                let Some(agent) = agent else { return };
                let stats = agent.stats();
                drop(agent);
                if let Ok(stream) = stream {
                    // A reader that goes away costs nobody anything.
                    let _ = answer(stream, &stats);
                }
            }
        };
        let thread =
            std::thread::Builder::new().name("ucm-metrics".into()).spawn(run).map_err(failed)?;
        Ok(Self { address, over, thread: Some(thread) })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        // Wakes the thread.
        let woken = TcpStream::connect_timeout(&self.address, PATIENCE);
        if let (Some(thread), true) = (self.thread.take(), woken.is_ok()) {
            let _ = thread.join();
        }
    }
}

fn answer(mut stream: TcpStream, stats: &AgentStats) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // Whatever it asks for; one buffer of it is enough.
    let mut request = [0; 2048];
    let _ = stream.read(&mut request)?;
    let mut body = String::new();
    for (name, value) in stats.list() {
        // Writing to a string cannot fail.
        let _ = writeln!(body, "ucm_remote_{name} {value}");
    }
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        body.len()
    )
}
