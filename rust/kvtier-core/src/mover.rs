//! Demotion: blocks on their way from memory to the tier below.
//!
//! One thread wakes at the high watermark, takes victims from the policy and moves them down until
//! the low one is reached. Writes to NVMe are in flight while it looks for more; their completion
//! publishes the new place and frees the old one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashSet;
use kvtier_codec::checksum::copy;
use kvtier_codec::image::{self, Id, Root};
use kvtier_nvme::IoBuf;
use kvtier_nvme::{Slot, Write};
use parking_lot::{Condvar, Mutex};

use crate::arena::Pin;
use crate::config::DEFAULT_TIMEOUT;
use crate::error::{Error, Kind, Result};
use crate::index::{Cold, Entry, MEMORY_TIERS, NOWHERE};
use crate::load::{Miss, memory_root};
use crate::order::Known;
use crate::policy::Handle;
use crate::space::Left;
use crate::store::Inner;

/// Bytes that may be on their way to NVMe at once.
const IN_FLIGHT: usize = 32 << 20;

/// Why a block is written below.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Why {
    /// To make room: it leaves the tier above.
    Demote,
    /// To keep it: it stays above too.
    Persist,
}

#[derive(Default)]
struct State {
    awake: bool,
    stop: bool,
    /// Blocks whose write is under way.
    writing: HashSet<Handle>,
    in_flight: usize,
    /// Blocks that stand in the way of a hole.
    requests: Vec<(usize, Handle)>,
    /// Pages that somebody waits for in each memory tier.
    wanted: [u32; MEMORY_TIERS],
}

/// The mover's mailbox, and its account of what is under way.
#[derive(Default)]
pub(crate) struct Mover {
    state: Mutex<State>,
    changed: Condvar,
}

/// How many bytes a day may be written, spent as they come.
pub(crate) struct Budget {
    per_second: f64,
    burst: f64,
    state: Mutex<(f64, Instant)>,
}

impl Budget {
    /// `per_day` bytes a day, of which an hour's share can be saved up.
    pub(crate) fn new(per_day: u64, now: Instant) -> Self {
        let per_second = per_day as f64 / 86_400.0;
        let burst = per_second * 3600.0;
        Budget {
            per_second,
            burst,
            state: Mutex::new((burst, now)),
        }
    }

    fn refill(&self, now: Instant) -> parking_lot::MutexGuard<'_, (f64, Instant)> {
        let mut state = self.state.lock();
        let passed = now.saturating_duration_since(state.1).as_secs_f64();
        *state = ((state.0 + passed * self.per_second).min(self.burst), now);
        state
    }

    /// Could `bytes` be spent now?
    fn allows(&self, bytes: usize, now: Instant) -> bool {
        self.refill(now).0 >= bytes as f64
    }

    /// Spends `bytes`, if there are so many.
    fn spend(&self, bytes: usize, now: Instant) -> bool {
        let mut state = self.refill(now);
        let enough = state.0 >= bytes as f64;
        if enough {
            state.0 -= bytes as f64;
        }
        enough
    }
}

/// The root of a block's image at `generation` on NVMe; `None` if the image is not what was put.
fn cold_root(entry: &Entry, image: &[u8], generation: u64) -> Option<Root> {
    let (id, shape) = (&entry.id, entry.shape);
    if shape.table_len() == 0 {
        let table = image::table(image, 0, shape);
        let proven = memory_root(id, shape, image, Some(&table)) == entry.root;
        return proven.then(|| Root::new(id, generation, 0, shape, &table[0].to_bytes()));
    }
    image::verify(image, shape, entry.root, id, 0, 0).ok()?;
    let stored = &image[shape.table_offset()..][..shape.table_len()];
    Some(Root::new(id, generation, 0, shape, stored))
}

impl Mover {
    /// Looks for work.
    pub(crate) fn wake(&self) {
        let mut state = self.state.lock();
        if !state.awake {
            state.awake = true;
            self.changed.notify_all();
        }
    }

    /// Asks for so many free pages in a tier, whatever its watermarks.
    pub(crate) fn press(&self, tier: usize, pages: u32) {
        let mut state = self.state.lock();
        state.wanted[tier] = state.wanted[tier].max(pages);
        state.awake = true;
        self.changed.notify_all();
    }

    /// Asks for one block to be moved down, whatever its turn.
    pub(crate) fn request(&self, tier: usize, h: Handle) {
        let mut state = self.state.lock();
        if !state.requests.contains(&(tier, h)) {
            state.requests.push((tier, h));
        }
        state.awake = true;
        self.changed.notify_all();
    }

    /// Ends the thread after what it is doing.
    pub(crate) fn stop(&self) {
        self.state.lock().stop = true;
        self.changed.notify_all();
    }

    fn begin(&self, h: Handle, bytes: usize) -> bool {
        let mut state = self.state.lock();
        let fresh = state.writing.insert(h);
        if fresh {
            state.in_flight += bytes;
        }
        fresh
    }

    fn end(&self, h: Handle, bytes: usize) {
        let mut state = self.state.lock();
        state.writing.remove(&h);
        state.in_flight -= bytes;
        self.changed.notify_all();
    }

    /// Waits until at most `bytes` are under way, or `deadline`.
    fn drain(&self, bytes: usize, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        while state.in_flight > bytes {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return state.in_flight <= bytes;
            }
        }
        true
    }
}

impl Inner {
    /// The mover's thread.
    pub(crate) fn run_mover(self: &Arc<Self>) {
        loop {
            let (requests, wanted) = {
                let mut state = self.mover.state.lock();
                while !state.awake && !state.stop {
                    self.mover.changed.wait(&mut state);
                }
                if state.stop {
                    return;
                }
                state.awake = false;
                (
                    std::mem::take(&mut state.requests),
                    std::mem::take(&mut state.wanted),
                )
            };
            for (tier, h) in requests {
                self.demote(tier, h);
            }
            for tier in (0..self.memory.len()).rev() {
                if wanted[tier] > 0 || self.is_above(tier, self.high) {
                    self.demote_to_low(tier, wanted[tier]);
                }
                self.memory[tier].arena.notify();
            }
        }
    }

    /// Moves victims down until the tier is at its low watermark and `wanted` pages are free,
    /// counting what is under way.
    fn demote_to_low(self: &Arc<Self>, tier: usize, wanted: u32) {
        const BATCH: usize = 16;
        let arena = &self.memory[tier].arena;
        if tier + 1 == self.memory.len() && self.cold.is_none() {
            return; // nothing below: whoever needs room evicts
        }
        loop {
            let (writing, going, stop) = {
                let state = self.mover.state.lock();
                let going = (state.in_flight / image::PAGE) as u32;
                (state.writing.clone(), going, state.stop)
            };
            let low = ((1.0 - self.low) * f64::from(arena.pages())) as u32;
            if stop || arena.free_pages() + going >= low.max(wanted) {
                return;
            }
            let mut victims = Vec::with_capacity(BATCH);
            self.order.lock().policy(tier).victims(
                BATCH,
                &mut |h| !writing.contains(&h),
                &mut victims,
            );
            let moved = victims.iter().filter(|&&h| self.demote(tier, h)).count();
            if moved == 0 {
                return; // all that is left is held, or the tier below takes nothing
            }
        }
    }

    /// Could this block be written to the tier below `tier` now?
    pub(crate) fn can_demote(&self, tier: usize, entry: &Entry) -> bool {
        match self.memory.get(tier + 1) {
            Some(below) => entry.shape.pages() <= below.arena.pages(),
            None => self.can_write(entry),
        }
    }

    /// Could this block be written to NVMe now?
    fn can_write(&self, entry: &Entry) -> bool {
        let bytes = entry.shape.image_len();
        self.cold.as_ref().is_some_and(|cold| {
            !cold.is_failed()
                && entry.shape.pages() <= cold.tier.max_slot_pages()
                && cold
                    .budget
                    .as_ref()
                    .is_none_or(|b| b.allows(bytes, self.clock.now()))
        })
    }

    /// Moves a victim to the tier below. False: it stays where it is.
    fn demote(self: &Arc<Self>, tier: usize, h: Handle) -> bool {
        let (entry, pin) = {
            let shard = self.index.shard(h);
            let Some(entry) = shard.get(h).filter(|e| e.memory[tier] != NOWHERE) else {
                return true;
            };
            if entry.is_below(tier) || !self.can_demote(tier, entry) {
                drop(shard);
                return self.give_up(tier, h);
            }
            let Some(pin) = self.memory[tier].arena.pin(entry.memory[tier]) else {
                return false;
            };
            (entry.clone(), pin)
        };
        if tier + 1 < self.memory.len() {
            self.copy_down(tier, h, &entry, pin)
        } else {
            self.write_down(tier, h, entry, pin, Why::Demote)
        }
    }

    /// Evicts a victim that cannot be, or need not be, written below.
    fn give_up(&self, tier: usize, h: Handle) -> bool {
        matches!(self.evict(tier, h, true), Left::Freed | Left::Gone)
    }

    /// Copies a block to the next memory tier and frees it here.
    fn copy_down(self: &Arc<Self>, tier: usize, h: Handle, entry: &Entry, pin: Pin) -> bool {
        let below = tier + 1;
        let deadline = Instant::now() + Duration::from_secs(1);
        let Ok(new) = self.reserve(below, entry.shape.pages(), deadline) else {
            drop(pin);
            return self.give_up(tier, h);
        };
        let len = entry.shape.image_len();
        // SAFETY: the new slot is ours alone and `len` long; the old one is pinned and complete.
        unsafe { copy(new.ptr(), pin.ptr(), len) };
        // SAFETY: filled just now, and ours alone.
        let copied = unsafe { new.bytes(len) };
        if image::verify(copied, entry.shape, entry.root, &entry.id, 0, 0).is_err() {
            new.discard();
            self.lose_memory((h, entry.epoch), tier, pin.start());
            return true;
        }
        let mut shard = self.index.shard(h);
        let Some(current) = shard
            .get_same(h, entry.epoch)
            .filter(|e| e.memory[tier] == pin.start() && e.memory[below] == NOWHERE)
        else {
            drop(shard);
            new.discard();
            return true;
        };
        current.memory[below] = new.start();
        self.memory[below].arena.set_owner(new.start(), h);
        self.insert_order(below, h, current);
        self.memory[below].stats.inserts.add(1);
        if pin.discard_if_only().is_ok() {
            current.memory[tier] = NOWHERE;
            self.order.lock().policy(tier).on_remove(h);
            self.memory[tier].stats.demotions.add(1);
        }
        true
    }

    /// Starts a block's write to NVMe. False: it stays where it is.
    fn write_down(
        self: &Arc<Self>,
        tier: usize,
        h: Handle,
        entry: Entry,
        pin: Pin,
        why: Why,
    ) -> bool {
        let Some(cold) = &self.cold else {
            return false;
        };
        let len = entry.shape.image_len();
        if !self.mover.begin(h, len) {
            return true; // under way already
        }
        let deadline = Instant::now() + DEFAULT_TIMEOUT;
        self.mover.drain(IN_FLIGHT.max(len), deadline);
        let affordable = |slot: &Slot| {
            let spent = cold
                .budget
                .as_ref()
                .is_none_or(|b| b.spend(len, self.clock.now()));
            if !spent {
                self.stats.over_budget.add(1);
                cold.tier.abandon(*slot);
            }
            spent
        };
        let Some(slot) = self.reserve_cold(entry.shape.pages()).filter(affordable) else {
            self.mover.end(h, len);
            drop(pin);
            return why == Why::Demote && self.give_up(tier, h);
        };
        // SAFETY: a published image, pinned.
        let bytes = unsafe { pin.bytes(len) };
        // A zero-copy lease may have been written to: never let that reach the disk unseen.
        let Some(root) = cold_root(&entry, bytes, slot.generation) else {
            cold.tier.abandon(slot);
            self.mover.end(h, len);
            self.lose_memory((h, entry.epoch), tier, pin.start());
            return true;
        };
        let place = Cold {
            slot,
            root,
            codec: 0,
        };
        let start = pin.start();
        // SAFETY: the slot has the image's length; pinned slots are not written to.
        let buf = unsafe { IoBuf::new(pin.ptr(), len, Arc::new(pin)) };
        let inner = self.clone();
        let known = (h, entry.epoch);
        let id = entry.id;
        cold.tier.write(Write {
            slot,
            id,
            parent: entry.parent,
            namespace: entry.namespace,
            shape: entry.shape,
            codec: 0,
            importance: entry.importance,
            root,
            buf,
            done: Box::new(move |result| {
                match result {
                    Ok(()) => inner.publish_cold(known, &id, place, (tier, start), why),
                    Err(_) => inner.cold_error(),
                }
                inner.mover.end(h, len);
                for memory in &inner.memory {
                    memory.arena.notify();
                }
            }),
        });
        true
    }

    /// A block's bytes are on NVMe: names the place, and frees the slot above if nobody reads it.
    fn publish_cold(&self, (h, epoch): Known, id: &Id, place: Cold, from: (usize, u32), why: Why) {
        let (tier, start) = from;
        let Some(cold) = &self.cold else {
            return;
        };
        let memory = &self.memory[tier];
        let mut shard = self.index.shard(h);
        let Some(entry) = shard.get_same(h, epoch).filter(|e| e.cold.is_none()) else {
            drop(shard);
            cold.tier.remove(place.slot, id);
            return;
        };
        entry.cold = Some(place);
        cold.tier.set_owner(place.slot, h);
        self.insert_order(self.memory.len(), h, entry);
        cold.stats.inserts.add(1);
        // The write itself may still hold one pin.
        if why == Why::Demote && entry.memory[tier] == start && memory.arena.pins(start) <= 1 {
            entry.memory[tier] = NOWHERE;
            self.order.lock().policy(tier).on_remove(h);
            memory.stats.demotions.add(1);
            memory.arena.retire(start);
        }
    }

    /// A slot on NVMe; evicts what is coldest there until there is room.
    fn reserve_cold(&self, pages: u32) -> Option<Slot> {
        let cold = self.cold.as_ref()?;
        for _ in 0..256 {
            if let Some(slot) = cold.tier.reserve(pages) {
                return Some(slot);
            }
            if cold.is_failed() || pages > cold.tier.max_slot_pages() {
                return None;
            }
            let soon = cold.tier.free_soon_pages();
            if soon >= u64::from(pages) {
                // A freed slot is reused only once the record that frees it is durable.
                cold.tier
                    .flush(Some(Instant::now() + Duration::from_secs(5)))
                    .ok()?;
                if let Some(slot) = cold.tier.reserve(pages) {
                    return Some(slot);
                }
            }
            let mut victims = Vec::new();
            if cold.tier.free_pages() >= u64::from(pages) {
                victims = cold.tier.window(pages);
            }
            let mut freed = 0;
            for h in victims {
                freed += u32::from(self.evict_cold(h));
            }
            if freed == 0 {
                let mut victims = Vec::new();
                self.order.lock().policy(self.memory.len()).victims(
                    64,
                    &mut |_| true,
                    &mut victims,
                );
                let mut pages_freed = 0;
                for h in victims {
                    // Twice what is needed: the next writer finds room without waiting.
                    if pages_freed >= 2 * pages {
                        break;
                    }
                    let shape = self.index.shard(h).get(h).map(|e| e.shape.pages());
                    if self.evict_cold(h) {
                        pages_freed += shape.unwrap_or(0);
                        freed += 1;
                    }
                }
            }
            if freed == 0 && soon == 0 {
                return None;
            }
            cold.tier
                .flush(Some(Instant::now() + Duration::from_secs(5)))
                .ok()?;
        }
        None
    }

    /// Takes a block off NVMe. False: it stays, since others follow it that are kept above.
    fn evict_cold(&self, h: Handle) -> bool {
        let Some(cold) = &self.cold else {
            return false;
        };
        let mut shard = self.index.shard(h);
        let Some(entry) = shard.get_mut(h) else {
            return false;
        };
        let Some(place) = entry.cold else {
            return false;
        };
        let id = entry.id;
        let mut order = self.order.lock();
        if entry.in_memory().is_some() {
            entry.cold = None;
            order.policy(self.memory.len()).on_remove(h);
            cold.tier.remove(place.slot, &id);
            cold.stats.drops.add(1);
        } else if order.has_children(h) {
            order.policy(self.memory.len()).on_hit(h);
            return false;
        } else {
            self.drop_entry(&mut shard, &mut order, h);
            cold.stats.evictions.add(1);
        }
        true
    }

    /// Writes every block that is only in memory to NVMe, parents first, and makes it durable.
    pub(crate) fn persist(self: &Arc<Self>, deadline: Instant) -> Result<()> {
        let Some(cold) = &self.cold else {
            return Ok(());
        };
        let mut dirty: Vec<Known> = Vec::new();
        self.index.for_each_shard(|shard| {
            let handles: Vec<Handle> = shard.handles().collect();
            dirty.extend(handles.into_iter().filter_map(|h| {
                let entry = shard.get(h)?;
                entry.cold.is_none().then_some((h, entry.epoch))
            }));
        });
        let dirty = self.order.lock().parents_first(&dirty);
        let late = || {
            Error::new(
                Kind::Deadline,
                "not every block reached NVMe before the deadline. Wait longer; what was written is kept",
            )
        };
        for known in dirty {
            if Instant::now() >= deadline {
                return Err(late());
            }
            self.persist_one(known);
        }
        if !self.mover.drain(0, deadline) {
            return Err(late());
        }
        cold.tier.flush(Some(deadline)).map_err(Error::from)
    }

    fn persist_one(self: &Arc<Self>, (h, epoch): Known) {
        let (entry, tier, pin) = {
            let mut shard = self.index.shard(h);
            let Some(entry) = shard.get_same(h, epoch).filter(|e| e.cold.is_none()) else {
                return;
            };
            let entry = entry.clone();
            let Some((tier, start)) = entry.in_memory() else {
                return;
            };
            let Some(pin) = self.memory[tier].arena.pin(start) else {
                return;
            };
            (entry, tier, pin)
        };
        if self.can_write(&entry) {
            self.write_down(tier, h, entry, pin, Why::Persist);
        }
    }

    /// Bytes in memory were not what was put: the slot is never used again, the block is dropped
    /// there, and leaves the store if it lies nowhere else.
    pub(crate) fn lose_memory(&self, (h, epoch): Known, tier: usize, start: u32) {
        let memory = &self.memory[tier];
        let mut shard = self.index.shard(h);
        let Some(entry) = shard.get_same(h, epoch).filter(|e| e.memory[tier] == start) else {
            return; // somebody saw it first
        };
        memory.stats.corrupt.add(1);
        memory.arena.quarantine(start);
        entry.memory[tier] = NOWHERE;
        let nowhere = entry.in_memory().is_none() && entry.cold.is_none();
        self.order.lock().policy(tier).on_remove(h);
        memory.arena.retire(start);
        drop(shard);
        if nowhere {
            self.remove_tree((h, epoch));
        }
    }

    /// A place on NVMe failed a reader. Says what the reader should report: if the block has moved
    /// meanwhile, the place was simply outdated.
    pub(crate) fn lose_cold(&self, (h, epoch): Known, place: &Cold, miss: Miss) -> Miss {
        let Some(cold) = &self.cold else {
            return Miss::Absent;
        };
        let mut shard = self.index.shard(h);
        let Some(entry) = shard
            .get_same(h, epoch)
            .filter(|e| e.cold.as_ref() == Some(place))
        else {
            return Miss::Absent;
        };
        entry.cold = None;
        let nowhere = entry.in_memory().is_none();
        let id = entry.id;
        self.order.lock().policy(self.memory.len()).on_remove(h);
        match miss {
            Miss::Corrupt => cold.stats.corrupt.add(1),
            _ => cold.stats.errors.add(1),
        }
        cold.tier.quarantine(place.slot, &id);
        drop(shard);
        if nowhere {
            self.remove_tree((h, epoch));
        }
        miss
    }

    fn cold_error(&self) {
        if let Some(cold) = &self.cold {
            cold.stats.errors.add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_spent_and_refills_with_time() {
        let start = Instant::now();
        let budget = Budget::new(86_400 * 1000, start);
        assert!(budget.spend(3_600_000, start));
        assert!(!budget.spend(1, start));
        let later = start + Duration::from_secs(10);
        assert!(budget.allows(10_000, later) && !budget.allows(10_001, later));
    }
}
