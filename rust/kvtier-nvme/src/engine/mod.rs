//! Engines: how reads and writes get to a device.

mod lone;
mod queue;
pub mod threads;
pub mod uring;

pub(crate) use queue::in_callback;

use std::io;
use std::sync::Arc;
use std::time::Instant;

use crate::buf::IoBuf;
use crate::clock::Clock;
use crate::device::Device;
use crate::error::Error;

/// Which engine moves the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// io_uring where a real read through it works, else the thread pool (with a warning).
    #[default]
    Auto,
    /// io_uring or an error.
    IoUring,
    /// A pool of threads that read and write synchronously.
    Threads,
}

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Device to memory.
    Read,
    /// Memory to device.
    Write,
}

/// One operation. It lets go of its buffer before `done` if it is a read, so that whoever waits for
/// it finds his memory free; a write keeps it until `done` has said where the bytes are now.
pub struct Op {
    /// Which way.
    pub kind: Kind,
    /// Where on the device, a multiple of 4096.
    pub offset: u64,
    /// Bytes, a multiple of 4096, at least one page, at most the buffer.
    pub len: usize,
    /// The memory.
    pub buf: IoBuf,
    /// Goes ahead of reads that are not.
    pub urgent: bool,
    /// Called once, without any lock, on a thread of the engine, or on that of who submits or attends.
    pub done: Box<dyn FnOnce(io::Result<()>) + Send>,
}

/// Moves bytes between memory and one device.
pub trait Engine: Send + Sync {
    /// Starts an operation; never blocks on the device. After [`Engine::close`] it fails at once,
    /// on the caller's thread.
    fn submit(&self, op: Op);

    /// As [`Engine::submit`], for a caller who has nothing else to do until then. A read that nothing
    /// else is beside may complete on his thread.
    fn attend(&self, op: Op, _until: Instant) {
        self.submit(op);
    }

    /// Lets the engine set up `len` bytes at `ptr` for faster transfers; returns what to pass to
    /// [`Engine::unregister`]. May do nothing.
    fn register(&self, _ptr: usize, _len: usize) -> Vec<u16> {
        Vec::new()
    }

    /// Takes back [`Engine::register`], before the memory goes away.
    fn unregister(&self, _regions: &[u16]) {}

    /// Completes what was submitted and stops. At the deadline, what was not sent yet fails, what
    /// is in flight is left alone (with its buffers), and the answer is false.
    fn close(&self, deadline: Option<Instant>) -> bool;

    /// The engine's name.
    fn name(&self) -> &'static str;
}

/// Bounds that hold for every engine.
#[derive(Clone)]
pub struct Limits {
    /// Bytes in flight.
    pub inflight_bytes: usize,
    /// Slow down to so many 1e9 bytes per second.
    pub emulate_gbs: Option<f64>,
    /// Tells the time for that.
    pub clock: Arc<dyn Clock>,
}

/// Starts an engine over `device`.
pub fn start(
    kind: EngineKind,
    device: Arc<dyn Device>,
    limits: &Limits,
) -> Result<Arc<dyn Engine>, Error> {
    let threads = |device| -> Result<Arc<dyn Engine>, Error> {
        let pool = threads::Threads::start(device, limits)
            .map_err(|e| Error::io("cannot start the threads of the I/O engine", e))?;
        Ok(Arc::new(pool))
    };
    if kind == EngineKind::Threads {
        return threads(device);
    }
    match uring::Uring::start(device.clone(), limits) {
        Ok(ring) => Ok(Arc::new(ring)),
        Err(e) if kind == EngineKind::IoUring => Err(Error::io(
            "io_uring does not work here: choose the engine \"threads\" or \"auto\"",
            e,
        )),
        Err(e) => {
            // A device without a descriptor (a simulated one) never had the choice.
            if e.kind() != io::ErrorKind::Unsupported {
                tracing::warn!(
                    "io_uring does not work here ({e}): using threads, at more CPU time"
                );
            }
            threads(device)
        }
    }
}

#[cfg(test)]
mod tests;
