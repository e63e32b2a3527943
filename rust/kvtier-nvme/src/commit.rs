//! The committer: one thread per path that makes records durable in groups.
//!
//! A group goes through two barriers: its blocks' data is made durable before the records that
//! name it are written, and the records before anybody is told or a freed slot is used again.
//! Under load both fall together: the second barrier of one group is the first of the next.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::checkpoint::Checkpoint;
use crate::journal::Journal;
use crate::record::{Change, PER_BLOCK, Record};
use crate::recover::Found;
use crate::superblock::Superblock;
use crate::sync::thread::{self, JoinHandle};
use crate::volume::{Volume, count};

/// How long a record waits for others to share its barriers with, unless somebody waits for it.
const GATHER: Duration = Duration::from_millis(5);

/// Makes the records of one volume durable.
pub struct Committer {
    volume: Arc<Volume>,
    superblock: Superblock,
    journal: Journal,
    checkpoint: Option<Checkpoint>,
    /// The data of all records before this number is durable.
    covered: u64,
    /// No slot was given out with this generation or a higher one.
    generation: Box<dyn Fn() -> u64 + Send>,
    /// Blocks of the checkpoint that were damaged at open.
    holes: Vec<u64>,
}

/// Starts a thread for each committer. If one cannot start, none of those behind it counts as
/// running.
pub fn start(
    committers: Vec<Committer>,
    spawn: impl Fn(Committer) -> io::Result<JoinHandle<()>>,
) -> io::Result<()> {
    let mut result = Ok(());
    for committer in committers {
        let volume = committer.volume.clone();
        match result.and_then(|()| spawn(committer)) {
            Ok(thread) => {
                *volume.committer.lock() = Some(thread);
                result = Ok(());
            }
            Err(e) => {
                volume.state.lock().stopped = true;
                result = Err(e);
            }
        }
    }
    result
}

/// Starts the thread of a committer.
pub fn spawn(committer: Committer) -> io::Result<JoinHandle<()>> {
    let thread = thread::Builder::new().name("kvtier-commit".into());
    thread.spawn(move || committer.run())
}

impl Committer {
    /// The committer over what recovery found.
    pub fn new(
        volume: Arc<Volume>,
        found: &Found,
        generation: impl Fn() -> u64 + Send + 'static,
    ) -> Self {
        Committer {
            volume,
            superblock: found.superblock,
            journal: found.journal,
            checkpoint: None,
            covered: 0,
            generation: Box::new(generation),
            holes: found.holes.clone(),
        }
    }

    /// Works until the volume is stopped or fails. Sleeps while there is nothing to do.
    pub fn run(mut self) {
        loop {
            let mut state = self.volume.state.lock();
            while state.queue.is_empty() && self.checkpoint.is_none() && !state.stopping {
                self.volume.work.wait(&mut state);
            }
            let until = Instant::now() + GATHER;
            while !state.hurry && !state.stopping && self.checkpoint.is_none() {
                if self.volume.work.wait_until(&mut state, until).timed_out() {
                    break;
                }
            }
            state.hurry = false;
            let end = state.queue.is_empty() && state.stopping;
            drop(state);
            if end {
                break;
            }
            // A panic must not leave others waiting for a thread that is gone.
            let turn = catch_unwind(AssertUnwindSafe(|| self.turn()))
                .unwrap_or_else(|_| Err(io::Error::other("a panic")));
            if let Err(e) = turn {
                let why = format!("its metadata cannot be read and written ({e})");
                self.volume.fail(why);
                break;
            }
        }
        self.volume.state.lock().stopped = true;
        self.volume.progress.notify_all();
    }

    /// Commits one group of what waits, and goes one step of a checkpoint that is due.
    pub fn turn(&mut self) -> io::Result<()> {
        self.commit_group()?;
        if self.checkpoint.is_some() || self.journal.room() < self.journal.len() {
            self.step()?;
        }
        Ok(())
    }

    /// The next records, and the number of the first. They stay in the queue until they are durable.
    fn take_group(&self) -> (u64, Vec<Record>) {
        let state = self.volume.state.lock();
        let most = self.journal.group() * PER_BLOCK as u64;
        // What the last barrier covered needs no other; the rest is covered by this group's own.
        let covered = self.covered.saturating_sub(state.committed);
        let take = if covered > 0 { covered.min(most) } else { most };
        let group = state.queue.iter().take(take as usize).copied().collect();
        (state.committed, group)
    }

    /// Commits one group of what waits; checkpoints only if there is no room for it.
    pub fn commit_group(&mut self) -> io::Result<()> {
        let (first, group) = self.take_group();
        if group.is_empty() {
            return Ok(());
        }
        let end = first + group.len() as u64;
        let adds = group.iter().any(|r| matches!(r.change, Change::Add(_)));
        if adds && self.covered < end {
            self.barrier()?; // the data before its record
        }
        while self.journal.room() < group.len().div_ceil(PER_BLOCK) as u64 {
            self.step()?;
        }
        let blocks = self.journal.append(&*self.volume.device, &group)?;
        self.barrier()?; // the record before anybody relies on it
        let counters = &self.volume.counters;
        count(&counters.journal_records, group.len() as u64);
        count(&counters.journal_blocks, blocks);
        let mut state = self.volume.state.lock();
        for record in &group {
            state.apply(record);
        }
        state.queue.drain(..group.len());
        if state.queue.is_empty() {
            state.queue = VecDeque::new(); // give the memory of a burst back
        }
        state.committed = end;
        drop(state);
        self.volume.progress.notify_all();
        Ok(())
    }

    /// Makes durable all that the device has completed, so the data of all records so far.
    fn barrier(&mut self) -> io::Result<()> {
        let completed = self.volume.state.lock().recorded();
        self.volume.device.sync()?;
        self.covered = completed;
        count(&self.volume.counters.syncs, 1);
        Ok(())
    }

    /// One step of the checkpoint; starts one if none is going.
    fn step(&mut self) -> io::Result<()> {
        let checkpoint = self.checkpoint.get_or_insert_with(|| {
            let generation = (self.generation)();
            Checkpoint::start(&self.superblock, &self.journal, generation, &self.holes)
        });
        let volume = &self.volume;
        let known = checkpoint.damaged;
        let complete = checkpoint.step(&*volume.device, |records| {
            let state = volume.state.lock();
            records.retain(|record| state.is_current(record));
        })?;
        count(&volume.counters.damaged, checkpoint.damaged - known);
        if let Some(superblock) = complete {
            self.superblock = superblock;
            self.journal.release(superblock.sequence);
            self.checkpoint = None;
            self.holes.clear();
            count(&volume.counters.checkpoints, 1);
        }
        Ok(())
    }
}
