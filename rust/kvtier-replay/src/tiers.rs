//! Tiers above one another, and the blocks that move between them.

use kvtier_core::error::Result;
use kvtier_core::policy::{self, Handle, Meta, Policy};

use crate::trace::Trace;

/// A block is nowhere.
const NOWHERE: u8 = u8::MAX;

struct Tier {
    policy: Box<dyn Policy>,
    used: usize,
    capacity: usize,
}

impl Tier {
    /// Is a block worth what it would push out, if anything?
    fn admits(&mut self, block: Handle, meta: &Meta) -> bool {
        self.used < self.capacity || self.policy.admit(block, meta)
    }
}

/// Blocks that may be written to the last tier, accruing with time; an hour's worth at most is kept.
struct Budget {
    per_second: f64,
    left: f64,
    since: f64,
}

/// A policy a tier, the fastest first. A block is in one of them.
pub(crate) struct Tiers<'a> {
    trace: &'a Trace,
    tiers: Vec<Tier>,
    place: Vec<u8>,
    /// How many blocks that follow each are somewhere.
    followers: Vec<u32>,
    chained: bool,
    budget: Option<Budget>,
    now: f64,
    /// Blocks that came into each tier from above.
    pub(crate) demoted: Vec<u64>,
}

/// Spreads a block's number over 64 bits, as an id's hash would.
fn fingerprint(block: Handle) -> u64 {
    let x = (u64::from(block) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) ^ (x >> 32)
}

impl<'a> Tiers<'a> {
    /// Empty tiers of these capacities in blocks; `budget` blocks a day may be written to the last.
    pub(crate) fn new(
        trace: &'a Trace,
        name: &str,
        capacities: &[usize],
        budget: Option<f64>,
    ) -> Result<Self> {
        let sizes: Vec<u64> = capacities.iter().map(|&capacity| capacity as u64).collect();
        let policies = policy::for_tiers(name, &sizes)?.into_iter();
        let tiers = policies.zip(capacities).map(|(policy, &capacity)| Tier {
            policy,
            used: 0,
            capacity,
        });
        Ok(Tiers {
            trace,
            tiers: tiers.collect(),
            place: vec![NOWHERE; trace.unique()],
            followers: vec![0; trace.unique()],
            chained: policy::keeps_chains(name),
            budget: budget.map(|blocks| Budget {
                per_second: blocks / 86_400.0,
                left: blocks / 24.0,
                since: 0.0,
            }),
            now: 0.0,
            demoted: vec![0; capacities.len()],
        })
    }

    /// Does a block leave only after its children?
    pub(crate) fn is_chained(&self) -> bool {
        self.chained
    }

    /// The tier that holds a block.
    pub(crate) fn tier_of(&self, block: Handle) -> Option<usize> {
        Some(self.place[block as usize])
            .filter(|&tier| tier != NOWHERE)
            .map(usize::from)
    }

    /// Time passes.
    pub(crate) fn advance(&mut self, now: f64) {
        self.now = self.now.max(now);
    }

    /// A request uses a block: it is there and moves to the first tier, unless that refuses it; or
    /// it is computed and put there.
    pub(crate) fn touch(&mut self, block: Handle) {
        match self.tier_of(block) {
            Some(0) => self.tiers[0].policy.on_hit(block),
            Some(tier) => {
                self.tiers[tier].policy.on_hit(block);
                let meta = self.meta(block);
                if self.tiers[0].admits(block, &meta) {
                    self.raise(tier, block, &meta);
                }
            }
            None => {
                if !self.is_orphan(block) {
                    let meta = self.meta(block);
                    if !self.offer(0, block, meta.parent) {
                        self.tiers[0].policy.on_refuse(&meta);
                    }
                }
            }
        }
    }

    /// Brings a block to the first tier, if that can make room; what leaves there may take its place.
    fn raise(&mut self, tier: usize, block: Handle, meta: &Meta) {
        self.vacate(tier, block);
        if self.arrive(0, block, meta.parent) {
            self.tiers[tier].policy.on_remove(block);
        } else if self.is_orphan(block) {
            self.tiers[tier].policy.on_remove(block);
            self.drop_followers(block);
        } else {
            self.occupy(tier, block); // its place there is still free
        }
    }

    /// Under chain order there is no block without its parent.
    fn is_orphan(&self, block: Handle) -> bool {
        let parent = self.trace.parent(block);
        self.chained && parent.is_some_and(|parent| self.tier_of(parent).is_none())
    }

    /// All that follow a block that is nowhere are useless, wherever they are.
    fn drop_followers(&mut self, root: Handle) {
        let mut gone = vec![root];
        while let Some(block) = gone.pop() {
            if self.followers[block as usize] == 0 {
                continue;
            }
            for &child in self.trace.children(block) {
                if let Some(tier) = self.tier_of(child) {
                    self.leave(tier, child);
                    gone.push(child);
                }
            }
        }
    }

    fn meta(&self, block: Handle) -> Meta {
        Meta {
            parent: self.trace.parent(block),
            fingerprint: fingerprint(block),
            pages: 1,
            importance: 0.0,
        }
    }

    /// Lets a block into the first tier from `tier` on that takes it. False: none does.
    fn offer(&mut self, tier: usize, block: Handle, needed: Option<Handle>) -> bool {
        for tier in tier..self.tiers.len() {
            // What blocks below depend on goes with them, if it can be afforded.
            let depended = self.chained && self.followers[block as usize] > 0;
            let meta = self.meta(block);
            let wanted = depended || self.tiers[tier].admits(block, &meta);
            if wanted && self.can_write(tier) && self.arrive(tier, block, needed) {
                return true;
            }
        }
        if self.chained {
            self.drop_followers(block);
        }
        false
    }

    /// Is a write to this tier within the budget? Counts it.
    fn can_write(&mut self, tier: usize) -> bool {
        if tier == 0 || tier + 1 < self.tiers.len() {
            return true;
        }
        let now = self.now;
        self.budget.as_mut().is_none_or(|budget| {
            let gained = (now - budget.since) * budget.per_second;
            budget.since = now;
            budget.left = (budget.left + gained).min(budget.per_second * 3600.0);
            let can = budget.left >= 1.0;
            budget.left -= f64::from(u8::from(can));
            can
        })
    }

    /// Puts a block into a tier; what must leave goes below. False: nothing there may leave.
    fn arrive(&mut self, tier: usize, block: Handle, needed: Option<Handle>) -> bool {
        let last = tier + 1 == self.tiers.len();
        if self.tiers[tier].used == self.tiers[tier].capacity {
            let (chained, followers) = (self.chained, &self.followers);
            let victim = self.tiers[tier].policy.victim(&mut |b| {
                !chained || (Some(b) != needed && (!last || followers[b as usize] == 0))
            });
            let Some(victim) = victim else {
                return false;
            };
            self.vacate(tier, victim);
            if !last {
                self.offer(tier + 1, victim, needed);
            }
            self.tiers[tier].policy.on_remove(victim);
            if self.is_orphan(block) {
                return false; // its parent went with what left
            }
        }
        if tier > 0 {
            self.demoted[tier] += 1;
        }
        self.enter(tier, block);
        true
    }

    fn enter(&mut self, tier: usize, block: Handle) {
        let meta = self.meta(block);
        self.tiers[tier].policy.on_insert(block, &meta);
        self.occupy(tier, block);
    }

    fn leave(&mut self, tier: usize, block: Handle) {
        self.vacate(tier, block);
        self.tiers[tier].policy.on_remove(block);
    }

    fn occupy(&mut self, tier: usize, block: Handle) {
        self.tiers[tier].used += 1;
        self.place[block as usize] = tier as u8;
        if let Some(parent) = self.trace.parent(block) {
            self.followers[parent as usize] += 1;
        }
    }

    /// A block's place is free, but the tier's policy knows it until it has another.
    fn vacate(&mut self, tier: usize, block: Handle) {
        self.tiers[tier].used -= 1;
        self.place[block as usize] = NOWHERE;
        if let Some(parent) = self.trace.parent(block) {
            self.followers[parent as usize] -= 1;
        }
    }
}
