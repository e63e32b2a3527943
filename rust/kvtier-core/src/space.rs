//! Making room: eviction and compaction.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_codec::checksum::copy;
use kvtier_codec::image::PAGE;
use kvtier_nvme::Bytes;
use kvtier_nvme::slots::{BUSY, FREE, LOST, Run};

use crate::arena::{Arena, Pin, Waiter};
use crate::cold::Room;
use crate::error::{Error, Kind, Result};
use crate::hbm;
use crate::index::{Entry, NOWHERE, Shard};
use crate::metadata::Charge;
use crate::order::{Known, Order};
use crate::policy::{Handle, Meta};
use crate::shares::{Claim, Need, Search};
use crate::stats::TierStats;
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

/// What an eviction is for, and may do that it would rather not.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Force {
    /// Evict what could still be written below.
    pub(crate) dirty: bool,
    /// Keep what has followers, or awaits one, instead of evicting them with it.
    pub(crate) alone: bool,
    /// Whose blocks may leave.
    pub(crate) need: Need,
}

/// What an attempt to make room came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Made {
    /// Something is free that was not.
    Room,
    /// Blocks were asked to leave.
    Asked,
    /// Nothing, but blocks are leaving.
    UnderWay,
    /// Nothing.
    Nothing,
    /// Nothing, and nobody else will make any.
    Never,
}

/// Whoever waits for a slot: one of just its size that a block leaves is handed over, in place of being freed,
/// found and taken again.
#[derive(Default)]
struct Heir {
    /// None of any other size will do; 0: none will.
    pages: u32,
    pin: Option<Pin>,
}

impl Heir {
    /// Takes a slot that nobody has pinned, if it is of the right size.
    fn take(&mut self, arena: &Arc<Arena>, start: u32, pages: u32) -> bool {
        if pages == self.pages {
            self.pin = arena.take_over(start);
        }
        self.pin.is_some()
    }

    /// Has those look again who wait below the cap of the namespace whose block left. (Of a slot that is freed
    /// all who wait hear.)
    fn tell(&self, arena: &Arena, order: &Order, tier: usize, tag: u64) {
        if self.pin.is_some() && order.shares.cap(tier, tag).is_some() {
            arena.notify();
        }
    }
}

/// Victims that one look at the policy asks for.
const BATCH: usize = 16;

/// How long somebody who waits for room trusts that he will be told, before he looks again.
const GLANCE: Duration = Duration::from_secs(1);

impl Inner {
    /// A slot in a memory tier for a block of this namespace, pinned for its writer, and its claim to
    /// the namespace's share until it is published. Evicts, moves and waits until `deadline` as
    /// needed; without one it does not wait.
    ///
    /// Do not wait here while holding slots that others wait for.
    pub(crate) fn reserve(
        &self,
        tier: usize,
        pages: u32,
        tag: u64,
        deadline: Option<Instant>,
    ) -> Result<(Pin, Claim)> {
        self.reserve_pressing(tier, pages, tag, deadline, &mut self.presser(tier))
    }

    /// Has the mover see to a hole of so many pages, given what was achieved already.
    pub(crate) fn presser(&self, tier: usize) -> impl FnMut(u32, Need, Made) -> Made {
        let mut asked = 0;
        move |wanted, need, made| {
            // Blocks that leave already should be enough, but those that were asked may stay.
            asked += u32::from(made == Made::Asked);
            if made == Made::Nothing || asked > 2 {
                self.mover.press(tier, wanted, need);
            }
            Made::UnderWay
        }
    }

    /// As [`Inner::reserve`]; `press` sees to it that blocks move down for a hole of so many pages,
    /// is told what was achieved already, and says what it came to.
    pub(crate) fn reserve_pressing(
        &self,
        tier: usize,
        pages: u32,
        tag: u64,
        deadline: Option<Instant>,
        press: &mut dyn FnMut(u32, Need, Made) -> Made,
    ) -> Result<(Pin, Claim)> {
        let memory = &self.memory[tier];
        let arena = &memory.arena;
        // Where no block has to go elsewhere before it leaves, there is hardly ever a wait.
        let mut waiter = self.has_below(tier).then(|| arena.waiter());
        let mut claimed = None;
        loop {
            let seen = waiter.as_ref().map(Waiter::seen);
            let mut need = Need::Block(tag);
            let mut heir = Heir::default();
            if claimed.is_none() {
                let claim = self.order.lock().shares.claim(tier, tag, pages);
                claimed = claim.map(|claim| claim.telling(arena));
            }
            let charge = if tier == 0 && claimed.is_some() {
                self.charge_metadata()
            } else {
                Charge::Paid
            };
            let wanted = match (charge, claimed.take()) {
                (Charge::Paid, Some(claim)) => match arena.alloc(pages) {
                    Some(pin) => {
                        self.wake_if_short(tier);
                        return Ok((pin, claim));
                    }
                    None => {
                        claimed = Some(claim);
                        heir.pages = pages;
                        pages
                    }
                },
                (_, None) => {
                    need = Need::Cap(tag);
                    pages
                }
                (Charge::Lacks(pages), claim) => {
                    claimed = claim;
                    pages
                }
                (Charge::TooMuch, claim) => {
                    claimed = claim;
                    // Records on their way to NVMe are part of it, and soon gone.
                    if let (Some(cold), Some(deadline)) = (&self.cold, deadline) {
                        let _ = cold
                            .tier
                            .commit(Some(deadline.min(Instant::now() + GLANCE)));
                    }
                    0
                }
            };
            let cap = self.order.lock().shares.cap(tier, tag);
            let most = cap.map_or(u64::MAX, |cap| cap.pages);
            let most = most.min(arena.pages().into());
            if u64::from(pages) > most {
                return Err(Error::new(
                    Kind::Full,
                    format!(
                        "a block of {} was given; the {} tier holds {} for its namespace beside the index. Use a larger tier or smaller blocks, or raise the cap",
                        Bytes(u64::from(pages) * PAGE as u64),
                        memory.name,
                        Bytes(most * PAGE as u64)
                    ),
                ));
            }
            if self.is_closed() {
                return Err(Error::new(Kind::Closed, "the store is being closed"));
            }
            let mut hope = true;
            if wanted > 0 {
                let mut made = self.make_room(tier, wanted, need, &mut heir);
                if let Some(pin) = heir.pin {
                    match claimed.take() {
                        Some(claim) => {
                            self.wake_if_short(tier);
                            return Ok((pin, claim));
                        }
                        None => pin.discard(),
                    }
                }
                if made != Made::Room && waiter.is_some() {
                    made = press(wanted, need, made);
                }
                if made == Made::Room {
                    continue;
                }
                hope = match made {
                    Made::Never => false,
                    Made::Nothing => waiter.as_ref().map(Waiter::seen) != seen,
                    _ => true,
                };
            }
            let Some((waiter, seen)) = waiter.as_ref().zip(seen) else {
                waiter = Some(arena.waiter()); // and once more, told from now on of what changes
                continue;
            };
            let now = Instant::now();
            if let Some(deadline) = deadline.filter(|&deadline| hope && now < deadline) {
                let brief = if wanted > 0 { GLANCE } else { GLANCE / 100 };
                // Where blocks leave one by one, their room is taken a few at a time.
                let least = match need {
                    Need::Block(_) if wanted > 0 && self.mover.is_leaving() => {
                        wanted.max(self.handful(tier))
                    }
                    _ => 0,
                };
                waiter.wait(seen, least, deadline.min(now + brief));
                continue;
            }
            let (kind, what) = if hope && deadline.is_some() {
                (Kind::Deadline, "before the deadline")
            } else {
                (Kind::Full, "now")
            };
            let (free, of) = match need {
                Need::Cap(_) => (0, "its namespace's cap"),
                _ => (arena.free_pages(), "it"),
            };
            return Err(Error::new(
                kind,
                format!(
                    "no room for {} in the {} tier {what}: {} of {} are free within {of}, the rest is pinned, leased, guaranteed to others or on its way down. Release leases, wait longer, or use a larger tier",
                    Bytes(u64::from(wanted) * PAGE as u64),
                    memory.name,
                    Bytes(u64::from(free) * PAGE as u64),
                    Bytes(most * PAGE as u64)
                ),
            ));
        }
    }

    /// Is there a tier to which blocks of memory tier `tier` go?
    pub(crate) fn has_below(&self, tier: usize) -> bool {
        tier + 1 < self.tiers()
    }

    /// Are so many pages free in a tier, or below the cap of the namespace that is at it?
    pub(crate) fn has_pages(&self, tier: usize, arena: &Arena, pages: u32, need: Need) -> bool {
        match need {
            Need::Cap(tag) => {
                let cap = self.order.lock().shares.cap(tier, tag);
                cap.is_none_or(|cap| cap.free >= pages.into())
            }
            _ => arena.free_pages() >= pages,
        }
    }

    /// Frees at least one slot on the way to a hole of `pages` pages, or to as many below a cap, if
    /// the caller can.
    fn make_room(&self, tier: usize, pages: u32, need: Need, heir: &mut Heir) -> Made {
        let arena = &self.memory[tier].arena;
        let mut made = Made::Nothing;
        let enough = || self.has_pages(tier, arena, pages, need);
        while self.reclaim_expired() {
            made = Made::Room;
            if enough() {
                return made;
            }
        }
        if !matches!(need, Need::Cap(_))
            && arena.free_pages() >= pages
            && let Some((from, to, runs)) = arena.window(pages)
        {
            made = self.clear(tier, from, to, &runs, need);
            if made == Made::Room {
                return made;
            }
        }
        // Where every window holds something that must stay, evicting may open another.
        let mut search = Search::new(tier, need);
        // None takes its followers in other tiers with it while there is one without.
        let mut force = Force {
            dirty: false,
            alone: true,
            need,
        };
        // One is mostly enough, and each costs a search.
        let mut asked = 1;
        let mut victims = Vec::with_capacity(BATCH);
        loop {
            victims.clear();
            self.order
                .lock()
                .shares
                .victims(&mut search, asked, &mut |_| true, &mut victims);
            asked = (2 * asked).min(BATCH);
            for &h in &victims {
                match self.evict_for(tier, h, force, heir) {
                    Left::Freed => made = Made::Room,
                    Left::Held | Left::Gone => {}
                    Left::Dirty => return made,
                }
                if made == Made::Room && (heir.pin.is_some() || enough()) {
                    return made;
                }
            }
            if victims.is_empty() {
                if made == Made::Room || !force.alone {
                    return made;
                }
                force.alone = false;
                search = Search::new(tier, need);
            }
        }
    }

    /// Takes a block out of a memory tier, and out of the store if it lies nowhere else.
    pub(crate) fn evict(&self, tier: usize, h: Handle, force: Force) -> Left {
        self.evict_for(tier, h, force, &mut Heir::default())
    }

    /// As [`Inner::evict`], for the sake of somebody.
    fn evict_for(&self, tier: usize, h: Handle, force: Force, heir: &mut Heir) -> Left {
        let memory = &self.memory[tier];
        let mut shard = self.index.shard(h);
        let Some(entry) = shard.get_mut(h) else {
            return Left::Gone;
        };
        let start = entry.memory[tier];
        if start == NOWHERE {
            return Left::Gone;
        }
        let (tag, pages) = (entry.namespace, entry.shape.pages());
        let mut order = self.order.lock();
        let held = |order: &mut Order| {
            order.shares.defer(tier, h);
            Left::Held
        };
        if !order.shares.may_leave(tier, tag, force.need) {
            return held(&mut order);
        }
        if entry.is_beside(tier) {
            let arena = &memory.arena;
            if !heir.take(arena, start, pages) && !arena.retire_idle(start) {
                return held(&mut order);
            }
            entry.memory[tier] = NOWHERE;
            order.shares.leave(tier, h, tag, pages);
            memory.stats.drops.add(1);
            heir.tell(arena, &order, tier, tag);
            return Left::Freed;
        }
        drop(order);
        if !force.dirty && self.can_demote(tier, entry) {
            return Left::Dirty;
        }
        if memory.arena.is_pinned(start) {
            return held(&mut self.order.lock());
        }
        let known = (h, entry.epoch);
        let unaffordable = self.is_unaffordable(entry);
        let mut order = self.order.lock();
        if force.alone && order.expects_child(h) {
            return held(&mut order);
        }
        if !order.has_children(h) {
            if heir.take(&memory.arena, start, pages)
                && let Some(entry) = shard.get_mut(h)
            {
                entry.memory[tier] = NOWHERE;
                order.shares.leave(tier, h, tag, pages);
                heir.tell(&memory.arena, &order, tier, tag);
            }
            self.drop_entry(&mut shard, &mut order, h);
            order.shares.count(tag, |account| account.evicted += 1);
            memory.stats.evictions.add(1);
        } else {
            // Its children lie elsewhere: without it they are useless.
            drop(order);
            drop(shard);
            if force.alone || !self.evict_tree(known, &memory.stats, force.need) {
                return held(&mut self.order.lock());
            }
        }
        if unaffordable {
            self.stats.over_budget.add(1);
        }
        Left::Freed
    }

    /// Has what a namespace holds of a tier above its cap leave: at once where nothing is below, else
    /// as the mover gets to it. Until then nothing more of it comes in.
    pub(crate) fn shrink_to_cap(&self, tier: usize, tag: u64) {
        let need = Need::Cap(tag);
        let excess = || {
            let cap = self.order.lock().shares.cap(tier, tag);
            cap.map_or(0, |cap| (-cap.free).clamp(0, u32::MAX.into()) as u32)
        };
        if let Some(hbm) = self.hbm.as_ref().filter(|_| tier == self.tiers()) {
            if excess() > 0 {
                self.make_room_in_hbm(hbm, 0, need);
            }
            return;
        }
        if tier < self.memory.len() {
            if excess() > 0 {
                self.make_room(tier, 0, need, &mut Heir::default());
                self.mover.press(tier, 0, need);
            }
            return;
        }
        while excess() > 0 {
            if self.evict_coldest(excess(), usize::MAX, Room::Coldest, need) == 0 {
                return;
            }
        }
    }

    /// Evicts a block and all that follow it, unless somebody holds one of them, or it may not leave a
    /// tier. False: it stayed.
    fn evict_tree(&self, root: Known, stats: &TierStats, need: Need) -> bool {
        let tree = self.order.lock().descendants(root);
        let is_held = |entry: &Entry| {
            self.memory
                .iter()
                .zip(entry.memory)
                .any(|(memory, start)| start != NOWHERE && memory.arena.is_pinned(start))
        };
        let held = tree.iter().any(|&(h, epoch)| {
            let mut shard = self.index.shard(h);
            shard.get_same(h, epoch).is_some_and(|entry| is_held(entry))
        });
        if held {
            return false;
        }
        for &(h, epoch) in &tree {
            let mut shard = self.index.shard(h);
            match shard.get_same(h, epoch) {
                None => continue,
                Some(entry) if is_held(entry) => return false,
                Some(entry) => {
                    let order = self.order.lock();
                    let mut tiers =
                        (0..self.tiers()).filter(|&tier| entry.is_in(tier, self.memory.len()));
                    if !tiers.all(|tier| order.shares.may_leave(tier, entry.namespace, need)) {
                        return false;
                    }
                }
            }
            let mut order = self.order.lock();
            if order.has_children(h) {
                return false; // a new one
            }
            if let Some(tag) = self.drop_entry(&mut shard, &mut order, h) {
                order.shares.count(tag, |account| account.evicted += 1);
            }
            stats.evictions.add(1);
        }
        true
    }

    /// Empties a stretch of a memory tier as far as possible: moves its blocks into holes outside
    /// it, evicts them, or asks for their demotion.
    pub(crate) fn clear(&self, tier: usize, from: u32, to: u32, runs: &[Run], need: Need) -> Made {
        // Which blocks stand here says nothing of their worth: none takes its followers with it.
        let force = Force {
            dirty: false,
            alone: true,
            need,
        };
        let mut cleared = true;
        // What is under way may be enough, and changes which stretch is the best.
        let idle = self.mover.is_idle();
        let mut made = if idle { Made::Nothing } else { Made::UnderWay };
        for run in runs {
            let h = run.owner;
            cleared &= match h {
                FREE => true,
                BUSY | LOST => false,
                _ => match self.relocate(tier, run, from, to) {
                    Some(moved) => moved,
                    None if !self.is_next(tier, h, need) => false,
                    None => match self.evict(tier, h, force) {
                        Left::Freed | Left::Gone => true,
                        Left::Held => false,
                        Left::Dirty => {
                            if idle {
                                self.mover.request(tier, h, need);
                                made = Made::Asked;
                            }
                            false
                        }
                    },
                },
            };
        }
        if cleared { Made::Room } else { made }
    }

    /// May a block leave a tier, and do no other namespaces' leave before it?
    pub(crate) fn is_next(&self, tier: usize, h: Handle, need: Need) -> bool {
        let shard = self.index.shard(h);
        let shares = &self.order.lock().shares;
        shard
            .get(h)
            .is_some_and(|entry| shares.is_next(tier, entry.namespace, need))
    }

    /// Moves a block out of `[from, to)`. `None`: no hole outside holds it. `Some(false)`: somebody
    /// reads it.
    fn relocate(&self, tier: usize, run: &Run, from: u32, to: u32) -> Option<bool> {
        let (h, start) = (run.owner, run.start);
        let arena = &self.memory[tier].arena;
        // First of all: letting go of a pin tells those who wait for room, and they may be us.
        let new = arena.alloc_outside(run.pages, from, to)?;
        let found = {
            let shard = self.index.shard(h);
            shard
                .get(h)
                .filter(|entry| entry.memory[tier] == start && entry.shape.pages() == run.pages)
                .map(|entry| (arena.pin(start), entry.epoch, entry.shape))
        };
        let Some((old, epoch, shape)) = found else {
            new.discard();
            return Some(true);
        };
        let Some(old) = old else {
            new.discard();
            return Some(false);
        };
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

    /// Tells the policy of a tier that a block of its arrived there.
    pub(crate) fn insert_order(&self, tier: usize, h: Handle, entry: &Entry) {
        let mut order = self.order.lock();
        let meta = self.meta(&order, tier, h, entry);
        order.shares.enter(tier, h, entry.namespace, &meta);
    }

    /// What a tier's policy is told of a block.
    pub(crate) fn meta(&self, order: &Order, tier: usize, h: Handle, entry: &Entry) -> Meta {
        let pages = match entry.cold() {
            _ if tier == self.tiers() => hbm::pages(entry.shape),
            Some(cold) if tier == self.memory.len() => cold.slot.pages,
            _ => entry.shape.pages(),
        };
        order.meta(h, entry.fingerprint(), pages, entry.importance)
    }

    /// Takes an entry without children out of the store, wherever it lies. Slots that are held are
    /// freed when they are let go. Says which namespace it was of.
    pub(crate) fn drop_entry(
        &self,
        shard: &mut Shard,
        order: &mut Order,
        h: Handle,
    ) -> Option<u64> {
        self.leave_hbm(shard, order, h);
        let entry = self.index.remove(shard, h)?;
        if self.leave_places(order, h, &entry) {
            // What is removed is no longer kept, even for who asked for that.
            self.pinned.lock().remove(&entry.id);
        }
        order.detach(h);
        Some(entry.namespace)
    }

    /// Gives up all places of an entry below HBM; slots that are held are freed when they are let go. Says
    /// whether one is.
    pub(crate) fn leave_places(&self, order: &mut Order, h: Handle, entry: &Entry) -> bool {
        let mut held = false;
        let (tag, pages) = (entry.namespace, entry.shape.pages());
        for (tier, memory) in self.memory.iter().enumerate() {
            let start = entry.memory[tier];
            if start != NOWHERE {
                order.shares.leave(tier, h, tag, pages);
                memory.arena.retire(start);
                held |= memory.arena.is_pinned(start);
            }
        }
        if let (Some(place), Some(cold)) = (entry.cold(), &self.cold) {
            let pages = place.slot.pages;
            order.shares.leave(self.memory.len(), h, tag, pages);
            cold.tier.remove(place.slot, &entry.id);
        }
        held
    }

    /// Gives up a block's place in HBM; a slot that is held is freed when it is let go.
    pub(crate) fn leave_hbm(&self, shard: &mut Shard, order: &mut Order, h: Handle) {
        if let (Some(start), Some(hbm)) = (shard.clear_hbm(h), &self.hbm) {
            if let Some(entry) = shard.get(h) {
                let (tag, pages) = (entry.namespace, hbm::pages(entry.shape));
                order.shares.leave(self.tiers(), h, tag, pages);
            }
            hbm.arena.retire(start);
        }
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
        if removed > 0 {
            // Also who waits for more than this, which a device that hangs may never free.
            for memory in &self.memory {
                memory.arena.notify();
            }
        }
        removed
    }
}
