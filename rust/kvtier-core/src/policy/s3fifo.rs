//! S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).

use super::ghosts::Ghosts;
use super::queue::Queue;
use super::{Handle, Meta, Policy, forward_to_queue};
use crate::index::grow;

const SMALL: u8 = 0;
const MAIN: u8 = 1;
const MAX_FREQUENCY: u8 = 3;

#[derive(Clone, Copy, Debug, Default)]
struct Node {
    fingerprint: u64,
    pages: u32,
    frequency: u8,
}

/// New blocks wait in a small queue of a tenth of the tier; those used again move to the main one,
/// the others leave early and are remembered, and enter the main queue if they come back.
#[derive(Debug)]
pub struct S3Fifo {
    queue: Queue<u8>,
    nodes: Vec<Node>,
    small_pages: u64,
    small_limit: u64,
    ghosts: Ghosts,
    /// The most blocks there ever were: what the tier holds.
    most: usize,
}

impl S3Fifo {
    /// For a tier of `pages` pages.
    pub fn new(pages: u64) -> Self {
        S3Fifo {
            queue: Queue::default(),
            nodes: Vec::new(),
            small_pages: 0,
            small_limit: pages / 10,
            ghosts: Ghosts::default(),
            most: 0,
        }
    }

    /// The newest place of a queue, for a block that is in none or leaves its own.
    fn push(&mut self, list: u8, block: Handle) {
        self.leave(self.queue.rank(block), block);
        if list == SMALL {
            self.small_pages += u64::from(self.nodes[block as usize].pages);
        }
        self.queue.put(block, list);
    }

    fn leave(&mut self, list: Option<u8>, block: Handle) {
        if list == Some(SMALL) {
            self.small_pages -= u64::from(self.nodes[block as usize].pages);
        }
    }

    /// Walks one queue from its oldest end: blocks that were used move on.
    fn scan(&mut self, list: u8, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        loop {
            let ((found, _), block) = self.queue.find((list, 0), eligible)?;
            if found != list {
                return None;
            }
            let frequency = &mut self.nodes[block as usize].frequency;
            if list == SMALL && *frequency > 1 {
                *frequency = 0;
                self.push(MAIN, block);
            } else if list == MAIN && *frequency > 0 {
                *frequency -= 1;
                self.push(MAIN, block);
            } else {
                return Some(block);
            }
        }
    }
}

impl Policy for S3Fifo {
    fn on_insert(&mut self, block: Handle, meta: &Meta) {
        grow(&mut self.nodes, block as usize, Node::default());
        self.nodes[block as usize] = Node {
            fingerprint: meta.fingerprint,
            pages: meta.pages,
            frequency: 0,
        };
        let back = self.ghosts.remove(meta.fingerprint);
        self.push(if back { MAIN } else { SMALL }, block);
        self.most = self.most.max(self.queue.len());
    }

    fn on_hit(&mut self, block: Handle) {
        if self.queue.rank(block).is_some() {
            let frequency = &mut self.nodes[block as usize].frequency;
            *frequency = (*frequency + 1).min(MAX_FREQUENCY);
        }
    }

    fn on_remove(&mut self, block: Handle) {
        let list = self.queue.remove(block);
        self.leave(list, block);
        if list == Some(SMALL) {
            self.ghosts.insert(self.nodes[block as usize].fingerprint);
            // As many as the main queue may have blocks, as in the paper.
            self.ghosts.limit((self.most - self.most / 10).max(16));
        }
    }

    fn victim(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        self.queue.ask_again(eligible);
        let first = if self.small_pages >= self.small_limit {
            SMALL
        } else {
            MAIN
        };
        // Blocks that the small queue passes on may be all that is left.
        [first, SMALL, MAIN]
            .into_iter()
            .find_map(|list| self.scan(list, eligible))
    }

    forward_to_queue!(|me| { me.nodes.capacity() * size_of::<Node>() + me.ghosts.memory_bytes() });
}
