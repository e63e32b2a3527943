//! The io_uring engine: one ring and one thread per device.
//!
//! The thread sleeps in `io_uring_enter`. A read of an eventfd is always armed in the ring, and
//! whoever adds an operation while the thread sleeps writes to that eventfd.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::channel::{Sender, bounded};
use crate::sync::thread::{self, ThreadId};
use crate::sync::{Condvar, Mutex};
use io_uring::{IoUring, opcode, squeue, types};
use kvtier_codec::image::PAGE;

use super::lone::Lone;
use super::queue::{Finished, MAX_PIECES, Next, Piece, Queue, Step};
use super::{Engine, Kind, Limits, Op};
use crate::buf::Pages;
use crate::clock::Clock;
use crate::device::Device;

/// Every piece in flight and the eventfd have an entry, so neither queue can overflow.
const ENTRIES: u32 = 2 * MAX_PIECES as u32;
/// Regions that can be registered at a time.
const REGIONS: u16 = 1024;
/// The kernel takes regions of at most this size.
const REGION_BYTES: usize = 1 << 30;
/// How often the ring thread looks whether a late read has come.
const GLANCE: Duration = Duration::from_millis(5);
/// Marks the eventfd's completion; pieces are numbered from 0.
const WAKE: u64 = u64::MAX;

/// The io_uring engine.
pub struct Uring {
    shared: Arc<Shared>,
    fd: RawFd,
    thread: ThreadId,
}

struct Shared {
    inbox: Mutex<Inbox>,
    wake: File,
    ended: Condvar,
}

struct Inbox {
    /// A read past the ring that its caller no longer waits for. Dropped before the queue, which has its
    /// memory.
    late: Option<(Lone, Piece)>,
    queue: Queue,
    /// The ring thread is about to sleep, or sleeps, and should be woken.
    asleep: bool,
    /// The thread has ended; did all that was in flight complete?
    ended: Option<bool>,
    /// Registered memory: the beginning of the ring's table, and how long that is.
    regions: Vec<Region>,
    most_regions: usize,
    regions_changed: bool,
}

/// One entry of the ring's table of registered memory.
#[derive(Clone, Copy, PartialEq)]
enum Region {
    Vacant,
    Wanted {
        ptr: usize,
        len: usize,
    },
    Active {
        ptr: usize,
        len: usize,
    },
    /// The kernel refused it; whoever wanted it still holds the entry.
    Refused,
    Leaving,
}

impl Uring {
    /// Makes the ring and proves by a real read that it works.
    pub fn start(device: Arc<dyn Device>, limits: &Limits) -> io::Result<Self> {
        let fd = device.raw_fd().ok_or(io::ErrorKind::Unsupported)?;
        let shared = Arc::new(Shared {
            inbox: Mutex::new(Inbox {
                late: None,
                queue: Queue::new(
                    limits.inflight_bytes,
                    limits.emulate_gbs,
                    limits.clock.now(),
                ),
                asleep: false,
                ended: None,
                regions: Vec::new(),
                most_regions: 0,
                regions_changed: false,
            }),
            wake: eventfd()?,
            ended: Condvar::new(),
        });
        let (clock, ring_shared) = (limits.clock.clone(), shared.clone());
        let (ready, started) = bounded(1);
        // The ring belongs to the one thread that submits to it, so that thread makes it.
        let thread = thread::Builder::new()
            .name("kvtier-ring".into())
            .spawn(move || Ring::serve(device, clock, ring_shared, &ready))?
            .thread()
            .id();
        match started.recv() {
            Ok(Ok(())) => Ok(Uring { shared, fd, thread }),
            Ok(Err(e)) => Err(e),
            Err(_) => Err(io::Error::other("the ring thread died")),
        }
    }
}

impl Inbox {
    /// Ends a read that went past the ring. What was not read is the ring thread's to read.
    fn end_alone(&mut self, piece: Piece, answer: Option<i64>) -> Option<Finished> {
        if answer.is_some_and(|answer| piece.is_whole(answer)) {
            return self.queue.settle(piece, Ok(()));
        }
        self.queue.take_back(piece);
        None
    }

    /// Ends the late read, if its answer has come.
    fn end_late(&mut self) -> Option<Finished> {
        let (lone, piece) = self.late.take()?;
        let answer = lone.wait(Instant::now());
        if answer.is_none() {
            self.late = Some((lone, piece));
            return None;
        }
        lone.give_back();
        self.end_alone(piece, answer)
    }
}

impl Shared {
    /// Wakes the ring thread if it sleeps. To be called after what it should see was done.
    fn wake_if(&self, asleep: bool) {
        if asleep && let Err(e) = (&self.wake).write_all(&1u64.to_ne_bytes()) {
            tracing::error!("cannot wake the ring thread: {e}");
        }
    }
}

impl Engine for Uring {
    fn submit(&self, op: Op) {
        let mut inbox = self.shared.inbox.lock();
        let refused = inbox.queue.push(op).err();
        let asleep = std::mem::take(&mut inbox.asleep);
        drop(inbox);
        self.shared.wake_if(asleep);
        if let Some(refused) = refused {
            refused.tell();
        }
    }

    fn attend(&self, op: Op, until: Instant) {
        if until <= Instant::now() {
            return self.submit(op);
        }
        let shared = &self.shared;
        let begun = shared.inbox.lock().queue.begin_alone(op);
        let piece = match begun {
            Ok(piece) => piece,
            Err(op) => return self.submit(op),
        };
        let sent = Lone::get().and_then(|lone| {
            // SAFETY: the queue keeps the piece's memory until it is settled or taken back, which
            // nobody does before the answer. The device is open until the queue is finished.
            unsafe { lone.send(self.fd, &piece) }.map(|()| lone)
        });
        let answer = sent.as_ref().ok().and_then(|lone| lone.wait(until));
        let mut inbox = shared.inbox.lock();
        let finished = match sent {
            Ok(lone) if answer.is_none() => {
                inbox.late = Some((lone, piece));
                None
            }
            sent => {
                sent.into_iter().for_each(Lone::give_back);
                inbox.end_alone(piece, answer)
            }
        };
        // The ring thread may have gone to sleep over what waits, or with this to end last.
        let wake = inbox.late.is_some() || inbox.queue.wants();
        drop(inbox);
        shared.wake_if(wake);
        if let Some(finished) = finished {
            finished.tell();
        }
    }

    fn register(&self, ptr: usize, len: usize) -> Vec<u16> {
        let mut inbox = self.shared.inbox.lock();
        let mut taken = Vec::new();
        for start in (0..len).step_by(REGION_BYTES) {
            let region = Region::Wanted {
                ptr: ptr + start,
                len: REGION_BYTES.min(len - start),
            };
            let vacant = inbox.regions.iter().position(|r| *r == Region::Vacant);
            match vacant {
                Some(index) => inbox.regions[index] = region,
                None if inbox.regions.len() < inbox.most_regions => inbox.regions.push(region),
                None => break,
            }
            taken.push(vacant.unwrap_or(inbox.regions.len() - 1) as u16);
        }
        inbox.regions_changed = true;
        let asleep = std::mem::take(&mut inbox.asleep);
        drop(inbox);
        self.shared.wake_if(asleep);
        taken
    }

    fn unregister(&self, regions: &[u16]) {
        let mut inbox = self.shared.inbox.lock();
        // From here on no piece finds the region, even if the kernel lets it go a little later.
        for &index in regions {
            inbox.regions[usize::from(index)] = Region::Leaving;
        }
        inbox.regions_changed = true;
        let asleep = std::mem::take(&mut inbox.asleep);
        drop(inbox);
        self.shared.wake_if(asleep);
    }

    fn close(&self, deadline: Option<Instant>) -> bool {
        let mut inbox = self.shared.inbox.lock();
        inbox.queue.close();
        self.shared.wake_if(true);
        if thread::current().id() == self.thread {
            return true; // called by a callback: the thread ends with its last operation
        }
        loop {
            if let Some(all) = inbox.ended {
                return all;
            }
            match deadline {
                None => self.shared.ended.wait(&mut inbox),
                Some(at) if self.shared.ended.wait_until(&mut inbox, at).timed_out() => {
                    let unsent = inbox.queue.cancel_waiting("the engine was closed");
                    let all = inbox.queue.is_finished();
                    drop(inbox);
                    self.shared.wake_if(true);
                    unsent.into_iter().for_each(Finished::tell);
                    return all;
                }
                Some(_) => {}
            }
        }
    }

    fn name(&self) -> &'static str {
        "io_uring"
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.shared.inbox.lock().queue.close();
        self.shared.wake_if(true);
    }
}

/// What the ring thread owns.
struct Ring {
    ring: IoUring,
    clock: Arc<dyn Clock>,
    shared: Arc<Shared>,
    /// Pieces in the ring, by the number their completion carries.
    sent: Vec<Option<Piece>>,
    vacant: Vec<usize>,
    /// Where the eventfd is read to; the ring writes there while `armed`.
    wake_count: Pages,
    armed: bool,
    /// Keeps the descriptor open. Dropped after the ring.
    _device: Arc<dyn Device>,
}

impl Ring {
    fn serve(
        device: Arc<dyn Device>,
        clock: Arc<dyn Clock>,
        shared: Arc<Shared>,
        ready: &Sender<io::Result<()>>,
    ) {
        short_slices();
        let ring = match new_ring().and_then(|ring| prove(ring, &*device)) {
            Ok(ring) => ring,
            Err(e) => {
                let _ = ready.send(Err(e)); // nobody listens only if the starter is gone
                return;
            }
        };
        if ring
            .submitter()
            .register_buffers_sparse(u32::from(REGIONS))
            .is_ok()
        {
            shared.inbox.lock().most_regions = usize::from(REGIONS);
        }
        let _ = ready.send(Ok(()));
        let mut this = Ring {
            ring,
            clock,
            shared: shared.clone(),
            sent: (0..MAX_PIECES).map(|_| None).collect(),
            vacant: (0..MAX_PIECES).collect(),
            wake_count: Pages::new(1),
            armed: false,
            _device: device,
        };
        if let Err(e) = this.run() {
            // The kernel may still write to the buffers of what is in flight: keep all of it for ever.
            tracing::error!("io_uring failed: {e}; the device is given up");
            std::mem::forget(this);
            let mut inbox = shared.inbox.lock();
            inbox.queue.close();
            inbox.ended = Some(false);
            let unsent = inbox.queue.cancel_waiting("io_uring failed");
            drop(inbox);
            shared.ended.notify_all();
            unsent.into_iter().for_each(Finished::tell);
            return;
        }
        drop(this);
        shared.inbox.lock().ended = Some(true);
        shared.ended.notify_all();
    }

    fn run(&mut self) -> io::Result<()> {
        let mut settled = Vec::new();
        let mut finished = Vec::new();
        let mut pieces = Vec::new();
        loop {
            self.reap(&mut settled)?;
            let shared = self.shared.clone();
            let mut inbox = shared.inbox.lock();
            if std::mem::take(&mut inbox.regions_changed) {
                let wanted = inbox.regions.clone();
                drop(inbox);
                let changes = self.update_regions(&wanted);
                inbox = shared.inbox.lock();
                for (index, after) in changes {
                    let now = &mut inbox.regions[index];
                    // Given up in the meantime: the next turn takes it out again.
                    if !(*now == Region::Leaving && after != Region::Vacant) {
                        *now = after;
                    }
                }
            }
            finished.extend(
                settled
                    .drain(..)
                    .filter_map(|(piece, result)| inbox.queue.settle(piece, result)),
            );
            finished.extend(inbox.end_late());
            let mut wake_at = None;
            loop {
                match inbox.queue.next(self.clock.now()) {
                    Next::Piece(piece) => {
                        let region = find_region(&inbox.regions, &piece);
                        pieces.push((piece, region));
                    }
                    Next::Wait(until) => break wake_at = Some(until),
                    Next::Nothing => break,
                }
            }
            if inbox.late.is_some() {
                let soon = self.clock.now() + GLANCE;
                wake_at = Some(wake_at.map_or(soon, |at| soon.min(at)));
            }
            let idle = finished.is_empty();
            if idle && inbox.queue.is_finished() {
                break;
            }
            inbox.asleep = idle && inbox.queue.has_room();
            drop(inbox);
            for (piece, region) in pieces.drain(..) {
                self.send(piece, region)?;
            }
            self.arm()?;
            if idle {
                self.wait(wake_at)?;
            } else {
                // The device gets its next work before the owners are told of the last.
                self.enter(|ring| ring.submit())?;
                finished.drain(..).for_each(Finished::tell);
            }
        }
        self.disarm()
    }

    /// Takes the completions that have arrived; sends the rest of what came back short.
    fn reap(&mut self, settled: &mut Vec<(Piece, io::Result<()>)>) -> io::Result<()> {
        let mut again = Vec::new();
        for entry in self.ring.completion() {
            if entry.user_data() == WAKE {
                self.armed = false;
                continue;
            }
            let index = entry.user_data() as usize;
            let Some(mut piece) = self.sent.get_mut(index).and_then(Option::take) else {
                tracing::error!("io_uring completed a request that is not in flight");
                continue;
            };
            self.vacant.push(index);
            let answer = match entry.result() {
                n if n >= 0 => Ok(n as usize),
                errno => Err(io::Error::from_raw_os_error(-errno)),
            };
            match piece.advance(answer) {
                Step::Settled(result) => settled.push((piece, result)),
                Step::Again => again.push(piece),
            }
        }
        // The queue has an entry for every piece in flight.
        again
            .into_iter()
            .try_for_each(|piece| self.send(piece, None))
    }

    fn send(&mut self, piece: Piece, region: Option<u16>) -> io::Result<()> {
        let full = || io::Error::other("the ring has no free entry");
        let index = self.vacant.pop().ok_or_else(full)?;
        let (ptr, len) = piece.memory();
        let (fd, len, offset) = (types::Fixed(0), len as u32, piece.offset());
        let entry = match (piece.kind, region) {
            (Kind::Read, None) => opcode::Read::new(fd, ptr, len).offset(offset).build(),
            (Kind::Write, None) => opcode::Write::new(fd, ptr, len).offset(offset).build(),
            (Kind::Read, Some(region)) => opcode::ReadFixed::new(fd, ptr, len, region)
                .offset(offset)
                .build(),
            (Kind::Write, Some(region)) => opcode::WriteFixed::new(fd, ptr, len, region)
                .offset(offset)
                .build(),
        };
        self.sent[index] = Some(piece);
        self.push(&entry.user_data(index as u64))
    }

    /// Lets the eventfd complete a request, so that others can end the thread's sleep.
    fn arm(&mut self) -> io::Result<()> {
        if self.armed {
            return Ok(());
        }
        let fd = types::Fd(self.shared.wake.as_raw_fd());
        let entry = opcode::Read::new(fd, self.wake_count.as_mut_ptr(), 8).build();
        self.armed = true;
        self.push(&entry.user_data(WAKE))
    }

    /// Ends the read of the eventfd, so that nothing is in the ring when it is dropped.
    fn disarm(&mut self) -> io::Result<()> {
        self.shared.wake_if(self.armed);
        while self.armed {
            self.wait(None)?;
            self.reap(&mut Vec::new())?;
        }
        // The kernel takes a dropped ring apart when it finds the time; the device is free at once.
        let _ = self.ring.submitter().unregister_files(); // it will be freed then at the latest
        Ok(())
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: memory and descriptor of the request outlive it: pieces stay in `sent`, and with
        // them their buffers in the queue, and `wake_count` in `self`, until the completion; if the
        // thread gives up before, it leaks all of them.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.enter(|ring| ring.submit())?;
        }
        Ok(())
    }

    fn wait(&mut self, until: Option<Instant>) -> io::Result<()> {
        let Some(until) = until else {
            return self.enter(|ring| ring.submit_and_wait(1));
        };
        let left = until.saturating_duration_since(self.clock.now());
        let left = types::Timespec::from(left);
        let args = types::SubmitArgs::new().timespec(&left);
        self.enter(|ring| ring.submitter().submit_with_args(1, &args))
    }

    /// Enters the kernel once; what only delays the work is not an error.
    fn enter(&mut self, call: impl FnOnce(&IoUring) -> io::Result<usize>) -> io::Result<()> {
        match call(&self.ring) {
            Err(e) => match e.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ETIME) => Ok(()),
                _ => Err(e),
            },
            Ok(_) => Ok(()),
        }
    }

    /// Tells the kernel which regions come and go; returns what became of those.
    fn update_regions(&self, regions: &[Region]) -> Vec<(usize, Region)> {
        let mut changes = Vec::new();
        for (index, region) in regions.iter().enumerate() {
            let (ptr, len, after, refused) = match *region {
                Region::Wanted { ptr, len } => {
                    (ptr, len, Region::Active { ptr, len }, Region::Refused)
                }
                Region::Leaving => (0, 0, Region::Vacant, Region::Vacant),
                Region::Vacant | Region::Refused | Region::Active { .. } => continue,
            };
            let entry = libc::iovec {
                iov_base: ptr as *mut _,
                iov_len: len,
            };
            // SAFETY: the memory stays mapped until `unregister`; the kernel pins its pages, and
            // keeps them pinned for what is in flight.
            let updated = unsafe {
                self.ring
                    .submitter()
                    .register_buffers_update(index as u32, &[entry], None)
            };
            changes.push(match updated {
                Ok(()) => (index, after),
                Err(e) => {
                    // Most often the memlock limit. Unregistered memory works, at more CPU time.
                    tracing::debug!("cannot register {len} bytes with io_uring: {e}");
                    (index, refused)
                }
            });
        }
        changes
    }
}

/// The registered region that the piece's memory lies in.
fn find_region(regions: &[Region], piece: &Piece) -> Option<u16> {
    let (from, len) = piece.memory();
    let from = from as usize;
    let inside = |region: &Region| matches!(*region, Region::Active { ptr, len: bytes } if ptr <= from && from + len <= ptr + bytes);
    regions.iter().position(inside).map(|index| index as u16)
}

/// RLIMIT_MEMLOCK of this process in bytes; `None` is unlimited.
pub fn memlock() -> Option<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure outlives the call.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) } == 0;
    (known && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Asks the scheduler for short turns of this thread, which then come soon after it is woken, also
/// where another thread computes on its processor: it only passes on what others wait for. A wish:
/// kernels before 6.12 do not know it.
fn short_slices() {
    #[repr(C)]
    #[derive(Default)]
    struct Attributes {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime: u64,
        deadline: u64,
        period: u64,
    }
    const SLICE_NS: u64 = 100_000;
    let mut attributes = Attributes::default();
    let size = std::mem::size_of::<Attributes>() as u32;
    // SAFETY: the structure outlives both calls, and is as long as they are told.
    unsafe {
        if libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) == 0 {
            attributes.runtime = SLICE_NS;
            libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0);
        }
    }
}

fn eventfd() -> io::Result<File> {
    // SAFETY: plain numbers in, a descriptor or -1 out.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else owns.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// A ring with the cheapest completions the kernel offers.
fn new_ring() -> io::Result<IoUring> {
    IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .build(ENTRIES)
        .or_else(|_| IoUring::new(ENTRIES)) // before Linux 6.1
}

/// Registers the device and reads its first page: what a sandbox forbids shows here.
fn prove(mut ring: IoUring, device: &dyn Device) -> io::Result<IoUring> {
    let fd = device.raw_fd().ok_or(io::ErrorKind::Unsupported)?;
    ring.submitter().register_files(&[fd])?;
    let mut page = Pages::new(1);
    let entry = opcode::Read::new(types::Fixed(0), page.as_mut_ptr(), PAGE as u32).build();
    // SAFETY: the page lives until the completion has been taken, or for ever.
    unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
    let mut sent = false;
    loop {
        match ring.submit_and_wait(1) {
            Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
            Err(e) => {
                if sent {
                    std::mem::forget(page);
                }
                return Err(e);
            }
            Ok(count) => sent |= count > 0,
        }
        let answer = ring.completion().next().map(|entry| entry.result());
        match answer {
            Some(errno) if errno < 0 => return Err(io::Error::from_raw_os_error(-errno)),
            Some(_) => return Ok(ring),
            None => {}
        }
    }
}
