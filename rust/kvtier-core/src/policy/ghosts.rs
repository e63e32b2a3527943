//! Blocks that left, remembered by fingerprint.

use std::collections::BTreeMap;

/// Fingerprints in the order in which they were remembered.
///
/// Trees, because they grow a little at a time: a policy's memory is counted, and must not jump.
#[derive(Debug, Default)]
pub struct Ghosts {
    times: BTreeMap<u64, u64>,
    order: BTreeMap<u64, u64>,
    clock: u64,
}

impl Ghosts {
    /// Remembers a block that left.
    pub fn insert(&mut self, fingerprint: u64) {
        self.clock += 1;
        if let Some(before) = self.times.insert(fingerprint, self.clock) {
            self.order.remove(&before);
        }
        self.order.insert(self.clock, fingerprint);
    }

    /// Is this one remembered?
    pub fn contains(&self, fingerprint: u64) -> bool {
        self.times.contains_key(&fingerprint)
    }

    /// Forgets this one. False: it was not remembered.
    pub fn remove(&mut self, fingerprint: u64) -> bool {
        let time = self.times.remove(&fingerprint);
        time.is_some_and(|time| self.order.remove(&time).is_some())
    }

    /// Forgets the oldest until `limit` are left.
    pub fn limit(&mut self, limit: usize) {
        while self.times.len() > limit
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.times.remove(&oldest);
        }
    }

    /// How many are remembered.
    pub fn len(&self) -> usize {
        self.times.len()
    }

    /// Bytes kept in memory; a B-tree's nodes are about two thirds full.
    pub fn memory_bytes(&self) -> usize {
        2 * self.times.len() * 16 * 3 / 2
    }
}
