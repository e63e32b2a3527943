//! The state of the store, in numbers.

use kvtier_codec::image::PAGE;

use crate::error::Result;
use crate::hbm::HBM;
use crate::shares::{Held, Shares};
use crate::stats::{Summary, TierStats};
use crate::store::{Inner, NVME, Namespace, Store};

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

/// What a namespace holds of one tier.
#[derive(Clone, Debug, PartialEq)]
pub struct ShareReport {
    /// The tier.
    pub tier: &'static str,
    /// Blocks there.
    pub blocks: u64,
    /// Their bytes, whole pages.
    pub bytes: u64,
    /// Bytes that no other namespace can take: what it was promised, or less where tables leave less.
    pub guaranteed: u64,
    /// Bytes that it never holds more than.
    pub cap: Option<u64>,
}

/// The state of one namespace.
#[derive(Clone, Debug, PartialEq)]
pub struct NamespaceReport {
    /// The first bytes of its digest.
    pub tag: u64,
    /// By tier, fastest first.
    pub shares: Vec<ShareReport>,
    /// Counters by name.
    pub counters: Vec<(&'static str, u64)>,
}

/// The state of the store.
#[derive(Clone, Debug)]
pub struct Report {
    /// Tiers, fastest first.
    pub tiers: Vec<TierReport>,
    /// Namespaces that hold something, or were read from.
    pub namespaces: Vec<NamespaceReport>,
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
        // All at one moment, so that they agree.
        let (blocks, mut namespaces) = {
            let order = inner.order.lock();
            let blocks: Vec<usize> = order.shares.tiers().map(|i| order.shares.len(i)).collect();
            let tags = order.shares.tags();
            let report = |tag| inner.namespace_report(&order.shares, tag);
            (blocks, tags.map(report).collect::<Vec<_>>())
        };
        namespaces.sort_unstable_by_key(|namespace| namespace.tag);
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
            let mut all = counters(&hbm.stats);
            all.push(("set_aside", hbm.health.is_aside().into()));
            let (pages, free) = (hbm.arena.pages(), hbm.arena.free_pages());
            tiers.push(TierReport {
                name: HBM,
                size: hbm.size,
                capacity: page(pages),
                used: page(pages.saturating_sub(free)),
                blocks: blocks[inner.tiers()] as u64,
                prefaulted: hbm.size,
                quarantined: 0,
                emulated: false,
                counters: all,
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
                blocks: blocks[i] as u64,
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
                blocks: blocks[inner.memory.len()] as u64,
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
            namespaces,
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
                ("writing", inner.mover.writing() as u64),
            ],
            put: s.put.summary(),
            load: s.load.summary(),
            engine: inner.cold.as_ref().map(|c| c.tier.engine_name()),
        }
    }
    /// The state of one namespace.
    pub fn namespace_report(&self, ns: &Namespace) -> Result<NamespaceReport> {
        self.inner.check_open()?;
        let order = self.inner.order.lock();
        Ok(self.inner.namespace_report(&order.shares, ns.tag()))
    }
}

impl Inner {
    fn namespace_report(&self, shares: &Shares, tag: u64) -> NamespaceReport {
        let page = PAGE as u64;
        let account = shares.read(tag);
        let tiers = account.held.iter().enumerate();
        let share = |(tier, held): (usize, &Held)| {
            let (guaranteed, cap) = shares.limits(tier, tag);
            ShareReport {
                tier: self.tier_name(tier),
                blocks: held.blocks,
                bytes: held.pages * page,
                guaranteed: guaranteed * page,
                cap: cap.map(|cap| cap * page),
            }
        };
        let mut shares: Vec<ShareReport> = tiers.map(share).collect();
        shares.rotate_right(self.hbm.iter().len()); // the last of the policies, and the fastest tier
        NamespaceReport {
            tag,
            shares,
            counters: vec![
                ("hits", account.hits),
                ("misses", account.misses),
                ("evicted", account.evicted),
                ("expired", account.expired),
            ],
        }
    }
}
