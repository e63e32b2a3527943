//! A loss of power at every write of a run, over a device with a volatile cache.
//!
//! No threads: operations complete as they are submitted and the test takes the committer's turns,
//! so a seed and a number say exactly what happens.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier_codec::image::{Id, PAGE, Shape};

use super::common::{Answer, answer, id, is_intact, write_of};
use super::{Random, rounds};
use crate::clock::SystemClock;
use crate::commit::Committer;
use crate::device::read_exact;
use crate::device::sim::{Fault, Op as SimOp, SimDevice};
use crate::fuzzing::Inline;
use crate::record::{Change, Record};
use crate::recover::Found;
use crate::slots::{BUSY, LOST};
use crate::state::Phase;
use crate::tier::Slot;
use crate::volume::Volume;
use crate::{Pages, place, recover};

pub const BYTES: u64 = 1 << 20;
const STEPS: usize = 70;

/// What must be true of the device whenever the power goes.
#[derive(Clone, Default)]
pub struct Promise {
    /// Acknowledged as durable, and not removed: must be there.
    pub kept: BTreeMap<u64, Id>,
    /// Acknowledged as durably removed: must not be there.
    gone: BTreeSet<u64>,
    /// Pages that must never be used again.
    lost: BTreeSet<u32>,
}

/// A store on one device, from open to its end.
pub struct Life {
    pub volume: Arc<Volume>,
    committer: Committer,
    /// The next one to give out, over all paths of the store.
    pub generation: Arc<AtomicU64>,
    /// The records that were found.
    pub found: Vec<Record>,
    /// What a reader can see, by generation.
    pub live: BTreeMap<u64, (Slot, Id)>,
    /// Removed and quarantined, not yet acknowledged.
    leaving: Vec<(u64, Option<Slot>)>,
    pub promise: Promise,
    /// Checkpoints are put off until the journal is full.
    lazy: bool,
    /// A failed write of a block is not the end.
    pub tolerant: bool,
}

impl Life {
    /// Opens the device and verifies all that was promised of it.
    pub fn open(device: Arc<SimDevice>, promise: Promise, lazy: bool) -> Result<Life, String> {
        Self::open_beside(device, promise, lazy, Arc::default())
    }

    /// As [`Life::open`], for one of several paths that share a counter of generations.
    pub fn open_beside(
        device: Arc<SimDevice>,
        promise: Promise,
        lazy: bool,
        generation: Arc<AtomicU64>,
    ) -> Result<Life, String> {
        let found = place::recover(&*device, "sim", BYTES).map_err(|e| e.to_string())?;
        if let Some(damage) = found.damaged.first() {
            return Err(format!("a mere crash is not damage, but {damage}"));
        }
        let lost: u32 = found.lost.iter().map(|r| r.pages).sum();
        let mut this = Life::over(device.clone(), found, lazy, generation);
        this.promise = promise;
        this.verify(&device, lost)?;
        Ok(this)
    }

    /// The store over what was recovered, whatever that is.
    pub fn over(
        device: Arc<SimDevice>,
        mut found: Found,
        lazy: bool,
        generation: Arc<AtomicU64>,
    ) -> Life {
        let engine = Arc::new(Inline(device.clone()));
        let clock = Arc::new(SystemClock);
        generation.fetch_max(found.generation, Ordering::Relaxed);
        let blocks = found.blocks.clone();
        let volume = Volume::new(0, "sim".into(), device, engine, clock, &mut found);
        let volume = Arc::new(volume);
        let next = generation.clone();
        let next = move || next.load(Ordering::Relaxed);
        let committer = Committer::new(volume.clone(), &found, next);
        let slots = blocks
            .iter()
            .map(|r| (r.generation, (recovered(r).slot, r.id)));
        Life {
            volume,
            committer,
            generation,
            live: slots.collect(),
            found: blocks,
            leaving: Vec::new(),
            promise: Promise::default(),
            lazy,
            tolerant: false,
        }
    }

    fn verify(&mut self, device: &SimDevice, lost_pages: u32) -> Result<(), String> {
        let geometry = &self.volume.geometry;
        for record in &self.found {
            let mut bytes = Pages::new(record.pages as usize);
            read_exact(device, &mut bytes, geometry.data_at(record.start))
                .map_err(|e| e.to_string())?;
            if !is_intact(&recovered(record), &bytes) {
                return Err(format!("wrong bytes of generation {}", record.generation));
            }
        }
        for (generation, id) in &self.promise.kept {
            if self.live.get(generation).map(|(_, id)| id) != Some(id) {
                return Err(format!("generation {generation} is not there"));
            }
        }
        let mut gone = self.promise.gone.iter();
        if let Some(back) = gone.find(|generation| self.live.contains_key(generation)) {
            return Err(format!("generation {back} came back"));
        }
        let state = self.volume.state.lock();
        let runs = state.slots.iter(0, u32::MAX);
        let lost: BTreeSet<u32> = runs
            .filter(|run| run.owner == LOST)
            .flat_map(|run| run.start..run.start + run.pages)
            .collect();
        if !self.promise.lost.is_subset(&lost) {
            return Err("a quarantined page is in use again".into());
        }
        let used: u32 = self.found.iter().map(|r| r.pages).sum();
        if state.slots.free_pages() + used + lost_pages != geometry.data {
            return Err("pages leaked".into());
        }
        drop(state);
        let live = self.live.iter();
        self.promise.kept = live
            .map(|(&generation, &(_, id))| (generation, id))
            .collect();
        Ok(())
    }

    /// Writes one block; `None` if there is no room for it.
    pub fn add(&mut self, random: &mut Random) -> Result<Option<(Slot, Id)>, String> {
        let payload = 1 + random.below(6 * PAGE as u64) as usize;
        let pages = Shape::new(payload, payload.min(7)).unwrap().pages();
        let id = id(random.below(20));
        if self.volume.load(pages).is_none() {
            return Ok(None);
        }
        let generation = self.generation.fetch_add(1, Ordering::Relaxed);
        let Some(slot) = self.volume.reserve(pages, generation) else {
            return Ok(None);
        };
        let (done, answer): (_, Answer) = answer();
        self.volume.write(write_of(slot, id, payload, done));
        answer.recv().unwrap().map_err(|e| e.to_string())?;
        self.live.insert(slot.generation, (slot, id));
        Ok(Some((slot, id)))
    }

    /// Does one random thing; false when the power is gone.
    pub fn step(&mut self, random: &mut Random) -> bool {
        match random.below(10) {
            0..=4 => self.put(random),
            5..=6 => self.leave(random),
            7 => self.turn(),
            _ => self.flush(),
        }
    }

    fn put(&mut self, random: &mut Random) -> bool {
        match self.add(random) {
            Ok(Some(_)) => true,
            Ok(None) => self.leave(random),
            Err(_) => self.tolerant,
        }
    }

    fn leave(&mut self, random: &mut Random) -> bool {
        let nth = random.below(self.live.len().max(1) as u64) as usize;
        let Some((&generation, &(slot, id))) = self.live.iter().nth(nth) else {
            return true;
        };
        self.live.remove(&generation);
        // From now on the block may be there after a crash or not.
        self.promise.kept.remove(&generation);
        let quarantine = random.below(16) == 0;
        let change = if quarantine {
            Change::Quarantine
        } else {
            Change::Remove
        };
        self.volume.leave(slot, &id, change);
        self.leaving.push((generation, quarantine.then_some(slot)));
        true
    }

    fn turn(&mut self) -> bool {
        let turned = if self.lazy {
            self.committer.commit_group()
        } else {
            self.committer.turn()
        };
        turned.is_ok()
    }

    /// What `NvmeTier::flush` waits for, and what it promises.
    pub fn flush(&mut self) -> bool {
        while !self.volume.state.lock().queue.is_empty() {
            if !self.turn() {
                return false;
            }
        }
        for (generation, lost) in self.leaving.drain(..) {
            self.promise.gone.insert(generation);
            if let Some(slot) = lost {
                self.promise
                    .lost
                    .extend(slot.start..slot.start + slot.pages);
            }
        }
        let live = self
            .live
            .iter()
            .map(|(&generation, &(_, id))| (generation, id));
        self.promise.kept = live.collect();
        let state = self.volume.state.lock();
        assert!(
            state
                .uses
                .up(0)
                .all(|(_, u)| matches!(u.phase, Phase::Live | Phase::Lost))
        );
        let owned = state.slots.iter(0, u32::MAX);
        let owned = owned.filter(|run| state.uses.get(run.start).is_some());
        let owned: u32 = owned.map(|run| run.pages).sum();
        assert_eq!(owned + state.slots.free_pages(), self.volume.geometry.data);
        assert!(
            !state
                .slots
                .iter(0, u32::MAX)
                .any(|r| r.owner != LOST && r.owner < BUSY)
        );
        true
    }
}

fn recovered(record: &crate::record::Record) -> crate::Recovered {
    let Change::Add(entry) = record.change else {
        panic!("blocks have records that add them")
    };
    crate::Recovered {
        id: record.id,
        parent: entry.parent,
        namespace: entry.namespace,
        slot: Slot {
            path: 0,
            start: record.start,
            pages: record.pages,
            generation: record.generation,
        },
        shape: entry.shape,
        codec: entry.codec,
        plain: entry.plain,
        importance: entry.importance,
        root: entry.root,
    }
}

/// Lives through one crash after another. The first life ends with request `crash` of kind `op`;
/// returns how many such requests there were.
fn run(seed: u64, op: SimOp, crash: u64, lying: bool) -> Result<u64, String> {
    let mut device = Arc::new(SimDevice::new(BYTES, seed));
    recover::format(&*device, BYTES, "sim").unwrap();
    let formatted = device.count(op);
    let mut promise = Promise::default();
    let mut random = Random(seed);
    let mut requests = 0;
    let lazy = seed % 2 == 1;
    for life in 0..3 {
        let before = device.count(op);
        device.inject(
            op,
            before + if life == 0 { crash } else { random.below(40) },
            Fault::Crash,
        );
        if lying {
            (0..500).for_each(|nth| device.inject(SimOp::Sync, nth, Fault::Lost));
        }
        // The power may go while the device is being opened, too.
        if let Ok(mut this) = Life::open(device.clone(), promise.clone(), lazy) {
            for _ in 0..STEPS {
                if !this.step(&mut random) {
                    break;
                }
            }
            promise = this.promise;
        }
        if life == 0 {
            requests = device.count(op) - formatted;
        }
        device = Arc::new(device.crash());
        promise = Life::open(device.clone(), promise, lazy)?.promise;
    }
    Ok(requests)
}

#[test]
fn a_crash_at_any_write_or_barrier_loses_nothing_that_was_promised() {
    for seed in 0..rounds(40) {
        for op in [SimOp::Write, SimOp::Sync] {
            let mut crash = 0;
            loop {
                let requests = run(seed, op, crash, false)
                    .unwrap_or_else(|e| panic!("seed {seed}, crash at {op:?} {crash}: {e}"));
                crash += 1;
                if crash > requests {
                    break;
                }
            }
            assert!(crash > 20, "the run is long enough to mean something");
        }
    }
}

#[test]
fn a_device_that_lies_about_barriers_is_found_out_by_this_test() {
    let broken = (0..12)
        .filter(|&seed| run(seed, SimOp::Write, 60, true).is_err())
        .count();
    assert!(broken > 3, "only {broken} of 12");
}
