//! shm between processes: segments passed by the rendezvous, rewritten under stamps, and an owner
//! that is killed in the middle of rewriting.

use std::{path::Path, sync::Arc};

use rustix::process::Signal;
use ucm_data::{
    Admission, Admitted, DataError, Enter, Geometry, LayoutTag, Membership, Offer, PageTier,
    Rendezvous, RendezvousConfig, Segments, SegmentsConfig, StewardHooks, Token,
};
use ucm_transport::{
    Access, Addr, ErrorKind, Location, Memory, RegionId, ShmEngine, Stamps, Transfer,
    TransferEngine, TransferPlan,
};

use crate::{child::say, parent::Proc, pattern};

const SLOTS: u32 = 4;
const SLOT_BYTES: usize = 64 << 10;

struct NoHooks;

impl StewardHooks for NoHooks {
    fn on_death(&self, _: u16, _: Token) -> bool {
        true
    }
    fn on_leave(&self, _: u16, _: Token) {}
}

/// The owner offers two segments, slots and stamps; a peer takes them.
#[derive(Default)]
struct Party {
    slots: Option<Segments>,
    stamps: Option<Segments>,
}

fn segment(slot_bytes: u64, slots: u32) -> Result<Segments, DataError> {
    Segments::create(&SegmentsConfig {
        prefer: PageTier::Small,
        threads: 1,
        segment_bytes: (slot_bytes * u64::from(slots)).next_multiple_of(4096),
        ..SegmentsConfig::new(slot_bytes, slots)
    })
}

impl Enter for Party {
    type Error = DataError;

    fn create(&mut self) -> Result<Offer, DataError> {
        let (slots, stamps) = (segment(SLOT_BYTES as u64, SLOTS)?, segment(4096, 1)?);
        let fds = slots.fds().iter().chain(stamps.fds()).cloned().collect();
        let mut meta = slots.geometry().encode();
        meta.extend(stamps.geometry().encode());
        Ok(Offer { meta, fds })
    }

    fn admit(&mut self, admission: &Admission<'_>) -> Result<Admitted, DataError> {
        let half = admission.offer.meta.len() / 2;
        let (first, second) = admission.offer.meta.split_at(half);
        let adopt = |meta: &[u8], at: usize| {
            Segments::from_fds(Geometry::decode(meta)?, [admission.offer.fds[at].clone()])
        };
        self.slots = Some(adopt(first, 0)?);
        self.stamps = Some(adopt(second, 1)?);
        let seat = (0..admission.max_seats).find(|s| !admission.occupied.contains(s)).unwrap();
        Ok(Admitted { seat, hooks: Arc::new(NoHooks) })
    }
}

fn enter(dir: &Path) -> (Membership, Party) {
    let mut party = Party::default();
    let config = RendezvousConfig::new(dir, LayoutTag::any_geometry(1, 1));
    let membership = Rendezvous::enter(&config, &mut party).unwrap();
    (membership, party)
}

fn stamps(segments: &Segments) -> Stamps {
    let mapped = segments.map().unwrap();
    let (base, len) = mapped.segment_range(0).unwrap();
    // SAFETY: mapped as long as the last argument lives; no references to the bytes exist.
    Stamps::new(unsafe { Memory::from_raw(base, len, Location::Host, mapped) }).unwrap()
}

/// The owner: "write SLOT GENERATION" rewrites a slot, "half SLOT GENERATION" never gets to its end.
pub(crate) fn peer(dir: &str) -> impl FnMut(&str) + use<> {
    let (membership, party) = enter(Path::new(dir));
    let slots = party.slots.unwrap().map().unwrap();
    let stamps = stamps(&party.stamps.unwrap());
    move |line| {
        let _member = &membership;
        let mut words = line.split(' ');
        let what = words.next().unwrap();
        let slot: u32 = words.next().unwrap().parse().unwrap();
        let generation: u64 = words.next().unwrap().parse().unwrap();
        let mut bytes = vec![0; SLOT_BYTES];
        pattern::fill(&mut bytes, slot, generation, 0);
        assert!(stamps.begin_rewrite(slot));
        if what == "half" {
            slots.write(slot, 0, &bytes[..SLOT_BYTES / 2]).unwrap();
            say("half");
            loop {
                std::thread::park();
            }
        }
        slots.write(slot, 0, &bytes).unwrap();
        stamps.end_rewrite(slot).unwrap();
        say("written");
    }
}

struct Reader {
    engine: ShmEngine,
    stamps: Stamps,
    theirs: RegionId,
    ours: RegionId,
    target: Memory,
    party: Party,
}

impl Reader {
    fn new(party: Party) -> Self {
        let engine = ShmEngine::builder().build().unwrap();
        let peer = engine.add_peer(Access::Read).unwrap();
        let theirs = engine.attach_segments(peer, party.slots.as_ref().unwrap()).unwrap()[0];
        let target = Memory::host(SLOT_BYTES).unwrap();
        let ours = engine.register(target.clone()).unwrap();
        let stamps = stamps(party.stamps.as_ref().unwrap());
        Self { engine, stamps, theirs, ours, target, party }
    }

    fn plan(&self, slot: u32) -> TransferPlan {
        let at = self.party.slots.as_ref().unwrap().geometry();
        let offset = u64::from(slot) * at.stride_bytes();
        let src = Addr { region: self.theirs, offset };
        let dst = Addr { region: self.ours, offset: 0 };
        let items = vec![Transfer { src, dst, len: SLOT_BYTES as u64 }];
        TransferPlan { items, holds: vec![] }
    }

    /// Reads a slot as it is now; `None` when it is stale.
    fn read(&self, slot: u32) -> Option<Vec<u8>> {
        let check = self.stamps.check(vec![(slot, self.stamps.current(slot)?)]);
        self.engine.submit_checked(self.plan(slot), check).unwrap();
        let mut ends = Vec::new();
        self.engine.poll(&mut ends);
        match &ends[0].result {
            Ok(_) => {
                let mut bytes = vec![0; SLOT_BYTES];
                self.target.read(0, &mut bytes).unwrap();
                Some(bytes)
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Stale);
                None
            }
        }
    }
}

/// Mutant seen to fail: an even stamp while rewriting.
#[test]
fn an_owner_killed_while_it_rewrites_serves_no_mixed_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let mut owner = Proc::start("shm", dir.path().to_str().unwrap());
    owner.expect("ready");
    let (_member, party) = enter(dir.path());
    let reader = Reader::new(party);
    for generation in 1..6_u64 {
        for slot in 0..SLOTS {
            owner.ask(&format!("write {slot} {generation}"), "written");
            let bytes = reader.read(slot).unwrap();
            assert!(pattern::is(&bytes, slot, generation, 0), "slot {slot} of {generation}");
        }
    }
    // A stamp of before is refused, whatever has been written since.
    let old = reader.stamps.check(vec![(2, reader.stamps.current(2).unwrap())]);
    owner.ask("write 2 6", "written");
    let refused = reader.engine.submit_checked(reader.plan(2), old).unwrap_err();
    assert_eq!(refused.error.kind(), ErrorKind::Stale);

    owner.ask("half 1 7", "half");
    owner.signal(Signal::STOP);
    assert_eq!(reader.read(1), None, "half of it is another generation");
    owner.kill();
    assert_eq!(reader.read(1), None, "and stays so when the owner is dead");
    for (slot, generation) in [(0, 5), (2, 6), (3, 5)] {
        let bytes = reader.read(slot).unwrap();
        assert!(pattern::is(&bytes, slot, generation, 0), "slot {slot} outlives its owner");
    }
}
