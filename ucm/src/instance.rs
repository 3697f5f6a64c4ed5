//! One process's stay in a cache: rendezvous, control region and segments put together.
//!
//! **Invariant:** a member's seat outlives its record in the control region, and both outlive every
//! handle made from them, so that nobody clears up after a member that can still write.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, OnceLock},
    thread::{self, ThreadId},
    time::Duration,
};

use ucm_ctrl::{
    Control, Geometry, LAYOUT_VERSION, Member, MemberId, MemberSpec, MemberState, PoolGeometry,
    WeakMember,
};
use ucm_data::{
    Admission, Admitted, Enter, LayoutTag, Liveness, Membership, Occupied, Offer, PeerWatch,
    Rendezvous, RendezvousConfig, Segments, SegmentsConfig, StewardHooks, Token, WhenAbsent,
};

use crate::{Config, Error, PoolConfig, meta::Meta};

/// Version of the protocol between members, apart from the layouts.
const PROTOCOL: u32 = 1;

/// Segments that a pool is cut into at most.
const MOST_SEGMENTS: u64 = 256;

/// Called with bytes done and bytes in total.
pub(crate) type Progress<'a> = dyn Fn(u64, u64) + Sync + 'a;

/// What `enter` gives to the roles.
#[derive(Debug)]
pub(crate) struct Instance {
    pub(crate) member: Member,
    pub(crate) segments: Vec<Segments>,
    pub(crate) created: bool,
    pub(crate) watch: PeerWatch,
}

/// Sizes of the control region for this configuration.
pub(crate) fn geometry(config: &Config) -> Geometry {
    let pools = config.pool.iter().map(|pool| PoolGeometry {
        slots: pool.slots_in_force(),
        reserved: pool.reserved,
        shards_per_block: pool.shards_per_block,
        shard_bytes: pool.shard_bytes,
    });
    Geometry { pools: pools.collect(), leases: config.cache.leases }
}

fn layout_tag(config: &Config) -> LayoutTag {
    let mut hash = blake3::Hasher::new();
    let mut text = Vec::new();
    hash.update(&config.cache.leases.to_le_bytes());
    for pool in &config.pool {
        let slots = pool.slots_in_force();
        for number in [
            u64::from(slots),
            u64::from(pool.reserved),
            u64::from(pool.shards_per_block),
            pool.shard_bytes,
        ] {
            hash.update(&number.to_le_bytes());
        }
        hash.update(&(pool.name.len() as u64).to_le_bytes());
        hash.update(pool.name.as_bytes());
        text.push(format!(
            "pool {:.20}: {slots}+{} slots of {} bytes, {} shards a block",
            pool.name, pool.reserved, pool.shard_bytes, pool.shards_per_block
        ));
    }
    let mut text = text.join("; ");
    let end = (0..=500.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text.truncate(end.unwrap_or(0));
    LayoutTag {
        protocol: PROTOCOL,
        layout_version: LAYOUT_VERSION,
        fingerprint: *hash.finalize().as_bytes(),
        text,
    }
}

/// Creates or joins the cache of the configuration.
pub(crate) fn enter(
    config: &Config,
    spec: MemberSpec,
    when_absent: WhenAbsent,
    progress: &Progress<'_>,
) -> Result<Instance, Error> {
    config.check()?;
    enter_as(config, spec, when_absent, layout_tag(config), progress)
}

/// Joins a living cache whatever its geometry; never creates one.
pub(crate) fn observe(config: &Config, patience: Duration) -> Result<Instance, Error> {
    let mut config = config.clone();
    config.cache.join_timeout_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
    let tag = LayoutTag::any_geometry(PROTOCOL, LAYOUT_VERSION);
    enter_as(&config, MemberSpec::observer(), WhenAbsent::Wait, tag, &|_, _| {})
}

fn enter_as(
    config: &Config,
    spec: MemberSpec,
    when_absent: WhenAbsent,
    layout: LayoutTag,
    progress: &Progress<'_>,
) -> Result<Instance, Error> {
    let any = when_absent == WhenAbsent::Wait && layout.fits_any_geometry();
    let rendezvous = RendezvousConfig {
        deadline: config.join_timeout(),
        sockets: config.cache.sockets.into(),
        when_absent,
        ..RendezvousConfig::new(config.instance_dir(), layout)
    };
    let mut entrant =
        Entrant { config, spec, any, progress, control: None, member: None, segments: Vec::new() };
    let membership = Rendezvous::enter(&rendezvous, &mut entrant)?;
    let (watch, created) = (membership.watch().clone(), membership.created());
    let Some((member, hooks)) = entrant.member.take() else {
        return Err(Error::Config("invariant: admitted without a member".into()));
    };
    member
        .set_liveness(Arc::new(Proof { control: member.control().clone(), watch: watch.clone() }));
    member.keep_until_left(Box::new(Seat { membership: Some(membership), hooks }));
    Ok(Instance { member, segments: entrant.segments, created, watch })
}

struct Entrant<'a> {
    config: &'a Config,
    spec: MemberSpec,
    /// Whatever the cache's geometry.
    any: bool,
    progress: &'a Progress<'a>,
    control: Option<Control>,
    member: Option<(Member, Arc<Hooks>)>,
    segments: Vec<Segments>,
}

impl Entrant<'_> {
    fn allocate(&self, pool: &PoolConfig, progress: &Progress<'_>) -> Result<Segments, Error> {
        let slots = pool.slots_in_force().checked_add(pool.reserved).ok_or_else(|| {
            Error::Config(format!(
                "pool {:?}: {} + {} slots are too many",
                pool.name, pool.slots, pool.reserved
            ))
        })?;
        let prefer = self.config.cache.pages.into();
        let mut segments = SegmentsConfig {
            prefer,
            strict: self.config.cache.strict_pages.then_some(prefer),
            ..SegmentsConfig::new(pool.shard_bytes, slots)
        };
        // A descriptor and a mapping a segment: large pools get larger segments, not more.
        let total = pool.shard_bytes.saturating_mul(u64::from(slots));
        let wanted = (total / MOST_SEGMENTS).max(pool.shard_bytes);
        segments.segment_bytes =
            segments.segment_bytes.max(wanted.checked_next_power_of_two().unwrap_or(u64::MAX));
        Ok(Segments::create_with_progress(&segments, progress)?)
    }
}

impl Enter for Entrant<'_> {
    type Error = Error;

    fn create(&mut self) -> Result<Offer, Error> {
        let geometry = geometry(self.config);
        ucm_data::check_memory("the control region", geometry.region_bytes()?)?;
        let control = Control::create(&geometry, Token::random()?.0)?;
        let total: u64 =
            self.config.pool.iter().map(|p| p.shard_bytes * u64::from(p.slots_in_force())).sum();
        let mut done = 0;
        for pool in &self.config.pool {
            let before = done;
            let segments = self
                .allocate(pool, &|bytes, _| (self.progress)((before + bytes).min(total), total))?;
            done += segments.geometry().total_bytes();
            self.segments.push(segments);
        }
        let fd = control
            .take_fd()
            .ok_or_else(|| Error::Config("invariant: a shared region has a descriptor".into()))?;
        let mut fds = vec![fd.into()];
        fds.extend(self.segments.iter().flat_map(|s| s.fds().iter().cloned()));
        let meta = Meta { pools: self.segments.iter().map(|s| s.geometry().encode()).collect() };
        self.control = Some(control);
        Ok(Offer { meta: meta.encode(), fds })
    }

    fn admit(&mut self, admission: &Admission<'_>) -> Result<Admitted, Error> {
        let control = match self.control.take() {
            Some(control) => control,
            None => {
                let (control, segments) = attach(admission.offer)?;
                // One that fits any geometry may have passed the offer on.
                if !self.any && *control.geometry() != geometry(self.config) {
                    return Err(Error::Data(ucm_data::DataError::new(
                        ucm_data::ErrorKind::Layout,
                        format!(
                            "the live cache has {:?}, this process wants {:?}; use the same \
                             configuration everywhere",
                            control.geometry(),
                            geometry(self.config)
                        ),
                    )));
                }
                self.segments = segments;
                control
            }
        };
        let spec = self.spec.named(admission.incarnation.0);
        let id = control
            .free_member(admission.occupied)
            .filter(|id| u16::from(id.0) < admission.max_seats)
            .ok_or_else(|| ucm_ctrl::CtrlError::MembersFull(usize::from(admission.max_seats)))?;
        admission.hold(u16::from(id.0))?;
        let member = control.join_at(id, spec)?;
        let hooks = Arc::new(Hooks { member: member.downgrade(), thread: OnceLock::new() });
        self.member = Some((member, hooks.clone()));
        Ok(Admitted { seat: u16::from(id.0), hooks })
    }

    fn seated(&mut self, occupied: &Occupied<'_>) {
        if let Some((member, _)) = &self.member {
            repair_leftovers(member, occupied);
        }
    }

    fn abandon(&mut self, _seat: u16) {
        self.member = None;
    }
}

fn attach(offer: &Offer) -> Result<(Control, Vec<Segments>), Error> {
    let meta = Meta::decode(&offer.meta)?;
    let mut fds = offer.fds.iter().map(|fd| {
        fd.as_fd()
            .try_clone_to_owned()
            .map_err(|source| Error::os("duplicate a descriptor of the cache", source))
    });
    let missing = || {
        Error::Data(ucm_data::DataError::new(
            ucm_data::ErrorKind::Corrupt,
            "the offer lacks descriptors",
        ))
    };
    let control = Control::attach(fds.next().ok_or_else(missing)??)?;
    let mut segments = Vec::new();
    for encoded in &meta.pools {
        let geometry = ucm_data::Geometry::decode(encoded)?;
        let wanted = geometry.segments().len();
        let own: Vec<OwnedFd> = fds.by_ref().take(wanted).collect::<Result<_, _>>()?;
        segments.push(Segments::from_fds(geometry, own)?);
    }
    Ok((control, segments))
}

/// Clears up after members that died while nobody was there to see it: of those whose process somebody
/// holds, that one hears. Should one live after all, or be still ending (its seat is free before its memory
/// is quiet), it can only let go from now on, and what it holds is handed on by nobody who has no proof.
///
/// Nobody has to keep out meanwhile: each record is read first, and its seat looked at then.
fn repair_leftovers(member: &Member, occupied: &Occupied<'_>) {
    let control = member.control();
    for other in control.inspect_members() {
        let left = other.state != MemberState::Free && other.index != member.id().0;
        if left && !occupied.is_taken(u16::from(other.index)) {
            if other.state == MemberState::Joining {
                // It never was more; or it is by now, and somebody else's business.
                let reaped = member.reap_joining(MemberId(other.index), other.generation);
                tracing::warn!(seat = other.index, ?reaped, "a member died while it joined");
                continue;
            }
            let expelled = member.expel(MemberId(other.index), other.generation);
            if other.state == MemberState::Joined && !expelled.done {
                // An expelled member cannot mark it: another one will.
                continue;
            }
            let unproven = matches!(other.state, MemberState::Joined | MemberState::Expelled);
            if unproven && control.holds_anything(MemberId(other.index)) {
                tracing::warn!(
                    seat = other.index,
                    "a member that nobody knows holds slots; they stay out of use until its end is heard of"
                );
                continue;
            }
            let reaped = member.reap(MemberId(other.index), Some(other.generation));
            tracing::warn!(
                seat = other.index,
                ?reaped,
                "cleared up after a member that died unseen"
            );
        }
    }
}

/// What the steward thread does in this member's name.
#[derive(Debug)]
struct Hooks {
    member: WeakMember,
    thread: OnceLock<ThreadId>,
}

impl Hooks {
    fn upgrade(&self) -> Option<Member> {
        self.thread.get_or_init(|| thread::current().id());
        self.member.upgrade()
    }
}

impl StewardHooks for Hooks {
    fn on_death(&self, seat: u16, incarnation: Token) -> bool {
        let (Some(member), Ok(seat)) = (self.upgrade(), u8::try_from(seat)) else { return false };
        let reaped = member.reap_stay(MemberId(seat), incarnation.0);
        if reaped.done {
            tracing::warn!(seat, ?reaped, "a member died; cleared up after it");
        }
        member.may_reap()
    }

    fn on_vanished(&self, seat: u16, incarnation: Token) -> bool {
        if let (Some(member), Ok(seat)) = (self.upgrade(), u8::try_from(seat)) {
            if member.control().is_stay_over(MemberId(seat), incarnation.0) {
                return true;
            }
            let members = member.control().inspect_members();
            // Read before the stay: if that is the right one, so is the generation, or it is over.
            let generation = members.iter().find(|m| m.index == seat).map(|m| m.generation);
            if let Some(generation) = generation
                && member.control().incarnation(MemberId(seat)) == Some(incarnation.0)
            {
                let expelled = member.expel(MemberId(seat), generation);
                tracing::warn!(
                    seat,
                    ?expelled,
                    "expelled a member that has become another program"
                );
            }
        }
        false
    }

    fn is_cleared(&self, seat: u16, incarnation: Token) -> bool {
        let member = self.upgrade().zip(u8::try_from(seat).ok());
        member.is_some_and(|(member, seat)| {
            member.control().is_stay_over(MemberId(seat), incarnation.0)
        })
    }

    fn on_failed_join(&self, occupied: &Occupied<'_>) {
        if let Some(member) = self.upgrade() {
            repair_leftovers(&member, occupied);
        }
    }

    fn on_leave(&self, seat: u16, incarnation: Token) {
        // A member that leaves gives its record back first, and its seat last. If the record is
        // still there, something kept it from doing so; nothing of it touches the memory any more.
        let _ = self.on_death(seat, incarnation);
    }
}

/// Holds the seat until the member record has been given back.
struct Seat {
    membership: Option<Membership>,
    hooks: Arc<Hooks>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let membership = self.membership.take();
        // A death notice may hold the last reference to the member; the steward thread cannot wait
        // for its own end.
        if self.hooks.thread.get() == Some(&thread::current().id()) {
            let _ = thread::Builder::new().name("ucm-leave".into()).spawn(move || drop(membership));
        }
    }
}

/// Proof of death for members that wait for a dead one's lock.
#[derive(Debug)]
struct Proof {
    control: Control,
    watch: PeerWatch,
}

impl ucm_ctrl::Liveness for Proof {
    fn is_dead(&self, member: MemberId) -> bool {
        self.control.incarnation(member).is_some_and(|stay| {
            self.watch.liveness(u16::from(member.0), Token(stay)) == Liveness::Dead
        })
    }
}
