//! NVMe as the core sees it: room there, what leaves it, and what is written to be kept.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashSet;
use kvtier_codec::image::PAGE;
use kvtier_nvme::{Bytes, Slot};

use crate::error::{Error, Kind, Result};
use crate::index::{Cold, NOWHERE};
use crate::load::Miss;
use crate::order::Known;
use crate::policy::Handle;
use crate::shares::{Claim, Need, Search};
use crate::space::Force;
use crate::store::{ColdTier, Inner};
use crate::write::{Sent, Why};

/// How long a slot's new use waits for the record that frees it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Pages that are kept free on NVMe ahead of need, and at most this part of it: a freed slot is
/// used again only once the record that frees it is durable, which no write should wait for.
const AHEAD: u64 = (64 << 20) / PAGE as u64;
const AHEAD_PART: u64 = 16;

/// What may leave NVMe so that a block finds room there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// Nothing.
    Free,
    /// Blocks that lie nowhere else: copies of what is in memory are worth as much as the new one.
    Spare,
    /// Whatever is coldest.
    Coldest,
}

impl ColdTier {
    fn ahead(&self) -> u64 {
        AHEAD.min(self.tier.capacity_pages() / AHEAD_PART)
    }

    /// Pages that are free, or will be.
    fn ready(&self) -> u64 {
        self.tier.free_pages() + self.tier.free_soon_pages()
    }

    /// Is it far from full: further than what leaves it at a time brings it?
    pub(crate) fn has_room(&self) -> bool {
        self.ready() >= 2 * self.ahead()
    }
}

impl Inner {
    /// A slot on NVMe for a block of this namespace, and its claim to the namespace's share until it
    /// is published; evicts there until there is room.
    pub(crate) fn reserve_cold(
        &self,
        pages: u32,
        tag: u64,
        room: Room,
        deadline: Instant,
        stop: &dyn Fn() -> bool,
    ) -> Option<(Slot, Claim)> {
        let cold = self.cold.as_ref()?;
        let tier = self.memory.len();
        let need = Need::Block(tag);
        let cap = self.order.lock().shares.cap(tier, tag);
        if cap.is_some_and(|cap| u64::from(pages) > cap.pages) {
            return None; // however much else leaves
        }
        let claim = loop {
            if let Some(claim) = self.order.lock().shares.claim(tier, tag, pages) {
                break claim;
            }
            let none = room == Room::Free || stop();
            if none || self.evict_coldest(pages, usize::MAX, room, Need::Cap(tag)) == 0 {
                return None;
            }
        };
        let ahead = cold.ahead();
        for _ in 0..256 {
            if room == Room::Coldest && cold.ready() < ahead {
                self.evict_coldest((ahead / 2) as u32, usize::MAX, room, Need::Tier);
            }
            if let Some(slot) = cold.tier.reserve(pages) {
                return Some((slot, claim));
            }
            if room == Room::Free
                || cold.is_failed()
                || self.mover.is_stalled()
                || pages > cold.tier.max_slot_pages()
                || stop()
            {
                return None;
            }
            let soon = cold.tier.free_soon_pages();
            if soon < u64::from(pages) {
                let mut freed = 0;
                if cold.tier.free_pages() >= u64::from(pages) {
                    // Where a block stands says nothing of its worth: none with followers leaves.
                    let window = cold.tier.window(pages);
                    freed = window
                        .into_iter()
                        .filter(|&h| !self.order.lock().has_children(h))
                        .filter(|&h| self.is_next(tier, h, need))
                        .map(|h| self.evict_cold(h, room, need))
                        .sum();
                }
                if freed == 0 {
                    // More than is needed: a freed slot costs a wait for its record.
                    let enough = (2 * pages).max((ahead / 4) as u32);
                    freed = self.evict_coldest(enough, usize::MAX, room, need);
                }
                if freed == 0 && soon == 0 {
                    return None;
                }
            }
            // A freed slot is reused only once the record that frees it is durable.
            let deadline = deadline.min(Instant::now() + PATIENCE);
            cold.tier.commit(Some(deadline)).ok()?;
        }
        None
    }

    /// Lets the coldest `count` blocks of the lowest tier go, whose entries are needed.
    pub(crate) fn forget_coldest(&self, count: usize) {
        if self.cold.is_some() {
            self.evict_coldest(u32::MAX, count, Room::Spare, Need::Tables);
            return;
        }
        let tier = self.memory.len() - 1;
        let force = Force {
            need: Need::Tables,
            ..Force::default()
        };
        let mut search = Search::new(tier, force.need);
        let mut victims = Vec::new();
        self.order
            .lock()
            .shares
            .victims(&mut search, count, &mut |_| true, &mut victims);
        for h in victims {
            self.evict(tier, h, force);
        }
    }

    /// Evicts from NVMe, in the policy's order, until so many pages or blocks have left. Returns how
    /// many pages.
    pub(crate) fn evict_coldest(&self, pages: u32, count: usize, room: Room, need: Need) -> u32 {
        const BATCH: usize = 64;
        let Some(cold) = &self.cold else {
            return 0;
        };
        let tier = self.memory.len();
        let (mut freed, mut gone) = (0, 0);
        while freed < pages {
            let used = cold.tier.used_pages();
            if !self.reclaim_expired() {
                break;
            }
            freed += used.saturating_sub(cold.tier.used_pages()) as u32;
        }
        let mut search = Search::new(tier, need);
        while freed < pages && gone < count {
            let asked = BATCH.min(count - gone);
            let mut victims = Vec::with_capacity(asked);
            self.order
                .lock()
                .shares
                .victims(&mut search, asked, &mut |_| true, &mut victims);
            if victims.is_empty() {
                break;
            }
            for h in victims {
                if freed < pages {
                    let n = self.evict_cold(h, room, need);
                    freed += n;
                    gone += usize::from(n > 0);
                }
            }
        }
        freed
    }

    /// Takes a block off NVMe. Returns its pages; 0 if it stays.
    fn evict_cold(&self, h: Handle, room: Room, need: Need) -> u32 {
        let Some(cold) = &self.cold else {
            return 0;
        };
        let mut shard = self.index.shard(h);
        let Some(entry) = shard.get_mut(h) else {
            return 0;
        };
        let Some(place) = entry.cold() else {
            return 0;
        };
        let (id, tag, tier) = (entry.id, entry.namespace, self.memory.len());
        let in_memory = entry.in_memory().is_some();
        let mut order = self.order.lock();
        let stays = if in_memory {
            room != Room::Coldest
        } else {
            order.has_children(h) || order.expects_child(h) // they are kept above
        };
        if stays || !order.shares.may_leave(tier, tag, need) {
            order.shares.defer(tier, h);
            return 0;
        }
        if in_memory {
            entry.clear_cold();
            order.shares.leave(tier, h, tag, place.slot.pages);
            cold.tier.remove(place.slot, &id);
            cold.stats.drops.add(1);
        } else {
            self.drop_entry(&mut shard, &mut order, h);
            order.shares.count(tag, |account| account.evicted += 1);
            cold.stats.evictions.add(1);
        }
        place.slot.pages
    }

    /// Writes every block that is only in memory to NVMe, parents first, and makes it durable.
    ///
    /// # Errors
    /// [`Kind::Deadline`]; [`Kind::Full`] if some do not fit, or must not be written;
    /// [`Kind::Storage`] if the device fails.
    pub(crate) fn persist(self: &Arc<Self>, deadline: Instant) -> Result<()> {
        let Some(cold) = &self.cold else {
            return Ok(());
        };
        let dirty = self.dirty();
        let dirty = self.order.lock().parents_first(&dirty);
        let late = || {
            Error::new(
                Kind::Deadline,
                "not every block reached NVMe before the deadline. Wait longer; what was written is kept",
            )
        };
        let errors = cold.stats.errors.get();
        let mut stuck: HashSet<Handle> = HashSet::new();
        for &known in &dirty {
            if Instant::now() >= deadline {
                return Err(late());
            }
            let parent = self.order.lock().parent(known.0);
            let orphan = parent.is_some_and(|parent| stuck.contains(&parent));
            let room = if stuck.is_empty() {
                Room::Spare
            } else {
                Room::Free
            };
            match self.persist_one(known, orphan, room, deadline) {
                Sent::Away => {}
                Sent::Refused => {
                    stuck.insert(known.0);
                }
                Sent::Late if self.mover.is_stalled() => {
                    return self.say_what_stayed(&dirty, true);
                }
                Sent::Late => return Err(late()),
            }
        }
        if !self.mover.settle(deadline) {
            return Err(late());
        }
        cold.tier.flush(Some(deadline)).map_err(Error::from)?;
        self.say_what_stayed(&dirty, cold.stats.errors.get() > errors)
    }

    /// Blocks that lie only in memory.
    fn dirty(&self) -> Vec<Known> {
        let mut dirty: Vec<Known> = Vec::new();
        self.index.for_each_shard(|shard| {
            let handles: Vec<Handle> = shard.handles().collect();
            dirty.extend(handles.into_iter().filter_map(|h| {
                let entry = shard.get(h)?;
                (!entry.is_cold()).then_some((h, entry.epoch))
            }));
        });
        dirty
    }

    fn persist_one(
        self: &Arc<Self>,
        (h, epoch): Known,
        orphan: bool,
        room: Room,
        deadline: Instant,
    ) -> Sent {
        let (entry, tier, pin) = {
            let mut shard = self.index.shard(h);
            let Some(entry) = shard.get_same(h, epoch).filter(|e| !e.is_cold()) else {
                return Sent::Away;
            };
            let entry = entry.clone();
            let Some((tier, start)) = entry.in_memory() else {
                return Sent::Away;
            };
            let Some(pin) = self.memory[tier].arena.pin(start) else {
                return Sent::Away;
            };
            (entry, tier, pin)
        };
        if orphan || !self.can_write(&entry) {
            return Sent::Refused;
        }
        self.write_down(tier, h, entry, pin, Why::Persist(room), None, deadline)
    }

    /// An error if some of these blocks still lie only in memory.
    fn say_what_stayed(&self, blocks: &[Known], failing: bool) -> Result<()> {
        let Some(cold) = &self.cold else {
            return Ok(());
        };
        let (mut count, mut bytes, mut unaffordable) = (0, 0, false);
        for &(h, epoch) in blocks {
            let mut shard = self.index.shard(h);
            if let Some(entry) = shard.get_same(h, epoch).filter(|e| !e.is_cold()) {
                count += 1;
                bytes += entry.shape.payload();
                unaffordable |= self.is_unaffordable(entry);
            }
        }
        if count == 0 {
            return Ok(());
        }
        let (kind, why) = if failing || cold.is_failed() || self.mover.is_stalled() {
            (
                Kind::Storage,
                "the device fails, or does not answer. See to the device",
            )
        } else if unaffordable {
            (Kind::Full, "the write budget is spent. Wait, or raise it")
        } else {
            (
                Kind::Full,
                "there is no room for them on NVMe. Use a larger NVMe tier",
            )
        };
        Err(Error::new(
            kind,
            format!(
                "{count} blocks of {} in all stay in memory only: {why}",
                Bytes(bytes as u64)
            ),
        ))
    }

    /// Bytes in memory were not what was put: the slot is never used again, the block is dropped
    /// there, and leaves the store if it lies nowhere else.
    pub(crate) fn lose_memory(&self, (h, epoch): Known, tier: usize, start: u32) {
        let memory = &self.memory[tier];
        let mut shard = self.index.shard(h);
        let Some(entry) = shard.get_same(h, epoch).filter(|e| e.memory[tier] == start) else {
            return; // somebody saw it first
        };
        if !memory.arena.quarantine(start) {
            return; // as above; it is about to be removed
        }
        memory.stats.corrupt.add(1);
        if entry.is_beside(tier) {
            entry.memory[tier] = NOWHERE;
            let (tag, pages) = (entry.namespace, entry.shape.pages());
            self.order.lock().shares.leave(tier, h, tag, pages);
            memory.arena.retire(start);
            return;
        }
        drop(shard);
        self.remove_tree((h, epoch));
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
            .filter(|e| e.cold().as_ref() == Some(place))
        else {
            return Miss::Absent;
        };
        match miss {
            Miss::Corrupt => cold.stats.corrupt.add(1),
            _ => cold.stats.errors.add(1),
        }
        if self.is_closed() && miss == Miss::Device {
            return miss; // the device may be sound: it takes no reads any more
        }
        cold.tier.quarantine(place.slot, &entry.id);
        if entry.in_memory().is_some() {
            entry.clear_cold();
            let (tag, pages) = (entry.namespace, place.slot.pages);
            let mut order = self.order.lock();
            order.shares.leave(self.memory.len(), h, tag, pages);
            return miss;
        }
        drop(shard);
        self.remove_tree((h, epoch));
        miss
    }
}
