//! Peers that stall, lie, or talk nonsense: typed failures, bounded memory, nobody else disturbed.
//!
//! **Invariant:** a liar costs itself its connection, and nobody else anything.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::Duration,
};

use ucm_data::Token;

use super::kit::{Client, config, eventually, filled, loopback, one, pattern, secret, serve, soon};
use crate::{
    ErrorKind, Exports, TcpEngine, TcpServer, TcpServerConfig, TransferEngine,
    tcp::{
        auth::Side,
        wire::{
            CHALLENGE_BYTES, Challenge, Grant, HELLO_BYTES, Hello, READY_BYTES, Ready, ReplyHead,
            RequestHead, RequestKind, Trailer, VERSIONS,
        },
    },
};

/// A client that knows the secret and then says what it likes.
fn raw_client(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    let hello =
        Hello { versions: VERSIONS, flags: 0, boot: Token([1; 16]), nonce: [2; 32] }.encode();
    stream.write_all(&hello).unwrap();
    let mut challenge = [0; CHALLENGE_BYTES];
    stream.read_exact(&mut challenge).unwrap();
    stream.write_all(&secret().proof(Side::Client, &hello, &challenge)).unwrap();
    let mut ready = [0; READY_BYTES];
    stream.read_exact(&mut ready).unwrap();
    assert_eq!(Ready::decode(&ready).unwrap().status, 0);
    stream
}

fn is_closed(mut stream: TcpStream) -> bool {
    stream.set_read_timeout(Some(crate::testing::WATCHDOG)).unwrap();
    let mut bytes = [0; 4096];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

#[test]
fn nonsense_from_clients_costs_their_connection() {
    let exports = Exports::default();
    let server = serve(Arc::new(exports.clone()));
    let client = Client::new(server.address());
    let far = client.remote(&exports, &filled(&pattern(1, 4096)));
    let (_, to) = client.local(4096);
    let head = RequestHead { kind: RequestKind::Read, id: 1, body: 0, payload: 0 };
    let say = |head: RequestHead, more: &[u8]| [head.encode().as_slice(), more].concat();
    let mut lies: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n".to_vec(),
        vec![0xFF; 100],
        say(RequestHead { body: 1 << 30, ..head }, b""),
        say(RequestHead { payload: 1 << 50, ..head }, b""),
        say(RequestHead { body: 8, payload: 8, ..head }, &[0; 8]),
        say(RequestHead { body: 20, payload: 5, ..head }, &[9; 20]),
        say(RequestHead { kind: RequestKind::Call, payload: 3, ..head }, b""),
        say(head, b""),
    ];
    // Random changes of a good request.
    let mut random = crate::testing::Random::new(3);
    for _ in 0..40 {
        let mut bytes = say(RequestHead { body: 40, payload: 100, ..head }, &[0; 40]);
        for _ in 0..4 {
            let at = usize::try_from(random.range(0, bytes.len() as u64)).unwrap();
            bytes[at] = random.next().to_le_bytes()[0];
        }
        bytes[0] = b'X';
        lies.push(bytes);
    }
    let count = lies.len() as u64;
    for lie in lies {
        let mut stream = raw_client(server.address());
        let _ = stream.write_all(&lie);
        assert!(is_closed(stream), "{lie:?}");
    }
    eventually("all of them are counted", || server.stats().expelled == count);
    // Before the handshake as well.
    for garbage in [b"GET / HTTP/1.1\r\n".repeat(8), vec![0; 1000]] {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        let _ = stream.write_all(&garbage);
        assert!(is_closed(stream));
    }
    let end = client.engine.transfer(one(far, to, 4096), soon()).unwrap();
    assert_eq!(end.result.unwrap(), 4096, "others are not disturbed");
}

#[test]
fn stalled_clients_are_expelled_and_their_holds_given_back() {
    let exports = Exports::default();
    let limits = TcpServerConfig { stall: Duration::from_millis(100), threads: 1, ..config() };
    let server = TcpServer::bind(loopback(), limits, Arc::new(exports.clone())).unwrap();
    let client = Client::new(server.address());
    let big = filled(&pattern(2, 16 << 20));
    let token = exports.export(big, crate::Access::Read).unwrap();
    // It asks for a lot and reads nothing.
    let mut greedy = raw_client(server.address());
    let mut body = crate::tcp::wire::Body::new(1);
    body.section(&token.0);
    body.range(crate::PeerRange { offset: 0, len: 16 << 20 });
    let body = body.finish().split_off(32);
    let length = u32::try_from(body.len()).unwrap();
    let head = RequestHead { kind: RequestKind::Read, id: 1, body: length, payload: 16 << 20 };
    greedy.write_all(&head.encode()).unwrap();
    greedy.write_all(&body).unwrap();
    // It begins a message and never ends it.
    let mut slow = raw_client(server.address());
    slow.write_all(&head.encode()[..7]).unwrap();
    // It never says anything.
    let silent = TcpStream::connect(server.address()).unwrap();
    assert!(is_closed(slow) && is_closed(silent));
    eventually("the stalled ones are expelled", || server.stats().expelled == 3);
    exports.revoke(token, soon()).unwrap();
    drop(greedy);
    // An idle lane between requests is no stall.
    assert!(client.engine.call(&client.peer, b"x", soon()).is_err());
    assert_eq!(client.engine.stats().lanes_closed, 0);
}

#[test]
fn connections_are_bounded_in_number() {
    let limits = TcpServerConfig { max_connections: 3, ..config() };
    let server = TcpServer::bind(loopback(), limits, Arc::new(Exports::default())).unwrap();
    let client = Client::new(server.address());
    let two = [raw_client(server.address()), raw_client(server.address())];
    let too_many = TcpStream::connect(server.address()).unwrap();
    assert!(is_closed(too_many));
    assert_eq!((server.stats().turned_away, server.stats().connections), (1, 3));
    drop(two);
    eventually("two are gone", || server.stats().connections == 1);
    assert!(client.engine.call(&client.peer, b"x", soon()).is_err());
    assert_eq!(client.engine.stats().lanes_closed, 0);
}

/// A server that knows the secret and answers each request with what it was given.
fn lying_server(answers: Vec<Vec<u8>>) -> (SocketAddr, thread::JoinHandle<()>) {
    let listener = TcpListener::bind(loopback()).unwrap();
    let address = listener.local_addr().unwrap();
    let thread = thread::spawn(move || {
        for answer in answers {
            let Ok((mut stream, _)) = listener.accept() else { return };
            let mut hello = [0; HELLO_BYTES];
            if stream.read_exact(&mut hello).is_err() {
                return;
            }
            let grant = Grant { window: 1 << 20, frame: 1 << 16, requests: 4, ranges: 100 };
            let boot = Token([7; 16]);
            let challenge =
                Challenge { version: 1, flags: 0, boot, nonce: [3; 32], grant }.encode();
            stream.write_all(&challenge).unwrap();
            stream.read_exact(&mut [0; 32]).unwrap();
            let proof = secret().proof(Side::Server, &hello, &challenge);
            stream.write_all(&Ready { status: 0, proof }.encode()).unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(&answer);
            // Until the client has had enough.
            while matches!(stream.read(&mut [0; 4096]), Ok(1..)) {}
        }
    });
    (address, thread)
}

#[test]
fn nonsense_from_servers_is_typed_and_writes_nothing_outside() {
    let reply = |status, id, payload, more: &[u8]| {
        [ReplyHead { status, id, payload }.encode().as_slice(), more].concat()
    };
    let good = |id, bytes: &[u8]| [bytes, &Trailer { status: 0, id }.encode()].concat();
    let answers: Vec<Vec<u8>> = vec![
        vec![0xEE; 200],
        reply(0, 2, 100, &good(2, &[1; 100])),
        reply(0, 1, 99, &good(1, &[1; 99])),
        reply(0, 1, 101, &good(1, &[1; 101])),
        reply(0, 1, u64::MAX, &[]),
        reply(3, 1, 1 << 40, &[]),
        reply(99, 1, 0, &good(1, &[])),
        reply(0, 1, 100, &good(9, &[1; 100])),
        reply(0, 1, 100, &[1; 116]),
    ];
    for answer in answers {
        // The same lie twice: a read whose reply has not begun is asked again.
        let (address, server) = lying_server(vec![answer.clone(), answer.clone(), Vec::new()]);
        let client = Client::with(address, TcpEngine::builder().breaker(1).max_lanes(1));
        let src = client.engine.attach(&client.peer, b"anything", 100).unwrap();
        let (target, to) = client.local(300);
        target.write(0, &[5; 300]).unwrap();
        let items = vec![crate::Transfer {
            src: crate::Addr { region: src, offset: 0 },
            dst: crate::Addr { region: to, offset: 100 },
            len: 100,
        }];
        let plan = crate::TransferPlan { items, holds: vec![] };
        let end = client.engine.transfer(plan, soon()).unwrap();
        assert_eq!(end.result.unwrap_err().kind(), ErrorKind::PeerDown, "{answer:?}");
        let bytes = super::kit::read(&target);
        assert!(bytes[..100] == [5; 100] && bytes[200..] == [5; 100], "outside of the destination");
        client.engine.deregister(to).unwrap();
        drop(client);
        // Lets the server's last accept end.
        drop(TcpStream::connect(address));
        server.join().unwrap();
    }
}

#[test]
fn a_server_that_does_not_know_the_secret_is_not_believed() {
    let listener = TcpListener::bind(loopback()).unwrap();
    let address = listener.local_addr().unwrap();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; HELLO_BYTES]).unwrap();
        let grant = Grant { window: 1, frame: 1, requests: 1, ranges: 1 };
        let challenge =
            Challenge { version: 1, flags: 0, boot: Token([7; 16]), nonce: [3; 32], grant };
        stream.write_all(&challenge.encode()).unwrap();
        stream.read_exact(&mut [0; 32]).unwrap();
        stream.write_all(&Ready { status: 0, proof: [1; 32] }.encode()).unwrap();
        let _ = stream.read(&mut [0; 1]);
    });
    let engine = TcpEngine::builder().build().unwrap();
    let error = engine.connect(address, &secret(), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    server.join().unwrap();
}

/// A39: no common version is said as such, with the numbers.
#[test]
fn a39_another_version_is_named() {
    let server = serve(Arc::new(Exports::default()));
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let hello = Hello { versions: (2, 9), flags: 0, boot: Token([1; 16]), nonce: [2; 32] };
    stream.write_all(&hello.encode()).unwrap();
    let mut challenge = [0; CHALLENGE_BYTES];
    stream.read_exact(&mut challenge).unwrap();
    assert_eq!(Challenge::decode(&challenge).unwrap().version, 0);
    assert!(is_closed(stream));

    let listener = TcpListener::bind(loopback()).unwrap();
    let address = listener.local_addr().unwrap();
    let newer = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; HELLO_BYTES]).unwrap();
        stream.write_all(&challenge).unwrap();
    });
    let engine = TcpEngine::builder().build().unwrap();
    let error = engine.connect(address, &secret(), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(error.to_string().contains("versions 1 to 1"), "{error}");
    newer.join().unwrap();
}
