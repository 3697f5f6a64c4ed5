//! Objects of an RDMA device as values that give themselves back, and the calls on them.
//!
//! **Invariant:** an object outlives those made of it; memory stays mapped for as long as it is
//! registered, and registered memory that the device does not give back is kept for ever. A forked
//! child gives nothing back: the objects are its parent's.

use std::{
    ffi::{CStr, c_int, c_uint, c_void},
    fmt,
    mem::ManuallyDrop,
    os::fd::{AsFd, BorrowedFd},
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::{fs::OFlags, process::Pid};

use super::{
    absent::{RdmaAbsent, VerbError},
    sys::{self, Functions},
};
use crate::Memory;

mod pair;

pub(super) use pair::{QueuePair, Route, Work};

type Verb<T> = Result<T, VerbError>;

/// Objects of this process that their device did not take back.
pub(super) static LEAKED: AtomicU64 = AtomicU64::new(0);

fn done(call: &'static str, answer: c_int) -> Verb<()> {
    match answer {
        0 => Ok(()),
        // Some calls return the number, others leave it in `errno`.
        -1 => Err(VerbError::last(call)),
        number => Err(VerbError::of(call, number)),
    }
}

fn leaked(what: &str, error: &VerbError) {
    LEAKED.fetch_add(1, Ordering::Relaxed);
    tracing::error!("{what} stays with the device until this process ends: {error}");
}

/// Names of all devices.
pub(super) fn device_names() -> Result<Vec<String>, RdmaAbsent> {
    let list = DeviceList::new()?;
    Ok((0..list.count).filter_map(|at| list.name(at)).collect())
}

struct DeviceList {
    functions: &'static Functions,
    raw: NonNull<*mut sys::Device>,
    count: usize,
}

impl DeviceList {
    fn new() -> Result<Self, RdmaAbsent> {
        let functions = sys::functions()?;
        let mut count = 0;
        // SAFETY: the place for the count is ours.
        let raw = unsafe { (functions.ibv_get_device_list)(&mut count) };
        let Some(raw) = NonNull::new(raw) else {
            let error = VerbError::last("ibv_get_device_list");
            // A kernel without RDMA has no such thing as devices.
            if error.is_unsupported() || error.errno == rustix::io::Errno::NOENT {
                return Err(RdmaAbsent::NoDevice { wanted: None, devices: Vec::new() });
            }
            return Err(error.into());
        };
        Ok(Self { functions, raw, count: usize::try_from(count).unwrap_or(0) })
    }

    fn device(&self, at: usize) -> *mut sys::Device {
        if at >= self.count {
            return ptr::null_mut();
        }
        // SAFETY: the list has `count` entries, which stay until it is freed.
        let entry = unsafe { self.raw.add(at) };
        // SAFETY: as above.
        unsafe { entry.read() }
    }

    fn name(&self, at: usize) -> Option<String> {
        let device = NonNull::new(self.device(at))?;
        // SAFETY: a device of the list.
        let name = NonNull::new(
            unsafe { (self.functions.ibv_get_device_name)(device.as_ptr()) }.cast_mut(),
        )?;
        // SAFETY: a text that ends in zero and lives as long as the list.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) };
        Some(name.to_string_lossy().into_owned())
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: got from the library, given back once.
        unsafe { (self.functions.ibv_free_device_list)(self.raw.as_ptr()) };
    }
}

/// An opened device.
pub(super) struct Context {
    raw: NonNull<sys::Context>,
    functions: &'static Functions,
    process: Pid,
}

// SAFETY: the library's objects may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: as above; all calls on a context lock what they must.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn open(name: &str) -> Result<Arc<Self>, RdmaAbsent> {
        let list = DeviceList::new()?;
        let at = (0..list.count).find(|at| list.name(*at).as_deref() == Some(name));
        let Some(at) = at else {
            let devices = (0..list.count).filter_map(|at| list.name(at)).collect();
            return Err(RdmaAbsent::NoDevice { wanted: Some(name.to_owned()), devices });
        };
        let functions = list.functions;
        // SAFETY: a device of the list, which is freed after this.
        let raw = unsafe { (functions.ibv_open_device)(list.device(at)) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbError::last("ibv_open_device"))?;
        Ok(Arc::new(Self { raw, functions, process: rustix::process::getpid() }))
    }

    pub(super) fn is_of_this_process(&self) -> bool {
        rustix::process::getpid() == self.process
    }

    pub(super) fn query(&self) -> Verb<sys::DeviceAttr> {
        let mut attr = std::mem::MaybeUninit::<sys::DeviceAttr>::zeroed();
        // SAFETY: a live context, and a place of ours.
        let answer =
            unsafe { (self.functions.ibv_query_device)(self.raw.as_ptr(), attr.as_mut_ptr()) };
        done("ibv_query_device", answer)?;
        // SAFETY: numbers, for which zeros are fine too.
        Ok(unsafe { attr.assume_init() })
    }

    pub(super) fn query_port(&self, port: u8) -> Verb<sys::PortAttr> {
        let mut attr = sys::PortAttr::default();
        // SAFETY: a live context, and a place of ours; the function writes no more than this.
        let answer = unsafe { (self.functions.ibv_query_port)(self.raw.as_ptr(), port, &mut attr) };
        done("ibv_query_port", answer)?;
        Ok(attr)
    }

    pub(super) fn query_gid(&self, port: u8, index: u8) -> Verb<sys::Gid> {
        let mut gid = sys::Gid::default();
        // SAFETY: a live context, and a place of ours.
        let answer = unsafe {
            (self.functions.ibv_query_gid)(self.raw.as_ptr(), port, c_int::from(index), &mut gid)
        };
        done("ibv_query_gid", answer)?;
        Ok(gid)
    }

    /// What a completion's status is called.
    pub(super) fn status_name(&self, status: c_uint) -> String {
        // SAFETY: any number may be asked about.
        let text = unsafe { (self.functions.ibv_wc_status_str)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: a constant text.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    fn ops(&self) -> &sys::ContextOps {
        // SAFETY: a live context, whose table does not change after it was opened.
        unsafe { &(*self.raw.as_ptr()).ops }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.is_of_this_process() {
            // SAFETY: opened by us, closed once, and nothing made of it is left.
            let answer = unsafe { (self.functions.ibv_close_device)(self.raw.as_ptr()) };
            if let Err(error) = done("ibv_close_device", answer) {
                leaked("a context", &error);
            }
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("process", &self.process).finish_non_exhaustive()
    }
}

/// A protection domain: what belongs together.
#[derive(Debug)]
pub(super) struct Domain {
    raw: NonNull<sys::Pd>,
    pub(super) context: Arc<Context>,
}

// SAFETY: the library's objects may be used from any thread.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    pub(super) fn new(context: &Arc<Context>) -> Verb<Arc<Self>> {
        // SAFETY: a live context.
        let raw = unsafe { (context.functions.ibv_alloc_pd)(context.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbError::last("ibv_alloc_pd"))?;
        Ok(Arc::new(Self { raw, context: Arc::clone(context) }))
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if self.context.is_of_this_process() {
            // SAFETY: made by us, given back once; everything in it kept it alive.
            let answer = unsafe { (self.context.functions.ibv_dealloc_pd)(self.raw.as_ptr()) };
            if let Err(error) = done("ibv_dealloc_pd", answer) {
                leaked("a protection domain", &error);
            }
        }
    }
}

/// Who may do what with registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rights {
    /// This device, for itself.
    Own,
    /// Peers may read.
    Read,
    /// Peers may read and write.
    ReadWrite,
}

impl Rights {
    fn flags(self) -> c_int {
        match self {
            Self::Own => sys::ACCESS_LOCAL_WRITE,
            Self::Read => sys::ACCESS_REMOTE_READ,
            Self::ReadWrite => {
                sys::ACCESS_LOCAL_WRITE | sys::ACCESS_REMOTE_READ | sys::ACCESS_REMOTE_WRITE
            }
        }
    }
}

/// Registered memory.
#[derive(Debug)]
pub(super) struct Registered {
    raw: Option<NonNull<sys::Mr>>,
    domain: Arc<Domain>,
    /// As the device addresses it.
    pub(super) addr: u64,
    pub(super) len: u64,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
    memory: Memory,
}

// SAFETY: the library's objects may be used from any thread.
unsafe impl Send for Registered {}
// SAFETY: as above; shared references only read numbers.
unsafe impl Sync for Registered {}

impl Registered {
    /// Registers all of this host memory by one call.
    pub(super) fn new(domain: &Arc<Domain>, memory: Memory, rights: Rights) -> Verb<Self> {
        let (base, len) = (memory.as_ptr().as_ptr(), memory.len());
        let register = domain.context.functions.ibv_reg_mr;
        // SAFETY: a live domain; the memory is mapped for as long as it is registered.
        let raw = unsafe { register(domain.raw.as_ptr(), base.cast(), len, rights.flags()) };
        Self::made("ibv_reg_mr", raw, domain, memory)
    }

    /// Registers memory of another device, by its dmabuf.
    pub(super) fn of_dmabuf(
        domain: &Arc<Domain>,
        memory: Memory,
        (dmabuf, offset): (BorrowedFd<'_>, u64),
        rights: Rights,
    ) -> Verb<Self> {
        const CALL: &str = "ibv_reg_dmabuf_mr";
        let Some(register) = domain.context.functions.ibv_reg_dmabuf_mr else {
            return Err(VerbError { call: CALL, errno: rustix::io::Errno::OPNOTSUPP });
        };
        let addr = memory.as_ptr().as_ptr().expose_provenance() as u64;
        let fd = std::os::fd::AsRawFd::as_raw_fd(&dmabuf);
        // SAFETY: a live domain; the kernel checks the descriptor and the range in it.
        let raw = unsafe {
            register(domain.raw.as_ptr(), offset, memory.len(), addr, fd, rights.flags())
        };
        Self::made(CALL, raw, domain, memory)
    }

    fn made(
        call: &'static str,
        raw: *mut sys::Mr,
        domain: &Arc<Domain>,
        memory: Memory,
    ) -> Verb<Self> {
        let raw = NonNull::new(raw).ok_or_else(|| VerbError::last(call))?;
        // SAFETY: just made.
        let lkey = unsafe { (*raw.as_ptr()).lkey };
        // SAFETY: as above.
        let rkey = unsafe { (*raw.as_ptr()).rkey };
        let addr = memory.as_ptr().as_ptr().expose_provenance() as u64;
        let len = memory.len() as u64;
        Ok(Self { raw: Some(raw), domain: Arc::clone(domain), addr, len, lkey, rkey, memory })
    }

    /// The memory itself.
    #[cfg(test)]
    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// First byte after it.
    pub(super) fn end(&self) -> u64 {
        self.addr + self.len
    }

    /// Ends the registration: after this no peer and no device reaches the memory by it.
    ///
    /// # Errors
    /// The device still has it; so it stays what it was.
    pub(super) fn end_now(&mut self) -> Verb<()> {
        let Some(raw) = self.raw else { return Ok(()) };
        // SAFETY: registered by us; `raw` is taken when it is gone.
        done("ibv_dereg_mr", unsafe {
            (self.domain.context.functions.ibv_dereg_mr)(raw.as_ptr())
        })?;
        self.raw = None;
        Ok(())
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if !self.domain.context.is_of_this_process() {
            return;
        }
        if let Err(error) = self.end_now() {
            leaked("registered memory", &error);
            let _ = ManuallyDrop::new((self.memory.clone(), Arc::clone(&self.domain)));
        }
    }
}

/// Where completions announce themselves.
pub(super) struct Channel {
    raw: NonNull<sys::CompChannel>,
    context: Arc<Context>,
}

// SAFETY: the library's objects may be used from any thread.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Channel {
    pub(super) fn new(context: &Arc<Context>) -> Verb<Arc<Self>> {
        const CALL: &str = "ibv_create_comp_channel";
        // SAFETY: a live context.
        let raw = unsafe { (context.functions.ibv_create_comp_channel)(context.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbError::last(CALL))?;
        let this = Self { raw, context: Arc::clone(context) };
        let set = rustix::fs::fcntl_getfl(&this)
            .and_then(|flags| rustix::fs::fcntl_setfl(&this, flags | OFlags::NONBLOCK));
        set.map_err(|errno| VerbError { call: CALL, errno })?;
        Ok(Arc::new(this))
    }

    /// Takes all announcements that are there.
    pub(super) fn hush(&self) {
        let (mut cq, mut note) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a live channel, and places of ours.
        while unsafe {
            (self.context.functions.ibv_get_cq_event)(self.raw.as_ptr(), &mut cq, &mut note)
        } == 0
        {
            // SAFETY: the queue cannot be gone before its announcements are acknowledged.
            unsafe { (self.context.functions.ibv_ack_cq_events)(cq, 1) };
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor of a live channel.
        let fd = unsafe { (*self.raw.as_ptr()).fd };
        // SAFETY: open for as long as the channel lives.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if self.context.is_of_this_process() {
            // SAFETY: made by us, given back once; its queues kept it alive.
            let answer =
                unsafe { (self.context.functions.ibv_destroy_comp_channel)(self.raw.as_ptr()) };
            if let Err(error) = done("ibv_destroy_comp_channel", answer) {
                leaked("a completion channel", &error);
            }
        }
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").finish_non_exhaustive()
    }
}

/// A completion queue.
pub(super) struct Completions {
    raw: NonNull<sys::Cq>,
    context: Arc<Context>,
    _channel: Option<Arc<Channel>>,
}

// SAFETY: the library's objects may be used from any thread.
unsafe impl Send for Completions {}
// SAFETY: as above; polling takes the queue's own lock.
unsafe impl Sync for Completions {}

impl Completions {
    pub(super) fn new(
        context: &Arc<Context>,
        entries: u32,
        channel: Option<&Arc<Channel>>,
    ) -> Verb<Self> {
        let announce = channel.map_or(ptr::null_mut(), |channel| channel.raw.as_ptr());
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: live objects; the queue keeps them alive.
        let raw = unsafe {
            (context.functions.ibv_create_cq)(
                context.raw.as_ptr(),
                entries,
                ptr::null_mut::<c_void>(),
                announce,
                0,
            )
        };
        let raw = NonNull::new(raw).ok_or_else(|| VerbError::last("ibv_create_cq"))?;
        Ok(Self { raw, context: Arc::clone(context), _channel: channel.cloned() })
    }

    /// Completions that fit.
    pub(super) fn entries(&self) -> u32 {
        // SAFETY: a live queue.
        u32::try_from(unsafe { (*self.raw.as_ptr()).cqe }).unwrap_or(0)
    }

    /// Takes completions; says how many.
    pub(super) fn poll(&self, into: &mut [sys::Wc]) -> Verb<usize> {
        const CALL: &str = "ibv_poll_cq";
        let Some(poll) = self.context.ops().poll_cq else {
            return Err(VerbError { call: CALL, errno: rustix::io::Errno::NOSYS });
        };
        let most = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
        // SAFETY: a live queue, and room for as many.
        let count = unsafe { poll(self.raw.as_ptr(), most, into.as_mut_ptr()) };
        usize::try_from(count).map_err(|_| VerbError::of(CALL, count))
    }

    /// Asks to be told once about the next completion.
    pub(super) fn arm(&self) -> Verb<()> {
        const CALL: &str = "ibv_req_notify_cq";
        let Some(arm) = self.context.ops().req_notify_cq else {
            return Err(VerbError { call: CALL, errno: rustix::io::Errno::NOSYS });
        };
        // SAFETY: a live queue.
        done(CALL, unsafe { arm(self.raw.as_ptr(), 0) })
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        if self.context.is_of_this_process() {
            // SAFETY: made by us, given back once.
            let answer = unsafe { (self.context.functions.ibv_destroy_cq)(self.raw.as_ptr()) };
            if let Err(error) = done("ibv_destroy_cq", answer) {
                leaked("a completion queue", &error);
            }
        }
    }
}

impl fmt::Debug for Completions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completions").finish_non_exhaustive()
    }
}
