//! One read at a time that its caller waits for himself, which spares two hand-overs between threads.
//!
//! It goes through the kernel's older interface (`io_submit`): what is in flight there belongs to the
//! process and not, as with a ring, to the thread that sent it. So any thread may take the answer, and
//! one that gave up waiting may end meanwhile.

use std::io;
use std::os::fd::RawFd;
use std::time::Instant;

use super::queue::Piece;
use crate::sync::Mutex;

const PREAD: u16 = 0;
/// Whoever sends is not made to wait for anything.
const NOWAIT: i32 = 8;

/// The kernel's `struct iocb`.
#[repr(C)]
#[derive(Default)]
struct Control {
    data: u64,
    #[cfg(target_endian = "little")]
    key: u32,
    flags: i32,
    #[cfg(target_endian = "big")]
    key: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buf: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    more: u32,
    event_fd: u32,
}

/// The kernel's `struct io_event`.
#[repr(C)]
#[derive(Default)]
struct Event {
    data: u64,
    control: u64,
    result: i64,
    more: i64,
}

/// Those that nobody uses now. The kernel takes tens of milliseconds to end one.
static IDLE: Mutex<Vec<Lone>> = Mutex::new(Vec::new());

/// What sends such a read, and gets its answer.
pub(super) struct Lone {
    context: libc::c_ulong,
}

impl Lone {
    /// One that nobody uses.
    pub(super) fn get() -> io::Result<Self> {
        // In a fork the lock may be held for ever.
        if let Some(lone) = IDLE.try_lock().and_then(|mut idle| idle.pop()) {
            return Ok(lone);
        }
        let mut context: libc::c_ulong = 0;
        // SAFETY: plain numbers, and a place for the answer.
        answer(unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) })?;
        Ok(Lone { context })
    }

    /// Keeps it for the next read. What was sent has been answered.
    pub(super) fn give_back(self) {
        if let Some(mut idle) = IDLE.try_lock() {
            idle.push(self);
        }
    }

    /// Sends a read of this file. An error: it was not sent, and in a fork never will be.
    ///
    /// # Safety
    /// Its memory must stay valid, and nobody else's, until [`Lone::wait`] gave the answer or this was
    /// dropped.
    pub(super) unsafe fn send(&self, fd: RawFd, piece: &Piece) -> io::Result<()> {
        let (ptr, len) = piece.memory();
        let mut control = Control {
            flags: NOWAIT,
            opcode: PREAD,
            fd: fd as u32,
            buf: ptr as u64,
            bytes: len as u64,
            offset: piece.offset() as i64,
            ..Control::default()
        };
        let mut list = &raw mut control;
        // SAFETY: the kernel copies the list and what it names before the call returns; for the
        // memory the caller vouches.
        answer(unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, &raw mut list) })?;
        Ok(())
    }

    /// The answer to what was sent: bytes read, or an error's negative number. `None`: not by then.
    pub(super) fn wait(&self, until: Instant) -> Option<i64> {
        let mut event = Event::default();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let left = libc::timespec {
                tv_sec: left.as_secs() as libc::time_t,
                tv_nsec: left.subsec_nanos().into(),
            };
            // SAFETY: event and time outlive the call.
            let taken = answer(unsafe {
                let (event, left) = (&raw mut event, &raw const left);
                libc::syscall(libc::SYS_io_getevents, self.context, 1, 1, event, left)
            });
            match taken {
                Ok(count) => return (count > 0).then_some(event.result),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
    }
}

impl Drop for Lone {
    fn drop(&mut self) {
        // SAFETY: set up in `get`. Waits for what is in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

fn answer(returned: libc::c_long) -> io::Result<libc::c_long> {
    match returned {
        0.. => Ok(returned),
        _ => Err(io::Error::last_os_error()),
    }
}
