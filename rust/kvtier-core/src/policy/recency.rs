//! FIFO, LRU, CLOCK and SIEVE: the order of arrival or use.

use super::queue::Queue;
use super::{Handle, Meta, Policy, forward_to_queue};

/// First in, first out.
#[derive(Debug, Default)]
pub struct Fifo {
    queue: Queue,
}

impl Policy for Fifo {
    fn on_insert(&mut self, block: Handle, _meta: &Meta) {
        self.queue.put(block, ());
    }

    fn on_hit(&mut self, _block: Handle) {}

    fn on_remove(&mut self, block: Handle) {
        self.queue.remove(block);
    }

    fn victim(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        self.queue.first(eligible)
    }

    forward_to_queue!();
}

/// The block that was used longest ago leaves first.
#[derive(Debug, Default)]
pub struct Lru {
    queue: Queue,
}

impl Policy for Lru {
    fn on_insert(&mut self, block: Handle, _meta: &Meta) {
        self.queue.put(block, ());
    }

    fn on_hit(&mut self, block: Handle) {
        self.queue.renew(block);
    }

    fn on_remove(&mut self, block: Handle) {
        self.queue.remove(block);
    }

    fn victim(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        self.queue.first(eligible)
    }

    forward_to_queue!();
}

/// FIFO with a second chance (Corbató, 1968): a block that was used since it was last looked at goes
/// to the back once.
#[derive(Debug, Default)]
pub struct Clock {
    queue: Queue,
    used: Vec<bool>,
}

impl Policy for Clock {
    fn on_insert(&mut self, block: Handle, _meta: &Meta) {
        crate::index::grow(&mut self.used, block as usize, false);
        self.used[block as usize] = false;
        self.queue.put(block, ());
    }

    fn on_hit(&mut self, block: Handle) {
        if let Some(used) = self.used.get_mut(block as usize) {
            *used = true;
        }
    }

    fn on_remove(&mut self, block: Handle) {
        self.queue.remove(block);
    }

    fn victim(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        self.queue.ask_again(eligible);
        loop {
            let (_, block) = self.queue.find(((), 0), eligible)?;
            if !std::mem::take(&mut self.used[block as usize]) {
                return Some(block);
            }
            self.queue.put(block, ());
        }
    }

    forward_to_queue!(|me| me.used.capacity());
}

/// SIEVE (Zhang et al., NSDI 2024): a hand moves from the oldest block to the newest and takes the
/// first that was not used since it last came by; nothing else moves.
#[derive(Debug, Default)]
pub struct Sieve {
    queue: Queue,
    used: Vec<bool>,
    hand: u64,
}

impl Policy for Sieve {
    fn on_insert(&mut self, block: Handle, _meta: &Meta) {
        crate::index::grow(&mut self.used, block as usize, false);
        self.used[block as usize] = false;
        self.queue.put(block, ());
    }

    fn on_hit(&mut self, block: Handle) {
        if let Some(used) = self.used.get_mut(block as usize) {
            *used = true;
        }
    }

    fn on_remove(&mut self, block: Handle) {
        self.queue.remove(block);
    }

    fn victim(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        self.queue.ask_again(eligible);
        // Twice round at most: the first time clears every mark.
        for _ in 0..=2 * self.queue.len() + 1 {
            let Some((((), time), block)) = self.queue.find(((), self.hand), eligible) else {
                if self.hand == 0 {
                    return None;
                }
                self.hand = 0;
                continue;
            };
            self.hand = time + 1;
            if !std::mem::take(&mut self.used[block as usize]) {
                if self.queue.first_from(((), self.hand)).is_none() {
                    self.hand = 0; // from the newest the hand goes to the oldest
                }
                return Some(block);
            }
        }
        None
    }

    forward_to_queue!(|me| me.used.capacity());
}
