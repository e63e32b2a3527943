//! What a namespace holds, and what became of its blocks.

/// What a namespace holds of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Blocks.
    pub blocks: u64,
    /// Their pages.
    pub pages: u64,
}

/// A namespace's account.
#[derive(Clone, Debug, Default)]
pub struct Account {
    pub(crate) group: usize,
    /// By tier.
    pub held: Vec<Held>,
    /// Blocks read.
    pub hits: u64,
    /// Reads that found nothing.
    pub misses: u64,
    /// Blocks that left the store to make room.
    pub evicted: u64,
    /// Blocks that left since they were older than allowed.
    pub expired: u64,
}

impl Account {
    /// Of nothing, in so many tiers.
    pub(crate) fn new(tiers: usize) -> Self {
        Account {
            held: vec![Held::default(); tiers],
            ..Account::default()
        }
    }
}
