//! TLS: the suite of all engines through it, and who is not talked to.
//!
//! **Invariant:** where one side has TLS, nothing is served without it.

use std::{sync::Arc, time::Duration};

use super::{
    kit::{config, loopback, secret, serve, soon},
    suite::TcpHarness,
};
use crate::{ErrorKind, Exports, TcpEngine, TcpServer, TlsClient, TlsServer, testing::conformance};

const ROOT: &[u8] = include_bytes!("certificates/root.pem");
const OTHER_ROOT: &[u8] = include_bytes!("certificates/other_root.pem");
const CHAIN: &[u8] = include_bytes!("certificates/server.pem");
const KEY: &[u8] = include_bytes!("certificates/server.key");
const NAME: &str = "peer.ucm.test";

fn server(exports: &Exports) -> TcpServer {
    let tls = TlsServer::new(CHAIN, KEY).unwrap();
    TcpServer::bind_tls(loopback(), config(), tls, Arc::new(exports.clone())).unwrap()
}

fn conforms(reads: bool) {
    let exports = Exports::default();
    let server = server(&exports);
    let tls = TlsClient::new(ROOT, NAME).unwrap();
    let connect = move |engine: &TcpEngine, address| {
        engine.connect_tls(address, &secret(), &tls, soon()).unwrap()
    };
    conformance(&TcpHarness::over(server, exports, reads, 1 << 20, Box::new(connect)));
}

#[test]
fn conforms_when_it_reads_through_tls() {
    conforms(true);
}

#[test]
fn conforms_when_it_writes_through_tls() {
    conforms(false);
}

#[test]
fn whoever_is_not_trusted_is_not_talked_to() {
    let secured = server(&Exports::default());
    let plain = serve(Arc::new(Exports::default()));
    let engine = TcpEngine::builder().build().unwrap();
    let soon = || std::time::Instant::now() + Duration::from_secs(2);
    for (root, name) in [(OTHER_ROOT, NAME), (ROOT, "another.ucm.test")] {
        let tls = TlsClient::new(root, name).unwrap();
        let error = engine.connect_tls(secured.address(), &secret(), &tls, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerDown, "{error}");
        assert!(error.to_string().contains("certificate"), "{error}");
    }
    let tls = TlsClient::new(ROOT, NAME).unwrap();
    assert!(engine.connect_tls(plain.address(), &secret(), &tls, soon()).is_err());
    assert!(engine.connect(secured.address(), &secret(), soon()).is_err());
    assert_eq!((secured.stats().requests, plain.stats().requests), (0, 0));
    engine.connect_tls(secured.address(), &secret(), &tls, soon()).unwrap();
}

#[test]
fn what_is_no_certificate_is_refused() {
    assert_eq!(TlsClient::new(b"", NAME).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(TlsClient::new(ROOT, "no name").unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(TlsServer::new(CHAIN, b"").unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(TlsServer::new(OTHER_ROOT, KEY).unwrap_err().kind(), ErrorKind::Invalid);
}
