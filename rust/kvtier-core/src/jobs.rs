//! Work that runs while the caller does something else: prefetches, and asynchronous verbs.

use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex};
use kvtier_codec::checksum::copy;
use kvtier_codec::image::{self, Id};

use crate::error::Result;
use crate::hbm::{GLANCE, HBM};
use crate::index::NOWHERE;
use crate::load::{Found, Landing, Miss};
use crate::order::Known;
use crate::read::Got;
use crate::store::{Inner, Namespace, Store};
use crate::workers::Task;

/// Bytes that prefetches have on their way at once, to memory and to HBM; to HBM at most this part of
/// memory, since a device that hangs keeps them.
const IN_FLIGHT: usize = 64 << 20;
const PART: usize = 4;

/// The turn before all others.
const AT_ONCE: u64 = u64::MAX;

/// How long a prefetch waits for a slot before it gives a block up.
const PATIENCE: Duration = Duration::from_secs(1);

/// Where a prefetch brings blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// This memory tier, or a faster one; the slowest that there is if there are fewer.
    Memory(usize),
    /// HBM, by way of memory.
    Hbm,
}

/// Called once, when a job is done, on whatever thread finished it. It must not block.
pub type OnDone = Box<dyn FnOnce() + Send>;

struct JobState {
    results: Vec<Option<Got>>,
    left: usize,
    cancelled: bool,
    callbacks: Vec<OnDone>,
}

/// A prefetch under way: one result a key.
pub struct Job {
    state: Mutex<JobState>,
    changed: Condvar,
    deadline: Option<Instant>,
}

impl Job {
    fn new(keys: usize, deadline: Option<Instant>) -> Arc<Self> {
        Arc::new(Job {
            state: Mutex::new(JobState {
                // Not `vec![None; keys]`: the optimizer looks at what None leaves unwritten (in vain, but
                // valgrind would report it).
                results: (0..keys).map(|_| None).collect(),
                left: keys,
                cancelled: false,
                callbacks: Vec::new(),
            }),
            changed: Condvar::new(),
            deadline,
        })
    }

    fn set(&self, i: usize, got: Got) {
        let mut state = self.state.lock();
        if state.results[i].is_some() {
            return;
        }
        state.results[i] = Some(got);
        state.left -= 1;
        self.finish_if_done(state);
    }

    /// Gives every key that has no result this one.
    fn set_rest(&self, miss: Miss) {
        let mut state = self.state.lock();
        for result in &mut state.results {
            result.get_or_insert(Err(miss));
        }
        if state.left > 0 {
            state.left = 0;
            self.finish_if_done(state);
        }
    }

    fn finish_if_done(&self, mut state: crate::sync::MutexGuard<'_, JobState>) {
        if state.left > 0 {
            return;
        }
        let callbacks = std::mem::take(&mut state.callbacks);
        drop(state);
        self.changed.notify_all();
        for callback in callbacks {
            callback();
        }
    }

    /// Every key has a result.
    pub fn is_done(&self) -> bool {
        self.state.lock().left == 0
    }

    /// Blocks until done or `deadline`; true: done.
    pub fn wait(&self, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        while state.left > 0 {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return state.left == 0;
            }
        }
        true
    }

    /// Keys not yet asked for become `cancelled`; reads in flight go on, but nobody waits for them.
    pub fn cancel(&self) {
        self.state.lock().cancelled = true;
        self.set_rest(Miss::Cancelled);
    }

    /// The results, once done.
    pub fn results(&self) -> Option<Vec<Got>> {
        let state = self.state.lock();
        (state.left == 0).then(|| {
            state
                .results
                .iter()
                .map(|r| r.unwrap_or(Err(Miss::Absent)))
                .collect()
        })
    }

    /// Calls `callback` when done; at once if it is.
    pub fn on_done(&self, callback: OnDone) {
        let mut state = self.state.lock();
        if state.left == 0 {
            drop(state);
            callback();
        } else {
            state.callbacks.push(callback);
        }
    }

    fn is_over(&self) -> bool {
        let state = self.state.lock();
        state.cancelled || state.left == 0
    }
}

/// A job's remaining keys, in the queue.
struct Queued {
    priority: i32,
    /// Counts down: the earliest of equal priority is the greatest.
    turn: u64,
    next: usize,
    end: usize,
    ids: Arc<Vec<Id>>,
    goal: Goal,
    job: Arc<Job>,
}

impl Queued {
    /// The key whose turn it is, for another turn right after this one.
    fn alone(&self) -> Queued {
        Queued {
            priority: self.priority,
            turn: AT_ONCE,
            next: self.next,
            end: self.next + 1,
            ids: self.ids.clone(),
            goal: self.goal,
            job: self.job.clone(),
        }
    }
}

impl PartialEq for Queued {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Queued {}
impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Queued {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.priority, self.turn).cmp(&(other.priority, other.turn))
    }
}

struct QueueState {
    heap: BinaryHeap<Queued>,
    /// Jobs that end by themselves at a time.
    timed: Vec<Arc<Job>>,
    in_flight: usize,
    turn: u64,
    stop: bool,
}

/// A prefetcher's queue. That of HBM is one of its own: who only wants memory never waits for a device.
pub(crate) struct Prefetcher {
    state: Mutex<QueueState>,
    changed: Condvar,
    /// Bytes on their way at once.
    most: usize,
}

impl Prefetcher {
    /// Of jobs that end in memory.
    pub(crate) fn to_memory() -> Self {
        Self::new(IN_FLIGHT)
    }

    /// Of jobs that end in HBM, from so many bytes of memory.
    pub(crate) fn to_hbm(memory: usize) -> Self {
        Self::new(IN_FLIGHT.min(memory / PART))
    }

    fn new(most: usize) -> Self {
        Prefetcher {
            most,
            state: Mutex::new(QueueState {
                heap: BinaryHeap::new(),
                timed: Vec::new(),
                in_flight: 0,
                turn: AT_ONCE,
                stop: false,
            }),
            changed: Condvar::new(),
        }
    }

    /// Ends the thread; what is queued is cancelled.
    pub(crate) fn stop(&self) {
        let mut state = self.state.lock();
        state.stop = true;
        let left: Vec<Arc<Job>> = state
            .heap
            .drain()
            .map(|queued| queued.job)
            .collect::<Vec<_>>()
            .into_iter()
            .chain(std::mem::take(&mut state.timed))
            .collect();
        drop(state);
        self.changed.notify_all();
        for job in left {
            job.set_rest(Miss::Cancelled);
        }
    }

    fn push(&self, mut queued: Queued) {
        let mut state = self.state.lock();
        if state.stop {
            drop(state);
            queued.job.set_rest(Miss::Cancelled);
            return;
        }
        if queued.turn != AT_ONCE {
            state.turn -= 1;
            queued.turn = state.turn;
            if queued.job.deadline.is_some() {
                state.timed.push(queued.job.clone());
            }
        }
        state.heap.push(queued);
        drop(state);
        self.changed.notify_all();
    }

    fn landed(&self, bytes: usize) {
        self.state.lock().in_flight -= bytes;
        self.changed.notify_all();
    }

    /// The next key to look at: waits for one, and for room in flight; ends jobs whose time is up.
    /// While anything is in flight, `look` is called now and then.
    fn pop(&self, look: Option<&dyn Fn()>) -> Option<Queued> {
        let mut state = self.state.lock();
        loop {
            if state.stop {
                return None;
            }
            let now = Instant::now();
            let (due, later): (Vec<_>, Vec<_>) = std::mem::take(&mut state.timed)
                .into_iter()
                .filter(|job| !job.is_over())
                .partition(|job| job.deadline.is_some_and(|at| at <= now));
            state.timed = later;
            if !due.is_empty() {
                drop(state);
                due.iter().for_each(|job| job.set_rest(Miss::Deadline));
                state = self.state.lock();
                continue;
            }
            if state.in_flight < self.most
                && let Some(queued) = state.heap.pop()
            {
                return Some(queued);
            }
            let look = look.filter(|_| state.in_flight > 0);
            let timed = state.timed.iter().filter_map(|job| job.deadline);
            match timed.chain(look.map(|_| now + GLANCE)).min() {
                Some(at) => {
                    let late = self.changed.wait_until(&mut state, at).timed_out();
                    if let Some(look) = look.filter(|_| late) {
                        drop(state);
                        look();
                        state = self.state.lock();
                    }
                }
                None => self.changed.wait(&mut state),
            }
        }
    }
}

impl Store {
    /// Brings blocks where `goal` says, in this order, behind jobs of higher priority. Does not block. After `deadline` the keys that are not there yet are misses.
    pub fn prefetch(
        &self,
        ns: &Namespace,
        keys: &[&[u8]],
        goal: Goal,
        deadline: Option<Instant>,
        priority: i32,
    ) -> Result<Arc<Job>> {
        self.inner.check_open()?;
        let ids = self.inner.ids(ns, keys)?;
        let job = Job::new(ids.len(), deadline);
        if !ids.is_empty() {
            self.inner.prefetcher(goal).push(Queued {
                priority,
                turn: 0,
                next: 0,
                end: ids.len(),
                ids: Arc::new(ids),
                goal,
                job: job.clone(),
            });
        }
        Ok(job)
    }

    /// Runs `task` on a thread for that once these blocks are in memory, or known not to come by `deadline`:
    /// an asynchronous read, without a thread that waits.
    pub fn after_loading(
        &self,
        ns: &Namespace,
        keys: &[&[u8]],
        deadline: Instant,
        task: Task,
    ) -> Result<()> {
        const FIRST: i32 = i32::MAX; // somebody waits for it
        let job = self.prefetch(ns, keys, Goal::Memory(usize::MAX), Some(deadline), FIRST)?;
        let inner = self.inner.clone();
        job.on_done(Box::new(move || inner.readers.spawn(task)));
        Ok(())
    }

    /// Runs `task`, which may wait for room, on the thread for asynchronous puts.
    pub fn write_later(&self, task: Task) -> Result<()> {
        self.inner.check_open()?;
        self.inner.writers.spawn(task);
        Ok(())
    }
}

impl Inner {
    /// Where jobs of this goal queue.
    fn prefetcher(&self, goal: Goal) -> &Prefetcher {
        match (goal, &self.hbm) {
            (Goal::Hbm, Some(hbm)) => &hbm.prefetcher,
            _ => &self.prefetcher,
        }
    }

    /// The thread of the prefetcher for this goal.
    pub(crate) fn run_prefetcher(self: &Arc<Self>, goal: Goal) {
        let prefetcher = self.prefetcher(goal);
        let look = || self.look_at_device();
        let look: Option<&dyn Fn()> = (goal == Goal::Hbm).then_some(&look);
        while let Some(mut queued) = prefetcher.pop(look) {
            if queued.job.is_over() {
                continue;
            }
            self.prefetch_one(&queued);
            queued.next += 1;
            if queued.next < queued.end {
                // Back to its own place: jobs of higher priority that came meanwhile go first.
                let mut state = prefetcher.state.lock();
                if state.stop {
                    drop(state);
                    queued.job.set_rest(Miss::Cancelled);
                } else {
                    state.heap.push(queued);
                }
            }
        }
    }

    fn prefetch_one(self: &Arc<Self>, queued: &Queued) {
        let (job, i) = (&queued.job, queued.next);
        let id = &queued.ids[i];
        let (known, place, in_hbm, bytes) = {
            let shard = self.index.of(id);
            let Some((h, entry)) = shard.find(id).and_then(|h| Some((h, shard.get(h)?))) else {
                drop(shard);
                return job.set(i, Err(Miss::Absent));
            };
            let (known, bytes) = ((h, entry.epoch), entry.shape.image_len());
            (
                known,
                entry.in_memory(),
                self.in_hbm(&shard, h).is_some(),
                bytes,
            )
        };
        let patience = Instant::now() + PATIENCE;
        let deadline = job.deadline.map_or(patience, |at| at.min(patience));
        match (place, queued.goal) {
            (_, Goal::Hbm) if in_hbm => return job.set(i, Ok(HBM)),
            (Some(_), Goal::Hbm) => return self.lift_for(known, bytes, deadline, job, i),
            (Some((at, _)), Goal::Memory(tier)) => {
                let tier = tier.min(self.memory.len() - 1);
                let promoted = at > tier && self.promote(known.0, known.1, at);
                let got = if promoted { tier } else { at };
                return job.set(i, Ok(self.memory[got].name));
            }
            (None, _) => {}
        }
        match self.load(known, queued.priority > 0, false, deadline, None) {
            // Into HBM it goes in a turn of its own: this thread may wait for room there.
            Found::Resident if queued.goal == Goal::Hbm => {
                self.prefetcher(Goal::Hbm).push(queued.alone());
            }
            Found::Resident => job.set(i, Ok(self.memory[0].name)),
            Found::Nowhere => job.set(i, Err(Miss::Absent)),
            Found::Failed(miss) => job.set(i, Err(miss)),
            Found::Flying(flight) => {
                self.prefetcher(queued.goal).state.lock().in_flight += bytes;
                let (inner, job, goal) = (self.clone(), job.clone(), queued.goal);
                let again = queued.alone();
                flight.course.on_landing(Box::new(move |landing| {
                    let prefetcher = inner.prefetcher(goal);
                    prefetcher.landed(bytes);
                    match landing {
                        Ok(()) if goal == Goal::Hbm => prefetcher.push(again),
                        landing => job.set(i, landing.map(|()| inner.memory[0].name)),
                    }
                }));
            }
        }
    }

    /// Has a block copied from memory to HBM for a job.
    fn lift_for(
        self: &Arc<Self>,
        known: Known,
        bytes: usize,
        deadline: Instant,
        job: &Arc<Job>,
        i: usize,
    ) {
        self.prefetcher(Goal::Hbm).state.lock().in_flight += bytes;
        let (inner, job) = (Arc::downgrade(self), job.clone());
        let told = move |how: Landing| {
            if let Some(inner) = inner.upgrade() {
                inner.prefetcher(Goal::Hbm).landed(bytes);
            }
            job.set(i, how.map(|()| HBM));
        };
        self.lift(known, deadline, Box::new(told));
    }

    /// Copies a block from a lower memory tier into DRAM, where it stays clean: dropping it there
    /// costs nothing.
    fn promote(&self, h: u32, epoch: u32, from: usize) -> bool {
        let (old, shape, id, root, tag) = {
            let mut shard = self.index.shard(h);
            let Some(entry) = shard
                .get_same(h, epoch)
                .filter(|e| e.memory[from] != NOWHERE)
            else {
                return false;
            };
            let Some(pin) = self.memory[from].arena.pin(entry.memory[from]) else {
                return false;
            };
            (pin, entry.shape, entry.id, entry.root, entry.namespace)
        };
        let patient = Instant::now() + PATIENCE;
        let Ok((new, _claim)) = self.reserve(0, shape.pages(), tag, Some(patient)) else {
            return false;
        };
        let len = shape.image_len();
        // SAFETY: the new slot is ours alone and `len` long; the old one is pinned and complete.
        unsafe { copy(new.ptr(), old.ptr(), len) };
        // SAFETY: filled just now, and ours alone.
        let image = unsafe { new.bytes(len) };
        if image::verify(image, shape, root, &id, 0, 0).is_err() {
            new.discard();
            self.lose_memory((h, epoch), from, old.start());
            return false;
        }
        if let Some(pacer) = &self.memory[from].pacer {
            pacer.pass(shape.payload());
        }
        let mut shard = self.index.shard(h);
        let Some(entry) = shard.get_same(h, epoch).filter(|e| e.memory[0] == NOWHERE) else {
            drop(shard);
            new.discard();
            return false;
        };
        entry.memory[0] = new.start();
        self.memory[0].arena.set_owner(new.start(), h);
        self.insert_order(0, h, entry);
        self.memory[0].stats.inserts.add(1);
        true
    }
}
