//! The floor of tcp: the same pieces over a bare socket, vectored on both sides.
//!
//! Owns: an exchange that knows everything beforehand: 8 bytes ask for a case, its pieces come back.
//! **Invariant:** nothing is checked, framed or copied; both sides use what the standard library has.

use std::{
    io::{IoSlice, IoSliceMut, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
};

use super::case::{self, Aligned, Case, Piece};
use crate::error::BenchError;

/// Most pieces of one system call.
const CALL: usize = 1024;

/// Serves cases by number, in a thread that ends with the connection.
pub(crate) fn serve(cases: &[Case]) -> Result<SocketAddr, BenchError> {
    let io = |e| BenchError::io("serve the floor", e);
    let listener = TcpListener::bind("127.0.0.1:0").map_err(io)?;
    let address = listener.local_addr().map_err(io)?;
    let pieces: Vec<Vec<Piece>> = cases.iter().map(Case::pieces).collect();
    let source = case::source(cases.iter().map(Case::memory).max().unwrap_or(1));
    let mut bytes = Aligned::new(source.len(), 0);
    bytes.bytes_mut().copy_from_slice(&source);
    thread::spawn(move || {
        let Ok((mut stream, _)) = listener.accept() else { return };
        let _ = stream.set_nodelay(true);
        let mut request = [0; 8];
        while stream.read_exact(&mut request).is_ok() {
            let number = usize::try_from(u64::from_le_bytes(request)).unwrap_or(usize::MAX);
            let Some(pieces) = pieces.get(number) else { return };
            let mut slices: Vec<IoSlice<'_>> = pieces
                .iter()
                .filter_map(|p| bytes.bytes().get(p.from..p.from + p.len))
                .map(IoSlice::new)
                .collect();
            let mut left = slices.as_mut_slice();
            while !left.is_empty() {
                let now = left.get(..CALL).unwrap_or(left);
                match stream.write_vectored(now) {
                    Ok(count @ 1..) => IoSlice::advance_slices(&mut left, count),
                    _ => return,
                }
            }
        }
    });
    Ok(address)
}

/// The client's side.
pub(crate) struct Floor {
    stream: TcpStream,
    bytes: Aligned,
}

impl Floor {
    pub(crate) fn connect(address: SocketAddr, memory: usize) -> Result<Self, BenchError> {
        let io = |e| BenchError::io("reach the floor", e);
        let stream = TcpStream::connect(address).map_err(io)?;
        stream.set_nodelay(true).map_err(io)?;
        Ok(Self { stream, bytes: Aligned::new(memory, 1) })
    }

    /// One exchange. The pieces' destinations ascend.
    pub(crate) fn exchange(&mut self, number: usize, pieces: &[Piece]) -> Result<(), BenchError> {
        let io = |e| BenchError::io("exchange with the floor", e);
        self.stream.write_all(&(number as u64).to_le_bytes()).map_err(io)?;
        let mut slices = Vec::with_capacity(pieces.len());
        let (mut rest, mut at) = (self.bytes.bytes_mut(), 0);
        for piece in pieces {
            let (_, from) = rest.split_at_mut(piece.to - at);
            let (here, after) = from.split_at_mut(piece.len);
            slices.push(IoSliceMut::new(here));
            (rest, at) = (after, piece.to + piece.len);
        }
        let mut left = slices.as_mut_slice();
        while !left.is_empty() {
            let end = left.len().min(CALL);
            let (now, _) = left.split_at_mut(end);
            let count = self.stream.read_vectored(now).map_err(io)?;
            if count == 0 {
                return Err(BenchError::Peer("the floor closed the connection".into()));
            }
            IoSliceMut::advance_slices(&mut left, count);
        }
        Ok(())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.bytes()
    }
}
