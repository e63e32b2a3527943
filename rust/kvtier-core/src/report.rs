//! The state of the store, in numbers.

use kvtier_codec::image::PAGE;

use crate::hbm::HBM;
use crate::stats::{Summary, TierStats};
use crate::store::{NVME, Store};

/// The state of one tier.
#[derive(Clone, Debug)]
pub struct TierReport {
    /// `hbm`, `dram`, `cxl` or `nvme`.
    pub name: &'static str,
    /// The configured size.
    pub size: u64,
    /// Bytes that blocks may use: the size less metadata and lost pages.
    pub capacity: u64,
    /// Bytes in use, whole pages.
    pub used: u64,
    /// Blocks there.
    pub blocks: u64,
    /// Bytes known to be backed by memory.
    pub prefaulted: u64,
    /// Bytes taken out of use since they did not keep what was written.
    pub quarantined: u64,
    /// A rate limit was set for a what-if run.
    pub emulated: bool,
    /// Counters by name.
    pub counters: Vec<(&'static str, u64)>,
    /// Time of one caller's read of one block.
    pub get: Summary,
}

/// The state of the store.
#[derive(Clone, Debug)]
pub struct Report {
    /// Tiers, fastest first.
    pub tiers: Vec<TierReport>,
    /// Blocks in the store.
    pub blocks: u64,
    /// Bytes of index, policies and tables.
    pub metadata: u64,
    /// Counters by name.
    pub counters: Vec<(&'static str, u64)>,
    /// Time of one put of one block.
    pub put: Summary,
    /// Time of a load from NVMe.
    pub load: Summary,
    /// The engine that reads and writes NVMe.
    pub engine: Option<&'static str>,
}

impl Store {
    /// The state of everything.
    pub fn report(&self) -> Report {
        let inner = &self.inner;
        let mut tiers = Vec::new();
        let counters = |s: &TierStats| {
            vec![
                ("hits", s.hits.get()),
                ("hit_bytes", s.hit_bytes.get()),
                ("inserts", s.inserts.get()),
                ("demotions", s.demotions.get()),
                ("drops", s.drops.get()),
                ("evictions", s.evictions.get()),
                ("corrupt", s.corrupt.get()),
                ("errors", s.errors.get()),
            ]
        };
        let page = |pages: u32| u64::from(pages) * PAGE as u64;
        if let Some(hbm) = &inner.hbm {
            let (pages, free) = (hbm.arena.pages(), hbm.arena.free_pages());
            tiers.push(TierReport {
                name: HBM,
                size: hbm.size,
                capacity: page(pages),
                used: page(pages.saturating_sub(free)),
                blocks: inner.order.lock().policy(inner.tiers()).len() as u64,
                prefaulted: hbm.size,
                quarantined: 0,
                emulated: false,
                counters: counters(&hbm.stats),
                get: hbm.stats.get.summary(),
            });
        }
        for (i, m) in inner.memory.iter().enumerate() {
            let (pages, free) = (m.arena.pages(), m.arena.free_pages());
            tiers.push(TierReport {
                name: m.name,
                size: m.size,
                capacity: page(pages),
                used: page(pages.saturating_sub(free)),
                blocks: inner.order.lock().policy(i).len() as u64,
                prefaulted: m.arena.prefaulted_bytes() as u64,
                quarantined: page(m.arena.lost_pages()),
                emulated: m.pacer.is_some(),
                counters: counters(&m.stats),
                get: m.stats.get.summary(),
            });
        }
        if let Some(cold) = &inner.cold {
            let page = PAGE as u64;
            let s = cold.tier.stats();
            let mut all = counters(&cold.stats);
            all.extend([
                ("reads", s.reads),
                ("read_bytes", s.read_bytes),
                ("read_errors", s.read_errors),
                ("writes", s.writes),
                ("write_bytes", s.write_bytes),
                ("write_errors", s.write_errors),
                ("syncs", s.syncs),
                ("journal_records", s.journal_records),
                ("checkpoints", s.checkpoints),
                ("recovered", s.recovered),
                ("failed_paths", s.failed_paths),
                ("damaged_metadata", s.damaged),
            ]);
            tiers.push(TierReport {
                name: NVME,
                size: cold.size,
                capacity: cold.tier.capacity_pages() * page,
                used: cold.tier.used_pages() * page,
                blocks: inner.order.lock().policy(inner.memory.len()).len() as u64,
                prefaulted: 0,
                quarantined: s.quarantined_pages * page,
                emulated: cold.emulated,
                counters: all,
                get: cold.stats.get.summary(),
            });
        }
        let s = &inner.stats;
        Report {
            tiers,
            blocks: inner.index.len() as u64,
            metadata: inner.metadata_bytes() as u64,
            counters: vec![
                ("puts", s.puts.get()),
                ("put_bytes", s.put_bytes.get()),
                ("present", s.present.get()),
                ("orphans", s.orphans.get()),
                ("misses", s.misses.get()),
                ("loads", s.loads.get()),
                ("joined", s.joined.get()),
                ("over_budget", s.over_budget.get()),
                ("moved", s.moved.get()),
            ],
            put: s.put.summary(),
            load: s.load.summary(),
            engine: inner.cold.as_ref().map(|c| c.tier.engine_name()),
        }
    }
}
