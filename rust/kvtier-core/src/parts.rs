//! What groups of namespaces have of a tier: a policy, an account, and what is guaranteed to each.

use std::sync::Arc;

use crate::claim::{Moving, Way};
use crate::policy::Policy;
use crate::shares::GUARANTEED;

/// Touches of a tier, at least, over which it is found out how fast a group's blocks are replaced.
const WINDOW: u64 = 1024;

/// A group's part of a tier.
pub(crate) struct Part {
    pub(crate) policy: Box<dyn Policy>,
    /// Blocks and bytes of that policy.
    pub(crate) blocks: usize,
    pub(crate) memory: usize,
    /// What its namespace was promised, and what of that is guaranteed now.
    pub(crate) promised: u64,
    pub(crate) guaranteed: u64,
    pub(crate) cap: u64,
    pub(crate) priority: i32,
    pub(crate) pages: u64,
    /// Pages of its largest block so far.
    pub(crate) largest: u64,
    /// Touches in the window before this one, and in this one.
    pub(crate) touched: [u64; 2],
}

impl Part {
    /// Does it hold a block more than it is guaranteed, perhaps on its way out?
    pub(crate) fn is_above(&self) -> bool {
        self.pages > 0 && (self.guaranteed == 0 || self.pages >= self.guaranteed + self.largest)
    }

    /// Do its blocks stay longer than the other's?
    pub(crate) fn stays_longer(&self, other: &Part) -> bool {
        let touched = |part: &Part| (1 + part.touched[0] + part.touched[1]) as f64;
        self.pages as f64 * touched(other) > other.pages as f64 * touched(self)
    }
}

/// The groups' parts of a tier, side by side: who gives way is found by a look at each.
pub(crate) struct Tier {
    /// In pages.
    pub(crate) size: u64,
    /// What the tables leave of it, where they take of it.
    left: u64,
    pub(crate) parts: Vec<Part>,
    pub(crate) moving: Arc<Moving>,
    pub(crate) blocks: usize,
    /// Touches in this window.
    pub(crate) touches: u64,
}

impl Tier {
    pub(crate) fn new(size: u64) -> Self {
        Tier {
            size,
            left: u64::MAX,
            parts: Vec::new(),
            moving: Arc::default(),
            blocks: 0,
            touches: 0,
        }
    }

    pub(crate) fn add_group(&mut self, policy: Box<dyn Policy>) {
        self.parts.push(Part {
            memory: policy.memory_bytes(),
            policy,
            blocks: 0,
            promised: 0,
            guaranteed: 0,
            cap: u64::MAX,
            priority: 0,
            pages: 0,
            largest: 1,
            touched: [0; 2],
        });
    }

    /// From now on the tables leave so many pages of it.
    pub(crate) fn set_left(&mut self, left: u64) {
        if self.left != left {
            self.left = left;
            self.guarantee();
        }
    }

    /// Guarantees what was promised. Where that would be too much of what the tables leave, all
    /// guarantees shrink alike, lest who has none finds no room.
    pub(crate) fn guarantee(&mut self) {
        let most = (self.left as f64 * GUARANTEED) as u64;
        let promised: u64 = self.parts.iter().map(|part| part.promised).sum();
        for part in &mut self.parts {
            part.guaranteed = match promised <= most {
                true => part.promised,
                false => (part.promised as f64 * most as f64 / promised as f64) as u64,
            };
        }
    }

    /// Pages of a group's blocks that are here to stay.
    pub(crate) fn staying(&self, group: usize) -> u64 {
        let going = self.moving.pages(Way::Out, group);
        self.parts[group].pages.saturating_sub(going)
    }

    /// Pages of a group here or on the way here.
    pub(crate) fn claimed(&self, group: usize) -> u64 {
        self.parts[group].pages + self.moving.pages(Way::In, group)
    }

    /// Can any of a group's blocks leave without taking it below its guarantee?
    pub(crate) fn has_spare(&self, group: usize) -> bool {
        let part = &self.parts[group];
        part.guaranteed == 0 || self.staying(group) >= part.guaranteed + part.largest
    }

    pub(crate) fn touch(&mut self, group: usize) {
        if self.parts.len() == 1 {
            return;
        }
        self.parts[group].touched[1] += 1;
        self.touches += 1;
        if self.touches >= WINDOW.max(self.blocks as u64) {
            self.touches = 0;
            for part in &mut self.parts {
                part.touched = [part.touched[1], 0];
            }
        }
    }
}
