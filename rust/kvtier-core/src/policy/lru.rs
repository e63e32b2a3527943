//! Least recently used.

use super::list::Lists;
use super::{Handle, Meta, Policy};

/// The block that was used longest ago leaves first.
#[derive(Debug, Default)]
pub struct Lru {
    list: Lists<1>,
}

impl Policy for Lru {
    fn on_insert(&mut self, block: Handle, _meta: &Meta) {
        self.list.push(0, block);
    }

    fn on_hit(&mut self, block: Handle) {
        if self.list.remove(block).is_some() {
            self.list.push(0, block);
        }
    }

    fn on_remove(&mut self, block: Handle) {
        self.list.remove(block);
    }

    fn set_importance(&mut self, _block: Handle, _score: f32) {}

    fn victims(
        &mut self,
        n: usize,
        eligible: &mut dyn FnMut(Handle) -> bool,
        out: &mut Vec<Handle>,
    ) {
        let mut next = self.list.oldest(0);
        let mut left = n;
        while let Some(block) = next
            && left > 0
        {
            next = self.list.newer(block);
            if eligible(block) {
                out.push(block);
                left -= 1;
            }
        }
    }

    fn len(&self) -> usize {
        self.list.len(0)
    }

    fn memory_bytes(&self) -> usize {
        self.list.memory_bytes()
    }
}
