//! Greedy-Dual: what has not been used for long is worth less, without a look at what is not used.

use super::Handle;
use super::queue::Queue;

/// The priority at which blocks leave now (Cao and Irani, 1997): a block's own is its value on top
/// of that, so value buys time, and time passes as others leave.
#[derive(Debug, Default)]
pub struct Age(f64);

impl Age {
    /// Puts a block that is worth so much here and now, not less than 0, where it belongs.
    pub fn place(&self, queue: &mut Queue<u64>, block: Handle, value: f64) {
        // Positive floats order as their bits do.
        queue.put(block, (self.0 + value).to_bits());
    }

    /// The block of the lowest priority, to which the age rises.
    pub fn victim(
        &mut self,
        queue: &mut Queue<u64>,
        eligible: &mut dyn FnMut(Handle) -> bool,
    ) -> Option<Handle> {
        let block = queue.first(eligible)?;
        self.0 = self.0.max(f64::from_bits(queue.rank(block)?));
        Some(block)
    }
}
