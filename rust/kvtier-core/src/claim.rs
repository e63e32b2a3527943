//! What is on its way into a tier, or out of it, and whose it is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::arena::Arena;
use crate::shares::GROUPS;

/// Pages on their way into a tier and out of it, by group.
pub(crate) struct Moving([[AtomicU64; GROUPS]; 2]);

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    In,
    Out,
}

impl Default for Moving {
    fn default() -> Self {
        let none = || std::array::from_fn(|_| AtomicU64::new(0));
        Moving([none(), none()])
    }
}

impl Moving {
    /// So many pages of a group.
    pub(crate) fn pages(&self, way: Way, group: usize) -> u64 {
        self.sum(way, group).load(Ordering::SeqCst)
    }

    fn sum(&self, way: Way, group: usize) -> &AtomicU64 {
        &self.0[way as usize][group]
    }
}

/// Pages that count for as long as this lives: a block on its way into a tier, or out of it.
pub(crate) struct Claim {
    on: Option<(Arc<Moving>, Way, usize, u64)>,
    /// Where somebody may wait for it to end.
    tells: Option<Arc<Arena>>,
}

impl Claim {
    /// Of somebody who has no share.
    pub(crate) fn none() -> Self {
        Claim {
            on: None,
            tells: None,
        }
    }

    pub(crate) fn on(moving: &Arc<Moving>, way: Way, group: usize, pages: u64) -> Self {
        moving.sum(way, group).fetch_add(pages, Ordering::SeqCst);
        Claim {
            on: Some((moving.clone(), way, group, pages)),
            tells: None,
        }
    }

    /// Has those look again, once it ends, who wait for room in this memory tier.
    pub(crate) fn telling(mut self, arena: &Arc<Arena>) -> Self {
        self.tells = self.on.as_ref().map(|_| arena.clone());
        self
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some((moving, way, group, pages)) = &self.on {
            moving.sum(*way, *group).fetch_sub(*pages, Ordering::SeqCst);
        }
        if let Some(arena) = &self.tells {
            arena.notify();
        }
    }
}
