//! Demotion: who leaves a memory tier for the one below, and the account of what is under way.
//!
//! One thread wakes at the high watermark, takes victims from the policy and moves them down until
//! the low one is reached. Writes to NVMe are in flight while it looks for more.

use std::sync::Arc;
use std::time::Instant;

use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Condvar, Mutex};
use hashbrown::{HashMap, HashSet};
use kvtier_codec::checksum::copy;
use kvtier_codec::image;
use kvtier_nvme::{Clock, STALL};

use crate::arena::Pin;
use crate::error::Kind;
use crate::index::{Entry, NOWHERE};
use crate::order::Known;
use crate::policy::Handle;
use crate::shares::{Claim, Need, Search};
use crate::space::{Force, Left, Made};
use crate::store::Inner;
use crate::write::{Sent, Why};

/// Bytes that may be on their way to NVMe at once, and at most this part of the memory they come
/// from: a device that hangs keeps them. One block may always go.
const IN_FLIGHT: usize = 32 << 20;
const PART: usize = 4;

/// Bytes that are kept free, or on their way down, ahead of need where NVMe is below, and at most
/// this part of the tier: puts go on while the device writes, and it is given its next work meanwhile.
const AHEAD: usize = 16 << 20;
const AHEAD_PART: u32 = 16;

struct State {
    awake: bool,
    stop: bool,
    /// Blocks whose write is under way: the number of the write, and when it began.
    writing: HashMap<Known, (u64, Instant)>,
    /// Writes begun so far.
    begun: u64,
    in_flight: usize,
    /// Bytes that what is coded takes beside the tiers.
    staged: usize,
    /// Blocks that stand in the way of a hole, their tiers, and what the hole is for.
    requests: Vec<(usize, Handle, Need)>,
    /// What somebody waits for: in which tier, what for, and how many pages side by side.
    wanted: Vec<(usize, Need, u32)>,
}

/// The mover's mailbox, and its account of what is under way.
pub(crate) struct Mover {
    state: Mutex<State>,
    /// The thread has something to do.
    work: Condvar,
    /// A write ended.
    progress: Condvar,
    /// Writes that went to the device so far.
    sent: AtomicUsize,
    /// The oldest write under way does not come back.
    stalled: AtomicBool,
    /// Bytes of `in_flight` that leave memory once they are written. Changed with the state.
    going: AtomicUsize,
    limit: usize,
    staging: usize,
}

/// What a write takes while it is under way.
#[derive(Clone, Copy)]
pub(crate) struct Load {
    /// Bytes of the block.
    pub(crate) bytes: usize,
    /// Bytes beside the tiers.
    pub(crate) staged: usize,
    /// Whether it leaves memory by that.
    pub(crate) leaves: bool,
}

impl Load {
    fn going(&self) -> usize {
        if self.leaves { self.bytes } else { 0 }
    }
}

impl Mover {
    /// For blocks that come from a memory tier of so many bytes, and `staging` bytes beside it for
    /// coded ones.
    pub(crate) fn new(memory: usize, staging: usize) -> Self {
        Mover {
            limit: IN_FLIGHT.min(memory / PART),
            staging,
            state: Mutex::new(State {
                awake: false,
                stop: false,
                writing: HashMap::new(),
                begun: 0,
                in_flight: 0,
                staged: 0,
                requests: Vec::new(),
                wanted: Vec::new(),
            }),
            work: Condvar::new(),
            progress: Condvar::new(),
            sent: AtomicUsize::new(0),
            stalled: AtomicBool::new(false),
            going: AtomicUsize::new(0),
        }
    }
}

impl Mover {
    /// Looks for work.
    pub(crate) fn wake(&self) {
        let mut state = self.state.lock();
        if !state.awake {
            state.awake = true;
            drop(state);
            self.work.notify_one();
        }
    }

    /// Asks for a hole of so many pages in a tier, whatever its watermarks.
    pub(crate) fn press(&self, tier: usize, pages: u32, need: Need) {
        let mut state = self.state.lock();
        let mut wanted = state.wanted.iter_mut();
        match wanted.find(|want| (want.0, want.1) == (tier, need)) {
            Some(want) => want.2 = want.2.max(pages),
            None => state.wanted.push((tier, need, pages)),
        }
        state.awake = true;
        drop(state);
        self.work.notify_one();
    }

    /// Asks for one block to be moved down, whatever its turn.
    pub(crate) fn request(&self, tier: usize, h: Handle, need: Need) {
        let mut state = self.state.lock();
        if !state.requests.contains(&(tier, h, need)) {
            state.requests.push((tier, h, need));
        }
        state.awake = true;
        drop(state);
        self.work.notify_one();
    }

    /// Ends the thread after what it is doing.
    pub(crate) fn stop(&self) {
        self.state.lock().stop = true;
        self.work.notify_one();
        self.progress.notify_all();
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.state.lock().stop
    }

    /// Notes that a block's write begins, once few enough bytes are under way. `None`: it is under
    /// way already. `Some(false)`: too many were, until `deadline`, [`Mover::stop`], or a stall.
    pub(crate) fn begin(
        &self,
        known: Known,
        load: Load,
        deadline: Instant,
        clock: &dyn Clock,
    ) -> Option<bool> {
        let mut state = self.state.lock();
        loop {
            if state.writing.contains_key(&known) {
                return None;
            }
            let free = state.in_flight == 0 || state.in_flight + load.bytes <= self.limit;
            if free && state.staged + load.staged <= self.staging {
                break;
            }
            if state.stop
                || self.is_late(&state, clock.now())
                || self.progress.wait_until(&mut state, deadline).timed_out()
            {
                return Some(false);
            }
        }
        let number = state.begun;
        state.begun += 1;
        state.in_flight += load.bytes;
        self.going.fetch_add(load.going(), Ordering::Relaxed);
        state.staged += load.staged;
        state.writing.insert(known, (number, clock.now()));
        Some(true)
    }

    /// Is nothing leaving memory, or about to?
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        !self.is_leaving() && state.requests.is_empty()
    }

    /// How many writes were sent to the device, if none is under way.
    fn quiet(&self) -> Option<usize> {
        let state = self.state.lock();
        let sent = self.sent.load(Ordering::Relaxed);
        state.writing.is_empty().then_some(sent)
    }

    /// Notes that a write that has begun is not refused, but goes to the device.
    pub(crate) fn note_sent(&self) {
        self.sent.fetch_add(1, Ordering::Relaxed);
    }

    /// Blocks on their way to NVMe.
    pub(crate) fn writing(&self) -> usize {
        self.state.lock().writing.len()
    }

    /// Is anything on its way to NVMe that leaves memory by that?
    pub(crate) fn is_leaving(&self) -> bool {
        self.going.load(Ordering::Relaxed) > 0
    }

    /// Notes that a write ended. Says whether nothing leaves memory any more.
    pub(crate) fn end(&self, known: Known, load: Load) -> bool {
        let mut state = self.state.lock();
        state.writing.remove(&known);
        state.in_flight -= load.bytes;
        self.going.fetch_sub(load.going(), Ordering::Relaxed);
        state.staged -= load.staged;
        self.stalled.store(false, Ordering::Relaxed);
        let last = !self.is_leaving();
        drop(state);
        self.progress.notify_all();
        last
    }

    /// Waits until all writes that have begun are complete; false if they are not by `deadline`.
    pub(crate) fn settle(&self, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        let begun = state.begun;
        while state.writing.values().any(|&(number, _)| number < begun) {
            if self.progress.wait_until(&mut state, deadline).timed_out() {
                return state.writing.values().all(|&(number, _)| number >= begun);
            }
        }
        true
    }

    /// Looks whether the writes under way come back.
    fn look(&self, now: Instant) {
        self.is_late(&self.state.lock(), now);
    }

    fn is_late(&self, state: &State, now: Instant) -> bool {
        let late = state
            .writing
            .values()
            .any(|&(_, began)| now.saturating_duration_since(began) > STALL);
        self.stalled.store(late, Ordering::Relaxed);
        late
    }

    /// Do writes not come back?
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::Relaxed)
    }
}

impl Inner {
    /// The mover's thread.
    pub(crate) fn run_mover(self: &Arc<Self>) {
        loop {
            let wanted = {
                let mut state = self.mover.state.lock();
                while !state.awake && !state.stop {
                    self.mover.work.wait(&mut state);
                }
                if state.stop {
                    return;
                }
                state.awake = false;
                std::mem::take(&mut state.wanted)
            };
            self.mover.look(self.clock.now());
            for tier in (0..self.memory.len()).rev() {
                self.demote_requested(tier);
                for &(_, need, pages) in wanted.iter().filter(|want| want.0 == tier) {
                    self.demote_to_low(tier, pages, need);
                }
                if self.is_short(tier) {
                    self.demote_to_low(tier, 0, Need::Tier);
                }
            }
        }
    }

    /// Are so few pages of a memory tier free, or about to be, that blocks should leave it?
    fn is_short(&self, tier: usize) -> bool {
        self.has_below(tier) && self.coming(tier) < self.marks(tier).0
    }

    /// Has blocks leave a memory tier if they should.
    pub(crate) fn wake_if_short(&self, tier: usize) {
        if self.is_short(tier) {
            self.mover.wake();
        }
    }

    /// For how many free pages somebody waits at a time where they come one by one from NVMe: less
    /// than is on its way.
    pub(crate) fn handful(&self, tier: usize) -> u32 {
        self.marks(tier).0.min((AHEAD / image::PAGE) as u32) / 8
    }

    /// Pages of a memory tier that are free, or will be once NVMe has written what leaves for it.
    fn coming(&self, tier: usize) -> u32 {
        let going = match tier + 1 == self.memory.len() && !self.mover.is_stalled() {
            true => self.mover.going.load(Ordering::Relaxed) / image::PAGE,
            false => 0,
        };
        self.memory[tier].arena.free_pages() + going as u32
    }

    /// At how few free pages of a tier blocks begin to leave it, and up to how many they go on.
    pub(crate) fn marks(&self, tier: usize) -> (u32, u32) {
        let pages = self.memory[tier].arena.pages();
        let ahead = match tier + 1 == self.memory.len() {
            true => ((AHEAD / image::PAGE) as u32).min(pages / AHEAD_PART),
            false => 0,
        };
        let (least, goal) = self.watermarks(pages);
        // Soon enough that the device is never without work.
        (least.max(ahead - ahead / 8), goal.max(ahead))
    }

    /// What the watermarks leave free of so many pages.
    fn watermarks(&self, pages: u32) -> (u32, u32) {
        let free = |used: f64| ((1.0 - used) * f64::from(pages)) as u32;
        (free(self.high), free(self.low))
    }

    /// Moves the blocks down that stand in the way of a hole.
    fn demote_requested(self: &Arc<Self>, tier: usize) {
        let requests = {
            let mut state = self.mover.state.lock();
            let all = std::mem::take(&mut state.requests);
            let (mine, others) = all.into_iter().partition(|request| request.0 == tier);
            state.requests = others;
            mine
        };
        let requests: Vec<(usize, Handle, Need)> = requests;
        let mut stayed = false;
        for (_, h, need) in requests {
            // Where it stands says nothing of its worth: none takes its followers with it.
            let force = Force {
                dirty: true,
                alone: true,
                need,
            };
            stayed |= !self.demote(tier, h, force);
        }
        if stayed {
            self.memory[tier].arena.notify(); // whoever asked must find another way
        }
    }

    /// Moves victims down until the tier is at its low watermark, counting what is under way, and
    /// somewhat further if somebody waits for a hole of `wanted` pages that did not appear; for a
    /// block's need, until there is that hole. For a namespace at its cap, the cap is the tier.
    fn demote_to_low(self: &Arc<Self>, tier: usize, wanted: u32, need: Need) {
        const BATCH: usize = 16;
        let arena = &self.memory[tier].arena;
        if !self.has_below(tier) {
            return; // whoever needs room evicts
        }
        let writes = tier + 1 == self.memory.len();
        let cap = || match need {
            Need::Cap(tag) => self.order.lock().shares.cap(tier, tag),
            _ => None,
        };
        let clamp = |pages: u64| pages.min(arena.pages().into()) as u32;
        let pages = clamp(cap().map_or(u64::MAX, |cap| cap.pages));
        let mut wanted = wanted.min(pages);
        let free = arena.free_pages();
        if wanted > 0 && cap().is_none() && free >= wanted && (!writes || self.mover.is_idle()) {
            wanted = free + (wanted / 8).max(1); // there are enough pages, but not side by side
        }
        let wanted = wanted.max(u32::from(cap().is_some()));
        let (least, goal) = match need {
            Need::Block(_) => (wanted, wanted), // its own blocks leave for no more than that
            Need::Cap(_) => self.watermarks(pages),
            _ => self.marks(tier),
        };
        let (least, goal) = (least.max(wanted), goal.max(wanted));
        // Pages that are free or will be; `None` to stop.
        let free = || {
            let cap = cap();
            let state = self.mover.state.lock();
            let idle = matches!(need, Need::Block(_)) && !arena.is_awaited();
            if state.stop || idle {
                return None; // nobody needs it any more
            }
            if let Some(cap) = cap {
                return Some(clamp((cap.free + cap.going).max(0) as u64));
            }
            drop(state);
            Some(self.coming(tier))
        };
        // A block that cannot go below takes its followers with it only if no other can leave.
        let mut force = Force {
            dirty: true,
            alone: true,
            need,
        };
        let mut search = Search::new(tier, need);
        let mut quiet = self.mover.quiet();
        while free().is_some_and(|free| free < goal) {
            if self.reclaim_expired() {
                continue;
            }
            let writing: HashSet<Handle> = {
                let state = self.mover.state.lock();
                state.writing.keys().map(|known| known.0).collect()
            };
            let mut victims = Vec::with_capacity(BATCH);
            let mut idle = |h| !writing.contains(&h);
            let mut order = self.order.lock();
            let shares = &mut order.shares;
            shares.victims(&mut search, BATCH, &mut idle, &mut victims);
            drop(order);
            let (mut moved, count) = (false, victims.len());
            for h in victims {
                let pages = self.index.shard(h).get(h).map_or(0, |e| e.shape.pages());
                match free() {
                    Some(free) if free < least => {}
                    // A large block for the sake of a few pages would leave too much empty.
                    Some(free) if free < goal && pages / 2 <= goal - free => {}
                    _ => return,
                }
                moved |= self.demote(tier, h, force);
            }
            if moved {
                force.alone = true;
            } else if count == 0 {
                if !force.alone {
                    return; // all that is left is held
                }
                // What was being written meanwhile could not leave, but may now: a chain's last
                // block perhaps, without which the first would take all of it with it.
                let calm = quiet.is_some() && quiet == self.mover.quiet();
                force.alone = !calm && self.mover.settle(Instant::now() + STALL);
                search = Search::new(tier, need);
                quiet = self.mover.quiet();
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

    /// Moves a victim to the tier below, or evicts it with `force`. False: it stays where it is.
    fn demote(self: &Arc<Self>, tier: usize, h: Handle, force: Force) -> bool {
        let (entry, pin, going) = {
            let shard = self.index.shard(h);
            let Some(entry) = shard.get(h).filter(|e| e.memory[tier] != NOWHERE) else {
                return true;
            };
            if self.is_too_old(&shard, h, entry) {
                let known = (h, entry.epoch);
                drop(shard);
                return self.remove_tree(known) > 0;
            }
            let beside = entry.is_beside(tier) || !self.can_demote(tier, entry);
            if beside || self.is_refused_below(tier, h, entry) {
                drop(shard);
                return self.give_up(tier, h, force);
            }
            let arena = &self.memory[tier].arena;
            let shares = &mut self.order.lock().shares;
            let (tag, pages) = (entry.namespace, entry.shape.pages());
            // What somebody holds would be written and stay, and its copy may push out the next one's.
            let free = !arena.is_pinned(entry.memory[tier]);
            let going = free.then(|| shares.going(tier, tag, pages, force.need));
            let Some(going) = going.flatten() else {
                shares.defer(tier, h);
                return false;
            };
            let Some(pin) = arena.pin(entry.memory[tier]) else {
                return false;
            };
            (entry.clone(), pin, going.telling(arena))
        };
        if tier + 1 < self.memory.len() {
            return self.copy_down(tier, h, &entry, (pin, going), force);
        }
        let deadline = Instant::now() + STALL;
        match self.write_down(tier, h, entry, pin, Why::Demote, Some(going), deadline) {
            Sent::Away => true,
            Sent::Refused => self.give_up(tier, h, force),
            Sent::Late => {
                self.mover.look(self.clock.now());
                false
            }
        }
    }

    /// Evicts a victim that cannot be, or need not be, written below.
    fn give_up(&self, tier: usize, h: Handle, force: Force) -> bool {
        matches!(self.evict(tier, h, force), Left::Freed | Left::Gone)
    }

    /// Copies a block to the next memory tier and frees it here.
    fn copy_down(
        self: &Arc<Self>,
        tier: usize,
        h: Handle,
        entry: &Entry,
        (pin, going): (Pin, Claim),
        force: Force,
    ) -> bool {
        let below = tier + 1;
        // Nobody else makes room there: this is the mover's own thread, and with nothing on its way
        // to NVMe a wait would be for ever. A few changes may have been somebody's who let go of a block;
        // more are its own attempts'.
        let mut vain = 0;
        let reserved = self.reserve_pressing(
            below,
            entry.shape.pages(),
            entry.namespace,
            Some(Instant::now() + STALL),
            &mut |wanted, need, _| {
                self.mover.look(self.clock.now());
                self.demote_requested(below);
                self.demote_to_low(below, wanted, need);
                if self.is_short(below) {
                    self.demote_to_low(below, 0, Need::Tier);
                }
                if self.mover.writing() > 0 {
                    return Made::UnderWay;
                }
                vain += 1;
                match vain {
                    ..4 => Made::Nothing,
                    _ => Made::Never,
                }
            },
        );
        let (new, _claim) = match reserved {
            Ok(new) => new,
            Err(error) => {
                drop((pin, going));
                return error.kind() != Kind::Closed && self.give_up(tier, h, force);
            }
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
            let (tag, pages) = (current.namespace, current.shape.pages());
            self.order.lock().shares.leave(tier, h, tag, pages);
            self.memory[tier].stats.demotions.add(1);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn load(bytes: usize) -> Load {
        Load {
            bytes,
            staged: 0,
            leaves: true,
        }
    }

    struct Fixed(Instant);

    impl Clock for Fixed {
        fn now(&self) -> Instant {
            self.0
        }
    }

    #[test]
    fn two_large_blocks_do_not_wait_for_each_other() {
        let mover = Mover::new(1 << 20, 100);
        let now = Instant::now();
        let begin = |h| mover.begin((h, 1), load((1 << 18) + 1), now, &Fixed(now));
        assert_eq!(begin(1), Some(true));
        assert_eq!(begin(2), Some(false), "and nothing is counted for it");
        mover.end((1, 1), load((1 << 18) + 1));
        assert_eq!(begin(2), Some(true));
    }

    #[test]
    fn coded_blocks_wait_for_the_memory_beside_the_tiers() {
        let mover = Mover::new(1 << 20, 100);
        let now = Instant::now();
        let load = |staged| Load { staged, ..load(10) };
        let begin = |h, staged| mover.begin((h, 1), load(staged), now, &Fixed(now));
        assert_eq!((begin(1, 60), begin(2, 41)), (Some(true), Some(false)));
        assert_eq!((begin(3, 0), begin(4, 40)), (Some(true), Some(true)));
        mover.end((1, 1), load(60));
        assert_eq!(begin(2, 41), Some(true));
    }

    #[test]
    fn another_use_of_a_handle_is_another_block() {
        let mover = Mover::new(1 << 20, 100);
        let now = Instant::now();
        let begin = |epoch| mover.begin((1, epoch), load(10), now, &Fixed(now));
        assert_eq!(
            (begin(1), begin(1), begin(2)),
            (Some(true), None, Some(true))
        );
        assert!(!mover.settle(now));
        mover.end((1, 1), load(10));
        mover.end((1, 2), load(10));
        assert!(mover.settle(now));
    }

    #[test]
    fn a_write_that_does_not_come_back_is_noticed() {
        let mover = Mover::new(1 << 20, 100);
        let now = Instant::now();
        let far = now + Duration::from_secs(600);
        let begin = |h, at| mover.begin((h, 1), load(1 << 18), far, &Fixed(at));
        assert_eq!(begin(1, now), Some(true));
        mover.look(now + STALL);
        assert!(!mover.is_stalled());
        assert_eq!(
            begin(2, now + STALL * 2),
            Some(false),
            "nobody waits for it"
        );
        assert!(mover.is_stalled());
        mover.end((1, 1), load(1 << 18));
        assert!(!mover.is_stalled());
    }
}
