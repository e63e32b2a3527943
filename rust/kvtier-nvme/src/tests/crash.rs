//! A loss of power at every write of a run, over a device with a volatile cache.
//!
//! No threads: operations complete as they are submitted and the test takes the committer's turns,
//! so a seed and a number say exactly what happens.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use kvtier_codec::image::{Id, PAGE, Shape};

use super::Random;
use super::common::{Answer, answer, id, is_intact, write_of};
use crate::clock::SystemClock;
use crate::commit::Committer;
use crate::device::sim::{Fault, Op as SimOp, SimDevice};
use crate::device::{Device, read_exact, write_all};
use crate::engine::{Engine, Kind, Op};
use crate::record::Change;
use crate::slots::{BUSY, LOST};
use crate::state::Phase;
use crate::tier::Slot;
use crate::volume::Volume;
use crate::{Pages, recover};

const BYTES: u64 = 1 << 20;
const STEPS: usize = 70;

/// An engine that completes everything at once, on the caller's thread.
struct Inline(Arc<dyn Device>);

impl Engine for Inline {
    fn submit(&self, op: Op) {
        let mut copy = Pages::new(op.len / PAGE);
        // SAFETY: the operation owns its buffer of at least `len` bytes.
        let buf = unsafe { std::slice::from_raw_parts_mut(op.buf.ptr(), op.len) };
        let result = match op.kind {
            Kind::Read => {
                read_exact(&*self.0, &mut copy, op.offset).map(|()| buf.copy_from_slice(&copy))
            }
            Kind::Write => write_all(&*self.0, buf, op.offset),
        };
        (op.done)(result);
    }

    fn close(&self, _: Option<Instant>) -> bool {
        true
    }

    fn name(&self) -> &'static str {
        "inline"
    }
}

/// What must be true of the device whenever the power goes.
#[derive(Clone, Default)]
struct Promise {
    /// Acknowledged as durable, and not removed: must be there.
    kept: BTreeMap<u64, Id>,
    /// Acknowledged as durably removed: must not be there.
    gone: BTreeSet<u64>,
    /// Pages that must never be used again.
    lost: BTreeSet<u32>,
}

struct Life {
    volume: Arc<Volume>,
    committer: Committer,
    generation: u64,
    /// What a reader can see, by generation.
    live: BTreeMap<u64, (Slot, Id)>,
    /// Removed and quarantined, not yet acknowledged.
    leaving: Vec<(u64, Option<Slot>)>,
    promise: Promise,
    /// Checkpoints are put off until the journal is full.
    lazy: bool,
}

impl Life {
    /// Opens the device and verifies all that was promised of it.
    fn open(device: Arc<SimDevice>, mut promise: Promise, lazy: bool) -> Result<Life, String> {
        let superblock = recover::superblock(&*device, "sim")
            .map_err(|e| e.to_string())?
            .0;
        device.sync().map_err(|e| e.to_string())?;
        let mut found = recover::recover(&*device, &superblock);
        if let Some(damage) = found.damaged.first() {
            return Err(format!("a mere crash is not damage, but {damage}"));
        }
        let engine = Arc::new(Inline(device.clone()));
        let clock = Arc::new(SystemClock);
        let (blocks, generation) = (found.blocks.clone(), found.generation);
        let volume = Arc::new(Volume::new(
            0,
            "sim".into(),
            device.clone(),
            engine,
            clock,
            &mut found,
        ));
        let committer = Committer::new(volume.clone(), &found, move || generation + 1000);
        let mut live = BTreeMap::new();
        for record in &blocks {
            let recovered = recovered(record);
            let mut bytes = Pages::new(record.pages as usize);
            read_exact(&*device, &mut bytes, volume.geometry.data_at(record.start))
                .map_err(|e| e.to_string())?;
            if !is_intact(&recovered, &bytes) {
                return Err(format!("wrong bytes of generation {}", record.generation));
            }
            live.insert(record.generation, (recovered.slot, record.id));
        }
        for (generation, id) in &promise.kept {
            if live.get(generation).map(|(_, id)| id) != Some(id) {
                return Err(format!("generation {generation} is not there"));
            }
        }
        if let Some(back) = promise
            .gone
            .iter()
            .find(|generation| live.contains_key(generation))
        {
            return Err(format!("generation {back} came back"));
        }
        let state = volume.state.lock();
        let lost: BTreeSet<u32> = state
            .slots
            .iter(0, u32::MAX)
            .filter(|run| run.owner == LOST)
            .flat_map(|run| run.start..run.start + run.pages)
            .collect();
        if !promise.lost.is_subset(&lost) {
            return Err("a quarantined page is in use again".into());
        }
        let used: u32 = blocks.iter().chain(&found.lost).map(|r| r.pages).sum();
        if state.slots.free_pages() + used != volume.geometry.data {
            return Err("pages leaked".into());
        }
        drop(state);
        promise.kept = live
            .iter()
            .map(|(&generation, &(_, id))| (generation, id))
            .collect();
        Ok(Life {
            volume,
            committer,
            generation,
            live,
            leaving: Vec::new(),
            promise,
            lazy,
        })
    }

    /// Does one random thing; false when the power is gone.
    fn step(&mut self, random: &mut Random) -> bool {
        match random.below(10) {
            0..=4 => self.put(random),
            5..=6 => self.leave(random),
            7 => self.turn(),
            _ => self.flush(),
        }
    }

    fn put(&mut self, random: &mut Random) -> bool {
        let payload = 1 + random.below(6 * PAGE as u64) as usize;
        let pages = Shape::new(payload, payload.min(7)).unwrap().pages();
        let number = random.below(20);
        if self.volume.load(pages).is_none() {
            return self.leave(random);
        }
        let Some(slot) = self.volume.reserve(pages, self.generation) else {
            return self.leave(random);
        };
        self.generation += 1;
        let (done, answer): (_, Answer) = answer();
        self.volume.write(write_of(slot, id(number), payload, done));
        if answer.recv().unwrap().is_err() {
            return false;
        }
        self.live.insert(slot.generation, (slot, id(number)));
        true
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
    fn flush(&mut self) -> bool {
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
                .values()
                .all(|u| matches!(u.phase, Phase::Live | Phase::Lost))
        );
        let owned: u32 = state.uses.values().map(|u| u.pages).sum();
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
    for seed in 0..40 {
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
