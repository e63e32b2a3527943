//! LFU and GDSF: how often a block was used.

use super::age::Age;
use super::queue::Queue;
use super::{Handle, Meta, Policy, forward_to_queue};
use crate::index::grow;

/// The block that was used least often since it came leaves first; among equals, the one that has
/// been so for longest.
#[derive(Debug, Default)]
pub struct Lfu {
    queue: Queue<u32>,
}

impl Policy for Lfu {
    fn on_insert(&mut self, block: Handle, _meta: &Meta) {
        self.queue.put(block, 1);
    }

    fn on_hit(&mut self, block: Handle) {
        if let Some(uses) = self.queue.rank(block) {
            self.queue.put(block, uses.saturating_add(1));
        }
    }

    fn on_remove(&mut self, block: Handle) {
        self.queue.remove(block);
    }

    fn victim(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        self.queue.first(eligible)
    }

    forward_to_queue!();
}

#[derive(Clone, Copy, Debug, Default)]
struct Weight {
    uses: u32,
    pages: u32,
}

/// Greedy-Dual-Size-Frequency (Cherkasova, 1998): uses per page, on top of an [`Age`].
#[derive(Debug, Default)]
pub struct Gdsf {
    queue: Queue<u64>,
    weights: Vec<Weight>,
    age: Age,
}

impl Gdsf {
    fn place(&mut self, block: Handle) {
        let weight = self.weights[block as usize];
        let value = f64::from(weight.uses) / f64::from(weight.pages.max(1));
        self.age.place(&mut self.queue, block, value);
    }
}

impl Policy for Gdsf {
    fn on_insert(&mut self, block: Handle, meta: &Meta) {
        grow(&mut self.weights, block as usize, Weight::default());
        self.weights[block as usize] = Weight {
            uses: 1,
            pages: meta.pages,
        };
        self.place(block);
    }

    fn on_hit(&mut self, block: Handle) {
        if self.queue.rank(block).is_some() {
            let uses = &mut self.weights[block as usize].uses;
            *uses = uses.saturating_add(1);
            self.place(block);
        }
    }

    fn on_remove(&mut self, block: Handle) {
        self.queue.remove(block);
    }

    fn victim(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        self.age.victim(&mut self.queue, eligible)
    }

    forward_to_queue!(|me| me.weights.capacity() * size_of::<Weight>());
}
