//! The engine for kernels and sandboxes without io_uring, and for simulated devices: a small pool
//! of threads that read and write synchronously.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use crate::sync::thread::{self, JoinHandle, ThreadId};
use crate::sync::{Condvar, Mutex};

use super::queue::{Next, Piece, Queue, Step};
use super::{Engine, Kind, Limits, Op};
use crate::clock::Clock;
use crate::device::Device;

/// Enough to keep a device busy at 256 KiB and more; idle ones cost nothing.
const THREADS: usize = 8;

/// The thread-pool engine.
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<ThreadId>,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    device: Arc<dyn Device>,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    work: Condvar,
    ended: Condvar,
}

struct State {
    queue: Queue,
    running: usize,
}

impl Threads {
    /// Starts the pool.
    pub fn start(device: Arc<dyn Device>, limits: &Limits) -> io::Result<Self> {
        let queue = Queue::new(
            limits.inflight_bytes,
            limits.emulate_gbs,
            limits.clock.now(),
        );
        let shared = Arc::new(Shared {
            device,
            clock: limits.clock.clone(),
            state: Mutex::new(State {
                queue,
                running: THREADS,
            }),
            work: Condvar::new(),
            ended: Condvar::new(),
        });
        let mut handles = Vec::with_capacity(THREADS);
        for i in 0..THREADS {
            let worker = shared.clone();
            let spawned = thread::Builder::new()
                .name(format!("kvtier-io-{i}"))
                .spawn(move || worker.run());
            match spawned {
                Ok(handle) => handles.push(handle),
                Err(e) => {
                    let mut state = shared.state.lock();
                    state.queue.close();
                    shared.work.notify_all();
                    return Err(e);
                }
            }
        }
        Ok(Threads {
            shared,
            workers: handles.iter().map(|h| h.thread().id()).collect(),
            handles: Mutex::new(handles),
        })
    }
}

impl Shared {
    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            let mut piece = match state.queue.next(self.clock.now()) {
                Next::Piece(piece) => piece,
                Next::Wait(until) => {
                    // The clock may be another than the one that the system sleeps by.
                    let left = until.saturating_duration_since(self.clock.now());
                    self.work.wait_until(&mut state, Instant::now() + left);
                    continue;
                }
                Next::Nothing if state.queue.is_finished() => break,
                Next::Nothing => {
                    self.work.wait(&mut state);
                    continue;
                }
            };
            drop(state);
            let result = self.transfer(&mut piece);
            state = self.state.lock();
            let finished = state.queue.settle(piece, result);
            if state.queue.is_finished() {
                self.work.notify_all();
            } else {
                self.work.notify_one(); // there is room for another piece now
            }
            if let Some(finished) = finished {
                drop(state);
                finished.tell();
                state = self.state.lock();
            }
        }
        state.running -= 1;
        drop(state);
        self.ended.notify_all();
    }

    fn transfer(&self, piece: &mut Piece) -> io::Result<()> {
        loop {
            let (ptr, len) = piece.memory();
            let answer = match piece.kind {
                // SAFETY: the queue keeps the buffer alive until the piece is settled, and its owner
                // leaves it alone until then.
                Kind::Read => self.device.read_at(
                    unsafe { std::slice::from_raw_parts_mut(ptr, len) },
                    piece.offset(),
                ),
                // SAFETY: as above.
                Kind::Write => self.device.write_at(
                    unsafe { std::slice::from_raw_parts(ptr, len) },
                    piece.offset(),
                ),
            };
            if let Step::Settled(result) = piece.advance(answer) {
                return result;
            }
        }
    }
}

impl Engine for Threads {
    fn submit(&self, op: Op) {
        let refused = self.shared.state.lock().queue.push(op).err();
        self.shared.work.notify_one();
        if let Some(refused) = refused {
            refused.tell();
        }
    }

    fn close(&self, deadline: Option<Instant>) -> bool {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        state.queue.close();
        shared.work.notify_all();
        if self.workers.contains(&thread::current().id()) {
            return true; // called by a callback: this thread ends with its last operation
        }
        while state.running > 0 {
            match deadline {
                None => shared.ended.wait(&mut state),
                Some(at) if shared.ended.wait_until(&mut state, at).timed_out() => {
                    let unsent = state.queue.cancel_waiting("the engine was closed");
                    let all = state.queue.is_finished();
                    drop(state);
                    shared.work.notify_all();
                    unsent.into_iter().for_each(|f| f.tell());
                    return all;
                }
                Some(_) => {}
            }
        }
        drop(state);
        for handle in self.handles.lock().drain(..) {
            let _ = handle.join(); // it only has to return, and to let go of the device
        }
        true
    }

    fn name(&self) -> &'static str {
        "threads"
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.state.lock().queue.close();
        self.shared.work.notify_all();
    }
}
