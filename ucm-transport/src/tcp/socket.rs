//! One connection's stream of bytes, as both ends use it.
//!
//! **Invariant:** no call blocks.

use std::{
    io,
    net::{Shutdown, TcpStream},
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use super::{sys::Scatter, tls::Tls};

/// A connected, non-blocking stream.
#[derive(Debug)]
pub(super) struct Socket {
    stream: TcpStream,
    tls: Option<Tls>,
}

impl Socket {
    /// Takes a connected stream over and makes it non-blocking.
    pub(super) fn new(stream: TcpStream, tls: Option<Tls>) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // A peer whose machine is gone is found out without traffic of ours. Not essential.
        let _ = rustix::net::sockopt::set_socket_keepalive(&stream, true);
        let _ = rustix::net::sockopt::set_tcp_keepidle(&stream, Duration::from_secs(10));
        let _ = rustix::net::sockopt::set_tcp_keepintvl(&stream, Duration::from_secs(5));
        let _ = rustix::net::sockopt::set_tcp_keepcnt(&stream, 3);
        Ok(Self { stream, tls })
    }

    /// Reads what is there into a buffer of ours.
    pub(super) fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = match &self.tls {
                Some(tls) => tls.receive(&self.stream, into),
                None => io::Read::read(&mut (&self.stream), into),
            };
            match read {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    /// Reads what is there into the next pieces.
    pub(super) fn receive_into(&self, pieces: &mut Scatter) -> io::Result<usize> {
        loop {
            let read = match &self.tls {
                Some(tls) => tls.receive_into(&self.stream, pieces),
                None => pieces.receive(self.stream.as_fd()),
            };
            match read {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    /// Sends pieces until all are used up or the socket takes no more (`WouldBlock`).
    pub(super) fn send(&self, pieces: &mut Scatter, more: bool) -> io::Result<()> {
        if let Some(tls) = &self.tls {
            return tls.send(&self.stream, pieces);
        }
        while pieces.left() > 0 {
            match pieces.send(self.stream.as_fd(), more) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                other => drop(other?),
            }
        }
        Ok(())
    }

    /// Whether bytes, an end or an error are there to be read.
    pub(super) fn has_something(&self) -> bool {
        !matches!(self.stream.peek(&mut [0]), Err(e) if e.kind() == io::ErrorKind::WouldBlock)
    }

    /// Ends both directions: whoever polls it wakes up.
    pub(super) fn shut_down(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
