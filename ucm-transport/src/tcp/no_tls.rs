//! What stands for TLS where it is not built in: types without values.
//!
//! **Invariant:** nothing here can ever run.

use std::{io, net::TcpStream};

use super::sys::Scatter;

/// No client can have TLS.
#[derive(Clone, Copy, Debug)]
pub(super) enum TlsClient {}

/// No server can have TLS.
#[derive(Clone, Copy, Debug)]
pub(super) enum TlsServer {}

/// No connection can have TLS.
#[derive(Debug)]
pub(super) enum Tls {}

impl TlsClient {
    pub(super) fn start(&self) -> io::Result<Tls> {
        match *self {}
    }
}

impl TlsServer {
    pub(super) fn start(&self) -> io::Result<Tls> {
        match *self {}
    }
}

impl Tls {
    pub(super) fn talk(&self, _: &TcpStream, _: &[u8], _: &mut [u8]) -> io::Result<()> {
        match *self {}
    }

    pub(super) fn receive(&self, _: &TcpStream, _: &mut [u8]) -> io::Result<usize> {
        match *self {}
    }

    pub(super) fn receive_into(&self, _: &TcpStream, _: &mut Scatter) -> io::Result<usize> {
        match *self {}
    }

    pub(super) fn send(&self, _: &TcpStream, _: &mut Scatter) -> io::Result<()> {
        match *self {}
    }
}
