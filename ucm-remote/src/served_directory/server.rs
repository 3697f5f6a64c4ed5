//! The side of a served directory that has it.
//!
//! **Invariant:** a run that registered here and is silent for longer than its time is removed: its
//! records are hints, and lost ones cost hits.

use std::{
    collections::HashMap,
    fmt,
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use ucm_transport::{
    Pieces, Refusal, RefusalKind, Request, Secret, Serve, Served, Session, TcpServer,
    TcpServerConfig, TransferError,
};

use super::wire::{self, Head, Op};
use crate::{
    Directory, DirectoryError, Epoch, Member, ObjectKey, PeerId, Record, Token,
    directory::PLACES,
    service::wire::{Fields, Malformed},
};

/// Bytes of a call or an answer: all records of a full batch.
const FRAME: u32 = 16 << 20;
/// For what the directory does by itself.
const PATIENCE: Duration = Duration::from_secs(1);

/// Lets other processes use a directory, by [`DirectoryClient`](crate::DirectoryClient). Dropping it
/// closes all connections.
#[derive(Debug)]
pub struct DirectoryServer {
    server: TcpServer,
}

impl DirectoryServer {
    /// Serves `directory` at this address (port 0: a free one) to whoever knows the secret. A run that
    /// has not registered again within `member_ttl` is removed.
    ///
    /// # Errors
    /// As [`TcpServer::bind`].
    pub fn start(
        directory: Arc<dyn Directory>,
        address: SocketAddr,
        secret: Secret,
        member_ttl: Duration,
    ) -> Result<Self, TransferError> {
        let mut config = TcpServerConfig::new(secret);
        config.frame_bytes = FRAME;
        let service = Service::new(directory, member_ttl);
        Ok(Self { server: TcpServer::bind(address, config, Arc::new(service))? })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }
}

struct Service {
    directory: Arc<dyn Directory>,
    ttl: Duration,
    /// Runs that registered by us, and when they last did.
    heard: Mutex<Heard>,
    /// With which place the next answer begins.
    turn: AtomicUsize,
}

#[derive(Default)]
struct Heard {
    runs: HashMap<PeerId, (Token, Instant)>,
    swept: Option<Instant>,
}

impl Service {
    fn new(directory: Arc<dyn Directory>, ttl: Duration) -> Self {
        Self { directory, ttl, heard: Mutex::default(), turn: AtomicUsize::new(0) }
    }

    /// Runs that have been silent for too long.
    fn silent(&self, now: Instant) -> Vec<(PeerId, Token)> {
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        let due = heard.swept.is_none_or(|at| now.saturating_duration_since(at) >= self.ttl / 8);
        if !due {
            return Vec::new();
        }
        heard.swept = Some(now);
        let over = |at: &Instant| now.saturating_duration_since(*at) >= self.ttl;
        let mut gone = Vec::new();
        heard.runs.retain(|peer, (boot, at)| {
            if over(at) {
                gone.push((peer.clone(), *boot));
            }
            !over(at)
        });
        gone
    }

    fn registered(&self, member: &Member, now: Instant) {
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        heard.runs.insert(member.peer.clone(), (member.boot, now));
    }

    fn answer(
        &self,
        head: Head,
        fields: &mut Fields<'_>,
        now: Instant,
    ) -> Result<Vec<u8>, Malformed> {
        let (Head { op, items, heard }, deadline) = (head, Instant::now() + PATIENCE);
        let epoch = match self.directory.epoch(deadline) {
            Ok(epoch) if epoch < heard => {
                let why = "another directory has taken over from this one";
                return Ok(wire::bad(epoch, &DirectoryError::Unavailable(why.into())));
            }
            Ok(epoch) => epoch,
            Err(error) => return Ok(wire::bad(Epoch(0), &error)),
        };
        for (peer, boot) in self.silent(now) {
            tracing::info!(%peer, "a peer has been silent; its records are taken out");
            if let Err(error) = self.directory.remove_peer(&peer, boot, deadline) {
                tracing::warn!(%peer, %error, "a silent peer could not be removed");
            }
        }
        let directory = &self.directory;
        let mut said = Vec::new();
        let result = match op {
            Op::Epoch => Ok(()),
            Op::Locate => {
                let keys = list(items, fields, Fields::key)?;
                directory.locate(&keys, deadline).map(|found| {
                    for records in found {
                        // From another one for each key: not all go to the same few.
                        let first = self.turn.fetch_add(1, Ordering::Relaxed);
                        let some = records.iter().cycle().skip(first % records.len().max(1));
                        let count = records.len().min(PLACES);
                        said.extend_from_slice(&u16::try_from(count).unwrap_or(0).to_le_bytes());
                        some.take(count).for_each(|r| wire::put_record(&mut said, r));
                    }
                })
            }
            Op::Announce | Op::Withdraw => {
                let pair = |f: &mut Fields<'_>| Ok((f.key()?, wire::record(f)?));
                let records: Vec<(ObjectKey, Record)> = list(items, fields, pair)?;
                match op {
                    Op::Announce => directory.announce(&records, deadline),
                    _ => directory.withdraw(&records, deadline),
                }
            }
            Op::Register => {
                let members = list(items, fields, wire::member)?;
                members.iter().try_for_each(|member| {
                    directory.register(member, deadline)?;
                    self.registered(member, now);
                    Ok(())
                })
            }
            Op::RemovePeer => {
                let pair = |f: &mut Fields<'_>| {
                    let boot = Token(f.array()?);
                    Ok((boot, PeerId::new(wire::text(f)?)))
                };
                let peers = list(items, fields, pair)?;
                peers
                    .iter()
                    .try_for_each(|(boot, peer)| directory.remove_peer(peer, *boot, deadline))
            }
            Op::Members => {
                fields.end()?;
                directory.members(deadline).map(|members| {
                    let count = u32::try_from(members.len()).unwrap_or(u32::MAX);
                    said.extend_from_slice(&count.to_le_bytes());
                    members.iter().for_each(|member| wire::put_member(&mut said, member));
                })
            }
            Op::Place => {
                let pair = |f: &mut Fields<'_>| Ok((f.key()?, f.u64()?));
                let objects = list(items, fields, pair)?;
                directory.place(&objects, deadline).map(|places| {
                    for place in places {
                        let count = place.0.len().min(usize::from(u8::MAX));
                        said.extend_from_slice(&u16::try_from(count).unwrap_or(0).to_le_bytes());
                        let names = place.0.iter().take(count);
                        names.for_each(|peer| wire::put_text(&mut said, peer.as_str()));
                    }
                })
            }
        };
        Ok(match result {
            Ok(()) => {
                let mut answer = wire::good(epoch);
                answer.append(&mut said);
                answer
            }
            Err(error) => wire::bad(epoch, &error),
        })
    }
}

/// So many items, and nothing behind them.
fn list<'a, T>(
    items: usize,
    fields: &mut Fields<'a>,
    take: impl Fn(&mut Fields<'a>) -> Result<T, Malformed>,
) -> Result<Vec<T>, Malformed> {
    // No item is shorter than 16 bytes: nothing is allocated for what is not there.
    let mut all = Vec::with_capacity(items.min(fields.0.len() / 16));
    for _ in 0..items {
        all.push(take(fields)?);
    }
    fields.end()?;
    Ok(all)
}

impl Serve for Service {
    fn read(&self, _: &Request<'_>, _: &mut Pieces) -> Result<Served, Refusal> {
        Err(Refusal::new(RefusalKind::Denied, "this is a directory: nothing can be read"))
    }

    fn call(&self, _: &Session, request: &[u8], reply: &mut Vec<u8>) -> Result<(), Refusal> {
        let (head, mut fields) = wire::parse_call(request)?;
        *reply = self.answer(head, &mut fields, Instant::now())?;
        Ok(())
    }
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("directory", &self.directory).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EmbeddedDirectory, EmbeddedLimits, Generation, service::wire::put_key};

    fn member(name: &str, run: u8) -> Member {
        Member::new(PeerId::new(name), Token([run; 16]), "host:1")
    }

    /// By a clock of the test's: who is silent goes, who registers again stays, and a run that went does
    /// not come back. Fails when nobody is swept, when a registration is not noted, or when a sweep
    /// takes a newer run for the silent one.
    #[test]
    fn a_silent_run_is_removed_and_a_living_one_stays() {
        let directory = Arc::new(EmbeddedDirectory::new(EmbeddedLimits::default()));
        let service = Service::new(directory.clone(), Duration::from_secs(8));
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let ask = |op, items: usize, bytes: &[u8], now| {
            let head = Head { op, items, heard: Epoch(0) };
            service.answer(head, &mut Fields(bytes), now).unwrap()
        };
        let register = |member: &Member, now| {
            let mut bytes = Vec::new();
            wire::put_member(&mut bytes, member);
            let answer = ask(Op::Register, 1, &bytes, now);
            wire::parse_answer(&answer).unwrap().1.map(drop)
        };
        register(&member("a", 1), at(0)).unwrap();
        register(&member("b", 2), at(0)).unwrap();
        let mut bytes = Vec::new();
        let key = ObjectKey { block: [1; 16], identity: [2; 32] };
        put_key(&mut bytes, &key);
        let record = Record::new(PeerId::new("a"), Token([1; 16]), Generation(1), 5);
        wire::put_record(&mut bytes, &record);
        ask(Op::Announce, 1, &bytes, at(1));
        assert_eq!(directory.records(), 1);
        register(&member("b", 2), at(5)).unwrap();
        assert_eq!(directory.members(begun + PATIENCE).unwrap().len(), 2);
        ask(Op::Epoch, 0, &[], at(9));
        assert_eq!(directory.members(begun + PATIENCE).unwrap(), [member("b", 2)]);
        assert_eq!(directory.records(), 0);
        assert!(matches!(register(&member("a", 1), at(9)), Err(DirectoryError::Refused(_))));
        register(&member("a", 3), at(10)).unwrap();
        register(&member("a", 4), at(12)).unwrap();
        register(&member("b", 2), at(12)).unwrap();
        ask(Op::Epoch, 0, &[], at(19));
        assert_eq!(directory.members(begun + PATIENCE).unwrap().len(), 2, "the newer run goes on");
    }

    #[test]
    fn items_that_are_not_there_are_not_made_room_for() {
        let service = Service::new(
            Arc::new(EmbeddedDirectory::new(EmbeddedLimits::default())),
            Duration::from_secs(8),
        );
        for op in [Op::Locate, Op::Announce, Op::Withdraw, Op::Register, Op::RemovePeer, Op::Place]
        {
            for bytes in [&[][..], &[0xff; 100], &[0; 300]] {
                let head = Head { op, items: 4096, heard: Epoch(0) };
                let answer = service.answer(head, &mut Fields(bytes), Instant::now());
                assert!(answer.is_err(), "{op:?}");
            }
        }
        let head = Head { op: Op::Members, items: 0, heard: Epoch(0) };
        assert!(service.answer(head, &mut Fields(&[1]), Instant::now()).is_err());
    }
}
