//! Slots: runs of 4 KiB pages, handed out from one flat range.
//!
//! The range is always tiled by runs, each free or owned. Free neighbours are merged at once, so
//! the largest hole is as large as it can be; when holes are plenty but none is large enough,
//! [`Slots::window`] names the cheapest stretch to clear, and its owners are moved or evicted.

use std::collections::BTreeSet;

use crate::runs::Runs;

/// Who owns a run. The meaning belongs to the caller; two values are taken.
pub type Owner = u32;

/// The owner of free runs.
pub const FREE: Owner = u32::MAX;

/// The owner of runs that are never given back (damaged, or ceded to other uses).
pub const LOST: Owner = u32::MAX - 1;

/// A run that is owned but must not be moved or evicted now (being filled, or awaiting a record).
pub const BUSY: Owner = u32::MAX - 2;

/// A run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First page.
    pub start: u32,
    /// Pages in the run.
    pub pages: u32,
    /// Who owns it.
    pub owner: Owner,
}

/// A best-fit allocator of page runs over a fixed range.
#[derive(Debug)]
pub struct Slots {
    runs: Runs,
    holes: BTreeSet<(u32, u32)>, // (pages, start)
    total: u32,
    free: u32,
}

impl Slots {
    /// A range of `pages` pages, all free.
    pub fn new(pages: u32) -> Self {
        let mut slots = Slots {
            runs: Runs::new(pages),
            holes: BTreeSet::new(),
            total: pages,
            free: 0,
        };
        if pages > 0 {
            slots.insert_hole(0, pages);
        }
        slots
    }

    /// Pages in the range.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Pages that nobody owns.
    pub fn free_pages(&self) -> u32 {
        self.free
    }

    /// Pages in the largest hole.
    pub fn largest_hole(&self) -> u32 {
        self.holes.last().map_or(0, |&(pages, _)| pages)
    }

    /// Bytes kept in memory.
    pub fn memory_bytes(&self) -> usize {
        // Two numbers a hole, in nodes of a tree that are half full at worst.
        self.runs.memory_bytes() + self.holes.len() * 16
    }

    /// Takes `pages` pages from the smallest hole that holds them, lowest address first.
    pub fn alloc(&mut self, pages: u32, owner: Owner) -> Option<u32> {
        let &(hole, start) = self.holes.range((pages, 0)..).next()?;
        self.take(start, hole, start, pages, owner);
        Some(start)
    }

    /// As [`Slots::alloc`], but never inside `[from, to)`: where a block of a window may move to.
    pub fn alloc_outside(&mut self, pages: u32, owner: Owner, from: u32, to: u32) -> Option<u32> {
        let &(hole, start) = self
            .holes
            .range((pages, 0)..)
            .find(|&&(hole, start)| start + hole <= from || start >= to)?;
        self.take(start, hole, start, pages, owner);
        Some(start)
    }

    /// Takes exactly `[start, start + pages)`; false if any of it is owned.
    pub fn alloc_at(&mut self, start: u32, pages: u32, owner: Owner) -> bool {
        let hole = self.runs.down(start).next();
        let Some(hole) = hole.filter(|run| run.owner == FREE) else {
            return false;
        };
        let end = hole.start + hole.pages;
        let fits = pages > 0 && start.checked_add(pages).is_some_and(|to| to <= end);
        if fits {
            self.take(hole.start, hole.pages, start, pages, owner);
        }
        fits
    }

    /// Gives a run back, and says how long it was. `start` must be the first page of an owned run.
    ///
    /// # Panics
    /// If no owned run starts there: freeing twice must not pass unseen.
    pub fn free(&mut self, start: u32) -> u32 {
        let (mut at, given) = match self.runs.remove(start) {
            Some((pages, owner)) if owner != FREE => (start, pages),
            other => panic!("page {start} is not the start of an owned run: {other:?}"),
        };
        let mut pages = given;
        self.free += pages;
        let before = self.runs.down(start).next();
        let after = self.runs.up(start).next();
        if let Some(hole) = before.filter(|run| run.owner == FREE) {
            self.remove_hole(hole.start, hole.pages);
            at = hole.start;
            pages += hole.pages;
        }
        if let Some(hole) = after.filter(|run| run.owner == FREE) {
            self.remove_hole(hole.start, hole.pages);
            pages += hole.pages;
        }
        self.runs.insert(at, pages, FREE);
        self.holes.insert((pages, at));
        given
    }

    /// Who owns the run that starts at `start`; `None` if none does.
    pub fn owner(&self, start: u32) -> Option<Owner> {
        self.runs.owner(start)
    }

    /// Changes who owns the run that starts at `start`.
    ///
    /// # Panics
    /// If no owned run starts there.
    pub fn set_owner(&mut self, start: u32, owner: Owner) {
        match self.runs.owner(start) {
            Some(current) if current != FREE => self.runs.set_owner(start, owner),
            other => panic!("page {start} is not the start of an owned run: {other:?}"),
        }
    }

    /// The runs from the one that holds `from` up to page `to`, in address order.
    pub fn iter(&self, from: u32, to: u32) -> impl Iterator<Item = Run> + '_ {
        let first = self.runs.down(from).next().map_or(from, |run| run.start);
        self.runs.up(first).take_while(move |run| run.start < to)
    }

    /// The stretch of at least `pages` pages that costs least to clear: as few owned pages as
    /// possible, none of them [`LOST`], [`BUSY`] or refused by `movable`.
    ///
    /// Looks around the `tries` largest holes only, so the work is bounded. Returns `[from, to)`,
    /// made of whole runs.
    pub fn window(
        &self,
        pages: u32,
        tries: usize,
        mut movable: impl FnMut(Run) -> bool,
    ) -> Option<(u32, u32)> {
        // Up from its hole, so that what stays free of the window moves up, and merges with the
        // next hole in the end; down only where nothing else is left.
        for up in [true, false] {
            let mut best: Option<(u32, (u32, u32))> = None;
            for &(_, hole) in self.holes.iter().rev().take(tries) {
                let found = if up {
                    cost(self.runs.up(hole), pages, &mut movable)
                } else {
                    cost(self.runs.down(hole), pages, &mut movable)
                };
                if let Some((cost, from, to)) = found
                    && best.is_none_or(|(least, _)| cost < least)
                {
                    best = Some((cost, (from, to)));
                }
            }
            if let Some((_, window)) = best {
                return Some(window);
            }
        }
        None
    }

    fn insert_hole(&mut self, start: u32, pages: u32) {
        self.runs.insert(start, pages, FREE);
        self.holes.insert((pages, start));
        self.free += pages;
    }

    fn remove_hole(&mut self, start: u32, pages: u32) {
        self.runs.remove(start);
        self.holes.remove(&(pages, start));
    }

    /// Cuts `[start, start + pages)` out of the hole `[at, at + len)`.
    fn take(&mut self, at: u32, len: u32, start: u32, pages: u32, owner: Owner) {
        self.remove_hole(at, len);
        self.free -= len;
        if start > at {
            self.insert_hole(at, start - at);
        }
        let (end, hole_end) = (start + pages, at + len);
        if end < hole_end {
            self.insert_hole(end, hole_end - end);
        }
        self.runs.insert(start, pages, owner);
    }
}

/// What the first of these neighbouring runs that have `pages` pages together cost to clear, and
/// where they are.
fn cost(
    mut runs: impl Iterator<Item = Run>,
    pages: u32,
    movable: &mut impl FnMut(Run) -> bool,
) -> Option<(u32, u32, u32)> {
    let (mut from, mut to, mut cost) = (u32::MAX, 0u32, 0);
    while to.saturating_sub(from) < pages {
        let run = runs.next()?;
        match run.owner {
            FREE => {}
            LOST | BUSY => return None,
            _ if !movable(run) => return None,
            _ => cost += run.pages,
        }
        (from, to) = (from.min(run.start), to.max(run.start + run.pages));
    }
    Some((cost, from, to))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(slots: &Slots) {
        let (mut next, mut free, mut last_free) = (0, 0, false);
        for run in slots.iter(0, slots.total()) {
            assert_eq!(run.start, next, "runs tile the range");
            assert!(run.pages > 0);
            assert!(!(last_free && run.owner == FREE), "holes are merged");
            last_free = run.owner == FREE;
            if last_free {
                free += run.pages;
                assert!(slots.holes.contains(&(run.pages, run.start)));
            }
            next += run.pages;
        }
        assert_eq!((next, free), (slots.total(), slots.free_pages()));
        assert_eq!(
            slots.holes.len(),
            slots.iter(0, next).filter(|r| r.owner == FREE).count()
        );
    }

    #[test]
    fn a_window_prefers_the_fewest_owned_pages_and_avoids_the_immovable() {
        let mut slots = Slots::new(40);
        let starts: Vec<u32> = (0..10).filter_map(|i| slots.alloc(4, i)).collect();
        for i in [1, 3, 7] {
            slots.free(starts[i]);
        }
        assert_eq!(slots.alloc(8, 99), None);
        assert_eq!(slots.window(12, 8, |_| true), Some((4, 16)));
        assert!(
            slots
                .window(12, 8, |r| r.owner != 2)
                .is_some_and(|(a, b)| !(a <= 8 && b >= 12))
        );
        assert_eq!(slots.window(12, 8, |_| false), None);
    }

    /// A full range of equal runs with two holes, each too small: as runs are cleared and taken
    /// again, the holes must meet.
    #[test]
    fn holes_that_are_too_small_meet_in_the_end() {
        for (low, high) in [(3, 6), (6, 3), (5, 5)] {
            let mut slots = Slots::new(60 + low + high);
            let at = |slots: &mut Slots, at| assert!(slots.alloc_at(at, 10, 1));
            (0..2).for_each(|i| at(&mut slots, i * 10));
            (2..6).for_each(|i| at(&mut slots, i * 10 + low));
            let mut turns = 0;
            while slots.largest_hole() < low + high {
                let (from, to) = slots.window(10, 8, |_| true).unwrap();
                let runs: Vec<Run> = slots.iter(from, to).filter(|r| r.owner != FREE).collect();
                assert_eq!(runs.len(), 1);
                slots.free(runs[0].start);
                slots.alloc(10, 1).unwrap();
                turns += 1;
                assert!(turns <= 6, "{low} and {high} never meet");
            }
        }
    }

    #[test]
    #[should_panic(expected = "not the start of an owned run")]
    fn freeing_twice_is_seen() {
        let mut slots = Slots::new(8);
        let start = slots.alloc(2, 0).unwrap();
        slots.free(start);
        slots.free(start);
    }

    proptest! {
        #[test]
        fn runs_always_tile_the_range(ops in prop::collection::vec((0u8..4, 0u32..64, 1u32..20), 1..200)) {
            let mut slots = Slots::new(64);
            let mut owned: Vec<u32> = Vec::new();
            for (op, at, pages) in ops {
                match op {
                    0 => owned.extend(slots.alloc(pages, 1)),
                    1 if slots.alloc_at(at, pages, 2) => owned.push(at),
                    2 => owned.extend(slots.alloc_outside(pages, 3, at, at + 8)),
                    _ if !owned.is_empty() => _ = slots.free(owned.swap_remove(at as usize % owned.len())),
                    _ => {}
                }
                check(&slots);
            }
        }
    }
}
