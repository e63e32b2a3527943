//! Reads that make their own room: what was read from NVMe, and has been copied to who asked.
//!
//! Where memory is full of blocks that must be written before they can leave, each block that is
//! read from NVMe would wait for one to be written. It takes the place of one that was read before
//! it instead, and was not asked for again.

use std::collections::VecDeque;
use std::time::Instant;

use hashbrown::HashSet;

use crate::arena::Pin;
use crate::error::Result;
use crate::index::{Entry, PlainHash};
use crate::policy::Handle;
use crate::shares::{Claim, Need};
use crate::space::{Force, Left, Made};
use crate::store::Inner;
use crate::sync::Mutex;

/// Blocks that are remembered at most: those before them stay until their turn comes.
const MOST: usize = 512;

/// Blocks in the first memory tier that were read from NVMe and used once.
#[derive(Default)]
pub(crate) struct Spent(Mutex<Blocks>);

#[derive(Default)]
struct Blocks {
    /// In the order of their reads; those that are not in `once` any more stay here for a while.
    order: VecDeque<Handle>,
    once: HashSet<Handle, PlainHash>,
}

impl Spent {
    /// A block was loaded, and copied to who asked.
    pub(crate) fn note(&self, h: Handle) {
        let mut blocks = self.0.lock();
        if blocks.order.len() == MOST
            && let Some(oldest) = blocks.order.pop_front()
        {
            blocks.once.remove(&oldest);
        }
        blocks.once.insert(h);
        blocks.order.push_back(h);
    }

    /// A block in memory was used: if it is one of these, it has earned its place.
    pub(crate) fn used(&self, h: Handle) {
        self.0.lock().once.remove(&h);
    }

    fn len(&self) -> usize {
        self.0.lock().once.len()
    }

    fn next(&self) -> Option<Handle> {
        let mut blocks = self.0.lock();
        loop {
            let h = blocks.order.pop_front()?;
            if blocks.once.remove(&h) {
                return Some(h);
            }
        }
    }
}

impl Inner {
    /// As [`Inner::reserve`], for a block that is read from NVMe into the first memory tier.
    pub(crate) fn reserve_loading(
        &self,
        pages: u32,
        tag: u64,
        deadline: Instant,
    ) -> Result<(Pin, Claim)> {
        let mut press = self.presser(0);
        self.reserve_pressing(
            0,
            pages,
            tag,
            (Instant::now() < deadline).then_some(deadline),
            &mut |wanted, need, made| match self.recycle(wanted, need) {
                true => Made::Room,
                false => press(wanted, need, made),
            },
        )
    }

    /// Lets go of blocks that were read once, until there are so many pages. False: there are none.
    fn recycle(&self, pages: u32, need: Need) -> bool {
        if matches!(need, Need::Cap(_)) {
            return false; // whose they are matters there
        }
        let force = Force {
            dirty: false,
            alone: true,
            need,
        };
        let mut freed = 0;
        for _ in 0..self.spent.len() {
            if freed >= pages {
                break;
            }
            let Some(h) = self.spent.next() else {
                break;
            };
            // What was dropped below since is not to be lost here.
            let beside = |e: &&Entry| e.is_beside(0);
            let found = self
                .index
                .shard(h)
                .get(h)
                .filter(beside)
                .map(|e| e.shape.pages());
            let Some(size) = found else {
                continue;
            };
            match self.evict(0, h, force) {
                Left::Freed => freed += size,
                Left::Held => self.spent.note(h), // somebody copies it just now
                Left::Dirty | Left::Gone => {}
            }
        }
        freed > 0
    }
}
