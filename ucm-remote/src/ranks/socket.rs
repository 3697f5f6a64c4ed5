//! Frames over a unix socket.
//!
//! A frame is its length (4 bytes, little-endian, of what follows), its kind (1), and its body.
//!
//! **Invariant:** a frame is read whole or not at all; nothing beyond [`MAX_FRAME`] is allocated for one;
//! the socket means nothing in a forked child.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
        socket_with,
    },
};
use ucm_data::SharedFd;

/// Bytes of a frame.
pub(super) const MAX_FRAME: usize = 16 << 20;
/// Descriptors of one message; the kernel allows 253.
const FDS: usize = 200;

/// How often a door with too many before it is tried again.
const AGAIN: Duration = Duration::from_millis(2);

/// Why nothing more comes from a connection, or goes into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Broken {
    #[error("the other end is closed")]
    Closed,
    #[error("no answer in time")]
    Timeout,
    #[error("what came is no frame")]
    Malformed,
    #[error("the system refused: {0}")]
    Os(Errno),
}

/// One end of a connection.
#[derive(Clone, Debug)]
pub(super) struct Socket(SharedFd);

/// Cuts frames out of what is received.
#[derive(Debug, Default)]
pub(super) struct Reader {
    bytes: Vec<u8>,
    at: usize,
}

pub(super) fn frame(kind: u8) -> Vec<u8> {
    vec![0, 0, 0, 0, kind]
}

/// Completes a frame that began with [`frame`].
pub(super) fn seal(mut frame: Vec<u8>) -> Result<Vec<u8>, Broken> {
    let len = frame.len().saturating_sub(4);
    if len > MAX_FRAME {
        return Err(Broken::Malformed);
    }
    let len = u32::try_from(len).map_err(|_| Broken::Malformed)?;
    if let Some(place) = frame.first_chunk_mut() {
        *place = len.to_le_bytes();
    }
    Ok(frame)
}

impl Socket {
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self(fd.into())
    }

    /// Connects by the deadline. (A socket that waits would wait without end for one that lets nobody in.)
    pub(super) fn connect(path: &Path, deadline: Instant) -> Result<Self, Broken> {
        let address = SocketAddrUnix::new(path).map_err(Broken::Os)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let fd = fd.map_err(Broken::Os)?;
        loop {
            match rustix::net::connect(&fd, &address) {
                Ok(()) => break,
                Err(Errno::INTR) => {}
                // Too many wait there already, which nothing tells the end of.
                Err(Errno::AGAIN) if Instant::now() < deadline => thread::sleep(AGAIN),
                Err(Errno::AGAIN) => return Err(Broken::Timeout),
                Err(_) => return Err(Broken::Closed),
            }
        }
        rustix::io::ioctl_fionbio(&fd, false).map_err(Broken::Os)?;
        Ok(Self::new(fd))
    }

    /// Waits until the other end is closed, or this one is shut down.
    pub(super) fn wait_for_end(&self) {
        loop {
            // Nothing is asked for: an end is always told.
            let mut fds = [PollFd::new(&self.0, PollFlags::empty())];
            match poll(&mut fds, None) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return,
                Err(error) => {
                    tracing::warn!(%error, "the end of the node's agent cannot be waited for");
                    thread::sleep(Duration::from_secs(1));
                }
            }
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Ends the connection for both sides.
    pub(super) fn shut_down(&self) {
        let _ = rustix::net::shutdown(&self.0, Shutdown::Both);
    }

    /// Sends a frame that began with [`frame`]. After an error the connection is of no use.
    pub(super) fn send(&self, frame: Vec<u8>, deadline: Option<Instant>) -> Result<(), Broken> {
        self.send_sealed(&seal(frame)?, deadline)
    }

    /// Sends [sealed](seal) frames; waits while the other end reads nothing.
    pub(super) fn send_sealed(
        &self,
        frames: &[u8],
        deadline: Option<Instant>,
    ) -> Result<(), Broken> {
        let mut rest = frames;
        while !rest.is_empty() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.0, rest, flags) {
                Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(Broken::Closed),
                Err(error) => return Err(Broken::Os(error)),
            }
        }
        Ok(())
    }

    /// Passes descriptors on.
    pub(super) fn send_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<(), Broken> {
        for some in fds.chunks(FDS) {
            let mut space = vec![MaybeUninit::uninit(); control_bytes(some.len())];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !control.push(SendAncillaryMessage::ScmRights(some)) {
                return Err(Broken::Malformed);
            }
            let byte = [IoSlice::new(b"F")];
            loop {
                match rustix::net::sendmsg(&self.0, &byte, &mut control, SendFlags::NOSIGNAL) {
                    Ok(_) => break,
                    Err(Errno::INTR) => {}
                    Err(error) => return Err(Broken::Os(error)),
                }
            }
        }
        Ok(())
    }

    /// Receives exactly so many descriptors.
    pub(super) fn receive_fds(
        &self,
        count: usize,
        deadline: Instant,
    ) -> Result<Vec<OwnedFd>, Broken> {
        let mut fds = Vec::new();
        while fds.len() < count {
            self.wait(PollFlags::IN, Some(deadline))?;
            let mut byte = [0];
            let mut space = vec![MaybeUninit::uninit(); control_bytes(FDS)];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut slices = [IoSliceMut::new(&mut byte)];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let received = match rustix::net::recvmsg(&self.0, &mut slices, &mut control, flags) {
                Err(Errno::INTR) => continue,
                other => other.map_err(Broken::Os)?,
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
                }
            }
            let want = count.min(fds.len().next_multiple_of(FDS));
            if received.bytes == 0 || byte != *b"F" || fds.len() < want || fds.is_empty() {
                return Err(Broken::Malformed);
            }
        }
        if fds.len() == count { Ok(fds) } else { Err(Broken::Malformed) }
    }

    /// Waits until something can be read, or sent.
    fn wait(&self, what: PollFlags, deadline: Option<Instant>) -> Result<(), Broken> {
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            // Rounded up, so that it is not asked in vain.
            let limit =
                left.and_then(|left| Timespec::try_from(left + Duration::from_micros(50)).ok());
            let mut fds = [PollFd::new(&self.0, what)];
            match poll(&mut fds, limit.as_ref()) {
                Ok(0) if left.is_some_and(|left| left.is_zero()) => return Err(Broken::Timeout),
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(Broken::Os(error)),
            }
        }
    }
}

impl Reader {
    /// The next frame: its kind and its body.
    pub(super) fn next(
        &mut self,
        socket: &Socket,
        deadline: Option<Instant>,
    ) -> Result<(u8, Vec<u8>), Broken> {
        loop {
            if let Some(found) = self.take()? {
                return Ok(found);
            }
            if deadline.is_some() {
                socket.wait(PollFlags::IN, deadline)?;
            }
            self.bytes.drain(..self.at);
            self.at = 0;
            let mut chunk = [0; 32 << 10];
            match rustix::net::recv(&socket.0, &mut chunk, RecvFlags::empty()) {
                Ok((0, _)) | Err(Errno::CONNRESET) => return Err(Broken::Closed),
                Ok((count, _)) => {
                    self.bytes.extend_from_slice(chunk.get(..count).unwrap_or_default());
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(Broken::Os(error)),
            }
        }
    }

    /// Whether a whole frame has been received already.
    pub(super) fn has_one(&self) -> bool {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        rest.split_first_chunk().is_some_and(|(head, rest): (&[u8; 4], _)| {
            length(*head).is_ok_and(|len| rest.len() >= len)
        })
    }

    /// As [`next`](Self::next), reading not one byte more than the frame.
    pub(super) fn exactly(socket: &Socket, deadline: Instant) -> Result<(u8, Vec<u8>), Broken> {
        let fill = |bytes: &mut [u8]| -> Result<(), Broken> {
            let mut at = 0;
            while let Some(rest) = bytes.get_mut(at..).filter(|rest| !rest.is_empty()) {
                socket.wait(PollFlags::IN, Some(deadline))?;
                match rustix::net::recv(&socket.0, rest, RecvFlags::empty()) {
                    Ok((0, _)) | Err(Errno::CONNRESET) => return Err(Broken::Closed),
                    Ok((count, _)) => at += count,
                    Err(Errno::INTR) => {}
                    Err(error) => return Err(Broken::Os(error)),
                }
            }
            Ok(())
        };
        let mut head = [0; 5];
        fill(&mut head)?;
        let [a, b, c, d, kind] = head;
        let len = length([a, b, c, d])?;
        let mut body = vec![0; len - 1];
        fill(&mut body)?;
        Ok((kind, body))
    }

    fn take(&mut self) -> Result<Option<(u8, Vec<u8>)>, Broken> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let Some((head, rest)) = rest.split_first_chunk() else { return Ok(None) };
        let len = length(*head)?;
        let Some((kind, body)) = rest.get(..len).and_then(<[u8]>::split_first) else {
            return Ok(None);
        };
        let found = (*kind, body.to_vec());
        self.at += 4 + len;
        Ok(Some(found))
    }
}

fn length(head: [u8; 4]) -> Result<usize, Broken> {
    let len = usize::try_from(u32::from_le_bytes(head)).map_err(|_| Broken::Malformed)?;
    if (1..=MAX_FRAME).contains(&len) { Ok(len) } else { Err(Broken::Malformed) }
}

/// Space for one SCM_RIGHTS message: header and descriptors, each padded to 8 bytes.
fn control_bytes(fds: usize) -> usize {
    rustix::cmsg_space!(ScmRights(0)) + (fds * size_of::<i32>()).next_multiple_of(8) + 8
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, sync::mpsc};

    use super::*;

    /// Mutant, seen to hang here: `connect` without `NONBLOCK`.
    #[test]
    fn connecting_to_who_lets_nobody_in_ends_by_the_deadline() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("door");
        let _listener = UnixListener::bind(&path).unwrap();
        let (said, ends) = mpsc::channel();
        thread::spawn(move || {
            let mut waiting = Vec::new();
            let broken = loop {
                match Socket::connect(&path, Instant::now()) {
                    Ok(socket) => waiting.push(socket),
                    Err(broken) => break broken,
                }
            };
            said.send(broken).unwrap();
        });
        assert_eq!(ends.recv_timeout(Duration::from_secs(60)), Ok(Broken::Timeout));
    }
}
