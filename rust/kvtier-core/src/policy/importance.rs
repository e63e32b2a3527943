//! `importance`: what a block is attended to, and what it would cost to compute it again.

use super::age::Age;
use super::queue::Queue;
use super::{Handle, Meta, Policy, forward_to_queue};
use crate::index::grow;

/// What each block before it adds to the time of computing a block, in an 8-billion-parameter model with
/// blocks of 512 tokens: attention to the preceding tokens costs as much as everything else at about 60
/// blocks (2·n_active = 4·layers·hidden·context FLOPs a token, with 32 layers of 4,096).
pub const SLOPE: f32 = 1.0 / 60.0;

#[derive(Clone, Copy, Debug, Default)]
struct Weight {
    score: f32,
    depth: u32,
    pages: u32,
}

/// Attention mass × recency × seconds to compute the block again, per page.
///
/// Recency is Greedy-Dual's: at each use a block gets its value on top of an [`Age`]. Blocks without
/// a score count as the mean of those that have one.
#[derive(Debug)]
pub struct Importance {
    slope: f32,
    queue: Queue<u64>,
    weights: Vec<Weight>,
    scores: f64,
    scored: f64,
    age: Age,
}

impl Importance {
    /// To compute a block takes 1, and `slope` more for each block before it: only the ratio matters to an
    /// order.
    pub fn new(slope: f32) -> Self {
        Importance {
            slope,
            queue: Queue::default(),
            weights: Vec::new(),
            scores: 0.0,
            scored: 0.0,
            age: Age::default(),
        }
    }

    fn place(&mut self, block: Handle) {
        let weight = self.weights[block as usize];
        let mean = if self.scored > 0.0 {
            self.scores / self.scored
        } else {
            1.0
        };
        let mass = match f64::from(weight.score) {
            score if score > 0.0 => score / mean,
            _ => 1.0,
        };
        let seconds = 1.0 + self.slope * weight.depth as f32;
        let value = mass * f64::from(seconds) / f64::from(weight.pages.max(1));
        self.age.place(&mut self.queue, block, value);
    }

    fn count(&mut self, score: f32, sign: f64) {
        if score > 0.0 {
            self.scores += sign * f64::from(score);
            self.scored += sign;
        }
    }
}

impl Policy for Importance {
    fn on_insert(&mut self, block: Handle, meta: &Meta) {
        grow(&mut self.weights, block as usize, Weight::default());
        let above = meta.parent.and_then(|p| self.weights.get(p as usize));
        self.weights[block as usize] = Weight {
            score: meta.importance,
            depth: above.map_or(0, |above| above.depth + 1),
            pages: meta.pages,
        };
        self.count(meta.importance, 1.0);
        self.place(block);
    }

    fn on_hit(&mut self, block: Handle) {
        if self.queue.rank(block).is_some() {
            self.place(block);
        }
    }

    fn on_remove(&mut self, block: Handle) {
        if self.queue.remove(block).is_some() {
            self.count(self.weights[block as usize].score, -1.0);
        }
    }

    fn set_importance(&mut self, block: Handle, score: f32) {
        if self.queue.rank(block).is_some() {
            let before = std::mem::replace(&mut self.weights[block as usize].score, score);
            self.count(before, -1.0);
            self.count(score, 1.0);
            self.place(block);
        }
    }

    fn victim(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        self.age.victim(&mut self.queue, eligible)
    }

    forward_to_queue!(|me| me.weights.capacity() * size_of::<Weight>());
}
