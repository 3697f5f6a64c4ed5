//! TLS around connections: certificates in, and a stream that never blocks.
//!
//! **Invariant:** without the feature there is no code path that could be taken for encryption; with
//! it, a side that was given TLS never talks without.

use std::{
    fmt,
    io::{self, Read as _, Write as _},
    net::TcpStream,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};

use super::sys::Scatter;
use crate::{ErrorKind, TransferError};

/// Bytes that go through a buffer of ours at a time: a record of TLS.
const RECORD: usize = 16 << 10;

/// What a client needs to know whom it talks to. Cheap to clone.
#[derive(Clone)]
pub struct TlsClient {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl TlsClient {
    /// Trusts servers whose certificate one of these roots (PEM) has signed for this name.
    ///
    /// # Errors
    /// `Invalid` for texts that are no certificates or no name.
    pub fn new(roots_pem: &[u8], server_name: &str) -> Result<Self, TransferError> {
        let mut roots = RootCertStore::empty();
        for root in CertificateDer::pem_slice_iter(roots_pem) {
            roots
                .add(root.map_err(|e| invalid("a root certificate", &e))?)
                .map_err(|e| invalid("a root certificate", &e))?;
        }
        if roots.is_empty() {
            return Err(TransferError::invalid("no root certificate is in the PEM text"));
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|e| invalid("the TLS versions", &e))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from(server_name.to_owned())
            .map_err(|e| invalid("the server's name", &e))?;
        Ok(Self { config: Arc::new(config), name })
    }

    pub(super) fn start(&self) -> io::Result<Tls> {
        let made = ClientConnection::new(Arc::clone(&self.config), self.name.clone());
        made.map(|made| Tls(Mutex::new(made.into()))).map_err(io::Error::other)
    }
}

impl fmt::Debug for TlsClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsClient").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A server's certificate chain and key. Cheap to clone.
#[derive(Clone)]
pub struct TlsServer {
    config: Arc<ServerConfig>,
}

impl TlsServer {
    /// From a certificate chain and its private key, both PEM.
    ///
    /// # Errors
    /// `Invalid` for texts that are none, or that do not belong together.
    pub fn new(chain_pem: &[u8], key_pem: &[u8]) -> Result<Self, TransferError> {
        let chain = CertificateDer::pem_slice_iter(chain_pem)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| invalid("the certificate chain", &e))?;
        let key =
            PrivateKeyDer::from_pem_slice(key_pem).map_err(|e| invalid("the private key", &e))?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|e| invalid("the TLS versions", &e))?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(|e| invalid("certificate and key", &e))?;
        // An idle connection stays silent, so that what can be read on it is its end.
        config.send_tls13_tickets = 0;
        Ok(Self { config: Arc::new(config) })
    }

    pub(super) fn start(&self) -> io::Result<Tls> {
        let made = ServerConnection::new(Arc::clone(&self.config));
        made.map(|made| Tls(Mutex::new(made.into()))).map_err(io::Error::other)
    }
}

impl fmt::Debug for TlsServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsServer(…)")
    }
}

fn invalid(what: &str, error: &dyn fmt::Display) -> TransferError {
    TransferError::new(ErrorKind::Invalid, format!("{what} cannot be used: {error}"))
}

/// The state of TLS beside a stream, which blocks during the greeting only.
pub(super) struct Tls(Mutex<Connection>);

impl Tls {
    /// Says something and reads an answer, over a stream that blocks.
    pub(super) fn talk(
        &self,
        stream: &TcpStream,
        said: &[u8],
        answer: &mut [u8],
    ) -> io::Result<()> {
        let mut pieces = Scatter::with_capacity(1);
        pieces.push_buffer(said.to_vec());
        self.send(stream, &mut pieces)?;
        let mut filled = 0;
        while let Some(room) = answer.get_mut(filled..).filter(|room| !room.is_empty()) {
            match self.receive(stream, room)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => filled += count,
            }
        }
        Ok(())
    }

    pub(super) fn receive(&self, mut stream: &TcpStream, into: &mut [u8]) -> io::Result<usize> {
        let mut connection = self.lock();
        loop {
            match connection.reader().read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => return other,
            }
            if connection.read_tls(&mut stream)? == 0 {
                return Ok(0);
            }
            connection
                .process_new_packets()
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            // Answers of the handshake; what does not fit goes with the next thing sent.
            while connection.wants_write() {
                match connection.write_tls(&mut stream) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    other => drop(other?),
                }
            }
        }
    }

    pub(super) fn receive_into(
        &self,
        stream: &TcpStream,
        pieces: &mut Scatter,
    ) -> io::Result<usize> {
        let mut record = [0; RECORD];
        let most = usize::try_from(pieces.left()).unwrap_or(RECORD).min(RECORD);
        let (room, _) = record.split_at_mut(most);
        let count = self.receive(stream, room)?;
        let (read, _) = room.split_at(count);
        pieces.fill(read);
        Ok(count)
    }

    /// Sends all pieces, and all that was left behind before; `WouldBlock` as long as anything is.
    pub(super) fn send(&self, mut stream: &TcpStream, pieces: &mut Scatter) -> io::Result<()> {
        let mut connection = self.lock();
        let mut record = [0; RECORD];
        loop {
            while connection.wants_write() {
                connection.write_tls(&mut stream)?;
            }
            if pieces.left() == 0 {
                return Ok(());
            }
            let count = pieces.peek(&mut record);
            let (now, _) = record.split_at(count);
            connection.writer().write_all(now)?;
            pieces.skip(count);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls(…)")
    }
}
