//! The child side: one process that enters, writes, reads, leaves … as its parent tells it.
//!
//! Every answer is one line that starts with `@@`; the parent ignores everything else, such as the
//! test harness's own output.

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ucm_data::{
    Admission, Admitted, DataError, Enter, ErrorKind, Geometry, LayoutTag, Mapped, Membership,
    Occupied, Offer, PageTier, Rendezvous, RendezvousConfig, Segments, SegmentsConfig, SharedFd,
    Sockets, StewardHooks, Token, WhenAbsent,
};

/// Set for children.
pub(crate) const MARK: &str = "UCM_DATA_CHILD";

pub(crate) fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    // One write, so that lines of several threads do not mix.
    let line = format!("@@{text}\n");
    if out.write_all(line.as_bytes()).and_then(|()| out.flush()).is_err() {
        std::process::exit(3);
    }
}

#[test]
#[ignore = "entry of child processes"]
fn entry() {
    if std::env::var_os(MARK).is_none() {
        return;
    }
    let mut actor = Actor {
        member: None,
        args: HashMap::new(),
        grip: Vec::new(),
        crowd: Vec::new(),
        robbed: None,
    };
    say("ready");
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        actor.obey(&line);
    }
    // The parent closed the pipe (or is gone): end at once.
    std::process::exit(0);
}

struct Member {
    membership: Membership,
    mapped: Option<Arc<Mapped>>,
}

struct Actor {
    member: Option<Member>,
    args: HashMap<String, String>,
    grip: Vec<Segments>,
    crowd: Vec<std::os::fd::OwnedFd>,
    robbed: Option<Membership>,
}

impl Actor {
    fn obey(&mut self, line: &str) {
        let mut words = line.split(' ');
        let verb = words.next().unwrap();
        self.args = words
            .filter_map(|word| word.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
        match verb {
            "enter" => self.enter(),
            "leave" => {
                self.member = None;
                say("left");
            }
            "write" => {
                let member = self.member.as_ref().unwrap();
                let (slot, word) = (self.number("slot"), self.number::<u64>("word"));
                let bytes: Vec<u8> = word.to_le_bytes().repeat(512);
                member.mapped.as_ref().unwrap().write(slot, 0, &bytes).unwrap();
                say("written");
            }
            "read" => {
                let member = self.member.as_ref().unwrap();
                let mut bytes = vec![0; 4096];
                member.mapped.as_ref().unwrap().read(self.number("slot"), 0, &mut bytes).unwrap();
                let word = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                let same = bytes == word.to_le_bytes().repeat(512);
                say(&format!("word {word} same {same}"));
            }
            "peers" => {
                let mut peers: Vec<_> = self.membership().peers();
                peers.sort_by_key(|peer| peer.seat);
                let seats: Vec<_> = peers.iter().map(|peer| peer.seat.to_string()).collect();
                say(&format!("peers {}", seats.join(",")));
            }
            "alive" => {
                let seat: u16 = self.number("seat");
                say(&format!("alive {}", self.membership().is_alive(seat)));
            }
            "liveness" => {
                let mut token = [0; 16];
                for (byte, at) in token.iter_mut().zip((0..).step_by(2)) {
                    *byte = u8::from_str_radix(&self.args["stay"][at..at + 2], 16).unwrap();
                }
                let liveness = self.membership().liveness(self.number("seat"), Token(token));
                say(&format!("liveness {liveness:?}"));
            }
            "stats" => say(&format!("stats {:?}", self.membership().stats())),
            "check" => match self.membership().check() {
                Ok(()) => say("check ok"),
                Err(error) => say(&format!("check {error}")),
            },
            "cycle" => self.cycle(),
            "switches" => say(&format!("switches {}", steward_switches())),
            "resources" => say(&format!("resources {:?}", Resources::now())),
            "rob" => {
                // SAFETY: takes no pointers. Nothing here is closed again: what owns it is left behind.
                assert_eq!(unsafe { libc::close_range(3, libc::c_uint::MAX, 0) }, 0);
                let member = self.member.take().unwrap();
                let _never_dropped = ManuallyDrop::new(member.mapped);
                self.robbed = Some(member.membership);
                say("robbed");
            }
            "check-robbed" => say(&format!("check {:?}", self.robbed.as_ref().unwrap().check())),
            "leave-robbed" => {
                drop(self.robbed.take());
                say("gone");
            }
            "exec" => {
                use std::os::unix::process::CommandExt;
                let error = std::process::Command::new("sleep").arg("600").exec();
                panic!("{error}");
            }
            "fill" => {
                let flags = rustix::event::EventfdFlags::CLOEXEC;
                while let Ok(fd) = rustix::event::eventfd(0, flags) {
                    self.crowd.push(fd);
                }
                self.crowd.truncate(self.crowd.len() - self.number::<usize>("leave"));
                say("filled");
            }
            "crowd" => self.crowd(),
            "nofile" => {
                let mut now = rustix::process::getrlimit(rustix::process::Resource::Nofile);
                let most = now.maximum.unwrap_or(1 << 16);
                let mut set = |limit: u64| {
                    now.current = Some(limit);
                    rustix::process::setrlimit(rustix::process::Resource::Nofile, now).unwrap();
                };
                // Counting takes a descriptor itself, and the limit may be met.
                set(most);
                let open = Resources::now().fds;
                let limit = open + self.number::<usize>("spare");
                set(limit as u64);
                say(&format!("nofile {limit}"));
            }
            "net" => {
                // SAFETY: plain system call; this thread gets a fresh network namespace.
                let rc = unsafe { libc::unshare(libc::CLONE_NEWNET) };
                say(&format!("net {rc}"));
            }
            "fork" => {
                let member = self.member.take().unwrap();
                let crowd = std::mem::take(&mut self.crowd);
                crate::fork::fork_in_child(member, move |member| {
                    drop(crowd);
                    let mapped = member.mapped.as_ref().unwrap();
                    format!(
                        "maps={} slot={:?} read={:?} check={:?} peers={} poke={:?}",
                        Resources::now().maps,
                        mapped.slot_ptr(0),
                        mapped.read(0, 0, &mut [0]).unwrap_err().kind(),
                        member.membership.check().unwrap_err().kind(),
                        member.membership.peers().len(),
                        member.membership.poke().unwrap_err().kind(),
                    )
                });
            }
            "alloc" => self.alloc(),
            "touch" => self.touch(),
            "knock" => crate::joining::knock_in_child(&self.args["dir"], self.number("seat")),
            other => panic!("unknown command {other}"),
        }
    }

    fn config(&self) -> RendezvousConfig {
        let version: u32 = self.number_or("version", 7);
        let layout = LayoutTag {
            protocol: 1,
            layout_version: version,
            fingerprint: [u8::try_from(version).unwrap(); 32],
            text: format!("test-layout-{version}"),
        };
        let files = self.args.get("sockets").is_some_and(|s| s == "files");
        let wait = self.args.get("absent").is_some_and(|s| s == "wait");
        RendezvousConfig {
            deadline: Duration::from_millis(self.number_or("deadline", 20_000)),
            sockets: if files { Sockets::Files } else { Sockets::Abstract },
            when_absent: if wait { WhenAbsent::Wait } else { WhenAbsent::Create },
            ..RendezvousConfig::new(PathBuf::from(&self.args["dir"]), layout)
        }
    }

    fn caller(&self) -> Caller {
        Caller {
            slots: self.number_or("slots", 16),
            segment_bytes: self.number_or("segment", 64 << 10),
            prefer: if self.args.contains_key("huge") { PageTier::Huge2M } else { PageTier::Small },
            extra_fds: self.number_or("fds", 0),
            panic_on_death: self.args.contains_key("panic"),
            abandoned: 0,
            segments: None,
            stop_in_admit: self.args.contains_key("stop"),
            force_seat: self.args.get("seat").map(|s| s.parse().unwrap()),
        }
    }

    fn enter(&mut self) {
        let mut caller = self.caller();
        let start = Instant::now();
        match Rendezvous::enter(&self.config(), &mut caller) {
            Ok(membership) => {
                let ms = start.elapsed().as_millis();
                let segments = caller.segments.unwrap();
                let mapped = (!self.args.contains_key("unmapped")).then(|| segments.map().unwrap());
                say(&format!(
                    "entered created={} seat={} boot={} stay={} ms={ms}",
                    membership.created(),
                    membership.seat(),
                    membership.boot_token(),
                    membership.incarnation(),
                ));
                self.member = Some(Member { membership, mapped });
            }
            Err(error) => {
                let ms = start.elapsed().as_millis();
                say(&format!(
                    "refused kind={:?} ms={ms} abandoned={} text={error}",
                    error.kind(),
                    caller.abandoned
                ));
            }
        }
    }

    /// Enters and leaves `count` times, or tries to; reports resources before and after.
    fn cycle(&mut self) {
        let count: usize = self.number("count");
        // The first stay installs what lives as long as the process.
        let mut failures = 0;
        let mut before = None;
        for round in 0..=count {
            if round == 1 {
                before = Some(Resources::now());
            }
            let mut caller = self.caller();
            match Rendezvous::enter(&self.config(), &mut caller) {
                Ok(membership) => {
                    let mapped = caller.segments.unwrap().map().unwrap();
                    mapped.write(0, 0, &[1]).unwrap();
                    membership.leave();
                }
                Err(error) if error.kind() == ErrorKind::DescriptorLimit => failures += 1,
                Err(error) => panic!("{error}"),
            }
        }
        let (before, after) = (before.unwrap(), Resources::now());
        say(&format!("cycled failures={failures} {before:?} {after:?} same={}", before == after));
    }

    /// Connects to a seat again and again and says nothing: `count` times, or until the queue is full.
    fn crowd(&mut self) {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
        use std::os::unix::fs::MetadataExt;
        let meta = std::fs::metadata(&self.args["dir"]).unwrap();
        let seat: u16 = self.number("seat");
        let name = format!("ucm-{:x}-{:x}-{seat}", meta.dev(), meta.ino());
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let most = self.number_or("count", usize::MAX);
        let mut done = 0;
        while done < most {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let kind = SocketType::SEQPACKET;
            let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
            match rustix::net::connect(&socket, &address) {
                Ok(()) => done += 1,
                Err(error) => {
                    assert_eq!(error, rustix::io::Errno::AGAIN);
                    break;
                }
            }
            if self.args.contains_key("stay") {
                self.crowd.push(socket);
            }
        }
        // The member keeps 64 of them: when it has hung up on the others, it has taken all.
        if let Some(given_up) = done.checked_sub(65).and_then(|index| self.crowd.get(index)) {
            rustix::io::ioctl_fionbio(given_up, false).unwrap();
            assert_eq!(rustix::io::read(given_up, &mut [0; 1]), Ok(0));
        }
        say(&format!("crowded {done}"));
    }

    /// Creates segments; answers with what was reached or refused.
    fn alloc(&mut self) {
        let tier = |name: &str| match name {
            "1g" => PageTier::Huge1G,
            "2m" => PageTier::Huge2M,
            "thp" => PageTier::Transparent,
            _ => PageTier::Small,
        };
        let config = SegmentsConfig {
            segment_bytes: self.number_or("segment", 8 << 20),
            prefer: tier(self.args.get("prefer").map_or("2m", |s| s)),
            strict: self.args.get("strict").map(|name| tier(name)),
            threads: self.number_or("threads", 2),
            ..SegmentsConfig::new(self.number_or("slot", 1 << 20), self.number("slots"))
        };
        match Segments::create(&config) {
            Ok(segments) => {
                let geometry = segments.geometry();
                let tiers: Vec<_> =
                    geometry.segments().iter().map(|s| format!("{:?}", s.tier)).collect();
                let why = segments.fallbacks().first().map(|f| f.error.to_string());
                say(&format!(
                    "allocated reached={:?} degraded={} tiers={} fallbacks={} why={why:?}",
                    geometry.reached(),
                    geometry.is_degraded(),
                    tiers.join(","),
                    segments.fallbacks().len(),
                ));
                self.grip.push(segments);
            }
            Err(error) => {
                let shortage = error.shortage();
                say(&format!("short kind={:?} {shortage:?} text={error}", error.kind()));
            }
        }
    }

    /// Maps what was allocated, writes and reads every page of it.
    fn touch(&mut self) {
        for segments in &self.grip {
            let mapped = segments.map().unwrap();
            mapped.prefault(2, &|_, _| {}).unwrap();
            let bytes = vec![0x5A; segments.geometry().slot_bytes().try_into().unwrap()];
            let mut back = vec![0; bytes.len()];
            for slot in 0..segments.geometry().slots() {
                mapped.write(slot, 0, &bytes).unwrap();
                mapped.read(slot, 0, &mut back).unwrap();
                assert_eq!(bytes, back);
            }
        }
        say("touched");
    }

    fn membership(&self) -> &Membership {
        &self.member.as_ref().expect("not a member").membership
    }

    fn number<T: std::str::FromStr<Err: std::fmt::Debug>>(&self, key: &str) -> T {
        self.args[key].parse().unwrap()
    }

    fn number_or<T: std::str::FromStr<Err: std::fmt::Debug>>(&self, key: &str, other: T) -> T {
        self.args.get(key).map_or(other, |text| text.parse().unwrap())
    }
}

/// A small pool; takes the lowest free seat.
struct Caller {
    slots: u32,
    segment_bytes: u64,
    prefer: PageTier,
    extra_fds: usize,
    panic_on_death: bool,
    abandoned: u32,
    segments: Option<Segments>,
    force_seat: Option<u16>,
    stop_in_admit: bool,
}

impl Enter for Caller {
    type Error = DataError;

    fn create(&mut self) -> Result<Offer, DataError> {
        let segments = Segments::create(&SegmentsConfig {
            segment_bytes: self.segment_bytes,
            prefer: self.prefer,
            ..SegmentsConfig::new(4096, self.slots)
        })?;
        let mut fds: Vec<SharedFd> = segments.fds().to_vec();
        for _ in 0..self.extra_fds {
            let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
            fds.push(fd.into());
        }
        Ok(Offer { meta: segments.geometry().encode(), fds })
    }

    fn admit(&mut self, admission: &Admission<'_>) -> Result<Admitted, DataError> {
        let geometry = Geometry::decode(&admission.offer.meta)?;
        let count = geometry.segments().len();
        let fds = admission.offer.fds.iter().take(count).cloned();
        assert_eq!(admission.offer.fds.len(), count + self.extra_fds);
        if self.stop_in_admit {
            // The parent ends the process here.
            say("admitting");
            loop {
                std::thread::park();
            }
        }
        // Every descriptor must be open.
        for fd in &admission.offer.fds {
            rustix::fs::fstat(fd.as_fd()).unwrap();
        }
        self.segments = Some(Segments::from_fds(geometry, fds)?);
        let free = (0..admission.max_seats).find(|seat| !admission.occupied.contains(seat));
        let seat = self.force_seat.or(free).ok_or_else(|| {
            DataError::new(ErrorKind::Seat, format!("{} seats taken", admission.occupied.len()))
        })?;
        let panic_on_death = self.panic_on_death;
        Ok(Admitted {
            seat,
            hooks: Arc::new(Hooks { panic_on_death, fired: AtomicBool::new(false) }),
        })
    }

    fn abandon(&mut self, _seat: u16) {
        self.abandoned += 1;
    }
}

struct Hooks {
    panic_on_death: bool,
    fired: AtomicBool,
}

impl StewardHooks for Hooks {
    fn on_joined(&self, seat: u16, stay: Token) {
        say(&format!("event joined {seat} {stay}"));
    }

    fn on_death(&self, seat: u16, stay: Token) -> bool {
        say(&format!("event died {seat} {stay}"));
        assert!(!self.panic_on_death || self.fired.swap(true, Ordering::SeqCst), "hook gives up");
        true
    }

    fn on_failed_join(&self, _occupied: &Occupied<'_>) {
        say("event failed");
    }

    fn on_vanished(&self, seat: u16, stay: Token) -> bool {
        say(&format!("event vanished {seat} {stay}"));
        false
    }

    fn on_leave(&self, seat: u16, stay: Token) {
        say(&format!("event left {seat} {stay}"));
    }
}

/// What a process holds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Resources {
    pub(crate) fds: usize,
    pub(crate) maps: usize,
    pub(crate) threads: usize,
}

impl Resources {
    pub(crate) fn now() -> Self {
        let count = |dir: &str| std::fs::read_dir(dir).unwrap().count();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        // The directory listing itself is one descriptor.
        Self {
            fds: count("/proc/self/fd") - 1,
            // Only shared mappings of memory files: the allocator's own come and go.
            maps: maps.lines().filter(|line| line.contains("memfd:ucm")).count(),
            threads: count("/proc/self/task"),
        }
    }
}

/// Voluntary context switches of the steward thread, once it sleeps.
fn steward_switches() -> u64 {
    loop {
        for task in std::fs::read_dir("/proc/self/task").unwrap() {
            // A thread that ends meanwhile is not the steward.
            let Ok(task) = task.map(|task| task.path()) else { continue };
            let read = |file| std::fs::read_to_string(task.join(file));
            let (Ok(name), Ok(status)) = (read("comm"), read("status")) else { continue };
            let field = |key: &str| {
                let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
                line.split_ascii_whitespace().next().unwrap().to_owned()
            };
            if name.starts_with("ucm-steward") && field("State:") == "S" {
                return field("voluntary_ctxt_switches:").parse().unwrap();
            }
        }
        // It has just been started or is still busy; the parent's watchdog bounds this.
        std::thread::yield_now();
    }
}
