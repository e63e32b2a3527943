//! S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).

use std::collections::VecDeque;

use hashbrown::{HashMap, HashSet};

use super::list::Lists;
use super::{Handle, Meta, Policy};
use crate::index::grow;

const SMALL: usize = 0;
const MAIN: usize = 1;
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
    lists: Lists<2>,
    nodes: Vec<Node>,
    small_pages: u64,
    small_limit: u64,
    /// Blocks that left the small queue, by fingerprint, each with the time it left.
    ghosts: HashMap<u64, u64>,
    /// The same in order; entries that came back, or left again later, are stale.
    ghost_order: VecDeque<(u64, u64)>,
    time: u64,
}

impl S3Fifo {
    /// For a tier of `pages` pages.
    pub fn new(pages: u64) -> Self {
        S3Fifo {
            lists: Lists::default(),
            nodes: Vec::new(),
            small_pages: 0,
            small_limit: pages / 10,
            ghosts: HashMap::new(),
            ghost_order: VecDeque::new(),
            time: 0,
        }
    }

    fn move_to_main(&mut self, block: Handle) {
        if self.lists.remove(block) == Some(SMALL) {
            self.small_pages -= u64::from(self.nodes[block as usize].pages);
        }
        self.lists.push(MAIN, block);
    }

    fn remember(&mut self, fingerprint: u64) {
        // As many ghosts as the main queue has blocks, as in the paper.
        let limit = self.lists.len(MAIN).max(16);
        self.time += 1;
        self.ghosts.insert(fingerprint, self.time);
        self.ghost_order.push_back((fingerprint, self.time));
        while self.ghosts.len() > limit || self.ghost_order.len() > 2 * limit {
            let Some((oldest, time)) = self.ghost_order.pop_front() else {
                break;
            };
            if self.ghosts.get(&oldest) == Some(&time) {
                self.ghosts.remove(&oldest);
            }
        }
    }

    /// Walks one queue from its oldest end. Blocks that were used move on (to the main queue, or
    /// to its newest end); the others are victims, and stay where they are until they are removed.
    fn scan(
        &mut self,
        list: usize,
        n: usize,
        eligible: &mut dyn FnMut(Handle) -> bool,
        out: &mut Vec<Handle>,
    ) {
        let goal = out.len() + n;
        // A block can be passed once per frequency step before it is a victim: bounded work.
        let mut steps = self.lists.len(list) * (MAX_FREQUENCY as usize + 1);
        let mut next = self.lists.oldest(list);
        while let Some(block) = next
            && out.len() < goal
            && steps > 0
        {
            steps -= 1;
            let newer = self.lists.newer(block);
            let frequency = &mut self.nodes[block as usize].frequency;
            if list == SMALL && *frequency > 1 {
                *frequency = 0;
                self.move_to_main(block);
            } else if list == MAIN && *frequency > 0 {
                *frequency -= 1;
                self.lists.remove(block);
                self.lists.push(MAIN, block);
                next = newer.or(Some(block)); // the last of the queue is its own successor
                continue;
            } else if eligible(block) {
                out.push(block);
            }
            next = newer;
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
        if self.ghosts.remove(&meta.fingerprint).is_some() {
            self.lists.push(MAIN, block);
        } else {
            self.lists.push(SMALL, block);
            self.small_pages += u64::from(meta.pages);
        }
    }

    fn on_hit(&mut self, block: Handle) {
        if self.lists.list_of(block).is_some() {
            let frequency = &mut self.nodes[block as usize].frequency;
            *frequency = (*frequency + 1).min(MAX_FREQUENCY);
        }
    }

    fn on_remove(&mut self, block: Handle) {
        if self.lists.remove(block) == Some(SMALL) {
            let node = self.nodes[block as usize];
            self.small_pages -= u64::from(node.pages);
            self.remember(node.fingerprint);
        }
    }

    fn set_importance(&mut self, _block: Handle, _score: f32) {}

    fn victims(
        &mut self,
        n: usize,
        eligible: &mut dyn FnMut(Handle) -> bool,
        out: &mut Vec<Handle>,
    ) {
        let goal = out.len() + n;
        let first = if self.small_pages >= self.small_limit {
            SMALL
        } else {
            MAIN
        };
        for list in [first, SMALL + MAIN - first] {
            let left = goal - out.len();
            self.scan(list, left, eligible, out);
        }
        // Blocks that the small queue passed on may be all that is left.
        if out.len() < goal {
            let mut found: Vec<Handle> = Vec::new();
            let taken: HashSet<Handle> = out.iter().copied().collect();
            self.scan(
                MAIN,
                goal - out.len(),
                &mut |b| !taken.contains(&b) && eligible(b),
                &mut found,
            );
            out.append(&mut found);
        }
    }

    fn len(&self) -> usize {
        self.lists.len(SMALL) + self.lists.len(MAIN)
    }

    fn memory_bytes(&self) -> usize {
        self.lists.memory_bytes()
            + self.nodes.capacity() * size_of::<Node>()
            + self.ghosts.capacity() * 17
            + self.ghost_order.capacity() * 16
    }
}
