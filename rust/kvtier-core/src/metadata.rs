//! The memory that index, policies and tables take: the first tier gives it up.

use kvtier_codec::image::PAGE;

use crate::shares::Need;
use crate::store::Inner;
use crate::sync::atomic::Ordering;

/// Whether the first memory tier has given up what metadata takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Charge {
    /// It has.
    Paid,
    /// So many pages are not free yet.
    Lacks(u32),
    /// It must not give up so much.
    TooMuch,
}

impl Inner {
    /// Sees to it that the first memory tier gives up as many pages as the index, the policies and
    /// the tables of the tiers use, so that all of it together stays within the tier's size.
    ///
    /// From half the tier on, each new entry takes the place of the coldest; three quarters are
    /// never passed.
    pub(crate) fn charge_metadata(&self) -> Charge {
        const STEP: usize = 32; // slots reserved between two looks
        const ENTRY: usize = 1536; // more than a new block's entry, links and nodes take
        const RECORDS: usize = 4 << 20; // more than records that wait for NVMe take
        let count = self.uncharged.fetch_add(1, Ordering::Relaxed);
        // The first blocks of a namespace with a quota take more: its policies begin.
        let order = self.order.lock().memory_bytes();
        if !count.is_multiple_of(STEP) && order < self.foreseen.load(Ordering::Relaxed) {
            return Charge::Paid;
        }
        let arena = &self.memory[0].arena;
        let bytes = self.metadata_bytes();
        let order = order + (bytes / 8 + STEP * ENTRY) / 2;
        self.foreseen.store(order, Ordering::Relaxed);
        let mapped = arena.mapped_pages();
        let records = match self.cold {
            Some(_) => RECORDS.min(mapped as usize * PAGE / 64),
            None => 0,
        };
        // What is added until the next look, and what vectors grow by at a time.
        let need = (bytes + bytes / 8 + STEP * ENTRY + records).div_ceil(PAGE) as u32;
        // Forgetting frees no tables, it makes cells vacant, for others of their shards: the more the
        // tables take above half, the less of them is to be in use, and once it is, that is enough.
        let (entries, cells) = (self.index.len() as u64, self.index.cells().max(1) as u64);
        if u64::from(need) * (cells + entries) > u64::from(mapped) * cells {
            self.forget_coldest(2 * STEP);
        }
        let most = mapped / 4 * 3;
        let due = need.min(most).saturating_sub(arena.ceded_pages());
        let left = arena.pages().saturating_sub(due);
        self.order.lock().shares.set_left(0, left);
        // Well ahead of time the highest pages are vacated, so that all that is given up lies
        // together; once it must be, any will do.
        let wish = (need + mapped / 64).min(most);
        let wish = wish.saturating_sub(arena.ceded_pages());
        if wish > 0 {
            let step = wish.max(mapped / 512);
            while arena.free_pages() < step && self.reclaim_expired() {}
            let (from, to, runs) = arena.top(step);
            self.clear(0, from, to, &runs, Need::Tier);
            arena.cede(step, false);
        }
        let mut lacking = need.min(most).saturating_sub(arena.ceded_pages());
        lacking -= arena.cede(lacking, true);
        if lacking == 0 && need <= most {
            return Charge::Paid;
        }
        self.uncharged.store(0, Ordering::Relaxed); // the next one looks again
        if lacking > 0 {
            Charge::Lacks(lacking)
        } else {
            Charge::TooMuch
        }
    }

    /// Sets memory aside for blocks that are coded or decoded, before the first one is.
    pub(crate) fn begin_coding(&self) {
        if self.codings.begin() {
            self.charge_now();
        }
    }

    /// Charges for what was just made; what is lacking now, the next reservation gets.
    pub(crate) fn charge_now(&self) {
        self.uncharged.store(0, Ordering::Relaxed);
        self.charge_metadata();
    }

    /// Bytes of everything that is kept in memory beside blocks.
    pub(crate) fn metadata_bytes(&self) -> usize {
        self.index.memory_bytes()
            + self.order.lock().memory_bytes()
            + self.codings.memory_bytes()
            + self
                .memory
                .iter()
                .map(|m| &m.arena)
                .chain(self.hbm.iter().map(|hbm| &hbm.arena))
                .map(|arena| arena.overhead_bytes())
                .sum::<usize>()
            + self
                .cold
                .as_ref()
                .map_or(0, |c| c.tier.memory_bytes() as usize)
    }
}
