//! Greeting each other: versions, boot tokens, and who knows the secret.
//!
//! **Invariant:** before both sides have proved that they know the secret, nothing but the messages
//! of the handshake is read or allocated.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use ucm_data::Token;

use super::{
    auth::{Secret, Side},
    server::ServerState,
    socket::Socket,
    tls::{Tls, TlsClient},
    wire::{
        CHALLENGE_BYTES, Challenge, Grant, HELLO_BYTES, Hello, Malformed, READY_BYTES, Ready,
        VERSIONS,
    },
};
use crate::{ErrorKind, TransferError};

/// The server's half, between challenge and proof.
pub(super) struct Greeting {
    pub(super) hello: [u8; HELLO_BYTES],
    pub(super) challenge: [u8; CHALLENGE_BYTES],
    pub(super) version: u16,
    pub(super) client: Token,
}

/// The server's answer to the first message.
pub(super) fn greet(
    hello: &[u8; HELLO_BYTES],
    server: &ServerState,
) -> Result<Greeting, Malformed> {
    let said = Hello::decode(hello)?;
    let newest = said.versions.1.min(VERSIONS.1);
    let version =
        if newest < said.versions.0.max(VERSIONS.0) || said.flags != 0 { 0 } else { newest };
    let nonce = nonce().map_err(|_| Malformed("the system gives no random bytes"))?;
    let grant = server.config.grant();
    let challenge = Challenge { version, flags: 0, boot: server.boot, nonce, grant }.encode();
    Ok(Greeting { hello: *hello, challenge, version, client: said.boot })
}

/// What a client knows after a handshake.
#[derive(Debug)]
pub(super) struct Greeted {
    stream: TcpStream,
    tls: Option<Tls>,
    pub(super) boot: Token,
    pub(super) grant: Grant,
}

impl Greeted {
    /// The connection as it is, blocking.
    #[cfg(feature = "rdma")]
    pub(super) fn into_stream(self) -> TcpStream {
        self.stream
    }

    /// The connection, from now on without blocking.
    pub(super) fn socket(self) -> io::Result<Socket> {
        Socket::new(self.stream, self.tls)
    }
}

/// The client's half: connects and proves itself, blocking until `deadline` at most.
///
/// # Errors
/// `PeerDown` when nobody answers, `Denied` when versions or secrets differ.
pub(super) fn connect(
    address: SocketAddr,
    secret: &Secret,
    tls: Option<&TlsClient>,
    boot: Token,
    deadline: Instant,
) -> Result<Greeted, TransferError> {
    let down = |what: &str, error: io::Error| {
        TransferError::new(ErrorKind::PeerDown, format!("{what} {address}: {error}"))
    };
    let denied = |text: String| TransferError::new(ErrorKind::Denied, text);
    let mut stream = TcpStream::connect_timeout(&address, left(deadline)?)
        .map_err(|error| down("cannot connect to", error))?;
    let nonce = nonce().map_err(|error| down("no random bytes for", error))?;
    let hello = Hello { versions: VERSIONS, flags: 0, boot, nonce }.encode();
    let start = tls.map(TlsClient::start).transpose();
    let tls = start.map_err(|error| down("no TLS with", error))?;
    let mut talk = |send: &[u8], answer: &mut [u8]| -> Result<(), TransferError> {
        let limit = Some(left(deadline)?);
        stream
            .set_nodelay(true)
            .and_then(|()| stream.set_write_timeout(limit))
            .and_then(|()| stream.set_read_timeout(limit))
            .and_then(|()| match &tls {
                Some(tls) => tls.talk(&stream, send, answer),
                None => stream.write_all(send).and_then(|()| stream.read_exact(answer)),
            })
            .map_err(|error| down("no handshake with", error))
    };
    let mut answer = [0; CHALLENGE_BYTES];
    talk(&hello, &mut answer)?;
    let nonsense = |error: Malformed| denied(format!("{address} is no ucm peer: {error}"));
    let challenge = Challenge::decode(&answer).map_err(nonsense)?;
    if challenge.version < VERSIONS.0 || challenge.version > VERSIONS.1 || challenge.flags != 0 {
        return Err(denied(format!(
            "{address} speaks none of the protocol versions {} to {} that we speak (it chose {}, \
             flags {:#x}); use the same release on both sides",
            VERSIONS.0, VERSIONS.1, challenge.version, challenge.flags
        )));
    }
    let mut verdict = [0; READY_BYTES];
    talk(&secret.proof(Side::Client, &hello, &answer), &mut verdict)?;
    let ready = Ready::decode(&verdict).map_err(nonsense)?;
    if ready.status != 0 {
        return Err(denied(format!(
            "{address} does not know our secret (status {})",
            ready.status
        )));
    }
    if !secret.verify(Side::Server, &hello, &answer, &ready.proof) {
        return Err(denied(format!("{address} does not prove that it knows the secret")));
    }
    Ok(Greeted { stream, tls, boot: challenge.boot, grant: challenge.grant })
}

fn left(deadline: Instant) -> Result<Duration, TransferError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(TransferError::new(ErrorKind::Timeout, "no handshake by the deadline"));
    }
    Ok(left)
}

fn nonce() -> io::Result<[u8; 32]> {
    let mut nonce = [0; 32];
    let mut filled = 0;
    while filled < nonce.len() {
        let (_, rest) = nonce.split_at_mut(filled);
        match rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(nonce)
}
