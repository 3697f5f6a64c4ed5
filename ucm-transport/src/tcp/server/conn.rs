//! One connection of a server: a state machine that reads a request, serves it, and reads on.
//!
//! **Invariant:** at most one request is in work, so a client can make a connection keep one read
//! buffer, one body, one list of pieces and one hold, and no more.

use std::{
    io,
    net::SocketAddr,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Instant,
};

use super::{
    ServerState,
    serve::{Pieces, Refusal, RefusalKind, Request, Served, Session},
};
use crate::tcp::{
    auth::Side,
    handshake,
    inbuf::InBuf,
    socket::Socket,
    sys::Scatter,
    wire::{
        self, AUTH_BYTES, HEAD_BYTES, HELLO_BYTES, Malformed, READY_BYTES, Ready, ReplyHead,
        RequestHead, RequestKind, TEXT_BYTES, Trailer,
    },
};

/// Requests served before other connections get their turn.
const TURN: u32 = 16;

/// What a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wants {
    /// Bytes from the client.
    In,
    /// Room in the socket.
    Out,
    /// Another turn: it has more to do.
    Turn,
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum Over {
    #[error("closed by the client")]
    Left,
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("not let in")]
    NotLetIn,
    #[error("the owner of the memory panicked")]
    Panicked,
    #[error("made no progress within the limit")]
    Stalled,
}

pub(super) struct Connection {
    socket: Socket,
    address: SocketAddr,
    input: InBuf,
    phase: Phase,
    session: Option<Session>,
    /// When bytes last moved.
    pub(super) moved: Instant,
    /// What the poller was told.
    pub(super) wants: Wants,
}

enum Phase {
    Hello,
    Auth(Box<handshake::Greeting>),
    Head,
    Body(RequestHead, Vec<u8>),
    Payload(Box<Job>),
    /// The client sends what was refused; it is read and thrown away.
    Drain(RequestHead, u64, Refusal),
    Reply(Box<Job>),
    /// A last message, then the end.
    Farewell(Scatter),
}

/// A request that was let in: pieces to receive into, or to send from. The order of the fields is
/// that of their end: the owner hears when the pieces are gone.
struct Job {
    head: RequestHead,
    pieces: Scatter,
    served: Option<Served>,
    /// The trailer is already among the pieces.
    sealed: bool,
}

fn message(bytes: &[u8]) -> Scatter {
    let mut pieces = Scatter::with_capacity(1);
    pieces.push_buffer(bytes.to_vec());
    pieces
}

impl Connection {
    pub(super) fn new(socket: Socket, address: SocketAddr, now: Instant) -> Self {
        Self {
            socket,
            address,
            input: InBuf::new(),
            phase: Phase::Hello,
            session: None,
            moved: now,
            wants: Wants::In,
        }
    }

    pub(super) fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.fd()
    }

    /// Between two requests: nothing is due.
    pub(super) fn is_idle(&self) -> bool {
        matches!(self.phase, Phase::Head) && self.input.is_empty()
    }

    /// Does what can be done without waiting.
    pub(super) fn drive(&mut self, server: &ServerState, now: Instant) -> Result<Wants, Over> {
        let mut served = 0;
        loop {
            let phase = std::mem::replace(&mut self.phase, Phase::Head);
            let (next, wants) = self.step(phase, server, now)?;
            if matches!(next, Phase::Head) {
                served += 1;
            }
            self.phase = next;
            match wants {
                Some(wants) => return Ok(wants),
                None if served >= TURN => return Ok(Wants::Turn),
                None => {}
            }
        }
    }

    /// One phase: the next one, and what must be waited for first.
    fn step(
        &mut self,
        phase: Phase,
        server: &ServerState,
        now: Instant,
    ) -> Result<(Phase, Option<Wants>), Over> {
        match phase {
            Phase::Hello => {
                let Some(bytes) = self.take::<HELLO_BYTES>(now)? else {
                    return Ok((Phase::Hello, Some(Wants::In)));
                };
                let greeting = handshake::greet(&bytes, server)?;
                let mut out = message(&greeting.challenge);
                if greeting.version == 0 {
                    return Ok((Phase::Farewell(out), None));
                }
                // 96 bytes fit into the buffer of a new connection.
                self.socket.send(&mut out, false)?;
                Ok((Phase::Auth(Box::new(greeting)), None))
            }
            Phase::Auth(greeting) => {
                let Some(proof) = self.take::<AUTH_BYTES>(now)? else {
                    return Ok((Phase::Auth(greeting), Some(Wants::In)));
                };
                let secret = &server.config.secret;
                let (hello, challenge) = (&greeting.hello, &greeting.challenge);
                if !secret.verify(Side::Client, hello, challenge, &proof) {
                    let no = Ready { status: RefusalKind::Denied as u32, proof: [0; 32] };
                    return Ok((Phase::Farewell(message(&no.encode())), None));
                }
                let proof = secret.proof(Side::Server, hello, challenge);
                let yes: [u8; READY_BYTES] = Ready { status: 0, proof }.encode();
                let mut out = message(&yes);
                self.socket.send(&mut out, false)?;
                self.open(server, greeting.client)?;
                Ok((Phase::Head, None))
            }
            Phase::Head => {
                let Some(bytes) = self.take::<HEAD_BYTES>(now)? else {
                    return Ok((Phase::Head, Some(Wants::In)));
                };
                let head = RequestHead::decode(&bytes, &server.config.grant())?;
                Ok((Phase::Body(head, Vec::new()), None))
            }
            Phase::Body(head, mut body) => {
                let length = usize::try_from(head.body).unwrap_or(usize::MAX);
                if !self.input.fill(&self.socket, &mut body, length)? {
                    return Ok((Phase::Body(head, body), Some(Wants::In)));
                }
                self.moved = now;
                self.begin(head, &body, server).map(|phase| (phase, None))
            }
            Phase::Payload(mut job) => {
                let before = job.pieces.left();
                let all = self.input.fill_pieces(&self.socket, &mut job.pieces)?;
                if job.pieces.left() < before {
                    self.moved = now;
                }
                if !all {
                    return Ok((Phase::Payload(job), Some(Wants::In)));
                }
                let verdict = finish(job.served.take())?;
                Ok((reply(&job.head, verdict, Vec::new()), None))
            }
            Phase::Drain(head, left, refusal) => {
                let left = self.input.skip(&self.socket, left)?;
                self.moved = now;
                if left > 0 {
                    return Ok((Phase::Drain(head, left, refusal), Some(Wants::In)));
                }
                Ok((reply(&head, Err(refusal), Vec::new()), None))
            }
            Phase::Reply(mut job) => {
                let before = job.pieces.left();
                let sent = self.socket.send(&mut job.pieces, !job.sealed);
                if job.pieces.left() < before {
                    self.moved = now;
                }
                match sent {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        return Ok((Phase::Reply(job), Some(Wants::Out)));
                    }
                    other => other?,
                }
                if job.sealed {
                    return Ok((Phase::Head, None));
                }
                let verdict = finish(job.served.take())?;
                job.seal(verdict.map_or_else(|refusal| refusal.kind() as u32, |()| 0));
                Ok((Phase::Reply(job), None))
            }
            Phase::Farewell(mut out) => match self.socket.send(&mut out, false) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    Ok((Phase::Farewell(out), Some(Wants::Out)))
                }
                _ => Err(Over::NotLetIn),
            },
        }
    }

    fn open(&mut self, server: &ServerState, client: ucm_data::Token) -> Result<(), Over> {
        let session = Session { id: server.next_session(), client, address: self.address };
        guarded(|| server.service.opened(&session))?;
        self.session = Some(session);
        Ok(())
    }

    /// Asks the owner, once the whole body is here.
    fn begin(&self, head: RequestHead, body: &[u8], server: &ServerState) -> Result<Phase, Over> {
        let Some(session) = &self.session else { return Err(Over::NotLetIn) };
        let grant = server.config.grant();
        server.count_request(head.payload);
        if head.kind == RequestKind::Call {
            let mut answer = Vec::new();
            let mut verdict = guarded(|| server.service.call(session, body, &mut answer))?;
            if verdict.is_ok() && answer.len() > usize::try_from(grant.frame).unwrap_or(0) {
                let text = format!("a reply of {} bytes; {} fit", answer.len(), grant.frame);
                verdict = Err(Refusal::new(RefusalKind::Failed, text));
            }
            return Ok(reply(&head, verdict, answer));
        }
        let sections = wire::sections(body, head.payload, &grant)?;
        let mut holds = Vec::with_capacity(sections.len());
        let mut pieces = Pieces::default();
        let write = head.kind == RequestKind::Write;
        let mut ranges = Vec::new();
        for section in &sections {
            ranges.clear();
            ranges.extend(section.ranges());
            let wanted: u64 = ranges.iter().map(|r| u64::from(r.len)).sum();
            let request = Request { session, descriptor: section.descriptor, ranges: &ranges };
            let before = pieces.bytes();
            let answer = guarded(|| {
                if write {
                    server.service.write(&request, &mut pieces)
                } else {
                    server.service.read(&request, &mut pieces)
                }
            });
            let refusal = match answer {
                Ok(Ok(served)) if pieces.bytes() - before == wanted => {
                    holds.push(served);
                    continue;
                }
                Ok(Ok(served)) => {
                    holds.push(served);
                    Refusal::new(RefusalKind::Failed, "the owner named too few or too many bytes")
                }
                Ok(Err(refusal)) => refusal,
                Err(over) => return Err(over),
            };
            // Nothing has moved: those that said yes hear that it is over.
            drop(pieces);
            drop(holds);
            return Ok(if write {
                Phase::Drain(head, head.payload, refusal)
            } else {
                reply(&head, Err(refusal), Vec::new())
            });
        }
        Ok(Job::start(head, pieces, holds))
    }

    fn take<const N: usize>(&mut self, now: Instant) -> Result<Option<[u8; N]>, Over> {
        let taken = self.input.take(&self.socket)?;
        if taken.is_some() {
            self.moved = now;
        }
        Ok(taken)
    }

    /// Tells the owner that this connection touches nothing any more.
    pub(super) fn end(mut self, server: &ServerState) {
        // Drops the pieces, and then what the owner holds for them.
        self.phase = Phase::Head;
        self.socket.shut_down();
        if let Some(session) = self.session.take() {
            let _ = guarded(|| server.service.closed(&session));
        }
    }
}

impl Job {
    /// Receives the payload of a write, or sends the one of a read.
    fn start(head: RequestHead, pieces: Pieces, holds: Vec<Served>) -> Phase {
        let served = Some(Served::all(holds));
        if head.kind == RequestKind::Write {
            return Phase::Payload(Box::new(Self {
                head,
                pieces: pieces.0,
                served,
                sealed: false,
            }));
        }
        let good = ReplyHead { status: 0, id: head.id, payload: head.payload };
        let mut job =
            Box::new(Self { head, pieces: message(&good.encode()), served, sealed: false });
        job.pieces.append(pieces.0);
        // A hold that asks nothing says already that the source does not change.
        if job.served.as_ref().is_some_and(|served| served.finish.is_none()) {
            job.seal(0);
        }
        Phase::Reply(job)
    }

    fn seal(&mut self, status: u32) {
        self.pieces.push_buffer(Trailer { status, id: self.head.id }.encode().to_vec());
        self.sealed = true;
    }
}

impl Served {
    /// Many yeses as one.
    fn all(mut each: Vec<Self>) -> Self {
        if each.len() == 1
            && let Some(only) = each.pop()
        {
            return only;
        }
        let mut finishes = Vec::new();
        let mut holds = Vec::new();
        for mut served in each {
            finishes.extend(served.finish.take());
            holds.extend(served.hold.take());
        }
        let finish = (!finishes.is_empty()).then(|| {
            Box::new(move |all: bool| {
                // All of them hear of the end; the first no counts.
                let verdicts: Vec<_> = finishes.into_iter().map(|finish| finish(all)).collect();
                verdicts.into_iter().collect::<Result<(), Refusal>>()
            }) as _
        });
        Self { hold: Some(Box::new(holds)), finish }
    }
}

/// A reply without pieces of others: a refusal, or the answer of a write or a call.
fn reply(head: &RequestHead, verdict: Result<(), Refusal>, answer: Vec<u8>) -> Phase {
    let (status, payload) = match verdict {
        Ok(()) => (0, answer),
        Err(refusal) => (refusal.kind() as u32, cut(refusal.text()).as_bytes().to_vec()),
    };
    let head = ReplyHead { status, id: head.id, payload: payload.len() as u64 };
    let mut frame = head.encode().to_vec();
    frame.extend_from_slice(&payload);
    frame.extend_from_slice(&Trailer { status, id: head.id }.encode());
    let mut pieces = Scatter::with_capacity(1);
    pieces.push_buffer(frame);
    let head = RequestHead { kind: RequestKind::Call, id: head.id, body: 0, payload: 0 };
    Phase::Reply(Box::new(Job { head, pieces, served: None, sealed: true }))
}

fn cut(text: &str) -> &str {
    let end = (0..=TEXT_BYTES.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    text.get(..end.unwrap_or(0)).unwrap_or_default()
}

/// Tells the owner that all bytes have moved.
fn finish(served: Option<Served>) -> Result<Result<(), Refusal>, Over> {
    guarded(|| match served {
        Some(mut served) => served.finish.take().map_or(Ok(()), |finish| finish(true)),
        None => Ok(()),
    })
}

/// Runs the owner's code.
fn guarded<T>(run: impl FnOnce() -> T) -> Result<T, Over> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|_| {
        tracing::error!("the owner of served memory panicked; the connection is closed");
        Over::Panicked
    })
}
