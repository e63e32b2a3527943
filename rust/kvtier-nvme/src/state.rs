//! The life of the slots on one path, from reservation to reuse. Pure bookkeeping: no I/O, no lock.

use std::collections::{BTreeSet, HashMap, VecDeque};

use crate::record::{Change, Record};
use crate::recover::Found;
use crate::runs::Pages;
use crate::slots::{BUSY, LOST, Slots};
use crate::tier::Slot;

/// What is known of a slot that is not free.
#[derive(Clone, Copy, Debug)]
#[repr(C, packed)] // there are as many as blocks
pub struct Use {
    /// Distinguishes it from other uses of the same pages.
    pub generation: u64,
    /// How far it is.
    pub phase: Phase,
}

/// How far a slot is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Given out; nothing was written.
    Reserved,
    /// Its data is being written.
    Writing,
    /// Removed while its data is being written.
    Unwanted,
    /// Written; its record is not durable yet.
    Written,
    /// Its record is durable.
    Live,
    /// The record that frees or quarantines it is not durable yet.
    Leaving,
    /// Free as soon as nobody holds it.
    Held,
    /// Never used again.
    Lost,
}

/// What the lock of a volume guards.
pub struct State {
    /// Which pages are free.
    pub slots: Slots,
    /// All slots that are not free, by first page.
    pub uses: Pages<Use>,
    /// How many holds a slot has.
    pub holds: HashMap<u32, u32>,
    /// Records that wait for the committer. The first has number `committed`.
    pub queue: VecDeque<Record>,
    /// Records that are durable (or given up), since open.
    pub committed: u64,
    /// Pages that become free with records and holds to come.
    pub free_soon: u64,
    /// Pages that are never used again.
    pub lost: u64,
    /// Writes in flight, by the order in which they began.
    pub writing: BTreeSet<u64>,
    /// The number of the next write.
    pub next_write: u64,
    /// Bytes of the writes in flight.
    pub writing_bytes: u64,
    /// Why the metadata cannot be written any more.
    pub failed: Option<String>,
    /// Nothing new is taken.
    pub closed: bool,
    /// Somebody waits for what the queue holds.
    pub hurry: bool,
    /// The committer ends when its queue is empty.
    pub stopping: bool,
    /// It has ended.
    pub stopped: bool,
}

impl State {
    /// The state over what recovery found.
    pub fn new(found: &mut Found) -> Self {
        let mut uses = Pages::new(found.slots.total());
        for (records, phase) in [(&found.blocks, Phase::Live), (&found.lost, Phase::Lost)] {
            for &Record {
                start, generation, ..
            } in records
            {
                uses.insert(start, Use { generation, phase });
            }
        }
        // What lost its slot to a newer record must not come back when that one goes.
        let forget = |r: &Record| Record {
            change: Change::Remove,
            ..*r
        };
        State {
            slots: std::mem::replace(&mut found.slots, Slots::new(0)),
            uses,
            holds: HashMap::new(),
            queue: found.overlapped.iter().map(forget).collect(),
            committed: 0,
            free_soon: 0,
            lost: found.lost.iter().map(|r| u64::from(r.pages)).sum(),
            writing: BTreeSet::new(),
            next_write: 0,
            writing_bytes: 0,
            failed: None,
            closed: false,
            hurry: false,
            stopping: false,
            stopped: false,
        }
    }

    /// The number of the next record.
    pub fn recorded(&self) -> u64 {
        self.committed + self.queue.len() as u64
    }

    /// Does `record` describe its slot's present use?
    pub fn is_current(&self, record: &Record) -> bool {
        let Some(current) = self.uses.get(record.start) else {
            return false;
        };
        let lost = current.phase == Phase::Lost;
        current.generation == record.generation
            && match record.change {
                Change::Add(_) => matches!(current.phase, Phase::Live | Phase::Leaving),
                Change::Quarantine => lost,
                Change::Remove => false,
            }
    }

    /// Carries out a record that has become durable.
    pub fn apply(&mut self, record: &Record) {
        let Some(current) = self.uses.get_mut(record.start) else {
            return;
        };
        if current.generation != record.generation {
            return;
        }
        match (record.change, current.phase) {
            (Change::Add(_), Phase::Written) => current.phase = Phase::Live,
            (Change::Quarantine, Phase::Leaving) => {
                current.phase = Phase::Lost;
                self.lost += u64::from(record.pages);
            }
            (Change::Remove, Phase::Leaving) if self.holds.contains_key(&record.start) => {
                current.phase = Phase::Held;
            }
            (Change::Remove, Phase::Leaving) => self.free(record.start),
            _ => {}
        }
    }

    /// Gives the pages of a slot to others.
    pub fn free(&mut self, start: u32) {
        let pages = self.slots.free(start);
        let gone = self.uses.remove(start).map(|gone| gone.phase);
        if let Some(Phase::Unwanted | Phase::Leaving | Phase::Held) = gone {
            self.free_soon -= u64::from(pages);
        }
    }

    /// The slot's use, if it is still this one.
    pub fn current(&mut self, slot: Slot) -> Option<&mut Use> {
        self.uses
            .get_mut(slot.start)
            .filter(|u| u.generation == slot.generation)
    }

    /// The cheapest stretch of whole runs to clear for a slot of `pages`.
    pub fn window(&self, pages: u32) -> Option<(u32, u32)> {
        const TRIES: usize = 8;
        let near_holes = self.slots.window(pages, TRIES, |_| true);
        near_holes.or_else(|| self.anywhere(pages))
    }

    /// The first stretch that may be cleared, where no hole is a place to begin.
    fn anywhere(&self, pages: u32) -> Option<(u32, u32)> {
        const RUNS: usize = 10_000;
        let mut from = 0;
        for run in self.slots.iter(0, self.slots.total()).take(RUNS) {
            let end = run.start + run.pages;
            if run.owner == BUSY || run.owner == LOST {
                from = end;
            } else if end - from >= pages {
                return Some((from, end));
            }
        }
        None
    }
}
