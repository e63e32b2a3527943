//! W-TinyLFU (Einziger, Friedman and Manes, ACM TOS 2017).

use super::queue::Queue;
use super::{Handle, Meta, Policy, forward_to_queue};
use crate::index::grow;

const WINDOW: u8 = 0;
const PROBATION: u8 = 1;
const PROTECTED: u8 = 2;

#[derive(Clone, Copy, Debug, Default)]
struct Node {
    fingerprint: u64,
    pages: u32,
}

/// Counts of four bits for fingerprints, halved from time to time.
#[derive(Debug)]
struct Sketch {
    counters: Vec<u8>,
    mask: u64,
    additions: u64,
}

impl Sketch {
    fn new(items: u64) -> Self {
        let width = (items * 4).next_power_of_two().clamp(256, 1 << 26);
        Sketch {
            counters: vec![0; width as usize],
            mask: width - 1,
            additions: 0,
        }
    }

    fn places(&self, fingerprint: u64) -> [usize; 4] {
        const SEEDS: [u64; 4] = [
            0x9E37_79B9_7F4A_7C15,
            0xC2B2_AE3D_27D4_EB4F,
            0x1656_67B1_9E37_79F9,
            0xD6E8_FEB8_6659_FD93,
        ];
        SEEDS.map(|seed| {
            let x = (fingerprint ^ (fingerprint >> 31)).wrapping_mul(seed);
            ((x >> 32) & self.mask) as usize
        })
    }

    fn add(&mut self, fingerprint: u64) {
        for place in self.places(fingerprint) {
            let counter = &mut self.counters[place];
            *counter = (*counter + 1).min(15);
        }
        self.additions += 1;
        // Ten times as many additions as blocks, as in the paper.
        if self.additions * 4 >= self.counters.len() as u64 * 10 {
            self.additions /= 2;
            self.counters.iter_mut().for_each(|counter| *counter /= 2);
        }
    }

    fn count(&self, fingerprint: u64) -> u8 {
        let counts = self.places(fingerprint).map(|place| self.counters[place]);
        counts.into_iter().min().unwrap_or(0)
    }
}

/// New blocks pass a window of a hundredth of the tier; at its end they stay only if they were used
/// more often, here or before, than the next victim of the main part, a segmented LRU.
#[derive(Debug)]
pub struct WTinyLfu {
    queue: Queue<u8>,
    nodes: Vec<Node>,
    pages: [u64; 3],
    window_limit: u64,
    protected_limit: u64,
    sketch: Sketch,
}

impl WTinyLfu {
    /// For a tier of `pages` pages.
    pub fn new(pages: u64) -> Self {
        let window_limit = (pages / 100).max(1);
        WTinyLfu {
            queue: Queue::default(),
            nodes: Vec::new(),
            pages: [0; 3],
            window_limit,
            protected_limit: (pages - window_limit.min(pages)) * 4 / 5,
            sketch: Sketch::new(pages),
        }
    }

    fn push(&mut self, list: u8, block: Handle) {
        let pages = u64::from(self.nodes[block as usize].pages);
        if let Some(before) = self.queue.rank(block) {
            self.pages[before as usize] -= pages;
        }
        self.pages[list as usize] += pages;
        self.queue.put(block, list);
    }

    fn oldest(&self, list: u8) -> Option<Handle> {
        let ((found, _), block) = self.queue.first_from((list, 0))?;
        (found == list).then_some(block)
    }

    fn uses(&self, block: Handle) -> u8 {
        self.sketch.count(self.nodes[block as usize].fingerprint)
    }
}

impl Policy for WTinyLfu {
    fn on_insert(&mut self, block: Handle, meta: &Meta) {
        grow(&mut self.nodes, block as usize, Node::default());
        self.nodes[block as usize] = Node {
            fingerprint: meta.fingerprint,
            pages: meta.pages,
        };
        self.sketch.add(meta.fingerprint);
        self.push(WINDOW, block);
        // There was room without a victim: what leaves the window need not compete.
        while self.pages[WINDOW as usize] > self.window_limit
            && let Some(oldest) = self.oldest(WINDOW)
        {
            self.push(PROBATION, oldest);
        }
    }

    fn on_hit(&mut self, block: Handle) {
        let Some(list) = self.queue.rank(block) else {
            return;
        };
        self.sketch.add(self.nodes[block as usize].fingerprint);
        self.push(if list == WINDOW { WINDOW } else { PROTECTED }, block);
        while self.pages[PROTECTED as usize] > self.protected_limit
            && let Some(oldest) = self.oldest(PROTECTED)
        {
            self.push(PROBATION, oldest);
        }
    }

    fn on_remove(&mut self, block: Handle) {
        if let Some(list) = self.queue.remove(block) {
            self.pages[list as usize] -= u64::from(self.nodes[block as usize].pages);
        }
    }

    fn victim(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        self.queue.ask_again(eligible);
        let settled = self.queue.find((PROBATION, 0), eligible).map(|(_, b)| b);
        if self.pages[WINDOW as usize] < self.window_limit && settled.is_some() {
            return settled;
        }
        let candidate = self.queue.find((WINDOW, 0), eligible).map(|(_, b)| b)?;
        let Some(settled) = settled.filter(|&settled| settled != candidate) else {
            return Some(candidate);
        };
        if self.uses(candidate) <= self.uses(settled) {
            return Some(candidate);
        }
        self.push(PROBATION, candidate);
        Some(settled)
    }

    forward_to_queue!(|me| { me.nodes.capacity() * size_of::<Node>() + me.sketch.counters.len() });
}
