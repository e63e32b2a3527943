//! The HBM tier: the slots of a pool that lies on a device, and the copies on their way to it.
//!
//! The bytes are somebody else's: a thread that knows the device takes [`Batch`]es from a [`Feed`],
//! copies, and says how that ended. A copy there is one more of what a tier below holds at the same
//! time, so dropping it is always right, and nothing is ever copied back.

use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvtier_codec::image::{self, Id, PAGE, Root, Shape};
use kvtier_nvme::slots::{BUSY, FREE, LOST};
use kvtier_nvme::{Clock, Health, STALL};

use crate::arena::backing::Backing;
use crate::arena::{Arena, Pin};
use crate::error::Result;
use crate::index::{Entry, Shard};
use crate::jobs::Prefetcher;
use crate::layout::Selection;
use crate::load::{Landing, Miss};
use crate::order::Known;
use crate::policy::Handle;
use crate::shares::{Claim, Need, Search};
use crate::stats::TierStats;
use crate::store::{Inner, Namespace, Store};
use crate::transfers::{Told, Transfers};

/// The HBM tier's name in results and statistics.
pub const HBM: &str = "hbm";

/// Victims that one look at the policy asks for.
const BATCH: usize = 16;

/// Copies handed out at a time.
const MOST: usize = 64;

/// How long somebody who waits for room trusts that he will be told, before he looks again.
pub(crate) const GLANCE: Duration = Duration::from_secs(1);

/// A pool of which this process has the addresses of slots, and nothing else.
struct Elsewhere(usize);

impl Backing for Elsewhere {
    fn base(&self) -> NonNull<u8> {
        NonNull::dangling()
    }
    fn size(&self) -> usize {
        self.0
    }
    fn is_private(&self) -> bool {
        false
    }
    fn release(&self) {}
}

/// The HBM tier at work.
pub(crate) struct HbmTier {
    pub(crate) size: u64,
    pub(crate) arena: Arc<Arena>,
    pub(crate) stats: TierStats,
    pub(crate) health: Health,
    pub(crate) prefetcher: Prefetcher,
    transfers: Transfers<Known, Transfer, Miss>,
}

impl HbmTier {
    /// A pool of so many bytes, all free, over so many of memory.
    pub(crate) fn new(size: u64, memory: u64, clock: Arc<dyn Clock>) -> Self {
        HbmTier {
            size,
            arena: Arena::new(Box::new(Elsewhere(size as usize))),
            stats: TierStats::default(),
            health: Health::new(clock),
            prefetcher: Prefetcher::to_hbm(memory as usize),
            transfers: Transfers::default(),
        }
    }

    /// A copy has ended. Who waits for room since it was under way looks again.
    fn end(&self, block: Known, how: Landing) {
        self.transfers.end(block, how);
        self.arena.notify();
    }

    /// No copy begins any more; those under way end with nobody to hear of it.
    pub(crate) fn stop(&self) {
        self.prefetcher.stop();
        drop(self.transfers.stop(Miss::Cancelled));
        self.arena.notify();
    }
}

/// Pages of the pool that a block takes: its payload alone.
pub(crate) fn pages(shape: Shape) -> u32 {
    shape.payload().div_ceil(PAGE) as u32
}

/// A copy of one block, asked for.
struct Transfer {
    block: Known,
    id: Id,
    shape: Shape,
    root: Root,
    /// The memory tier that it is copied from.
    from: usize,
    source: Pin,
    /// `None` once it was published.
    slot: Option<Pin>,
    /// To its namespace's share.
    _claim: Claim,
    /// What is wrong with the source.
    wrong: Option<Miss>,
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            slot.discard();
        }
    }
}

/// A copy for the thread that copies: payload bytes at `host`, for place `at` of the pool.
#[derive(Clone, Copy, Debug)]
pub struct Copying {
    /// Bytes from the pool's first one.
    pub at: usize,
    /// The source. It keeps its bytes until the batch has ended.
    pub host: *const u8,
    /// How many.
    pub len: usize,
}

/// Copies that end together. Dropped without [`Batch::finish`], it has failed.
pub struct Batch {
    hbm: Arc<HbmTier>,
    inner: Weak<Inner>,
    transfers: Vec<Transfer>,
}

impl Batch {
    /// What to copy.
    pub fn copies(&self) -> Vec<Copying> {
        let copying = |t: &Transfer| {
            let slot = t.slot.as_ref()?;
            Some(Copying {
                at: slot.start() as usize * PAGE,
                host: t.source.ptr(),
                len: t.shape.payload(),
            })
        };
        self.transfers.iter().filter_map(copying).collect()
    }

    /// Verifies the sources: a block that is not what was put ends as corrupt. Meant to run beside
    /// the copy; blocks.
    pub fn verify(&mut self) {
        let inner = self.inner.upgrade();
        for t in &mut self.transfers {
            // SAFETY: a published image, pinned.
            let bytes = unsafe { t.source.bytes(t.shape.image_len()) };
            if image::verify(bytes, t.shape, t.root, &t.id, 0, 0).is_err() {
                t.wrong = Some(Miss::Corrupt);
            }
            if let Some(inner) = &inner {
                match &inner.memory[t.from].pacer {
                    _ if t.wrong.is_some() => inner.lose_memory(t.block, t.from, t.source.start()),
                    Some(pacer) => pacer.pass(t.shape.payload()),
                    None => {}
                }
            }
        }
    }

    /// The copies have ended, well (`ok`) or not: from now on nothing touches their places. Those
    /// that are right become visible.
    pub fn finish(mut self, ok: bool) {
        let inner = self.inner.upgrade();
        // Whoever hears of a copy that failed finds the device set aside, if it is.
        self.answered();
        match &inner {
            _ if self.transfers.is_empty() => {}
            _ if ok => self.hbm.health.succeeded(),
            Some(inner) => inner.device_failed(),
            None => {}
        }
        for mut t in std::mem::take(&mut self.transfers) {
            let how = match (&inner, t.wrong) {
                (_, Some(miss)) => Err(miss),
                (Some(inner), None) if ok => inner.publish_lifted(&mut t),
                _ => Err(self.fail()),
            };
            let block = t.block;
            drop(t); // whoever hears of it finds its place free, or the block there
            self.hbm.end(block, how);
        }
    }

    /// The device has done with it, or was not given it.
    fn answered(&self) {
        if !self.transfers.is_empty() {
            self.hbm.health.answered();
        }
    }

    fn fail(&self) -> Miss {
        self.hbm.stats.errors.add(1);
        Miss::Device
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.answered();
        let transfers = std::mem::take(&mut self.transfers);
        match self.inner.upgrade() {
            Some(inner) if !transfers.is_empty() => inner.device_failed(),
            _ => {}
        }
        for t in transfers {
            let (block, miss) = (t.block, self.fail());
            drop(t);
            self.hbm.end(block, Err(miss));
        }
    }
}

/// What the thread that copies works from. It keeps the memory tiers mapped, and the store not.
pub struct Feed {
    hbm: Arc<HbmTier>,
    inner: Weak<Inner>,
    arenas: Vec<Arc<Arena>>,
}

impl Feed {
    /// First byte and length of each memory tier, for the device's driver; mapped while this lives.
    pub fn host(&self) -> Vec<(*mut u8, usize)> {
        self.arenas.iter().map(|arena| arena.range()).collect()
    }

    /// The next copies. With `wait`, blocks until there are some; without, there may be none.
    /// `None`: no more come.
    pub fn next(&self, wait: bool) -> Option<Batch> {
        let transfers = self.hbm.transfers.take(MOST, wait)?;
        if !transfers.is_empty() {
            self.hbm.health.asked();
        }
        Some(Batch {
            transfers,
            hbm: self.hbm.clone(),
            inner: self.inner.clone(),
        })
    }

    /// Something else failed that the device was asked for.
    pub fn failed(&self) {
        self.hbm.stats.errors.add(1);
        if let Some(inner) = self.inner.upgrade() {
            inner.device_failed();
        }
    }

    /// Does the device answer? Where not, nobody should wait for what it was given.
    pub fn answers(&self) -> bool {
        self.hbm.health.has_stalled();
        !self.hbm.health.is_stalled()
    }

    /// No more come from now on, and blocks that wait for one are told so.
    pub fn stop(&self) {
        self.hbm.stop();
    }
}

/// A block that stays where it is in the pool while this lives, and nobody else is given.
#[derive(Clone)]
pub struct Placed {
    pin: Pin,
    len: usize,
    /// To its namespace's share, of what was taken out of the tier.
    _claim: Option<Arc<Claim>>,
}

impl Placed {
    /// Bytes from the pool's first one.
    pub fn at(&self) -> usize {
        self.pin.start() as usize * PAGE
    }

    /// Payload bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a block has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Store {
    /// Where the thread that copies to the HBM tier gets its work; `None` without such a tier.
    pub fn feed(&self) -> Option<Feed> {
        let inner = &self.inner;
        Some(Feed {
            hbm: inner.hbm.clone()?,
            inner: Arc::downgrade(inner),
            arenas: inner.memory.iter().map(|m| m.arena.clone()).collect(),
        })
    }

    /// Pins those of these blocks that lie in HBM, for a copy out of there. With `take`, for somebody
    /// who may write to them: then they are in HBM no more for anybody else.
    pub fn place(
        &self,
        ns: &Namespace,
        keys: &[&[u8]],
        selection: &Selection,
        take: bool,
    ) -> Result<Vec<Option<Placed>>> {
        let inner = &self.inner;
        inner.check_open()?;
        let mut used = Vec::with_capacity(keys.len());
        let places = inner.ids(ns, keys)?.into_iter().map(|id| {
            let Some((placed, known, shape)) = inner.place_one(&id, take) else {
                return Ok(None);
            };
            let pieces = ns.layout.pieces(shape, selection)?;
            inner.count_placed(pieces.iter().map(|p| p.len).sum());
            used.push(known);
            Ok(Some(placed))
        });
        let places = places.collect::<Result<_>>()?;
        let mut order = inner.order.lock();
        order.shares.count_reads(ns.tag(), used.len(), 0);
        for (h, below) in used.into_iter().rev() {
            if take {
                order.shares.on_hit(below, h);
            } else {
                order.shares.on_hit(inner.tiers(), h);
                order.shares.on_hit_above(below, h);
            }
        }
        Ok(places)
    }
}

impl Inner {
    fn count_placed(&self, bytes: usize) {
        if let Some(hbm) = &self.hbm {
            hbm.stats.hits.add(1);
            hbm.stats.hit_bytes.add(bytes as u64);
        }
    }

    fn place_one(&self, id: &Id, take: bool) -> Option<(Placed, (Handle, usize), Shape)> {
        let hbm = self.hbm.as_ref()?;
        let mut shard = self.index.of(id);
        let h = shard.find(id)?;
        let pin = hbm.arena.pin(self.in_hbm(&shard, h)?)?;
        let entry = shard.get(h)?;
        let (tag, shape, below) = (entry.namespace, entry.shape, self.below_hbm(entry));
        let mut claim = None;
        if take {
            let mut order = self.order.lock();
            self.leave_hbm(&mut shard, &mut order, h);
            // Somebody copies from it still: the next copy is the taker's.
            if hbm.arena.pins(pin.start()) > 1 {
                return None;
            }
            let kept = order.shares.keep(self.tiers(), tag, pages(shape));
            claim = Some(Arc::new(kept.telling(&hbm.arena)));
        }
        let placed = Placed {
            pin,
            len: shape.payload(),
            _claim: claim,
        };
        Some((placed, (h, below), shape))
    }

    /// The fastest tier that holds a block for readers of this process's memory.
    pub(crate) fn below_hbm(&self, entry: &Entry) -> usize {
        entry
            .in_memory()
            .map_or(self.memory.len(), |(tier, _)| tier)
    }

    /// Where a block lies in HBM, if its device is to be asked for it.
    pub(crate) fn in_hbm(&self, shard: &Shard, h: Handle) -> Option<u32> {
        let place = shard.hbm(h)?;
        let hbm = self.hbm.as_ref()?;
        (!hbm.health.is_stalled()).then_some(place)
    }

    /// Looks whether the device answers. Where it does not, it is bypassed until it does: nobody waits
    /// for its copies any more, and what they hold stays theirs.
    pub(crate) fn look_at_device(&self) {
        let Some(hbm) = self.hbm.as_ref().filter(|hbm| hbm.health.has_stalled()) else {
            return;
        };
        tracing::warn!(
            "the hbm tier is bypassed: no copy to its device has ended for {} s. Blocks are served from the tiers below until one does. See what its stream waits for, and whether the device works",
            STALL.as_secs()
        );
        hbm.stats.errors.add(1);
        for transfer in hbm.transfers.take(usize::MAX, false).into_iter().flatten() {
            let block = transfer.block;
            drop(transfer);
            hbm.end(block, Err(Miss::Device));
        }
        hbm.transfers.give_up(Err(Miss::Device));
    }

    /// Notes that the device failed. Where it does nothing else, it is set aside for a while, and what
    /// lies there is not trusted any more.
    fn device_failed(&self) {
        let Some(hbm) = self.hbm.as_ref().filter(|hbm| hbm.health.failed()) else {
            return;
        };
        tracing::warn!(
            "the hbm tier is set aside: its device fails again and again. Blocks are served from the tiers below, and it is tried anew every 10 s. See what it says, and whether the device works"
        );
        self.index.for_each_shard(|shard| {
            for h in shard.handles_in_hbm() {
                self.leave_hbm(shard, &mut self.order.lock(), h);
                hbm.stats.drops.add(1);
            }
        });
    }

    /// Has a block copied from memory to HBM, unless it is there; waits until `deadline` for room
    /// there, see [`Inner::reserve_hbm`]. `told` hears how it ended.
    pub(crate) fn lift(&self, block: Known, deadline: Instant, told: Told<Miss>) {
        let Some(hbm) = &self.hbm else {
            return told(Err(Miss::Absent));
        };
        self.look_at_device();
        if hbm.health.is_aside() {
            return told(Err(Miss::Device));
        }
        if !hbm.transfers.begin(block, told) {
            return;
        }
        let how = match self.prepare(hbm, block, deadline) {
            Ok(None) => Ok(()),
            Ok(Some(transfer)) => match hbm.transfers.push(transfer) {
                Ok(()) => return,
                Err(_) => Err(Miss::Cancelled),
            },
            Err(miss) => Err(miss),
        };
        hbm.transfers.end(block, how);
    }

    fn prepare(
        &self,
        hbm: &HbmTier,
        block: Known,
        deadline: Instant,
    ) -> std::result::Result<Option<Transfer>, Miss> {
        let (id, tag, shape, root, from, source) = {
            let mut shard = self.index.shard(block.0);
            let entry = shard.get_same(block.0, block.1).ok_or(Miss::Absent)?;
            // It left memory since the caller looked.
            let (from, start) = entry.in_memory().ok_or(Miss::Full)?;
            let source = self.memory[from].arena.pin(start).ok_or(Miss::Full)?;
            let (id, tag, shape, root) = (entry.id, entry.namespace, entry.shape, entry.root);
            if shard.hbm(block.0).is_some() {
                return Ok(None);
            }
            (id, tag, shape, root, from, source)
        };
        let (slot, claim) = self.reserve_hbm(hbm, tag, pages(shape), deadline)?;
        Ok(Some(Transfer {
            block,
            id,
            shape,
            root,
            from,
            source,
            slot: Some(slot),
            _claim: claim,
            wrong: None,
        }))
    }

    /// Makes a copy visible that is complete.
    fn publish_lifted(&self, t: &mut Transfer) -> Landing {
        let (Some(hbm), (h, epoch)) = (&self.hbm, t.block) else {
            return Err(Miss::Absent);
        };
        if hbm.transfers.is_stopped() {
            return Err(Miss::Cancelled);
        }
        let mut shard = self.index.shard(h);
        // With another root, an exact copy took the place of the one that was copied.
        let entry = shard.get_same(h, epoch).filter(|e| e.root == t.root);
        if entry.is_none() {
            return Err(Miss::Absent);
        }
        if shard.hbm(h).is_none()
            && let Some(slot) = t.slot.take()
        {
            self.index.set_hbm(&mut shard, h, slot.start());
            hbm.arena.set_owner(slot.start(), h);
            if let Some(entry) = shard.get(h) {
                self.insert_order(self.tiers(), h, entry);
            }
            hbm.stats.inserts.add(1);
            drop(shard);
            drop(slot); // the last: from now on it may be dropped
        }
        Ok(())
    }

    /// A slot in HBM for a block of this namespace, pinned for its writer, and its claim to the
    /// namespace's share. Drops copies that nobody uses, and waits until `deadline` for those that
    /// are on their way; what is held is not waited for.
    fn reserve_hbm(
        &self,
        hbm: &HbmTier,
        tag: u64,
        pages: u32,
        deadline: Instant,
    ) -> std::result::Result<(Pin, Claim), Miss> {
        let (arena, tier) = (&hbm.arena, self.tiers());
        let waiter = arena.waiter();
        let mut claimed = None;
        loop {
            let seen = waiter.seen();
            let mut need = Need::Block(tag);
            if claimed.is_none() {
                let claim = self.order.lock().shares.claim(tier, tag, pages);
                claimed = claim.map(|claim| claim.telling(arena));
            }
            match claimed.take() {
                None => need = Need::Cap(tag),
                Some(claim) => match arena.alloc(pages) {
                    Some(slot) => return Ok((slot, claim)),
                    None => claimed = Some(claim),
                },
            }
            let cap = self.order.lock().shares.cap(tier, tag);
            let most = cap.map_or(u64::MAX, |cap| cap.pages);
            if u64::from(pages) > most.min(arena.pages().into()) {
                return Err(Miss::Full);
            }
            if hbm.transfers.is_stopped() {
                return Err(Miss::Cancelled);
            }
            if self.make_room_in_hbm(hbm, pages, need) {
                continue;
            }
            let (now, others) = (Instant::now(), hbm.transfers.under_way() > 1);
            if now >= deadline || !(others || waiter.seen() != seen) {
                return Err(Miss::Full);
            }
            waiter.wait(seen, 0, deadline.min(now + GLANCE));
        }
    }

    /// Drops at least one copy, if any can be: the coldest until there are enough free pages, or as
    /// many below a cap; then those that stand in the way of a hole.
    pub(crate) fn make_room_in_hbm(&self, hbm: &HbmTier, pages: u32, need: Need) -> bool {
        let (arena, tier) = (&hbm.arena, self.tiers());
        let enough = || self.has_pages(tier, arena, pages, need);
        let mut dropped = false;
        while self.reclaim_expired() {
            dropped = true;
            if enough() {
                return true;
            }
        }
        if !matches!(need, Need::Cap(_))
            && enough()
            && let Some((_, _, runs)) = arena.window(pages)
        {
            let owners = runs.iter().map(|run| run.owner);
            let blocks = owners.filter(|owner| ![FREE, BUSY, LOST].contains(owner));
            // Another's that must stay there would make it all for nothing.
            if blocks.clone().all(|h| self.is_next(tier, h, need)) {
                dropped |= blocks.fold(false, |any, h| self.drop_from_hbm(hbm, h, need) | any);
            }
            if dropped {
                return true;
            }
        }
        let mut search = Search::new(tier, need);
        loop {
            let mut victims = Vec::with_capacity(BATCH);
            self.order
                .lock()
                .shares
                .victims(&mut search, BATCH, &mut |_| true, &mut victims);
            if victims.is_empty() {
                return dropped;
            }
            for h in victims {
                dropped |= self.drop_from_hbm(hbm, h, need);
                if dropped && enough() {
                    return true;
                }
            }
        }
    }

    /// Gives up a block's copy in HBM, unless somebody uses it, or it may not leave for this need.
    fn drop_from_hbm(&self, hbm: &HbmTier, h: Handle, need: Need) -> bool {
        let mut shard = self.index.shard(h);
        let (Some(start), Some(entry)) = (shard.hbm(h), shard.get(h)) else {
            return false;
        };
        let (tier, tag, pages) = (self.tiers(), entry.namespace, pages(entry.shape));
        let shares = &mut self.order.lock().shares;
        if !shares.may_leave(tier, tag, need) || !hbm.arena.retire_idle(start) {
            shares.defer(tier, h);
            return false;
        }
        shard.clear_hbm(h);
        shares.leave(tier, h, tag, pages);
        hbm.stats.drops.add(1);
        true
    }
}
