//! Making room: eviction, compaction and the index's share of memory.

use std::sync::atomic::Ordering;
use std::time::Instant;

use kvtier_codec::checksum::copy;
use kvtier_codec::image::PAGE;
use kvtier_nvme::slots::{BUSY, FREE, LOST, Run};

use crate::arena::Pin;
use crate::error::{Error, Kind, Result};
use crate::index::{Entry, NOWHERE, Shard};
use crate::order::{Known, Order};
use crate::policy::Handle;
use crate::store::Inner;

/// What became of a block that should leave a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// It left, and its pages are free.
    Freed,
    /// Somebody holds it.
    Held,
    /// It must be written below first.
    Dirty,
    /// It was not there.
    Gone,
}

/// Victims that one look at the policy asks for.
const BATCH: usize = 16;

impl Inner {
    /// A slot in a memory tier, pinned for its writer. Evicts, moves and waits until `deadline` as
    /// needed.
    pub(crate) fn reserve(&self, tier: usize, pages: u32, deadline: Instant) -> Result<Pin> {
        let arena = &self.memory[tier].arena;
        self.charge_index()?;
        if pages > arena.pages() {
            return Err(Error::new(
                Kind::Full,
                format!(
                    "a block of {} bytes was given; the {} tier holds {} bytes beside its index. Use a larger tier or smaller blocks",
                    pages as usize * PAGE,
                    self.memory[tier].name,
                    arena.pages() as usize * PAGE
                ),
            ));
        }
        let patient = Instant::now() < deadline;
        loop {
            let seen = arena.freed();
            if let Some(pin) = arena.alloc(pages) {
                if self.is_above(tier, self.high) {
                    self.mover.wake();
                }
                return Ok(pin);
            }
            if self.make_room(tier, pages) {
                continue;
            }
            self.mover.press(tier, pages);
            if !patient || !arena.wait_freed(seen, deadline) {
                let (kind, what) = if patient {
                    (Kind::Deadline, "before the deadline")
                } else {
                    (Kind::Full, "now")
                };
                return Err(Error::new(
                    kind,
                    format!(
                        "no room for {} bytes in the {} tier {what}: {} of {} bytes are free, the rest is pinned, leased or on its way down. Release leases, wait longer, or use a larger tier",
                        pages as usize * PAGE,
                        self.memory[tier].name,
                        arena.free_pages() as usize * PAGE,
                        arena.pages() as usize * PAGE
                    ),
                ));
            }
        }
    }

    /// Is more than this share of a memory tier in use?
    pub(crate) fn is_above(&self, tier: usize, share: f64) -> bool {
        let arena = &self.memory[tier].arena;
        f64::from(arena.pages() - arena.free_pages().min(arena.pages()))
            > share * f64::from(arena.pages())
    }

    /// Frees at least one slot on the way to a hole of `pages` pages. False: nothing can be freed
    /// by the caller now.
    fn make_room(&self, tier: usize, pages: u32) -> bool {
        let arena = &self.memory[tier].arena;
        if arena.free_pages() >= pages {
            if let Some((from, to, runs)) = arena.window(pages)
                && self.clear(tier, from, to, &runs)
            {
                return true;
            }
            // Every window holds something that must stay: evicting may open another.
        }
        let mut left = self.order.lock().policy(tier).len();
        let mut progress = false;
        loop {
            let mut victims = Vec::with_capacity(BATCH);
            self.order
                .lock()
                .policy(tier)
                .victims(BATCH, &mut |_| true, &mut victims);
            let mut held = false;
            for &h in &victims {
                match self.evict(tier, h, false) {
                    Left::Freed => progress = true,
                    Left::Held => held = true,
                    Left::Dirty => return progress,
                    Left::Gone => {}
                }
                if progress && arena.free_pages() >= pages {
                    return true;
                }
            }
            // Held blocks went to the far end of the order: look at the next ones, each once.
            left = left.saturating_sub(victims.len());
            if victims.is_empty() || left == 0 || !(held || progress) {
                return progress;
            }
        }
    }

    /// Takes a block out of a memory tier, and out of the store if it lies nowhere else. `forced`:
    /// even where it could still be written below.
    pub(crate) fn evict(&self, tier: usize, h: Handle, forced: bool) -> Left {
        let memory = &self.memory[tier];
        let mut shard = self.index.shard(h);
        let Some(entry) = shard.get_mut(h) else {
            return Left::Gone;
        };
        let start = entry.memory[tier];
        if start == NOWHERE {
            return Left::Gone;
        }
        if entry.is_below(tier) {
            if !memory.arena.retire_idle(start) {
                self.order.lock().policy(tier).on_hit(h);
                return Left::Held;
            }
            entry.memory[tier] = NOWHERE;
            self.order.lock().policy(tier).on_remove(h);
            memory.stats.drops.add(1);
            return Left::Freed;
        }
        if !forced && self.can_demote(tier, entry) {
            return Left::Dirty;
        }
        if memory.arena.is_pinned(start) {
            self.order.lock().policy(tier).on_hit(h);
            return Left::Held;
        }
        let known = (h, entry.epoch);
        let mut order = self.order.lock();
        if order.has_children(h) {
            // Its children lie below: without it they are useless.
            drop(order);
            drop(shard);
            self.remove_tree(known);
        } else {
            self.drop_entry(&mut shard, &mut order, h);
        }
        memory.stats.evictions.add(1);
        Left::Freed
    }

    /// Empties a stretch of a memory tier: moves its blocks into holes outside it, or evicts them.
    fn clear(&self, tier: usize, from: u32, to: u32, runs: &[Run]) -> bool {
        let mut cleared = true;
        for run in runs {
            let h = run.owner;
            if h == FREE {
                continue;
            }
            if h == BUSY || h == LOST {
                return false;
            }
            cleared &= match self.relocate(tier, h, run.start, from, to) {
                Some(moved) => moved,
                None => match self.evict(tier, h, false) {
                    Left::Freed | Left::Gone => true,
                    Left::Held => false,
                    Left::Dirty => {
                        self.mover.request(tier, h);
                        false
                    }
                },
            };
        }
        cleared
    }

    /// Moves a block out of `[from, to)`. `None`: no hole outside holds it. `Some(false)`: somebody
    /// reads it.
    fn relocate(&self, tier: usize, h: Handle, start: u32, from: u32, to: u32) -> Option<bool> {
        let arena = &self.memory[tier].arena;
        let (old, epoch, shape) = {
            let shard = self.index.shard(h);
            let Some(entry) = shard.get(h).filter(|entry| entry.memory[tier] == start) else {
                return Some(true);
            };
            let Some(old) = arena.pin(start) else {
                return Some(false);
            };
            (old, entry.epoch, entry.shape)
        };
        let new = arena.alloc_outside(shape.pages(), from, to)?;
        // SAFETY: both slots hold an image of this shape; the new one is ours alone, the old one is
        // pinned and complete.
        unsafe { copy(new.ptr(), old.ptr(), shape.image_len()) };
        let mut shard = self.index.shard(h);
        let Some(entry) = shard
            .get_same(h, epoch)
            .filter(|entry| entry.memory[tier] == start)
        else {
            drop(shard);
            new.discard();
            return Some(true);
        };
        if let Err(old) = old.discard_if_only() {
            drop(shard);
            drop(old);
            new.discard();
            return Some(false);
        }
        entry.memory[tier] = new.start();
        arena.set_owner(new.start(), h);
        self.stats.moved.add(1);
        Some(true)
    }

    /// Sees to it that the first memory tier gives up as many pages as the index, the policies and
    /// the tables of the tiers use, so that all of it together stays within the tier's size.
    fn charge_index(&self) -> Result<()> {
        const STEP: usize = 256; // entries between two looks
        const SLACK: usize = STEP * 256; // more than they can add until then
        let len = self.index.len();
        if len < self.charged.load(Ordering::Relaxed) {
            return Ok(());
        }
        let memory = &self.memory[0];
        let arena = &memory.arena;
        let bytes = self.metadata_bytes() + SLACK;
        let need = bytes.div_ceil(PAGE) as u32;
        let mut tries = 0;
        while arena.ceded_pages() < need {
            let step = (need - arena.ceded_pages())
                .max(arena.mapped_pages() / 512)
                .max(1);
            match arena.cede(step) {
                Ok(()) => {}
                Err((from, to, runs)) if tries < 64 && from < to => {
                    tries += 1;
                    if !self.clear(0, from, to, &runs) {
                        self.mover.wake();
                        return Err(Error::new(
                            Kind::Full,
                            format!(
                                "the index needs {bytes} bytes of the {} tier, and the blocks in its way are pinned or on their way down. Try again, release leases, or use a larger tier",
                                memory.name
                            ),
                        ));
                    }
                }
                Err(_) => {
                    return Err(Error::new(
                        Kind::Full,
                        format!(
                            "the index needs {bytes} bytes of the {} tier, which has {}. Use a larger tier or larger blocks",
                            memory.name,
                            arena.mapped_pages() as usize * PAGE
                        ),
                    ));
                }
            }
        }
        self.charged.store(len + STEP, Ordering::Relaxed);
        Ok(())
    }

    /// Bytes of everything that is kept in memory beside blocks.
    pub(crate) fn metadata_bytes(&self) -> usize {
        self.index.memory_bytes()
            + self.order.lock().memory_bytes()
            + self
                .memory
                .iter()
                .map(|m| m.arena.overhead_bytes())
                .sum::<usize>()
            + self
                .cold
                .as_ref()
                .map_or(0, |c| c.tier.memory_bytes() as usize)
    }

    /// Tells the policy of a tier that a block of its arrived there.
    pub(crate) fn insert_order(&self, tier: usize, h: Handle, entry: &Entry) {
        let mut order = self.order.lock();
        let meta = order.meta(
            h,
            entry.fingerprint(),
            entry.shape.pages(),
            entry.importance,
        );
        order.policy(tier).on_insert(h, &meta);
    }

    /// Takes an entry without children out of the store, wherever it lies. Slots that are held are
    /// freed when they are let go.
    pub(crate) fn drop_entry(&self, shard: &mut Shard, order: &mut Order, h: Handle) {
        let Some(entry) = self.index.remove(shard, h) else {
            return;
        };
        for (tier, memory) in self.memory.iter().enumerate() {
            if entry.memory[tier] != NOWHERE {
                order.policy(tier).on_remove(h);
                memory.arena.retire(entry.memory[tier]);
            }
        }
        if let (Some(place), Some(cold)) = (entry.cold, &self.cold) {
            order.policy(self.memory.len()).on_remove(h);
            cold.tier.remove(place.slot, &entry.id);
        }
        order.detach(h);
    }

    /// Removes a block and all that follow it. Returns how many were removed.
    pub(crate) fn remove_tree(&self, root: Known) -> usize {
        let tree = self.order.lock().condemn(root);
        let mut removed = 0;
        for (h, epoch) in tree {
            let mut shard = self.index.shard(h);
            if shard.get_same(h, epoch).is_some() {
                let mut order = self.order.lock();
                self.drop_entry(&mut shard, &mut order, h);
                removed += 1;
            }
        }
        removed
    }
}
