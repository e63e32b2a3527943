//! ARC (Megiddo and Modha, FAST 2003).

use super::ghosts::Ghosts;
use super::queue::Queue;
use super::{Handle, Meta, Policy, forward_to_queue};
use crate::index::grow;

const ONCE: u8 = 0;
const OFTEN: u8 = 1;

/// Blocks used once and blocks used often, each by recency; what comes back after it left shifts
/// room to the side that lost it.
#[derive(Debug, Default)]
pub struct Arc {
    queue: Queue<u8>,
    fingerprints: Vec<u64>,
    /// Blocks here that were used once.
    once: usize,
    gone_once: Ghosts,
    gone_often: Ghosts,
    /// How many of the blocks may be ones used once.
    target: f64,
    /// The most blocks there ever were: what the tier holds.
    capacity: usize,
    /// The block that is about to arrive, and whether it was here and was used often.
    expected: Option<(u64, bool)>,
}

impl Arc {
    fn place(&mut self, block: Handle, list: u8) {
        if self.queue.rank(block) == Some(ONCE) {
            self.once -= 1;
        }
        self.once += usize::from(list == ONCE);
        self.queue.put(block, list);
    }

    /// Shifts room for a block that arrives. Says whether it was here and was used often.
    fn adapt(&mut self, fingerprint: u64) -> bool {
        let (once, often) = (self.gone_once.len() as f64, self.gone_often.len() as f64);
        if self.gone_once.contains(fingerprint) {
            self.target = (self.target + (often / once).max(1.0)).min(self.capacity as f64);
        } else if self.gone_often.contains(fingerprint) {
            self.target = (self.target - (once / often).max(1.0)).max(0.0);
            return true;
        }
        false
    }
}

impl Policy for Arc {
    fn admit(&mut self, _block: Handle, meta: &Meta) -> bool {
        self.expected = Some((meta.fingerprint, self.adapt(meta.fingerprint)));
        true
    }

    fn on_insert(&mut self, block: Handle, meta: &Meta) {
        grow(&mut self.fingerprints, block as usize, 0);
        self.fingerprints[block as usize] = meta.fingerprint;
        let expected = self.expected.take();
        if expected.is_none_or(|(fingerprint, _)| fingerprint != meta.fingerprint) {
            self.adapt(meta.fingerprint);
        }
        let back =
            self.gone_once.remove(meta.fingerprint) | self.gone_often.remove(meta.fingerprint);
        self.place(block, if back { OFTEN } else { ONCE });
        self.capacity = self.capacity.max(self.queue.len());
        let rest = self.capacity.saturating_sub(self.once);
        self.gone_once.limit(rest);
        let rest = (2 * self.capacity).saturating_sub(self.queue.len() + self.gone_once.len());
        self.gone_often.limit(rest);
    }

    fn on_hit(&mut self, block: Handle) {
        if self.queue.rank(block).is_some() {
            self.place(block, OFTEN);
        }
    }

    fn on_remove(&mut self, block: Handle) {
        let Some(list) = self.queue.remove(block) else {
            return;
        };
        let fingerprint = self.fingerprints[block as usize];
        if list == ONCE {
            self.once -= 1;
            self.gone_once.insert(fingerprint);
        } else {
            self.gone_often.insert(fingerprint);
        }
    }

    fn victim(&mut self, eligible: &mut dyn FnMut(Handle) -> bool) -> Option<Handle> {
        self.queue.ask_again(eligible);
        let once = self.once as f64;
        let returning = self.expected.is_some_and(|(_, returning)| returning);
        let take_once = self.once > 0 && (once > self.target || (returning && once == self.target));
        let first = if take_once { ONCE } else { OFTEN };
        let found = self.queue.find((first, 0), eligible);
        match found {
            Some(((list, _), block)) if list == first => Some(block),
            _ => self.queue.find((ONCE, 0), eligible).map(|(_, block)| block),
        }
    }

    forward_to_queue!(|me| {
        me.fingerprints.capacity() * size_of::<u64>()
            + me.gone_once.memory_bytes()
            + me.gone_often.memory_bytes()
    });
}
