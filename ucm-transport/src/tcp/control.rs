//! A connection that only asks: what other engines use to meet their peers.
//!
//! **Invariant:** one question at a time; a question that did not get its whole answer ends the
//! connection.

use std::{
    io::{self, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    os::fd::{AsFd, BorrowedFd},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use ucm_data::Token;

use super::{
    auth::Secret,
    handshake,
    server::refused,
    wire::{HEAD_BYTES, ReplyHead, RequestHead, RequestKind, TRAILER_BYTES, Trailer},
};
use crate::{ErrorKind, TransferError};

/// An authenticated connection to a [`TcpServer`](super::TcpServer).
#[derive(Debug)]
pub(crate) struct ControlLane {
    address: SocketAddr,
    stream: TcpStream,
    boot: Token,
    frame: u32,
    /// Number of the next question; `None` when one failed half-way.
    next: Mutex<Option<u64>>,
}

impl ControlLane {
    /// Connects and proves itself, as the tcp engine does.
    pub(crate) fn connect(
        address: SocketAddr,
        secret: &Secret,
        boot: Token,
        deadline: Instant,
    ) -> Result<Self, TransferError> {
        let greeted = handshake::connect(address, secret, None, boot, deadline)?;
        let (boot, frame) = (greeted.boot, greeted.grant.frame);
        let stream = greeted.into_stream();
        let _ = rustix::net::sockopt::set_socket_keepalive(&stream, true);
        let _ = rustix::net::sockopt::set_tcp_keepidle(&stream, Duration::from_secs(10));
        let _ = rustix::net::sockopt::set_tcp_keepintvl(&stream, Duration::from_secs(5));
        let _ = rustix::net::sockopt::set_tcp_keepcnt(&stream, 3);
        Ok(Self { address, stream, boot, frame, next: Mutex::new(Some(1)) })
    }

    /// The run of the peer that answers here.
    pub(crate) fn boot(&self) -> Token {
        self.boot
    }

    /// Asks, and waits for the answer.
    pub(crate) fn ask(&self, question: &[u8], deadline: Instant) -> Result<Vec<u8>, TransferError> {
        let down = |text: &dyn std::fmt::Display| {
            TransferError::new(ErrorKind::PeerDown, format!("{}: {text}", self.address))
        };
        let body = u32::try_from(question.len()).ok().filter(|body| *body <= self.frame);
        let body = body.ok_or_else(|| {
            TransferError::invalid(format!(
                "a question of {} bytes; the peer takes {}",
                question.len(),
                self.frame
            ))
        })?;
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        // Taken, and put back only when the whole answer is here.
        let id = next.take().ok_or_else(|| down(&"the control connection has failed"))?;
        let answer = self.exchange(id, body, question, deadline);
        match answer {
            Ok(answer) => {
                *next = Some(id + 1);
                answer
            }
            Err(error) => {
                self.close();
                if error.kind() == io::ErrorKind::WouldBlock
                    || error.kind() == io::ErrorKind::TimedOut
                {
                    let text = format!("{} did not answer by the deadline", self.address);
                    return Err(TransferError::new(ErrorKind::Timeout, text));
                }
                Err(down(&error))
            }
        }
    }

    fn exchange(
        &self,
        id: u64,
        body: u32,
        question: &[u8],
        deadline: Instant,
    ) -> io::Result<Result<Vec<u8>, TransferError>> {
        let nonsense = || io::Error::from(io::ErrorKind::InvalidData);
        let read = |into: &mut [u8]| -> io::Result<()> {
            let left = deadline.saturating_duration_since(Instant::now());
            self.stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            (&self.stream).read_exact(into)
        };
        let head = RequestHead { kind: RequestKind::Call, id, body, payload: 0 };
        let message = [&head.encode()[..], question].concat();
        let left = deadline.saturating_duration_since(Instant::now());
        self.stream.set_write_timeout(Some(left.max(Duration::from_millis(1))))?;
        (&self.stream).write_all(&message)?;
        let mut head = [0; HEAD_BYTES];
        read(&mut head)?;
        let head = ReplyHead::decode(&head).map_err(|_| nonsense())?;
        if head.id != id || head.payload > u64::from(self.frame) {
            return Err(nonsense());
        }
        let mut answer = vec![0; usize::try_from(head.payload).map_err(|_| nonsense())?];
        read(&mut answer)?;
        let mut trailer = [0; TRAILER_BYTES];
        read(&mut trailer)?;
        let trailer = Trailer::decode(&trailer).map_err(|_| nonsense())?;
        if trailer.id != id {
            return Err(nonsense());
        }
        let status = if head.status != 0 { head.status } else { trailer.status };
        let text = if head.status != 0 { String::from_utf8_lossy(&answer) } else { "".into() };
        match refused(status, &text).map_err(|()| nonsense())? {
            Some(error) => Ok(Err(error)),
            None => Ok(Ok(answer)),
        }
    }

    /// Ends it, for both sides.
    pub(crate) fn close(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl AsFd for ControlLane {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Drop for ControlLane {
    fn drop(&mut self) {
        self.close();
    }
}
