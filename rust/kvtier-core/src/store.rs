//! The store: its tiers, its threads and its verbs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvtier_codec::image::{Id, PAGE};
use kvtier_nvme::Clock;
use kvtier_nvme::IoBuf;
use kvtier_nvme::{NvmeTier, Recovered, Registration};
use parking_lot::Mutex;

use crate::arena::{Arena, Pin, backing};
use crate::config::{Config, Memory, Progress};
use crate::error::{Error, Kind, Result};
use crate::fork;
use crate::index::{Cold, Entry, Index};
use crate::jobs::Prefetcher;
use crate::key;
use crate::layout::Layout;
use crate::mover::{Budget, Mover};
use crate::order::{Known, Order};
use crate::pacer::Pacer;
use crate::policy;
use crate::stats::{StoreStats, Summary, TierStats};
use crate::workers::Workers;

/// A memory tier at work.
pub(crate) struct MemoryTier {
    pub(crate) name: &'static str,
    pub(crate) size: u64,
    pub(crate) arena: Arc<Arena>,
    pub(crate) pacer: Option<Pacer>,
    pub(crate) stats: TierStats,
}

/// The NVMe tier at work.
pub(crate) struct ColdTier {
    pub(crate) tier: Arc<NvmeTier>,
    pub(crate) size: u64,
    pub(crate) paths: u64,
    pub(crate) budget: Option<Budget>,
    pub(crate) emulated: bool,
    pub(crate) stats: TierStats,
}

impl ColdTier {
    /// Every path is bypassed.
    pub(crate) fn is_failed(&self) -> bool {
        self.tier.stats().failed_paths >= self.paths
    }
}

/// The NVMe tier's name in results and statistics.
pub const NVME: &str = "nvme";

/// What all threads of a store share.
pub(crate) struct Inner {
    pub(crate) index: Index,
    pub(crate) order: Mutex<Order>,
    pub(crate) memory: Vec<MemoryTier>,
    pub(crate) cold: Option<ColdTier>,
    pub(crate) mover: Mover,
    pub(crate) prefetcher: Prefetcher,
    /// Verifies loads and does the copying of asynchronous reads.
    pub(crate) workers: Workers,
    /// Does the copying of asynchronous puts, which may wait for room.
    pub(crate) writers: Workers,
    pub(crate) pinned: Mutex<hashbrown::HashMap<Id, (Pin, usize)>>,
    pub(crate) regions: Mutex<Vec<Arc<Region>>>,
    pub(crate) stats: StoreStats,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) verify: bool,
    pub(crate) high: f64,
    pub(crate) low: f64,
    /// The number of entries up to which the first tier has ceded memory.
    pub(crate) charged: AtomicUsize,
    closed: AtomicBool,
    fork: fork::Generation,
}

/// A tiered store of KV blocks.
pub struct Store {
    pub(crate) inner: Arc<Inner>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    registrations: Mutex<Vec<Registration>>,
}

/// A namespace's digest and layout: all that a verb must know of the blocks it is asked for.
#[derive(Clone, Debug)]
pub struct Namespace {
    /// What every id of it is derived from.
    pub digest: key::Namespace,
    /// How its blocks are arranged.
    pub layout: Layout,
}

impl Namespace {
    /// The namespace of this canonical identity and layout.
    pub fn new(identity: &[u8], layout: Layout) -> Self {
        Namespace {
            digest: key::namespace(identity),
            layout,
        }
    }

    /// The ids of these keys.
    pub fn ids(&self, keys: &[&[u8]]) -> Result<Vec<Id>> {
        keys.iter().map(|key| key::id(&self.digest, key)).collect()
    }

    /// The tag by which its entries are recognised after a restart.
    pub fn tag(&self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|i| self.digest[i]))
    }
}

/// Memory of the caller that is a direct target and source of I/O.
pub struct Region {
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) keep: Arc<dyn std::any::Any + Send + Sync>,
}

impl Region {
    /// Operations that still read or write the region.
    pub fn in_flight(&self) -> usize {
        Arc::strong_count(&self.keep) - 1
    }

    pub(crate) fn holds(&self, at: usize, len: usize) -> bool {
        at >= self.start && at + len <= self.start + self.len
    }
}

/// How much of a prefix is resident, and where.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Match {
    /// Leading keys that are resident.
    pub blocks: usize,
    /// Tokens in them; 0 in an opaque namespace.
    pub tokens: u64,
    /// The fastest tier of each.
    pub tiers: Vec<&'static str>,
    /// Payload bytes by that tier, fastest first.
    pub bytes: Vec<(&'static str, u64)>,
}

/// The state of one tier.
#[derive(Clone, Debug)]
pub struct TierReport {
    /// `dram`, `cxl` or `nvme`.
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

fn memory_tier(m: &Memory) -> Result<MemoryTier> {
    let size = m.size as usize;
    let backing = match &m.path {
        Some(path) => backing::file(path, size)?,
        None => backing::anonymous(size, m.huge_pages, m.numa_node)?,
    };
    Ok(MemoryTier {
        name: m.name(),
        size: m.size,
        arena: Arena::new(backing),
        pacer: m.emulate_gbs.map(Pacer::new),
        stats: TierStats::default(),
    })
}

impl Store {
    /// Opens a store: maps its memory, opens or creates its NVMe tier and reads the journal there.
    pub fn open(config: Config) -> Result<Self> {
        config.validate()?;
        let nvme = match &config.nvme {
            None => None,
            Some(options) => Some(NvmeTier::open(options.clone())?),
        };
        Self::assemble(config, nvme)
    }

    /// As [`Store::open`], over an NVMe tier that is open already (simulated devices).
    pub fn assemble(config: Config, nvme: Option<(Arc<NvmeTier>, Vec<Recovered>)>) -> Result<Self> {
        config.validate()?;
        let memory = config
            .memory
            .iter()
            .map(memory_tier)
            .collect::<Result<Vec<_>>>()?;
        let clock: Arc<dyn Clock> = match &config.nvme {
            Some(options) => options.clock.clone(),
            None => Arc::new(kvtier_nvme::SystemClock),
        };
        let mut policies = Vec::new();
        for m in &memory {
            policies.push(policy::by_name(&config.policy, m.arena.pages().into())?);
        }
        let (cold, recovered) = match nvme {
            None => (None, Vec::new()),
            Some((tier, recovered)) => {
                policies.push(policy::by_name(&config.policy, tier.capacity_pages())?);
                let options = config.nvme.as_ref();
                let cold = ColdTier {
                    size: options.map_or(0, |o| o.size),
                    paths: options.map_or(1, |o| o.paths.len().max(1) as u64),
                    budget: config.write_budget.map(|b| Budget::new(b, clock.now())),
                    emulated: options.is_some_and(|o| o.emulate_gbs.is_some()),
                    stats: TierStats::default(),
                    tier,
                };
                (Some(cold), recovered)
            }
        };
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let start = |name: &str, n| {
            Workers::new(name, n)
                .map_err(|e| Error::new(Kind::Storage, format!("starting threads: {e}")))
        };
        let inner = Arc::new(Inner {
            index: Index::default(),
            order: Mutex::new(Order::new(policies)),
            memory,
            cold,
            mover: Mover::default(),
            prefetcher: Prefetcher::default(),
            workers: start("kvtier-worker", cores.clamp(2, 4))?,
            writers: start("kvtier-writer", 1)?,
            pinned: Mutex::default(),
            regions: Mutex::default(),
            stats: StoreStats::default(),
            clock,
            verify: config.verify,
            high: config.high,
            low: config.low,
            charged: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            fork: fork::Generation::now(),
        });
        inner.adopt(recovered);
        let mut registrations = Vec::new();
        if let Some(cold) = &inner.cold {
            const CHUNK: usize = 1 << 30; // the most that one registered buffer may hold
            let (base, len) = inner.memory[0].arena.range();
            for at in (0..len).step_by(CHUNK) {
                let n = CHUNK.min(len - at);
                // SAFETY: the arena is kept mapped by the Arc; slots are written only by their
                // owners.
                let chunk = unsafe { IoBuf::new(base.add(at), n, inner.memory[0].arena.clone()) };
                registrations.push(cold.tier.register(chunk));
            }
        }
        let store = Store {
            threads: Mutex::default(),
            registrations: Mutex::new(registrations),
            inner,
        };
        store.spawn("kvtier-mover", |inner| inner.run_mover())?;
        store.spawn("kvtier-prefetch", |inner| inner.run_prefetcher())?;
        if !config.memory.iter().any(|m| m.prefault) {
            if let Some(progress) = config.progress {
                progress(0, 0);
            }
        } else {
            let wanted: Vec<bool> = config.memory.iter().map(|m| m.prefault).collect();
            let progress = config.progress;
            store.spawn("kvtier-prefault", move |inner| {
                inner.prefault(&wanted, progress)
            })?;
        }
        Ok(store)
    }

    fn spawn(&self, name: &str, run: impl FnOnce(&Arc<Inner>) + Send + 'static) -> Result<()> {
        let inner = self.inner.clone();
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || run(&inner))
            .map_err(|e| Error::new(Kind::Storage, format!("starting {name}: {e}")))?;
        self.threads.lock().push(thread);
        Ok(())
    }

    /// Which of these keys are resident.
    pub fn contains(&self, ns: &Namespace, keys: &[&[u8]]) -> Result<Vec<bool>> {
        self.inner.check_open()?;
        let ids = ns.ids(keys)?;
        Ok(ids
            .iter()
            .map(|id| self.inner.index.of(id).find(id).is_some())
            .collect())
    }

    /// How long a prefix of these keys is resident, and where.
    pub fn matching(&self, ns: &Namespace, keys: &[&[u8]]) -> Result<Match> {
        self.inner.check_open()?;
        let mut found = Match::default();
        for key in keys {
            let id = key::id(&ns.digest, key)?;
            let shard = self.inner.index.of(&id);
            let Some(entry) = shard.find(&id).and_then(|h| shard.get(h)) else {
                break;
            };
            let tier = match entry.in_memory() {
                Some((tier, _)) => self.inner.memory[tier].name,
                None => NVME,
            };
            found.blocks += 1;
            found.tokens += u64::from(ns.layout.tokens(entry.shape));
            found.tiers.push(tier);
            let bytes = entry.shape.payload() as u64;
            match found.bytes.iter_mut().find(|(name, _)| *name == tier) {
                Some((_, sum)) => *sum += bytes,
                None => found.bytes.push((tier, bytes)),
            }
        }
        Ok(found)
    }

    /// Removes these blocks and all that follow them. Says which were there.
    pub fn remove(&self, ns: &Namespace, keys: &[&[u8]]) -> Result<Vec<bool>> {
        self.inner.check_open()?;
        let ids = ns.ids(keys)?;
        Ok(ids.iter().map(|id| self.inner.remove_id(id)).collect())
    }

    /// Removes every block of a namespace, or of the store. Returns how many.
    pub fn clear(&self, ns: Option<&Namespace>) -> Result<usize> {
        self.inner.check_open()?;
        let tag = ns.map(Namespace::tag);
        let mut doomed: Vec<Known> = Vec::new();
        self.inner.index.for_each_shard(|shard| {
            for h in shard.handles().collect::<Vec<_>>() {
                if let Some(entry) = shard.get(h)
                    && tag.is_none_or(|tag| tag == entry.namespace)
                {
                    doomed.push((h, entry.epoch));
                }
            }
        });
        Ok(doomed
            .into_iter()
            .map(|known| self.inner.remove_tree(known))
            .sum())
    }

    /// Sets the caller's score of these blocks. Says which were there.
    pub fn set_importance(
        &self,
        ns: &Namespace,
        keys: &[&[u8]],
        scores: &[f32],
    ) -> Result<Vec<bool>> {
        self.inner.check_open()?;
        if keys.len() != scores.len() || scores.iter().any(|s| !s.is_finite() || *s < 0.0) {
            return Err(Error::new(
                Kind::InvalidBlock,
                format!(
                    "{} scores were given for {} keys; one finite score of at least 0 a key is needed",
                    scores.len(),
                    keys.len()
                ),
            ));
        }
        let inner = &self.inner;
        let set = |(id, &score): (&Id, &f32)| {
            let mut shard = inner.index.of(id);
            let Some(h) = shard.find(id) else {
                return false;
            };
            let Some(entry) = shard.get_mut(h) else {
                return false;
            };
            entry.importance = score;
            let mut order = inner.order.lock();
            for tier in 0..inner.tiers() {
                order.policy(tier).set_importance(h, score);
            }
            true
        };
        Ok(ns.ids(keys)?.iter().zip(scores).map(set).collect())
    }

    /// Writes every block that lies only in memory to NVMe, and waits until it is durable there.
    pub fn flush(&self, deadline: Instant) -> Result<()> {
        self.inner.check_open()?;
        self.inner.persist(deadline)
    }

    /// Makes the caller's memory a direct target of reads from NVMe. It must stay valid while
    /// `keep` lives; operations hold `keep` until they have completed.
    ///
    /// # Safety
    /// `start` must be valid for reads and writes of `len` bytes while `keep` lives.
    pub unsafe fn register_region(
        &self,
        start: *mut u8,
        len: usize,
        keep: Arc<dyn std::any::Any + Send + Sync>,
    ) -> Result<Arc<Region>> {
        self.inner.check_open()?;
        let aligned = (start as usize).next_multiple_of(PAGE);
        let usable = (len.saturating_sub(aligned - start as usize)) / PAGE * PAGE;
        if let (Some(cold), true) = (&self.inner.cold, usable > 0) {
            // SAFETY: inside the caller's memory, which `keep` keeps valid.
            let buf = unsafe { IoBuf::new(aligned as *mut u8, usable, keep.clone()) };
            self.registrations.lock().push(cold.tier.register(buf));
        }
        let region = Arc::new(Region {
            start: start as usize,
            len,
            keep,
        });
        self.inner.regions.lock().push(region.clone());
        Ok(region)
    }

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
        for (i, m) in inner.memory.iter().enumerate() {
            let page = |pages: u32| u64::from(pages) * PAGE as u64;
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

    /// Flushes, ends all threads and lets go of the directory. Leases stay valid. Done by the
    /// deadline even if a device hangs; then what is in flight is leaked and the lock kept, and the
    /// error says so. Closing twice is allowed.
    pub fn close(&self, deadline: Instant) -> Result<()> {
        let inner = &self.inner;
        if inner.fork.is_stale() {
            return Ok(()); // the parent's threads and rings are not ours to end
        }
        if inner.closed.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        let flushed = inner.persist(deadline);
        inner.prefetcher.stop();
        inner.mover.stop();
        for thread in self.threads.lock().drain(..) {
            let _ = thread.join();
        }
        self.registrations.lock().clear();
        inner.regions.lock().clear();
        inner.pinned.lock().clear();
        let closed = match &inner.cold {
            Some(cold) => cold.tier.close(Some(deadline)).map_err(Error::from),
            None => Ok(()),
        };
        if closed.is_ok() {
            inner.workers.stop();
            inner.writers.stop();
        }
        flushed.and(closed)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if self.inner.fork.is_stale() {
            // In a fork: the threads do not exist here, and nothing of the parent's may be touched.
            std::mem::forget(self.inner.clone());
            std::mem::forget(std::mem::take(&mut *self.threads.lock()));
            std::mem::forget(std::mem::take(&mut *self.registrations.lock()));
            return;
        }
        let _ = self.close(Instant::now() + Duration::from_secs(10));
    }
}

impl Inner {
    /// Refuses work on a closed store, and in a fork of the process that opened it.
    pub(crate) fn check_open(&self) -> Result<()> {
        if self.fork.is_stale() {
            return Err(Error::new(
                Kind::Closed,
                "this process is a fork of the one that opened the store, and a fork has none of its threads. Open a store in each process, after the fork",
            ));
        }
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::new(
                Kind::Closed,
                "the store is closed. Open a new one",
            ));
        }
        Ok(())
    }

    /// Is the store being closed?
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Tiers in the order of policies.
    pub(crate) fn tiers(&self) -> usize {
        self.memory.len() + usize::from(self.cold.is_some())
    }

    /// Removes a block and all that follow it.
    pub(crate) fn remove_id(&self, id: &Id) -> bool {
        match self.index.find(id) {
            Some(known) => self.remove_tree(known) > 0,
            None => false,
        }
    }

    fn prefault(&self, wanted: &[bool], progress: Option<Progress>) {
        let sizes: Vec<usize> = self
            .memory
            .iter()
            .zip(wanted)
            .map(|(m, &on)| if on { m.arena.range().1 } else { 0 })
            .collect();
        let total = sizes.iter().sum();
        let threads = std::thread::available_parallelism()
            .map_or(2, usize::from)
            .min(8);
        let mut before = 0;
        for (m, size) in self.memory.iter().zip(sizes) {
            if size > 0 {
                m.arena.prefault(threads, &|| self.is_closed(), &|done, _| {
                    if let Some(progress) = &progress {
                        progress(before + done, total);
                    }
                });
            }
            before += size;
        }
        if let (Some(progress), false) = (&progress, self.is_closed()) {
            progress(total, total); // pages ceded to the index meanwhile count as done
        }
    }

    /// Takes over what the NVMe tier found. Blocks whose parent was lost are dropped.
    fn adopt(&self, recovered: Vec<Recovered>) {
        let Some(cold) = &self.cold else {
            return;
        };
        let mut known = Vec::with_capacity(recovered.len());
        for r in recovered {
            let entry = Entry {
                parent: r.parent,
                cold: Some(Cold {
                    slot: r.slot,
                    root: r.root,
                    codec: r.codec,
                }),
                ..Entry::new(r.id, None, r.namespace, r.shape, r.importance)
            };
            let mut shard = self.index.of(&r.id);
            let h = self.index.insert(&mut shard, entry);
            let epoch = shard.get(h).map_or(0, |e| e.epoch);
            known.push((h, epoch));
        }
        for &block in &known {
            // Up to the first ancestor that is attached or a root, then down again.
            let mut path = Vec::new();
            let mut at = Some(block);
            let mut orphan = false;
            while let Some((h, epoch)) = at {
                if self.order.lock().is_attached(h) {
                    path.push((h, epoch));
                    break;
                }
                let mut shard = self.index.shard(h);
                let Some(entry) = shard.get_same(h, epoch) else {
                    break; // dropped with an earlier orphan
                };
                path.push((h, epoch));
                let parent = entry.parent;
                drop(shard);
                at = parent.and_then(|half| self.index.find_half(&half));
                orphan = parent.is_some() && at.is_none();
            }
            for pair in (0..path.len()).rev() {
                let (h, epoch) = path[pair];
                if orphan {
                    let mut shard = self.index.shard(h);
                    if let Some(entry) = self.index.remove(&mut shard, h)
                        && let Some(place) = entry.cold
                    {
                        cold.tier.remove(place.slot, &entry.id);
                        self.stats.orphans.add(1);
                    }
                    continue;
                }
                if self.order.lock().is_attached(h) {
                    continue;
                }
                let parent = path.get(pair + 1).copied();
                let mut order = self.order.lock();
                order.attach((h, epoch), parent);
                drop(order);
            }
        }
        for (h, epoch) in known {
            let mut shard = self.index.shard(h);
            if let Some(entry) = shard.get_same(h, epoch) {
                self.insert_order(self.memory.len(), h, entry);
                if let Some(place) = entry.cold {
                    cold.tier.set_owner(place.slot, h);
                }
            }
        }
    }
}
