//! The store: its tiers, its threads and its verbs.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use kvtier_codec::image::Id;
use kvtier_nvme::{Bytes, Clock, IoBuf, NvmeTier, Recovered, Registration};

use crate::ages::Ages;
use crate::arena::{Arena, Pin, backing};
use crate::budget::Budget;
use crate::coding::{Coding, Codings};
use crate::config::{Config, Memory, Progress};
use crate::error::{Error, Kind, Result};
use crate::fork;
use crate::hbm::{self, HBM, HbmTier};
use crate::index::{Index, NOWHERE};
use crate::jobs::{Goal, Prefetcher};
use crate::key;
use crate::layout::Layout;
use crate::metadata::Charge;
use crate::mover::Mover;
use crate::order::{Known, Order};
use crate::pacer::Pacer;
pub use crate::region::Region;
pub use crate::report::{NamespaceReport, Report, ShareReport, TierReport};
use crate::shares::{Quota, Shares};
use crate::spent::Spent;
use crate::stats::{StoreStats, TierStats};
use crate::workers::{Crew, Workers};

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
    pub(crate) hbm: Option<Arc<HbmTier>>,
    pub(crate) mover: Mover,
    pub(crate) codings: Codings,
    pub(crate) prefetcher: Prefetcher,
    /// Verifies loads that nobody waits for. Its tasks never wait.
    pub(crate) workers: Workers,
    /// Does the copying of asynchronous reads, which may wait for loads and for room.
    pub(crate) readers: Workers,
    /// Does the copying of asynchronous puts, which may wait for room.
    pub(crate) writers: Workers,
    pub(crate) spent: Spent,
    pub(crate) pinned: Mutex<hashbrown::HashMap<Id, (Pin, usize)>>,
    pub(crate) regions: Mutex<Vec<Weak<Region>>>,
    pub(crate) stats: StoreStats,
    pub(crate) ages: Ages,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) verify: bool,
    pub(crate) high: f64,
    pub(crate) low: f64,
    /// Slots reserved since the first tier last ceded memory to the index.
    pub(crate) uncharged: AtomicUsize,
    /// Bytes of the order up to which metadata is charged for before the next look.
    pub(crate) foreseen: AtomicUsize,
    /// Parts of the first tier that the NVMe engines know.
    registrations: Mutex<Vec<Registration>>,
    closed: AtomicBool,
    fork: fork::Generation,
}

/// A tiered store of KV blocks.
pub struct Store {
    pub(crate) inner: Arc<Inner>,
    threads: Crew,
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

/// How much of a prefix is resident, and where.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Match {
    /// Leading keys that are resident.
    pub blocks: usize,
    /// Tokens in them; 0 in an opaque namespace.
    pub tokens: u64,
    /// The fastest tier of each.
    pub tiers: Vec<&'static str>,
    /// Payload bytes by that tier, as they lie there, fastest first.
    pub bytes: Vec<(&'static str, u64)>,
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

fn no_thread(name: &str, e: &std::io::Error) -> Error {
    Error::new(
        Kind::Storage,
        format!("cannot start the thread {name}: {e}. Raise the limit on processes (ulimit -u)"),
    )
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
        let mut sizes: Vec<u64> = memory.iter().map(|m| m.arena.pages().into()).collect();
        let (cold, recovered) = match nvme {
            None => (None, Vec::new()),
            Some((tier, recovered)) => {
                sizes.push(tier.capacity_pages());
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
        let first = memory.first().map_or(0, |m| m.size);
        let hbm = config
            .hbm
            .map(|size| Arc::new(HbmTier::new(size, first, clock.clone())));
        if let Some(hbm) = &hbm {
            sizes.push(hbm.arena.pages().into());
        }
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let start = |name: &str, n| Workers::new(name, n).map_err(|e| no_thread(name, &e));
        let codings = Codings::new(first as usize);
        let inner = Arc::new(Inner {
            index: Index::default(),
            order: Mutex::new(Order::new(Shares::new(
                &config.policy,
                sizes,
                hbm.is_some(),
            )?)),
            mover: Mover::new(
                memory.last().map_or(0, |m| m.size as usize),
                codings.limit(),
            ),
            codings,
            memory,
            cold,
            hbm,
            prefetcher: Prefetcher::to_memory(),
            workers: start("kvtier-verify", cores.clamp(2, 4))?,
            readers: start("kvtier-reader", cores.clamp(2, 4))?,
            writers: start("kvtier-writer", 1)?,
            pinned: Mutex::default(),
            spent: Spent::default(),
            regions: Mutex::default(),
            stats: StoreStats::default(),
            ages: Ages::new(clock.now()),
            clock,
            verify: config.verify,
            high: config.high,
            low: config.low,
            uncharged: AtomicUsize::new(0),
            foreseen: AtomicUsize::new(0),
            registrations: Mutex::default(),
            closed: AtomicBool::new(false),
            fork: fork::Generation::now(),
        });
        inner.adopt(recovered);
        if inner.charge_metadata() != Charge::Paid {
            return Err(Error::new(
                Kind::Config,
                format!(
                    "a {} tier of {} was given; the tables for all tiers take {} of it. Use a larger one",
                    inner.memory[0].name,
                    Bytes(inner.memory[0].size),
                    Bytes(inner.metadata_bytes() as u64)
                ),
            ));
        }
        let store = Store {
            threads: Crew::default(),
            inner,
        };
        store.spawn("kvtier-mover", |inner| inner.run_mover())?;
        store.spawn("kvtier-prefetch", |inner| {
            inner.run_prefetcher(Goal::Memory(0));
        })?;
        if store.inner.hbm.is_some() {
            store.spawn("kvtier-lift", |inner| inner.run_prefetcher(Goal::Hbm))?;
        }
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
        self.threads
            .spawn(name, move || run(&inner))
            .map_err(|e| no_thread(name, &e))
    }

    /// Refuses work on a closed store, and in a fork of the process that opened it.
    pub fn check_open(&self) -> Result<()> {
        self.inner.check_open()
    }

    /// Which of these keys are resident.
    pub fn contains(&self, ns: &Namespace, keys: &[&[u8]]) -> Result<Vec<bool>> {
        self.inner.check_open()?;
        let ids = self.inner.ids(ns, keys)?;
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
            self.inner.expire(ns, &id);
            let shard = self.inner.index.of(&id);
            let Some((h, entry)) = shard.find(&id).and_then(|h| Some((h, shard.get(h)?))) else {
                break;
            };
            let tier = self.inner.nearest(&shard, h, entry);
            found.blocks += 1;
            found.tokens += u64::from(ns.layout.tokens(entry.shape));
            found.tiers.push(tier);
            let bytes = match (entry.in_memory(), entry.cold()) {
                (None, Some(cold)) if tier != HBM => u64::from(cold.stored),
                _ => entry.shape.payload() as u64,
            };
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
        let ids = self.inner.ids(ns, keys)?;
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
            inner.order.lock().shares.set_importance(h, score);
            true
        };
        Ok(inner.ids(ns, keys)?.iter().zip(scores).map(set).collect())
    }

    /// Writes every block that lies only in memory to NVMe, and waits until it is durable there.
    pub fn flush(&self, deadline: Instant) -> Result<()> {
        self.inner.check_open()?;
        self.inner.persist(deadline)
    }

    /// From now on, blocks of this namespace that are written below memory are coded so; `None`: they
    /// are written as they are. Blocks that lie there are read however they were written.
    pub fn set_coding(&self, ns: &Namespace, coding: Option<Coding>) -> Result<()> {
        self.inner.check_open()?;
        if coding.is_some() {
            self.inner.begin_coding();
        }
        self.inner.codings.set(ns.tag(), coding);
        Ok(())
    }

    /// Sets what a namespace may hold, from now on; what it has above a cap leaves. Quotas, and
    /// blocks' ages, are the process's: they are not on NVMe.
    pub fn set_quota(&self, ns: &Namespace, quota: &Quota) -> Result<()> {
        let inner = &self.inner;
        inner.check_open()?;
        let tag = ns.tag();
        let mut sizes: Vec<(&str, u64)> = inner.memory.iter().map(|m| (m.name, m.size)).collect();
        sizes.extend(inner.cold.iter().map(|cold| (NVME, cold.size)));
        let mut quota = quota.clone();
        if let Some(hbm) = &inner.hbm {
            sizes.push((HBM, hbm.size));
            quota.guaranteed.resize(sizes.len(), 0);
            quota.guaranteed.rotate_left(1);
            quota.cap.resize(sizes.len(), None);
            quota.cap.rotate_left(1);
        }
        inner.order.lock().shares.set_quota(tag, &quota, &sizes)?;
        for tag in inner.move_to_share(tag) {
            inner.set_life(tag, quota.ttl);
        }
        inner.charge_now(); // for policies of its own
        for tier in 0..sizes.len() {
            inner.shrink_to_cap(tier, tag);
        }
        Ok(())
    }

    /// From now on what a namespace holds counts to another one, its quota and its time to live are
    /// those of that one. A namespace with a quota of its own keeps it.
    pub fn count_to(&self, ns: &Namespace, owner: &Namespace) -> Result<()> {
        let inner = &self.inner;
        inner.check_open()?;
        let tag = ns.tag();
        let counted = inner.order.lock().shares.count_to(tag, owner.tag());
        let Some(owner) = counted else {
            return Ok(()); // it does already, or there is no quota yet
        };
        inner.move_to_share(owner);
        inner.share_life(tag, owner);
        for tier in 0..inner.tiers() + inner.hbm.iter().len() {
            inner.shrink_to_cap(tier, owner);
        }
        Ok(())
    }

    /// Flushes as far as NVMe has room, ends all threads and lets go of the directory and of all
    /// memory that no lease holds. Done by the deadline even if a device hangs; then what is in flight is leaked and the
    /// lock kept, and the error says so. Closing twice is allowed.
    pub fn close(&self, deadline: Instant) -> Result<()> {
        let inner = &self.inner;
        if inner.fork.is_stale() {
            return Ok(()); // the parent's threads and rings are not ours to end
        }
        if inner.closed.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        for memory in &inner.memory {
            memory.arena.notify(); // nobody waits for room any more
        }
        if let Some(hbm) = &inner.hbm {
            hbm.stop();
        }
        let flushed = match inner.persist(deadline) {
            Err(error) if error.kind() == Kind::Full => {
                tracing::warn!("closing: {error}");
                Ok(())
            }
            flushed => flushed,
        };
        inner.prefetcher.stop();
        inner.mover.stop();
        let mut ended = self.threads.join(deadline);
        let closed = match &inner.cold {
            Some(cold) => cold.tier.close(Some(deadline)).map_err(Error::from),
            None => Ok(()),
        };
        inner.registrations.lock().clear();
        inner.regions.lock().clear();
        inner.pinned.lock().clear();
        for pool in [&inner.readers, &inner.writers, &inner.workers] {
            ended &= pool.stop(deadline);
        }
        inner.let_go();
        flushed.and(closed)?;
        if ended {
            return Ok(());
        }
        Err(Error::new(
            Kind::Deadline,
            "a thread of the store did not end by the deadline, and is left to itself. Give more time, or see whether the device hangs",
        ))
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if self.inner.fork.is_stale() {
            // In a fork: the threads do not exist here, and nothing of the parent's may be touched.
            std::mem::forget(self.inner.clone());
            self.threads.forget();
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

    /// Gives the memory back to the machine, except what leases and requests in flight hold.
    fn let_go(&self) {
        self.index.for_each_shard(|shard| {
            for h in shard.handles().collect::<Vec<_>>() {
                let Some(entry) = shard.get_mut(h) else {
                    continue;
                };
                for (memory, place) in self.memory.iter().zip(&mut entry.memory) {
                    let start = std::mem::replace(place, NOWHERE);
                    if start != NOWHERE {
                        memory.arena.retire(start);
                    }
                }
                self.leave_hbm(shard, &mut self.order.lock(), h);
            }
        });
        for memory in &self.memory {
            memory.arena.close();
        }
        if let Some(hbm) = &self.hbm {
            hbm.arena.close();
        }
    }

    /// Is the store being closed?
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Tiers in the order of policies, save HBM: its policy, if there is one, comes after theirs.
    pub(crate) fn tiers(&self) -> usize {
        self.memory.len() + usize::from(self.cold.is_some())
    }

    /// Moves what counts to a namespace from the common pool to its own share. Says whose that is.
    fn move_to_share(&self, tag: u64) -> Vec<u64> {
        let tags = self.order.lock().shares.counted_to(tag);
        let mut all = Vec::new();
        self.index.for_each_shard(|shard| {
            let entries = shard.handles().filter_map(|h| Some((h, shard.get(h)?)));
            let mine = entries.filter(|(_, entry)| tags.contains(&entry.namespace));
            all.extend(mine.map(|(h, entry)| {
                let mut pages = vec![entry.shape.pages(); self.tiers()];
                if let Some(cold) = entry.cold() {
                    pages[self.memory.len()] = cold.slot.pages;
                }
                pages.extend(self.hbm.iter().map(|_| hbm::pages(entry.shape)));
                let meta = (entry.fingerprint(), entry.importance);
                ((h, entry.epoch), (meta, pages))
            }));
        });
        // A shard hands out its numbers in turn: about the order in which they came.
        all.sort_unstable_by_key(|&(known, _)| known);
        let known: Vec<Known> = all.iter().map(|block| block.0).collect();
        let details: hashbrown::HashMap<Known, _> = all.into_iter().collect();
        let mut order = self.order.lock();
        for block in order.parents_first(&known) {
            if let Some(((fingerprint, importance), pages)) = details.get(&block) {
                let meta = order.meta(block.0, *fingerprint, 0, *importance);
                order.shares.adopt(block.0, tag, &meta, pages);
            }
        }
        tags
    }

    /// Removes a block and all that follow it.
    pub(crate) fn remove_id(&self, id: &Id) -> bool {
        match self.index.find(id) {
            Some(known) => self.remove_tree(known) > 0,
            None => false,
        }
    }

    /// Makes the first tier known to the NVMe engines. Only once it is backed: registering faults in
    /// what is not, on the thread that moves the bytes.
    fn register_memory(&self) {
        const CHUNK: usize = 1 << 30; // the most that one registered buffer may hold
        const HUGE: usize = 2 << 20;
        let Some(cold) = &self.cold else {
            return;
        };
        let arena = &self.memory[0].arena;
        let (base, len) = (arena.range().0, arena.usable_bytes());
        // The kernel handles a buffer in huge pages only if all of it lies in such, and cuts requests
        // at some 250 pages: what ends amid one is a buffer of its own.
        let whole = len / HUGE * HUGE;
        for (from, to) in [(0, whole), (whole, len)] {
            for at in (from..to).step_by(CHUNK) {
                let n = CHUNK.min(to - at);
                // SAFETY: the arena is kept mapped by the Arc; slots are written only by their owners.
                let chunk = unsafe { IoBuf::new(base.add(at), n, arena.clone()) };
                self.registrations.lock().push(cold.tier.register(chunk));
            }
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
        for (tier, (m, size)) in self.memory.iter().zip(sizes).enumerate() {
            if size > 0 {
                m.arena.prefault(threads, &|| self.is_closed(), &|done, _| {
                    if let Some(progress) = &progress {
                        progress(before + done, total);
                    }
                });
                if tier == 0 && !self.is_closed() {
                    self.register_memory();
                }
            }
            before += size;
        }
        if let (Some(progress), false) = (&progress, self.is_closed()) {
            progress(total, total); // pages ceded to the index meanwhile count as done
        }
    }
}
