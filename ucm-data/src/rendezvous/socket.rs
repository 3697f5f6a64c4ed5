//! SEQPACKET sockets at seats, and datagrams with descriptors.
//!
//! **Invariant:** no call here blocks (except where a deadline is given), and a datagram whose
//! descriptors did not all arrive is reported as truncated with the rest closed.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::DataError;
use crate::fork::GuardedFd;
use crate::rendezvous::wire::{FDS_PER_MESSAGE, MAX_MESSAGE_BYTES, Message};

/// Where the seats of one instance are.
#[derive(Clone, Debug)]
pub(crate) enum Seats {
    Abstract { device: u64, inode: u64 },
    Files { dir: PathBuf },
}

impl Seats {
    pub(crate) fn address(&self, seat: u16) -> Result<SocketAddrUnix, Errno> {
        match self {
            Self::Abstract { device, inode } => {
                let name = format!("ucm-{device:x}-{inode:x}-{seat}");
                SocketAddrUnix::new_abstract_name(name.as_bytes())
            }
            Self::Files { .. } => {
                let file = self.file(seat).unwrap_or_default();
                SocketAddrUnix::new(file)
            }
        }
    }

    /// The socket file of a seat, if seats are files.
    pub(crate) fn file(&self, seat: u16) -> Option<PathBuf> {
        match self {
            Self::Abstract { .. } => None,
            Self::Files { dir } => Some(dir.join(format!("seat-{seat}.sock"))),
        }
    }
}

/// Joiners that can knock while a member is stopped; the kernel's own limit (somaxconn) may be lower.
pub(super) const BACKLOG: i32 = 4096;

pub(crate) fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

pub(crate) fn listen_at(address: &SocketAddrUnix) -> Result<GuardedFd, Errno> {
    let socket = GuardedFd::made(new_socket)?;
    rustix::net::bind(socket.as_fd(), address)?;
    rustix::net::listen(socket.as_fd(), BACKLOG)?;
    Ok(socket)
}

pub(crate) fn connect(socket: &OwnedFd, address: &SocketAddrUnix) -> Result<(), Errno> {
    loop {
        match rustix::net::connect(socket, address) {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

pub(crate) fn accept(listener: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(listener, flags) {
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            other => return other,
        }
    }
}

/// Sends one message, with descriptors if there are any. Never blocks.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    message: &Message,
    fds: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let bytes = message.encode();
    let mut space = vec![MaybeUninit::uninit(); control_bytes(fds.len())];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::MSGSIZE);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    loop {
        match rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// What one receive gave.
#[derive(Debug)]
pub(crate) enum Received {
    Message {
        message: Message,
        fds: Vec<OwnedFd>,
        truncated: bool,
    },
    /// The datagram was no message.
    Garbage(DataError),
    /// The other end is closed.
    Closed,
    /// Nothing there at the moment.
    Empty,
}

/// Receives datagrams into one reusable buffer.
#[derive(Debug)]
pub(crate) struct Receiver {
    bytes: Vec<u8>,
    control: Vec<MaybeUninit<u8>>,
}

impl Receiver {
    /// For members: descriptors that strangers send are never accepted.
    pub(crate) fn without_fds() -> Self {
        Self { bytes: vec![0; MAX_MESSAGE_BYTES], control: Vec::new() }
    }

    /// For joiners.
    pub(crate) fn with_fds() -> Self {
        let space = control_bytes(FDS_PER_MESSAGE);
        Self { control: vec![MaybeUninit::uninit(); space], ..Self::without_fds() }
    }

    pub(crate) fn receive(&mut self, socket: BorrowedFd<'_>) -> Received {
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut control = RecvAncillaryBuffer::new(&mut self.control);
        let result = loop {
            let mut slices = [IoSliceMut::new(&mut self.bytes)];
            match rustix::net::recvmsg(socket, &mut slices, &mut control, flags) {
                // A peer that closed with unread messages: reported once, ahead of what it had sent.
                Err(Errno::INTR | Errno::CONNRESET) => {}
                other => break other,
            }
        };
        let result = match result {
            Ok(result) => result,
            Err(Errno::AGAIN) => return Received::Empty,
            Err(_) => return Received::Closed,
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if result.bytes == 0 {
            return Received::Closed;
        }
        if result.flags.contains(ReturnFlags::TRUNC) {
            return Received::Garbage(DataError::corrupt("rendezvous message is too long"));
        }
        let truncated = result.flags.contains(ReturnFlags::CTRUNC);
        let bytes = self.bytes.get(..result.bytes).unwrap_or_default();
        match Message::decode(bytes) {
            Ok(message) => Received::Message { message, fds, truncated },
            Err(error) => Received::Garbage(error),
        }
    }
}

/// Ends a connection for both ends, even if a forked child still holds a copy of the descriptor.
pub(crate) fn shutdown(socket: BorrowedFd<'_>) {
    let _ = rustix::net::shutdown(socket.as_fd(), rustix::net::Shutdown::Both);
}

/// Space for one SCM_RIGHTS message: header and descriptors, each padded to 8 bytes.
fn control_bytes(fds: usize) -> usize {
    if fds == 0 {
        0
    } else {
        rustix::cmsg_space!(ScmRights(0)) + (fds * size_of::<i32>()).next_multiple_of(8) + 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    #[test]
    fn a_full_message_of_descriptors_arrives() {
        let (left, right) = pair();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        rustix::io::write(&writer, b"through").unwrap();
        let fds = vec![reader.as_fd(); FDS_PER_MESSAGE];
        send(left.as_fd(), &Message::Fds { first: 0, count: 200 }, &fds).unwrap();
        let Received::Message { message, fds, truncated } =
            Receiver::with_fds().receive(right.as_fd())
        else {
            panic!("nothing received");
        };
        assert_eq!(message, Message::Fds { first: 0, count: 200 });
        assert_eq!((fds.len(), truncated), (FDS_PER_MESSAGE, false));
        let mut text = [0; 7];
        rustix::io::read(&fds[199], &mut text).unwrap();
        assert_eq!(&text, b"through");
    }

    #[test]
    fn a_member_takes_no_descriptors_from_strangers() {
        let (left, right) = pair();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        send(left.as_fd(), &Message::Bye, &[writer.as_fd()]).unwrap();
        drop(writer);
        let received = Receiver::without_fds().receive(right.as_fd());
        assert!(
            matches!(&received, Received::Message { fds, truncated: true, .. } if fds.is_empty()),
            "{received:?}"
        );
        // The passed write end was closed by the kernel: end of file.
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]).unwrap(), 0);
    }

    #[test]
    fn a05_what_a_peer_said_before_it_closed_is_heard_even_if_it_read_nothing() {
        let (left, right) = pair();
        send(right.as_fd(), &Message::WantFds { first: 0 }, &[]).unwrap();
        send(left.as_fd(), &Message::Bye, &[]).unwrap();
        drop(left);
        let mut receiver = Receiver::without_fds();
        let received = receiver.receive(right.as_fd());
        assert!(
            matches!(received, Received::Message { message: Message::Bye, .. }),
            "{received:?}"
        );
        assert!(matches!(receiver.receive(right.as_fd()), Received::Closed));
    }

    #[test]
    fn closed_empty_and_garbage_are_told_apart() {
        let (left, right) = pair();
        let mut receiver = Receiver::without_fds();
        assert!(matches!(receiver.receive(right.as_fd()), Received::Empty));
        rustix::io::write(&left, b"hello?").unwrap();
        assert!(matches!(receiver.receive(right.as_fd()), Received::Garbage(_)));
        drop(left);
        assert!(matches!(receiver.receive(right.as_fd()), Received::Closed));
    }
}
