//! Nodes, clients, and a proxy between them.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex},
    task::Waker,
    thread,
    time::{Duration, Instant},
};

use ucm_data::{PageTier, Segments, SegmentsConfig};
use ucm_remote::{
    Agent, AgentBuilder, ByteRange, Destination, Directory, EmbeddedDirectory, EmbeddedLimits,
    GetOutcome, GetRequest, HostMedium, ObjectKey, PagedLimits, PeerId, PoolClient, PutOutcome,
    PutRequest, RemotePool as _, Source,
};
use ucm_transport::{
    Addr, Capabilities, Completion, HostEngine, Memory, Quiesce, RegionId, Rejected, Secret,
    Ticket, TransferEngine, TransferError, TransferPlan,
};

pub(crate) const PAGE: u64 = 4096;
pub(crate) const POISON: u8 = 0xa5;
/// Nothing here takes as long unless it hangs.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(60);

pub(crate) fn soon() -> Instant {
    Instant::now() + WATCHDOG
}

pub(crate) fn secret() -> Secret {
    Secret::new(b"a secret for tests only").unwrap()
}

pub(crate) fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

pub(crate) fn directory() -> Arc<EmbeddedDirectory> {
    let mut limits = EmbeddedLimits::default();
    limits.records = 10_000;
    Arc::new(EmbeddedDirectory::new(limits))
}

pub(crate) fn key(number: u64) -> ObjectKey {
    let mut block = [0; 16];
    block[..8].copy_from_slice(&number.to_le_bytes());
    ObjectKey { block, identity: [3; 32] }
}

/// The byte at `offset` of a storing of a key.
pub(crate) fn byte(number: u64, version: u64, offset: u64) -> u8 {
    let mut x = number
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(version.wrapping_mul(0xbf58_476d_1ce4_e5b9))
        .wrapping_add(offset / 8);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let byte = (x >> (offset % 8 * 8)).to_le_bytes()[0];
    if byte == POISON { 0 } else { byte }
}

pub(crate) fn bytes(number: u64, version: u64, range: ByteRange) -> Vec<u8> {
    (range.offset..range.offset + range.len).map(|at| byte(number, version, at)).collect()
}

pub(crate) fn range(offset: u64, len: u64) -> ByteRange {
    ByteRange { offset, len }
}

pub(crate) fn poisoned(len: u64) -> Memory {
    let memory = Memory::host(usize::try_from(len).unwrap()).unwrap();
    memory.write(0, &vec![POISON; memory.len()]).unwrap();
    memory
}

pub(crate) fn content(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

/// Bytes that are not poison any more.
pub(crate) fn touched(memory: &Memory) -> usize {
    content(memory).iter().filter(|byte| **byte != POISON).count()
}

/// How the reader reaches the owner's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Tcp,
    Shm,
}

/// A case of the specification runs over every engine.
pub(crate) fn each_way(case: impl Fn(Way)) {
    case(Way::Tcp);
    case(Way::Shm);
}

/// One node of a test.
pub(crate) struct Node {
    pub(crate) agent: Agent,
    pub(crate) client: PoolClient,
    pub(crate) engine: Arc<HostEngine>,
    pub(crate) memory: Memory,
    pub(crate) arena: Memory,
}

pub(crate) struct Setup {
    pub(crate) name: &'static str,
    pub(crate) pages: u64,
    pub(crate) page_bytes: u64,
    pub(crate) arena: u64,
    /// Other nodes are served.
    pub(crate) serves: bool,
    /// Other processes can map its memory.
    pub(crate) shared: bool,
    pub(crate) build: Box<dyn Fn(AgentBuilder) -> AgentBuilder>,
}

impl Setup {
    pub(crate) fn new(name: &'static str, pages: u64) -> Self {
        Self {
            name,
            pages,
            page_bytes: PAGE,
            arena: 8192,
            serves: true,
            shared: false,
            build: Box::new(|builder| builder),
        }
    }

    pub(crate) fn with(self, build: impl Fn(AgentBuilder) -> AgentBuilder + 'static) -> Self {
        Self { build: Box::new(build), ..self }
    }

    pub(crate) fn start(&self, directory: &Arc<EmbeddedDirectory>) -> Node {
        self.start_with(Arc::clone(directory) as _)
    }

    pub(crate) fn start_with(&self, directory: Arc<dyn Directory>) -> Node {
        let limits = PagedLimits::new(self.page_bytes);
        let me = PeerId::new(self.name);
        let (memory, arena, builder);
        if self.shared {
            let medium = shared(self.page_bytes, self.pages);
            let segments = shared(self.arena, 1);
            memory = Memory::of_segments(&medium).unwrap().remove(0);
            arena = Memory::of_segments(&segments).unwrap().remove(0);
            let medium = HostMedium::shared(&medium, limits).unwrap();
            builder = Agent::builder(me, medium, directory, secret()).shared_arena(segments);
        } else {
            (memory, arena) = (poisoned(self.pages * self.page_bytes), poisoned(self.arena));
            let medium = HostMedium::new(vec![memory.clone()], limits).unwrap();
            builder = Agent::builder(me, medium, directory, secret()).arena(arena.clone());
        }
        let builder = if self.serves { builder.listen(loopback()) } else { builder };
        let agent = (self.build)(builder).start().unwrap();
        let engine = Arc::new(HostEngine::builder().build().unwrap());
        let client = agent.client(Arc::clone(&engine) as _).unwrap();
        Node { agent, client, engine, memory, arena }
    }
}

fn shared(bytes: u64, count: u64) -> Segments {
    let mut config = SegmentsConfig::new(bytes, u32::try_from(count).unwrap());
    config.prefer = PageTier::Small;
    config.threads = 1;
    Segments::create(&config).unwrap()
}

/// A destination whose bytes are poison, and what became of a read into it.
pub(crate) struct Reading {
    pub(crate) request: GetRequest,
    memory: Memory,
    region: RegionId,
}

impl Node {
    /// The other's bytes are copied out of its memory.
    pub(crate) fn reach(&self, other: &Self, way: Way) {
        if way == Way::Shm {
            let boot = other.agent.boot().unwrap();
            self.agent.attach_neighbour(boot, other.agent.medium().segments()).unwrap();
        }
    }

    pub(crate) fn put(&self, number: u64, version: u64, len: u64) -> PutOutcome {
        let memory = Memory::host(usize::try_from(len).unwrap()).unwrap();
        memory.write(0, &bytes(number, version, range(0, len))).unwrap();
        let region = self.engine.register(memory).unwrap();
        let from = Addr { region, offset: 0 };
        let ranges = vec![Source { range: range(0, len), from }];
        let request = PutRequest { key: key(number), len, ranges };
        let outcome = self.client.put(&[request], soon())[0];
        self.engine.deregister(region).unwrap();
        outcome
    }

    /// Puts, and waits until the directory tells of it.
    pub(crate) fn publish(
        &self,
        directory: &EmbeddedDirectory,
        number: u64,
        version: u64,
        len: u64,
    ) {
        assert_eq!(self.put(number, version, len), PutOutcome::Created);
        self.wait_told(directory, number);
    }

    pub(crate) fn wait_told(&self, directory: &EmbeddedDirectory, number: u64) {
        let (boot, (generation, _)) =
            (self.agent.boot().unwrap(), self.agent.medium().medium().find(&key(number)).unwrap());
        eventually("the directory is told", || {
            let told = directory.locate(&[key(number)], soon()).unwrap();
            told[0].iter().any(|r| r.boot == boot && r.generation == generation)
        });
    }

    /// Ranges of one object, packed back to back in the destination.
    pub(crate) fn reading(&self, number: u64, len: u64, ranges: &[ByteRange]) -> Reading {
        reading_of(&*self.engine, number, len, ranges)
    }

    pub(crate) fn read(&self, readings: &[Reading], deadline: Instant) -> Vec<GetOutcome> {
        let requests: Vec<GetRequest> = readings.iter().map(|r| r.request.clone()).collect();
        let outcomes = self.client.get(&requests, deadline);
        readings.iter().for_each(|reading| self.engine.deregister(reading.region).unwrap());
        outcomes
    }

    /// Reads and compares: the outcome, after all bytes were found to be those of `version`, or the
    /// destination untouched.
    pub(crate) fn get(
        &self,
        number: u64,
        version: u64,
        len: u64,
        ranges: &[ByteRange],
    ) -> GetOutcome {
        let reading = self.reading(number, len, ranges);
        let outcome = self.read(std::slice::from_ref(&reading), soon())[0];
        if outcome.is_served() {
            reading.check(number, version);
        }
        outcome
    }

    pub(crate) fn is_resident(&self, number: u64) -> bool {
        self.agent.medium().medium().find(&key(number)).is_some()
    }
}

/// Ranges of one object, packed back to back in a destination of this engine.
pub(crate) fn reading_of(
    engine: &dyn TransferEngine,
    number: u64,
    len: u64,
    ranges: &[ByteRange],
) -> Reading {
    let total: u64 = ranges.iter().map(|r| r.len).sum();
    let memory = poisoned(total.clamp(1, 1 << 26));
    let region = engine.register(memory.clone()).unwrap();
    let mut at = 0;
    let mut destinations = Vec::new();
    for range in ranges {
        destinations.push(Destination { range: *range, to: Addr { region, offset: at } });
        at += range.len;
    }
    let request = GetRequest { key: key(number), len, ranges: destinations, will_read_all: false };
    Reading { request, memory, region }
}

impl Reading {
    pub(crate) fn free(&self, engine: &dyn TransferEngine) {
        engine.deregister(self.region).unwrap();
    }

    pub(crate) fn check(&self, number: u64, version: u64) {
        let seen = content(&self.memory);
        let mut at = 0;
        for destination in &self.request.ranges {
            let range = destination.range;
            for offset in range.offset..range.offset + range.len {
                let (want, have) = (byte(number, version, offset), seen[at]);
                assert_eq!(have, want, "byte {offset} of key {number}, storing {version}");
                at += 1;
            }
        }
    }

    pub(crate) fn is_untouched(&self) -> bool {
        touched(&self.memory) == 0
    }

    /// Whether all bytes are of this storing.
    pub(crate) fn is(&self, number: u64, version: u64) -> bool {
        let want = self.request.ranges.iter().flat_map(|d| bytes(number, version, d.range));
        want.eq(content(&self.memory))
    }
}

/// Waits for something that comes without a signal.
pub(crate) fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let until = soon();
    while !is() {
        assert!(Instant::now() < until, "{what}: not within the watchdog");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Nothing is left of anything: gauges are zero.
pub(crate) fn idle(node: &Node) {
    node.agent.forget_parts();
    eventually("everything has ended", || {
        let stats = node.agent.stats();
        (stats.assemblies, stats.fetches, stats.waiting, stats.holds) == (0, 0, 0, 0)
            && stats.arena_pages == 0
            && stats.medium.pending_bytes == 0
            && stats.medium.quarantine_bytes == 0
            && stats.medium.leases == 0
    });
}

/// Passes bytes between nodes and a peer; what comes from the peer can be held back, cut, or refused.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    gate: Arc<Gate>,
}

#[derive(Default)]
struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    target: Option<SocketAddr>,
    /// Bytes from the peer that may still pass; `None`: all.
    allowance: Option<u64>,
    streams: Vec<TcpStream>,
    refusing: bool,
}

impl Proxy {
    /// To nowhere yet.
    pub(crate) fn new() -> Self {
        let listener = TcpListener::bind(loopback()).unwrap();
        let address = listener.local_addr().unwrap();
        let gate = Arc::new(Gate::default());
        let of_thread = Arc::clone(&gate);
        thread::spawn(move || {
            for client in listener.incoming() {
                let Ok(client) = client else { return };
                let target = {
                    let state = of_thread.state.lock().unwrap();
                    if state.refusing { None } else { state.target }
                };
                let Some(peer) = target.and_then(|target| TcpStream::connect(target).ok()) else {
                    continue;
                };
                client.set_nodelay(true).unwrap();
                peer.set_nodelay(true).unwrap();
                // What is held back must not all find a place in the kernel.
                rustix::net::sockopt::set_socket_recv_buffer_size(&peer, 256 << 10).unwrap();
                let mut state = of_thread.state.lock().unwrap();
                state.streams.push(client.try_clone().unwrap());
                state.streams.push(peer.try_clone().unwrap());
                drop(state);
                pump(client.try_clone().unwrap(), peer.try_clone().unwrap(), None);
                pump(peer, client, Some(Arc::clone(&of_thread)));
            }
        });
        Self { address, gate }
    }

    pub(crate) fn lead_to(&self, target: SocketAddr) {
        self.gate.state.lock().unwrap().target = Some(target);
    }

    /// From now on only so many bytes of the peer pass.
    pub(crate) fn allow(&self, bytes: u64) {
        self.gate.state.lock().unwrap().allowance = Some(bytes);
    }

    pub(crate) fn allow_all(&self) {
        self.gate.state.lock().unwrap().allowance = None;
        self.gate.changed.notify_all();
    }

    /// New connections are let in again.
    pub(crate) fn welcome(&self) {
        self.gate.state.lock().unwrap().refusing = false;
    }

    /// Ends all connections; with `refuse`, new ones too.
    pub(crate) fn cut(&self, refuse: bool) {
        let mut state = self.gate.state.lock().unwrap();
        state.refusing = refuse;
        for stream in state.streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(state);
        self.gate.changed.notify_all();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.allow_all();
        self.cut(true);
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, gate: Option<Arc<Gate>>) {
    thread::spawn(move || {
        let mut buffer = vec![0; 16 << 10];
        'all: while let Ok(count @ 1..) = from.read(&mut buffer) {
            let mut at = 0;
            while at < count {
                let mut now = count - at;
                if let Some(gate) = &gate {
                    let mut state = gate.state.lock().unwrap();
                    while state.allowance == Some(0) {
                        state = gate.changed.wait(state).unwrap();
                    }
                    if let Some(left) = &mut state.allowance {
                        now = now.min(usize::try_from(*left).unwrap_or(usize::MAX));
                        *left -= now as u64;
                    }
                }
                if to.write_all(&buffer[at..at + now]).is_err() {
                    break 'all;
                }
                at += now;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    });
}

impl Reading {
    /// The same destination as a region of another engine.
    pub(crate) fn rebase(&mut self, engine: &dyn TransferEngine) -> RegionId {
        let region = engine.register(self.memory.clone()).unwrap();
        self.request.ranges.iter_mut().for_each(|destination| destination.to.region = region);
        region
    }
}

/// A host engine that says of every plan with a copy into one region that it has failed.
#[derive(Debug)]
pub(crate) struct Spoiling {
    engine: HostEngine,
    state: Mutex<(Option<RegionId>, Vec<Ticket>)>,
}

impl Default for Spoiling {
    fn default() -> Self {
        let engine = HostEngine::builder().build().unwrap();
        Self { engine, state: Mutex::default() }
    }
}

impl Spoiling {
    pub(crate) fn spoil(&self, region: RegionId) {
        self.state.lock().unwrap().0 = Some(region);
    }
}

impl TransferEngine for Spoiling {
    fn name(&self) -> &'static str {
        "spoiling"
    }

    fn capabilities(&self) -> Capabilities {
        self.engine.capabilities()
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransferError> {
        self.engine.register(memory)
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransferError> {
        self.engine.deregister(region)
    }

    fn submit(&self, plan: TransferPlan) -> Result<Ticket, Rejected> {
        // Held until the ticket is known: nobody polls in between.
        let mut state = self.state.lock().unwrap();
        let bad = plan.items.iter().any(|item| Some(item.dst.region) == state.0);
        let ticket = self.engine.submit(plan)?;
        if bad {
            state.1.push(ticket);
        }
        Ok(ticket)
    }

    fn poll(&self, out: &mut Vec<Completion>) -> usize {
        let state = self.state.lock().unwrap();
        let before = out.len();
        let count = self.engine.poll(out);
        for completion in out[before..].iter_mut().filter(|c| state.1.contains(&c.ticket)) {
            let why = "the test says so";
            completion.result = Err(TransferError::new(ucm_transport::ErrorKind::Failed, why));
        }
        count
    }

    fn set_waker(&self, waker: Option<Waker>) {
        self.engine.set_waker(waker);
    }

    fn quiesce(&self, target: Quiesce, deadline: Instant) -> Result<(), TransferError> {
        self.engine.quiesce(target, deadline)
    }
}

impl Reading {
    pub(crate) fn region(&self) -> RegionId {
        self.region
    }
}

/// A host engine whose copies wait at a gate.
#[derive(Debug)]
pub(crate) struct Gated {
    engine: HostEngine,
    state: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl Default for Gated {
    fn default() -> Self {
        let engine = HostEngine::builder().build().unwrap();
        Self { engine, state: Mutex::default(), changed: Condvar::new() }
    }
}

impl Gated {
    pub(crate) fn waiting(&self) -> usize {
        self.state.lock().unwrap().0
    }

    pub(crate) fn open(&self) {
        self.state.lock().unwrap().1 = true;
        self.changed.notify_all();
    }
}

impl TransferEngine for Gated {
    fn name(&self) -> &'static str {
        "gated"
    }

    fn capabilities(&self) -> Capabilities {
        self.engine.capabilities()
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransferError> {
        self.engine.register(memory)
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransferError> {
        self.engine.deregister(region)
    }

    fn submit(&self, plan: TransferPlan) -> Result<Ticket, Rejected> {
        let mut state = self.state.lock().unwrap();
        state.0 += 1;
        while !state.1 {
            state = self.changed.wait(state).unwrap();
        }
        state.0 -= 1;
        drop(state);
        self.engine.submit(plan)
    }

    fn poll(&self, out: &mut Vec<Completion>) -> usize {
        self.engine.poll(out)
    }

    fn set_waker(&self, waker: Option<Waker>) {
        self.engine.set_waker(waker);
    }

    fn quiesce(&self, target: Quiesce, deadline: Instant) -> Result<(), TransferError> {
        self.engine.quiesce(target, deadline)
    }
}

/// xorshift.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit.max(1)
    }

    pub(crate) fn ranges(&mut self, len: u64) -> Vec<ByteRange> {
        match self.below(3) {
            0 => vec![range(0, len)],
            1 => {
                let offset = self.below(len);
                vec![range(offset, 1 + self.below(len - offset))]
            }
            _ => {
                let cut = 1 + self.below(len - 2);
                vec![range(cut, len - cut), range(0, cut)]
            }
        }
    }
}

/// A host engine that tells of ends only when it was waited for since the last plan.
#[derive(Debug)]
pub(crate) struct Lazy {
    engine: HostEngine,
    waited: std::sync::atomic::AtomicBool,
}

impl Default for Lazy {
    fn default() -> Self {
        Self { engine: HostEngine::builder().build().unwrap(), waited: false.into() }
    }
}

impl TransferEngine for Lazy {
    fn name(&self) -> &'static str {
        "lazy"
    }

    fn capabilities(&self) -> Capabilities {
        self.engine.capabilities()
    }

    fn register(&self, memory: Memory) -> Result<RegionId, TransferError> {
        self.engine.register(memory)
    }

    fn deregister(&self, region: RegionId) -> Result<(), TransferError> {
        self.engine.deregister(region)
    }

    fn submit(&self, plan: TransferPlan) -> Result<Ticket, Rejected> {
        self.waited.store(false, std::sync::atomic::Ordering::SeqCst);
        self.engine.submit(plan)
    }

    fn poll(&self, out: &mut Vec<Completion>) -> usize {
        if self.waited.load(std::sync::atomic::Ordering::SeqCst) {
            self.engine.poll(out)
        } else {
            0
        }
    }

    fn set_waker(&self, waker: Option<Waker>) {
        self.engine.set_waker(waker);
    }

    fn quiesce(&self, target: Quiesce, deadline: Instant) -> Result<(), TransferError> {
        self.waited.store(true, std::sync::atomic::Ordering::SeqCst);
        self.engine.quiesce(target, deadline)
    }
}
