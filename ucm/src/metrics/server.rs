//! Metrics over HTTP, as a text that Prometheus reads.
//!
//! **Invariant:** one reader is answered at a time, each within a second or two.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use crate::Error;

/// How long a reader may take to ask, and to take the answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long it is not tried again to let a reader in.
const AGAIN: Duration = Duration::from_millis(50);

/// Answers every request with the metrics, until it is dropped or their source is gone.
#[derive(Debug)]
pub(crate) struct MetricsServer {
    address: SocketAddr,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// `what` names the setting that says where, for errors; `text` says `None` once its source is gone.
    pub(crate) fn start(
        what: &str,
        address: SocketAddr,
        text: impl Fn() -> Option<String> + Send + 'static,
    ) -> Result<Self, Error> {
        let failed = |source| Error::os(format!("listen at {what} {address}"), source);
        let listener = TcpListener::bind(address).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let over = Arc::new(AtomicBool::new(false));
        let of_thread = Arc::clone(&over);
        let run = move || {
            for stream in listener.incoming() {
                if of_thread.load(Ordering::SeqCst) {
                    return;
                }
                let Some(text) = text() else { return };
                match stream {
                    // A reader that goes away costs nobody anything.
                    Ok(stream) => drop(answer(stream, &text)),
                    // Without descriptors left it would be tried again at once, and again.
                    Err(error) => {
                        tracing::debug!(%error, "a reader of metrics could not be let in");
                        std::thread::sleep(AGAIN);
                    }
                }
            }
        };
        let thread =
            std::thread::Builder::new().name("ucm-metrics".into()).spawn(run).map_err(failed)?;
        Ok(Self { address, over, thread: Some(thread) })
    }

    pub(crate) fn address(&self) -> SocketAddr {
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

fn answer(mut stream: TcpStream, body: &str) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // Whatever it asks for; one buffer of it is enough.
    let mut request = [0; 2048];
    let _ = stream.read(&mut request)?;
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: application/openmetrics-text; version=1.0.0; \
         charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}
