//! What the owner of memory decides: the trait behind a [`TcpServer`](super::TcpServer).
//!
//! **Invariant:** bytes are served only from pieces that the owner named for this very request, and
//! the owner hears exactly once when the request no longer touches them.

use std::{
    any::Any,
    fmt,
    net::SocketAddr,
    panic::{AssertUnwindSafe, catch_unwind},
};

use ucm_data::Token;

use crate::{
    ErrorKind, Memory, TransferError,
    tcp::{sys::Scatter, wire::PeerRange},
};

/// Why an owner does not serve a request. Numbers are those of the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RefusalKind {
    /// What the descriptor names has been replaced, evicted or revoked.
    Stale = 1,
    /// The descriptor names nothing.
    Missing = 2,
    /// A range leaves what the descriptor names.
    OutOfBounds = 3,
    /// This client may not do that.
    Denied = 4,
    /// Not now; try again later.
    Busy = 5,
    /// The request makes no sense.
    Invalid = 6,
    /// The owner failed.
    Failed = 7,
}

/// An owner's no, with a text for people (at most 1024 bytes of it travel).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind:?}: {text}")]
pub struct Refusal {
    kind: RefusalKind,
    text: String,
}

impl Refusal {
    /// A refusal of this kind.
    pub fn new(kind: RefusalKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }

    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> RefusalKind {
        self.kind
    }

    /// Its text.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl From<TransferError> for Refusal {
    fn from(error: TransferError) -> Self {
        let kind = match error.kind() {
            ErrorKind::Stale | ErrorKind::StaleRegion => RefusalKind::Stale,
            ErrorKind::OutOfBounds => RefusalKind::OutOfBounds,
            ErrorKind::Invalid => RefusalKind::Invalid,
            ErrorKind::Busy => RefusalKind::Busy,
            ErrorKind::Denied => RefusalKind::Denied,
            _ => RefusalKind::Failed,
        };
        Self::new(kind, error.to_string())
    }
}

/// What a status on the wire means to the one who asked; `None` for good, `Err` for nonsense.
pub(crate) fn refused(status: u32, text: &str) -> Result<Option<TransferError>, ()> {
    let kind = match status {
        0 => return Ok(None),
        1 | 2 => ErrorKind::Stale,
        3 => ErrorKind::OutOfBounds,
        4 => ErrorKind::Denied,
        5 => ErrorKind::Busy,
        6 => ErrorKind::Invalid,
        7 => ErrorKind::Failed,
        _ => return Err(()),
    };
    Ok(Some(TransferError::new(kind, format!("the peer refused: {text}"))))
}

/// One authenticated connection, from its handshake to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Names the connection; never reused in the life of a server.
    pub id: u64,
    /// The run of the client's engine; connections of one engine share it.
    pub client: Token,
    /// Where the client connects from.
    pub address: SocketAddr,
}

/// Ranges of one descriptor that a client wants to read or write.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Who asks.
    pub session: &'a Session,
    /// What the client got to name its wish: opaque here, at most 256 bytes.
    pub descriptor: &'a [u8],
    /// Which parts, in the order of the stream; none empty, none beyond 64 bits. May overlap.
    pub ranges: &'a [PeerRange],
}

/// Where the bytes of a request lie. Keeps the memory it names.
#[derive(Default)]
pub struct Pieces(pub(in crate::tcp) Scatter);

impl Pieces {
    /// Adds a piece of host memory. Pieces follow the order of the ranges; a range may take several.
    ///
    /// # Errors
    /// `OutOfBounds` when the piece leaves the memory, `Failed` for memory that is not on the host.
    pub fn push(&mut self, memory: &Memory, offset: u64, len: u64) -> Result<(), Refusal> {
        Ok(self.0.push(memory, offset, len)?)
    }

    /// Bytes of all pieces together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.left()
    }
}

impl fmt::Debug for Pieces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pieces").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

/// An owner's verdict when all bytes have moved.
type Finish = Box<dyn FnOnce(bool) -> Result<(), Refusal> + Send>;

/// An owner's yes: what keeps the pieces as they are, until nothing touches them any more.
pub struct Served {
    pub(crate) hold: Option<Box<dyn Any + Send>>,
    pub(crate) finish: Option<Finish>,
}

impl Served {
    /// Kept until the request is over (a pin, a lease); by itself it guarantees that the source
    /// does not change. For memory that does not change at all, `()`.
    #[must_use]
    pub fn holding(hold: impl Any + Send) -> Self {
        Self { hold: Some(Box::new(hold)), finish: None }
    }

    /// Calls `finish` once when the request no longer touches the pieces: with `true` when all of
    /// its bytes have moved, and then what it answers is what the client gets (a source that has
    /// changed meanwhile is `Stale`); with `false` when the connection broke before.
    #[must_use]
    pub fn asking(finish: impl FnOnce(bool) -> Result<(), Refusal> + Send + 'static) -> Self {
        Self { hold: None, finish: Some(Box::new(finish)) }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(finish) = self.finish.take() {
            // Runs in a thread of the server, which no owner's panic may end.
            let ended = catch_unwind(AssertUnwindSafe(|| drop(finish(false))));
            if ended.is_err() {
                tracing::error!("the owner of served memory panicked at the end of a request");
            }
        }
    }
}

impl fmt::Debug for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Served").field("asks", &self.finish.is_some()).finish_non_exhaustive()
    }
}

/// The owner of the memory behind a [`TcpServer`](super::TcpServer). Called from the server's
/// threads; no call may block on another process. A panic costs the connection, not the server.
pub trait Serve: Send + Sync {
    /// A client has authenticated.
    fn opened(&self, session: &Session) {
        let _ = session;
    }

    /// A connection has ended, and nothing of it touches any memory any more: what it has not
    /// finished may be reclaimed.
    fn closed(&self, session: &Session) {
        let _ = session;
    }

    /// Names the pieces of a read: exactly as many bytes as the ranges have.
    ///
    /// # Errors
    /// The whole request is refused and nothing is sent.
    fn read(&self, request: &Request<'_>, pieces: &mut Pieces) -> Result<Served, Refusal>;

    /// Names the pieces of a write.
    ///
    /// # Errors
    /// The whole request is refused and nothing is written.
    fn write(&self, request: &Request<'_>, pieces: &mut Pieces) -> Result<Served, Refusal> {
        let _ = (request, pieces);
        Err(Refusal::new(RefusalKind::Denied, "nothing here can be written"))
    }

    /// Answers a call: `reply` is sent if the answer is yes. Longer replies than the frame limit
    /// are refused as `Failed`.
    ///
    /// # Errors
    /// Told to the client.
    fn call(&self, session: &Session, request: &[u8], reply: &mut Vec<u8>) -> Result<(), Refusal> {
        let _ = (session, request, reply);
        Err(Refusal::new(RefusalKind::Invalid, "no calls are served here"))
    }
}
