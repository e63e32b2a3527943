//! One path: its slots, what is in flight on it, and the records that wait for the committer.

use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::thread::JoinHandle;
use std::sync::Arc;
use std::time::Instant;

use crate::sync::{Condvar, Mutex, MutexGuard};
use kvtier_codec::image::{Id, PAGE};

use crate::clock::Clock;
use crate::device::Device;
use crate::engine::{Engine, Kind, Op};
use crate::error::{Error, ErrorKind};
use crate::health::Health;
use crate::record::{Change, Entry, Record};
use crate::recover::Found;
use crate::slots::{BUSY, FREE, LOST};
use crate::state::{Phase, State, Use};
use crate::superblock::Geometry;
use crate::tier::{Read, Slot, Write};

/// Records that are worth a group of their own.
const PLENTY: usize = 1024;

/// One path of the tier.
pub struct Volume {
    /// Its place among the paths.
    pub index: u8,
    /// How messages call it.
    pub name: String,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) geometry: Geometry,
    pub(crate) state: Mutex<State>,
    /// The committer has something to do.
    pub(crate) work: Condvar,
    /// A write completed, a group became durable, the path failed, or the committer ended.
    pub(crate) progress: Condvar,
    pub(crate) counters: Counters,
    /// The committer's thread, once it was started.
    pub(crate) committer: Mutex<Option<JoinHandle<()>>>,
    /// Of the data writes.
    health: Health,
}

/// Counters since open.
#[derive(Default)]
#[allow(missing_docs)] // as in `Stats`
pub struct Counters {
    pub reads: AtomicU64,
    pub writes: AtomicU64,
    pub read_bytes: AtomicU64,
    pub write_bytes: AtomicU64,
    pub read_errors: AtomicU64,
    pub write_errors: AtomicU64,
    pub syncs: AtomicU64,
    pub journal_records: AtomicU64,
    pub journal_blocks: AtomicU64,
    pub checkpoints: AtomicU64,
    pub damaged: AtomicU64,
}

/// Adds to a counter.
pub(crate) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

impl Volume {
    /// The volume over what recovery found.
    pub fn new(
        index: u8,
        name: String,
        device: Arc<dyn Device>,
        engine: Arc<dyn Engine>,
        clock: Arc<dyn Clock>,
        found: &mut Found,
    ) -> Self {
        Volume {
            index,
            name,
            device,
            engine,
            geometry: found.superblock.geometry,
            state: Mutex::new(State::new(found)),
            work: Condvar::new(),
            progress: Condvar::new(),
            counters: Counters::default(),
            committer: Mutex::new(None),
            health: Health::new(clock),
        }
    }

    /// Is the path bypassed, for good or for a while?
    fn is_bypassed(&self, state: &State) -> bool {
        state.failed.is_some() || self.health.is_aside()
    }

    /// How attractive the path is for a slot of `pages`: lower is better, `None` if it has none.
    pub fn load(&self, pages: u32) -> Option<(u64, u32)> {
        let mut state = self.state.lock();
        let room = state.slots.largest_hole() >= pages && self.takes(&state);
        if !room && state.free_soon > 0 {
            self.hurry(&mut state);
        }
        room.then(|| (state.writing_bytes, u32::MAX - state.slots.free_pages()))
    }

    /// Does the path take another block? More than `max_blocks` would not fit into a checkpoint.
    fn takes(&self, state: &State) -> bool {
        (state.uses.len() as u64) < self.geometry.max_blocks
            && !state.closed
            && !self.is_bypassed(state)
    }

    /// A slot of `pages`, if there still is room.
    pub fn reserve(&self, pages: u32, generation: u64) -> Option<Slot> {
        let mut state = self.state.lock();
        if !self.takes(&state) {
            return None; // others took the last since `load`
        }
        let start = state.slots.alloc(pages, BUSY)?;
        let phase = Phase::Reserved;
        state.uses.insert(start, Use { generation, phase });
        Some(Slot {
            path: self.index,
            start,
            pages,
            generation,
        })
    }

    /// See [`crate::NvmeTier::set_owner`].
    pub fn set_owner(&self, slot: Slot, owner: u32) {
        let mut state = self.state.lock();
        if state.current(slot).is_some_and(|u| {
            matches!(
                u.phase,
                Phase::Reserved | Phase::Writing | Phase::Written | Phase::Live
            )
        }) {
            state.slots.set_owner(slot.start, owner);
        }
    }

    /// The cheapest window to clear: its owned pages and its owners.
    pub fn window(&self, pages: u32) -> Option<(u32, Vec<u32>)> {
        let state = self.state.lock();
        if state.closed || self.is_bypassed(&state) {
            return None;
        }
        let (from, to) = state.window(pages)?;
        let owned = state.slots.iter(from, to).filter(|run| run.owner != FREE);
        Some(owned.fold((0, Vec::new()), |(cost, mut owners), run| {
            owners.push(run.owner);
            (cost + run.pages, owners)
        }))
    }

    /// See [`crate::NvmeTier::abandon`].
    pub fn abandon(&self, slot: Slot) {
        let mut state = self.state.lock();
        if state
            .current(slot)
            .is_some_and(|u| u.phase == Phase::Reserved)
        {
            state.free(slot.start);
        }
    }

    /// See [`crate::NvmeTier::write`].
    pub fn write(self: &Arc<Self>, write: Write) {
        let Write {
            slot,
            shape,
            buf,
            done,
            ..
        } = write;
        let len = shape.image_len();
        let (ticket, refused) = {
            let mut state = self.state.lock();
            let closed = state.closed;
            let failed = state.failed.clone();
            let ticket = state.next_write;
            let reserved = state.current(slot).filter(|u| u.phase == Phase::Reserved);
            let refused = match reserved {
                None => Some(Error::new(
                    ErrorKind::Config,
                    format!("{slot:?} is not a reserved slot: reserve one for each write"),
                )),
                Some(_) if closed => Some(closed_error()),
                Some(_) if shape.pages() != slot.pages || buf.len() < len => Some(Error::new(
                    ErrorKind::Config,
                    format!(
                        "an image of {len} bytes, a buffer of {}, a slot of {} pages: \
                         they must agree",
                        buf.len(),
                        slot.pages
                    ),
                )),
                Some(_) if failed.is_some() => Some(self.failed_error(failed)),
                Some(reserved) => {
                    reserved.phase = Phase::Writing;
                    state.next_write += 1;
                    state.writing.insert(ticket);
                    state.writing_bytes += len as u64;
                    None
                }
            };
            (ticket, refused)
        };
        if let Some(error) = refused {
            self.abandon(slot);
            return done(Err(error));
        }
        let record = Record {
            change: Change::Add(Entry {
                parent: write.parent,
                namespace: write.namespace,
                shape,
                codec: write.codec,
                plain: write.plain,
                importance: write.importance,
                root: write.root,
            }),
            start: slot.start,
            pages: slot.pages,
            generation: slot.generation,
            id: write.id,
        };
        let this = self.clone();
        self.engine.submit(Op {
            kind: Kind::Write,
            offset: self.geometry.data_at(slot.start),
            len,
            buf,
            urgent: false,
            done: Box::new(move |result| {
                let result = result
                    .map_err(|e| Error::io(format!("cannot write a block to {}", this.name), e));
                done(this.written(ticket, record, result))
            }),
        });
    }

    /// A data write has completed.
    fn written(&self, ticket: u64, record: Record, result: Result<(), Error>) -> Result<(), Error> {
        let len = u64::from(record.pages) * PAGE as u64;
        let mut state = self.state.lock();
        state.writing.remove(&ticket);
        state.writing_bytes -= len;
        if result.is_ok() {
            count(&self.counters.writes, 1);
            count(&self.counters.write_bytes, len);
            self.health.succeeded();
        } else {
            count(&self.counters.write_errors, 1);
            self.health.failed();
        }
        let phase = state.uses.get(record.start).map(|u| u.phase);
        let result = match (result, phase) {
            (Ok(()), Some(Phase::Writing)) => {
                if let Some(current) = state.uses.get_mut(record.start) {
                    current.phase = Phase::Written;
                }
                self.record(&mut state, record);
                Ok(())
            }
            (result, _) => {
                // No record names these pages, so nothing has to become durable first.
                state.free(record.start);
                result.and_then(|()| {
                    Err(Error::new(
                        ErrorKind::Io,
                        "the block was removed while it was written",
                    ))
                })
            }
        };
        drop(state);
        self.progress.notify_all();
        result
    }

    /// Hands a record to the committer.
    fn record(&self, state: &mut State, record: Record) {
        if state.failed.is_some() {
            state.committed += 1; // given up: the slot stays as it is until the path is opened again
            return;
        }
        state.queue.push_back(record);
        match state.queue.len() {
            1 => self.work.notify_one(),
            PLENTY => self.hurry(state),
            _ => {}
        }
    }

    /// Asks the committer to work at once.
    pub fn hasten(&self) {
        self.hurry(&mut self.state.lock());
    }

    /// Lets the committer end as soon as it has nothing to do.
    pub fn begin_stop(&self) {
        self.state.lock().stopping = true;
        self.work.notify_all();
    }

    /// Asks the committer not to wait for more records.
    fn hurry(&self, state: &mut State) {
        state.hurry = true;
        self.work.notify_one();
    }

    /// See [`crate::NvmeTier::hold`].
    pub fn hold(&self, slot: Slot) {
        *self.state.lock().holds.entry(slot.start).or_insert(0) += 1;
    }

    /// Ends a hold.
    pub fn unhold(&self, slot: Slot) {
        let mut state = self.state.lock();
        let Some(holds) = state.holds.get_mut(&slot.start) else {
            return;
        };
        *holds -= 1;
        if *holds > 0 {
            return;
        }
        state.holds.remove(&slot.start);
        if state
            .uses
            .get(slot.start)
            .is_some_and(|u| u.phase == Phase::Held)
        {
            state.free(slot.start);
        }
    }

    /// See [`crate::NvmeTier::read`].
    pub fn read(self: &Arc<Self>, read: Read) {
        let Read {
            slot,
            offset,
            len,
            buf,
            hold,
            urgent,
            attended,
            done,
        } = read;
        let (at, end) = (u64::from(offset), u64::from(offset) + u64::from(len));
        let sound = at % PAGE as u64 == 0
            && end % PAGE as u64 == 0
            && len > 0
            && end <= u64::from(slot.pages) * PAGE as u64
            && len as usize <= buf.len()
            && slot
                .start
                .checked_add(slot.pages)
                .is_some_and(|end| end <= self.geometry.data);
        if !sound {
            return done(Err(Error::new(
                ErrorKind::Config,
                format!(
                    "bytes {at}..{end} of {slot:?} into a buffer of {}: give multiples of {PAGE} \
                     within the slot and the buffer",
                    buf.len()
                ),
            )));
        }
        let this = self.clone();
        let op =
            Op {
                kind: Kind::Read,
                offset: self.geometry.data_at(slot.start) + at,
                len: len as usize,
                buf,
                urgent,
                done: Box::new(move |result| {
                    drop(hold);
                    let counters = &this.counters;
                    match &result {
                        Ok(()) => {
                            count(&counters.reads, 1);
                            count(&counters.read_bytes, u64::from(len));
                        }
                        Err(_) => count(&counters.read_errors, 1),
                    }
                    done(result.map_err(|e| {
                        Error::io(format!("cannot read a block from {}", this.name), e)
                    }));
                }),
            };
        match attended {
            Some(until) => self.engine.attend(op, until),
            None => self.engine.submit(op),
        }
    }

    /// Records that the slot is free (or, with [`Change::Quarantine`], never used again).
    pub fn leave(&self, slot: Slot, id: &Id, change: Change) {
        let lost = change == Change::Quarantine;
        let mut state = self.state.lock();
        let Some(current) = state.current(slot) else {
            return; // it has left before
        };
        match current.phase {
            Phase::Reserved => state.free(slot.start),
            Phase::Writing => {
                current.phase = Phase::Unwanted;
                state.slots.set_owner(slot.start, BUSY);
                state.free_soon += u64::from(slot.pages);
            }
            Phase::Written | Phase::Live => {
                current.phase = Phase::Leaving;
                state
                    .slots
                    .set_owner(slot.start, if lost { LOST } else { BUSY });
                if !lost {
                    state.free_soon += u64::from(slot.pages);
                }
                let record = Record {
                    change,
                    start: slot.start,
                    pages: slot.pages,
                    generation: slot.generation,
                    id: *id,
                };
                self.record(&mut state, record);
            }
            Phase::Unwanted | Phase::Leaving | Phase::Held | Phase::Lost => {}
        }
    }

    /// See [`crate::NvmeTier::flush`].
    pub fn flush(&self, deadline: Option<Instant>) -> Result<(), Error> {
        let state = self.state.lock();
        let writes = state.next_write;
        self.durable(state, writes, deadline)
    }

    /// See [`crate::NvmeTier::commit`].
    pub fn commit(&self, deadline: Option<Instant>) -> Result<(), Error> {
        self.durable(self.state.lock(), 0, deadline)
    }

    /// Waits until the writes before number `writes` are complete, and all records of then durable.
    fn durable(
        &self,
        mut state: MutexGuard<'_, State>,
        writes: u64,
        deadline: Option<Instant>,
    ) -> Result<(), Error> {
        let mut records = None;
        loop {
            if let Some(why) = &state.failed {
                return Err(self.failed_error(Some(why.clone())));
            }
            if records.is_none() && state.writing.first().is_none_or(|&first| first >= writes) {
                records = Some(state.recorded());
            }
            if records.is_some_and(|records| state.committed >= records) {
                return Ok(());
            }
            if state.stopped {
                return Err(closed_error());
            }
            self.hurry(&mut state);
            let timed_out = match deadline {
                Some(at) => self.progress.wait_until(&mut state, at).timed_out(),
                None => {
                    self.progress.wait(&mut state);
                    false
                }
            };
            if timed_out {
                return Err(Error::new(
                    ErrorKind::Deadline,
                    format!(
                        "{} writes and {} records were not durable on {} at the deadline: \
                         give more time, or see whether the device hangs",
                        state.writing.len(),
                        state.queue.len(),
                        self.name
                    ),
                ));
            }
        }
    }

    /// Stops the committer and the engine; false if something did not end by the deadline.
    pub fn stop(&self, deadline: Option<Instant>) -> bool {
        self.begin_stop();
        let mut state = self.state.lock();
        while !state.stopped {
            match deadline {
                None => self.progress.wait(&mut state),
                Some(at) if self.progress.wait_until(&mut state, at).timed_out() => break,
                Some(_) => {}
            }
        }
        let stopped = state.stopped;
        drop(state);
        if stopped && let Some(thread) = self.committer.lock().take() {
            // It only has to return, and to let go of the device.
            let _ = thread.join(); // a panic was told when it happened
        }
        self.engine.close(deadline) && stopped
    }

    /// Refuses new slots and writes from now on.
    pub fn refuse(&self) {
        self.state.lock().closed = true;
    }

    /// Gives the metadata up: nothing can become durable on this path any more.
    pub(crate) fn fail(&self, why: String) {
        tracing::error!(
            "{}: {why}; the path is bypassed until it is opened again",
            self.name
        );
        let mut state = self.state.lock();
        state.committed = state.recorded();
        state.queue.clear();
        state.failed = Some(why);
        drop(state);
        self.progress.notify_all();
    }

    fn failed_error(&self, why: Option<String>) -> Error {
        let why = why.unwrap_or_default();
        Error::new(
            ErrorKind::Io,
            format!(
                "{} is bypassed because {why}: mend the device and open it again",
                self.name
            ),
        )
    }

    /// Numbers of the moment.
    pub fn gauges(&self) -> Gauges {
        let state = self.state.lock();
        Gauges {
            free: u64::from(state.slots.free_pages()),
            free_soon: state.free_soon,
            lost: state.lost,
            bypassed: self.is_bypassed(&state),
            memory: (state.slots.memory_bytes()
                + state.uses.memory_bytes()
                + state.queue.capacity() * size_of::<Record>()) as u64,
        }
    }
}

/// See [`Volume::gauges`].
#[allow(missing_docs)] // as in `Stats`
pub struct Gauges {
    pub free: u64,
    pub free_soon: u64,
    pub lost: u64,
    pub bypassed: bool,
    pub memory: u64,
}

/// The error of whoever comes after close.
pub(crate) fn closed_error() -> Error {
    Error::new(ErrorKind::Closed, "the NVMe tier is closed: open it again")
}
