//! Blocks that are too old: namespaces with a time to live.
//!
//! A block's age counts on the store's monotonic clock from when it was stored, whatever was done
//! with it since; what was there before its namespace got a time to live (after a restart, say)
//! counts from that moment. One that is too old is a miss, and the first to leave where room is
//! needed. Its time of birth is four bytes beside the index, which exist once a namespace has such a
//! quota.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use kvtier_codec::image::Id;

use crate::error::Result;
use crate::index::{Entry, SHARDS, Shard};
use crate::order::Known;
use crate::policy::Handle;
use crate::store::{Inner, Namespace};
use crate::sync::Mutex;

/// Ticks a second.
const RATE: f64 = 64.0;

/// No block will be too old.
const NEVER: u64 = u64::MAX;

/// Shards that one search for room looks through at most, and blocks that leave each at once.
const LOOKS: usize = 4;
const BATCH: usize = 64;

/// A shard is looked through at most this often in a time to live.
const OFTEN: u64 = 64;

/// Who has a time to live, and when to look for what has passed it.
pub(crate) struct Ages {
    start: Instant,
    used: AtomicBool,
    /// In ticks, by the namespace's tag.
    lives: Mutex<HashMap<u64, u32>>,
    /// When to look through each shard, in ticks.
    due: Vec<AtomicU64>,
    hand: AtomicUsize,
}

impl Ages {
    /// Nobody has one; time is counted from now on.
    pub(crate) fn new(now: Instant) -> Self {
        Ages {
            start: now,
            used: AtomicBool::new(false),
            lives: Mutex::default(),
            due: (0..SHARDS).map(|_| AtomicU64::new(NEVER)).collect(),
            hand: AtomicUsize::new(0),
        }
    }

    fn tick(&self, now: Instant) -> u32 {
        (now.saturating_duration_since(self.start).as_secs_f64() * RATE) as u64 as u32
    }

    fn life(&self, tag: u64) -> Option<u32> {
        if !self.used.load(Ordering::Relaxed) {
            return None;
        }
        self.lives.lock().get(&tag).copied()
    }
}

impl Inner {
    /// The ids of these keys. Those of them that are too old leave now, with all that follow them.
    pub(crate) fn ids(&self, ns: &Namespace, keys: &[&[u8]]) -> Result<Vec<Id>> {
        let ids = ns.ids(keys)?;
        for id in &ids {
            self.expire(ns, id);
        }
        Ok(ids)
    }

    /// Lets a block go if it is too old.
    pub(crate) fn expire(&self, ns: &Namespace, id: &Id) {
        let Some(life) = self.ages.life(ns.tag()) else {
            return;
        };
        let old = {
            let shard = self.index.of(id);
            let now = self.ages.tick(self.clock.now()); // nothing there was born after it
            let h = shard.find(id).filter(|&h| is_old(&shard, h, now, life));
            h.and_then(|h| Some((h, shard.get(h)?.epoch)))
        };
        if let Some(old) = old {
            self.remove_old(ns.tag(), old);
        }
    }

    fn remove_old(&self, tag: u64, old: Known) {
        let removed = self.remove_tree(old) as u64;
        let mut order = self.order.lock();
        order
            .shares
            .count(tag, |account| account.expired += removed);
    }

    /// Notes that a block is stored, in its locked shard.
    pub(crate) fn is_born(&self, shard: &mut Shard, h: Handle, tag: u64) {
        if let Some(life) = self.ages.life(tag) {
            let now = self.ages.tick(self.clock.now());
            self.index.counted(shard, |shard| shard.set_born(h, now));
            let due = u64::from(now) + u64::from(life);
            self.ages.due[h as usize % SHARDS].fetch_min(due, Ordering::Relaxed);
        }
    }

    /// Is a block too old?
    pub(crate) fn is_too_old(&self, shard: &Shard, h: Handle, entry: &Entry) -> bool {
        let life = self.ages.life(entry.namespace);
        life.is_some_and(|life| is_old(shard, h, self.ages.tick(self.clock.now()), life))
    }

    /// Gives a namespace a time to live, or none. What it holds is as young as can be.
    pub(crate) fn set_life(&self, tag: u64, life: Option<Duration>) {
        let Some(life) = life else {
            self.ages.lives.lock().remove(&tag);
            return;
        };
        self.set_ticks(
            tag,
            (life.as_secs_f64() * RATE).clamp(1.0, f64::from(u32::MAX / 2)) as u32,
        );
    }

    fn set_ticks(&self, tag: u64, ticks: u32) {
        let before = self.ages.lives.lock().insert(tag, ticks);
        self.ages.used.store(true, Ordering::SeqCst);
        self.index.for_each_shard(|shard| {
            let mine = |shard: &Shard, h| shard.get(h).is_some_and(|e| e.namespace == tag);
            let all: Vec<Handle> = shard.handles().filter(|&h| mine(shard, h)).collect();
            for h in all {
                match before {
                    None => self.is_born(shard, h, tag),
                    Some(_) => self.ages.due[h as usize % SHARDS].store(0, Ordering::Relaxed),
                }
            }
        });
    }

    /// Gives a namespace the time to live of another one.
    pub(crate) fn share_life(&self, tag: u64, of: u64) {
        match self.ages.life(of) {
            Some(ticks) => self.set_ticks(tag, ticks),
            None => self.set_life(tag, None),
        }
    }

    /// Lets blocks go that are too old, somewhere in the store; true if there were any. A bounded
    /// look.
    pub(crate) fn reclaim_expired(&self) -> bool {
        let ages = &self.ages;
        if !ages.used.load(Ordering::Relaxed) {
            return false;
        }
        let now = ages.tick(self.clock.now());
        let first = ages.hand.load(Ordering::Relaxed);
        let is_due = |&number: &usize| ages.due[number].load(Ordering::Relaxed) <= now.into();
        let turns = (first..first + SHARDS).map(|number| number % SHARDS);
        let mut found = false;
        for number in turns.filter(is_due).take(LOOKS) {
            let old = self.old_of(number);
            ages.hand
                .store(number + usize::from(old.len() < BATCH), Ordering::Relaxed);
            found |= !old.is_empty();
            for (tag, old) in old {
                self.remove_old(tag, old);
            }
        }
        found
    }

    /// Some blocks of a shard that are too old, and their namespaces. Notes when to look again.
    fn old_of(&self, number: usize) -> Vec<(u64, Known)> {
        let lives = self.ages.lives.lock().clone();
        let shard = self.index.shard(number as Handle);
        let now = self.ages.tick(self.clock.now()); // nothing there was born after it
        let mut old = Vec::new();
        let mut due = NEVER;
        for h in shard.handles() {
            let Some(entry) = shard.get(h) else { continue };
            let (Some(&life), Some(born)) = (lives.get(&entry.namespace), shard.born(h)) else {
                continue;
            };
            let age = now.wrapping_sub(born);
            if age >= life {
                old.push((entry.namespace, (h, entry.epoch)));
                if old.len() == BATCH {
                    due = 0;
                    break;
                }
            } else {
                let rest = u64::from(life - age).max(u64::from(life) / OFTEN);
                due = due.min(u64::from(now) + rest);
            }
        }
        // Still under the shard's lock: a block that is born now is not forgotten.
        self.ages.due[number].store(due, Ordering::Relaxed);
        old
    }
}

fn is_old(shard: &Shard, h: Handle, now: u32, life: u32) -> bool {
    shard
        .born(h)
        .is_some_and(|born| now.wrapping_sub(born) >= life)
}
