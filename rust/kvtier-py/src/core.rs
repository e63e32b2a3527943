//! The store as Python calls it. `kvtier.store` gives it types, defaults and documentation.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_core::config::{Config, MemoryKind};
use kvtier_core::error::{Error, Kind, Result};
use kvtier_core::fork::Generation;
use kvtier_core::hbm::HBM;
use kvtier_core::jobs::Goal;
use kvtier_core::load::Miss;
use kvtier_core::put::{Block, Put};
use kvtier_core::read::{Got, Out};
use kvtier_core::shares::Quota;
use kvtier_core::store::{Namespace, Store};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyDict;

use crate::arguments::{Key, Keys, Parents, Seconds};
use crate::buffers::View;
use crate::errors::{check_home, from_core, raise};
use crate::hbm::{Feed, Placed};
use crate::lease::Lease;
use crate::ops::{Completions, Finisher, Job, Operation, Outcome};
use crate::progress::Progress;
use crate::region::{Region, give_back};
use crate::space::{Selections, Space, selection};
use crate::{codecs, log, report, tiers};

/// How long a store that nobody closed may take to close.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);

/// Tiers by code.
pub const TIERS: [&str; 4] = ["dram", "cxl", "nvme", HBM];

const ALL_MISSES: [Miss; 7] = [
    Miss::Absent,
    Miss::Corrupt,
    Miss::Deadline,
    Miss::Full,
    Miss::Device,
    Miss::Codec,
    Miss::Cancelled,
];

/// Reasons for a miss, by code less [`MISS`].
pub fn misses() -> Vec<&'static str> {
    ALL_MISSES.iter().map(|m| m.name()).collect()
}

/// Codes from here on are misses.
const MISS: u8 = 16;
/// Codes of puts: stored is the tier's own code; present is this and the tier's.
const PRESENT: u8 = 16;
const ORPHAN: u8 = 32;
const FULL: u8 = 33;
const LATE: u8 = 34;

fn tier_code(name: &str) -> u8 {
    TIERS.iter().position(|t| *t == name).unwrap_or(0) as u8
}

/// One byte for a read's result: results are shared constants in Python.
pub fn got_code(got: Got) -> u8 {
    match got {
        Ok(tier) => tier_code(tier),
        Err(miss) => MISS + ALL_MISSES.iter().position(|m| *m == miss).unwrap_or(0) as u8,
    }
}

/// One byte for a put's result.
pub fn put_code(put: Put) -> u8 {
    match put {
        Put::Stored(tier) => tier_code(tier),
        Put::Present(tier) => PRESENT + tier_code(tier),
        Put::Orphan => ORPHAN,
        Put::Full => FULL,
        Put::Deadline => LATE,
    }
}

fn views(space: &Space, objects: &Bound<'_, PyAny>, writable: bool) -> PyResult<Vec<View>> {
    objects
        .try_iter()?
        .map(|object| View::new(&object?, space, writable))
        .collect()
}

/// Buffers that each receive bytes of their own.
fn targets(views: &[View]) -> Result<Vec<Out>> {
    let targets: Vec<Out> = views.iter().map(View::out).collect();
    let mut spans: Vec<(usize, usize)> = targets
        .iter()
        .filter(|out| out.len > 0)
        .map(|out| (out.ptr as usize, out.len))
        .collect();
    spans.sort_unstable();
    if spans.windows(2).any(|w| w[0].0 + w[0].1 > w[1].0) {
        return Err(Error::new(
            Kind::InvalidBlock,
            "two of the buffers that were given share memory; each block needs one of its own",
        ));
    }
    Ok(targets)
}

fn slices<K: Deref<Target = [u8]>>(keys: &[K]) -> Vec<&[u8]> {
    keys.iter().map(|key| &key[..]).collect()
}

fn blocks<'a, K: Deref<Target = [u8]>>(
    keys: &'a [K],
    datas: &[&'a [u8]],
    parents: &'a [Option<K>],
    replaces: Option<&'a K>,
    importance: &[f32],
) -> Vec<Block<'a>> {
    keys.iter()
        .zip(datas)
        .enumerate()
        .map(|(i, (key, data))| Block {
            key,
            data,
            parent: parents.get(i).and_then(|p| p.as_deref()),
            replaces: replaces.map(|r| &r[..]),
            importance: importance.get(i).copied().unwrap_or(0.0),
        })
        .collect()
}

/// One block a key; parents and scores likewise, or none.
fn same_length(
    py: Python<'_>,
    keys: usize,
    blocks: usize,
    parents: usize,
    scores: usize,
) -> PyResult<()> {
    for (what, given, optional) in [
        ("blocks", blocks, false),
        ("parents", parents, true),
        ("importance scores", scores, true),
    ] {
        if given != keys && !(optional && given == 0) {
            let why = format!("{given} {what} were given for {keys} keys; one a key is needed");
            return Err(raise(py, "InvalidBlockError", why));
        }
    }
    Ok(())
}

/// The native store.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct Core {
    store: Arc<Store>,
    home: Generation,
}

impl Drop for Core {
    fn drop(&mut self) {
        // A store that nobody closed is closed with its last user: other threads go on meanwhile.
        if let Some(store) = Arc::get_mut(&mut self.store)
            && !self.home.is_stale()
        {
            Python::attach(|py| {
                py.detach(|| store.close(Instant::now() + DROP_TIMEOUT).ok());
                log::pass_on(py);
            });
        }
        give_back();
    }
}

impl Core {
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Store) -> Result<T> + Send,
    ) -> PyResult<T> {
        check_home(py, self.home)?;
        let store = &self.store;
        let done = py
            .detach(move || work(store))
            .map_err(|e| from_core(py, &e));
        give_back();
        log::pass_on(py);
        done
    }

    /// Starts an operation: `begin` hands work to a thread of the store.
    fn start<T: 'static>(
        &self,
        py: Python<'_>,
        (operation, finisher): (Operation, Finisher<T>),
        begin: impl FnOnce(Arc<Store>, Finisher<T>) -> Result<()> + Send,
    ) -> PyResult<Operation> {
        let store = self.store.clone();
        // Where it is refused, the finisher is dropped with the work: the token that it posts then
        // is one that nobody waits for.
        py.detach(move || begin(store, finisher))
            .map(|()| operation)
            .map_err(|e| from_core(py, &e))
    }

    /// Starts an operation that reads blocks: what lies on NVMe is loaded first, so that `work`
    /// finds it in memory.
    fn start_reading<T: 'static>(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: &[PyBackedBytes],
        until: Instant,
        started: (Operation, Finisher<T>),
        work: impl FnOnce(&Store, &Namespace, &[&[u8]]) -> Result<T> + Send + 'static,
    ) -> PyResult<Operation> {
        // The worker must not touch Python objects: it gets copies of the keys.
        let copies: Vec<Vec<u8>> = keys.iter().map(|k| k.to_vec()).collect();
        let (wanted, ns) = (slices(keys), space.ns.clone());
        self.start(py, started, move |store, finisher| {
            let inner = store.clone();
            let work = Box::new(move || finisher.finish(work(&inner, &ns, &slices(&copies))));
            store.after_loading(&space.ns, &wanted, until, work)
        })
    }
}

#[pymethods]
impl Core {
    /// Opens a store; `tiers` are dicts with `kind`, `size` and what their kind takes.
    #[new]
    #[pyo3(signature = (tiers, policy, verify, high, low, write_budget=None, progress=None))]
    #[expect(clippy::too_many_arguments, reason = "the options of a store")]
    fn new(
        py: Python<'_>,
        tiers: Vec<Bound<'_, PyDict>>,
        policy: String,
        verify: bool,
        high: f64,
        low: f64,
        write_budget: Option<u64>,
        progress: Option<PyRef<'_, Progress>>,
    ) -> PyResult<Self> {
        let mut config = Config::new(Vec::new(), None);
        for tier in &tiers {
            let kind = match tier.get_item("kind")? {
                Some(kind) => kind.extract::<String>()?,
                None => String::new(),
            };
            match kind.as_str() {
                "dram" => config.memory.push(tiers::memory(tier, MemoryKind::Dram)?),
                "cxl" => config.memory.push(tiers::memory(tier, MemoryKind::Cxl)?),
                "nvme" => config.nvme = Some(tiers::nvme(tier)?),
                HBM => config.hbm = Some(tiers::size(tier)?),
                other => {
                    return Err(raise(
                        py,
                        "ConfigError",
                        format!("a tier of kind {other:?} was given; allowed are {TIERS:?}"),
                    ));
                }
            }
        }
        config.policy = policy;
        config.verify = verify;
        config.high = high;
        config.low = low;
        config.write_budget = write_budget;
        config.progress = progress.map(|p| {
            let state = p.state();
            Box::new(move |done: usize, total: usize| state.set(done, total)) as _
        });
        let opened = py.detach(|| Store::open(config));
        log::pass_on(py);
        Ok(Core {
            store: Arc::new(opened.map_err(|e| from_core(py, &e))?),
            home: Generation::now(),
        })
    }

    /// Stores blocks; one code a key.
    #[expect(clippy::too_many_arguments, reason = "the verb's own")]
    fn put_many(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Keys,
        datas: &Bound<'_, PyAny>,
        parents: Parents,
        replaces: Option<Key>,
        importance: Vec<f32>,
        timeout: Seconds,
    ) -> PyResult<Vec<u8>> {
        let views = views(space, datas, false)?;
        same_length(py, keys.len(), views.len(), parents.len(), importance.len())?;
        let until = timeout.until(py)?;
        let bytes: Vec<&[u8]> = views.iter().map(View::bytes).collect();
        let puts = self.run(py, |store| {
            let blocks = blocks(&keys, &bytes, &parents, replaces.as_deref(), &importance);
            store.put_many(&space.ns, &blocks, until)
        })?;
        Ok(puts.into_iter().map(put_code).collect())
    }

    /// Stores a block; its code.
    #[expect(clippy::too_many_arguments, reason = "the verb's own")]
    fn put(
        &self,
        py: Python<'_>,
        space: &Space,
        key: Key,
        data: &Bound<'_, PyAny>,
        parent: Option<Key>,
        replaces: Option<Key>,
        importance: f32,
        timeout: Seconds,
    ) -> PyResult<u8> {
        let view = View::new(data, space, false)?;
        let until = timeout.until(py)?;
        let bytes = view.bytes();
        let put = self.run(py, |store| {
            let block = Block {
                key: &key,
                data: bytes,
                parent: parent.as_ref().map(|p| &p[..]),
                replaces: replaces.as_ref().map(|r| &r[..]),
                importance,
            };
            store.put(&space.ns, &block, until)
        })?;
        Ok(put_code(put))
    }

    /// Whether each key is resident.
    fn contains(&self, py: Python<'_>, space: &Space, keys: Keys) -> PyResult<Vec<bool>> {
        self.run(py, |store| store.contains(&space.ns, &slices(&keys)))
    }

    /// `(blocks, tokens, tiers, [(tier, bytes)])`.
    #[expect(clippy::type_complexity, reason = "unpacked at once by the caller")]
    fn matching(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Keys,
    ) -> PyResult<(usize, u64, Vec<&'static str>, Vec<(&'static str, u64)>)> {
        let found = self.run(py, |store| store.matching(&space.ns, &slices(&keys)))?;
        Ok((found.blocks, found.tokens, found.tiers, found.bytes))
    }

    /// Payload bytes that a part of each block has; `None` for a miss.
    fn sizes(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Keys,
        layers: Option<(u32, u32)>,
        tokens: Option<(u32, u32)>,
    ) -> PyResult<Vec<Option<usize>>> {
        let part = selection(layers, tokens);
        self.run(py, |store| store.sizes(&space.ns, &slices(&keys), &part))
    }

    /// Copies blocks into buffers; one code a key.
    #[expect(clippy::too_many_arguments, reason = "the verb's own")]
    fn get_into(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Keys,
        outs: &Bound<'_, PyAny>,
        layers: Option<(u32, u32)>,
        tokens: &Bound<'_, PyAny>,
        timeout: Seconds,
    ) -> PyResult<Vec<u8>> {
        let views = views(space, outs, true)?;
        let until = timeout.until(py)?;
        let parts = Selections::new(space, keys.len(), layers, tokens)?;
        let (names, views) = (slices(&keys), &views); // which are dropped attached
        let gots = self.run(py, move |store| {
            let targets = targets(views)?;
            // SAFETY: the views keep the caller's memory until after the call.
            unsafe { store.get_each_into(&space.ns, &names, &targets, &parts.all(), until) }
        })?;
        Ok(gots.into_iter().map(got_code).collect())
    }

    /// Views of blocks in memory.
    fn lease(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Keys,
        verify: bool,
        timeout: Seconds,
    ) -> PyResult<Lease> {
        let until = timeout.until(py)?;
        let leases = self.run(py, |store| {
            store.lease(&space.ns, &slices(&keys), verify, until)
        })?;
        Ok(Lease::new(leases))
    }

    /// Keeps blocks in memory; whether each is.
    fn pin(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Keys,
        timeout: Seconds,
    ) -> PyResult<Vec<bool>> {
        let until = timeout.until(py)?;
        self.run(py, |store| store.pin(&space.ns, &slices(&keys), until))
    }

    /// Takes back one `pin` of each key.
    fn unpin(&self, py: Python<'_>, space: &Space, keys: Keys) -> PyResult<Vec<bool>> {
        self.run(py, |store| store.unpin(&space.ns, &slices(&keys)))
    }

    /// Removes blocks and what follows them.
    fn remove(&self, py: Python<'_>, space: &Space, keys: Keys) -> PyResult<Vec<bool>> {
        self.run(py, |store| store.remove(&space.ns, &slices(&keys)))
    }

    /// Sets the caller's scores.
    fn set_importance(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Keys,
        scores: Vec<f32>,
    ) -> PyResult<Vec<bool>> {
        self.run(py, |store| {
            store.set_importance(&space.ns, &slices(&keys), &scores)
        })
    }

    /// Removes all blocks of a namespace, or of the store.
    fn clear(&self, py: Python<'_>, space: Option<PyRef<'_, Space>>) -> PyResult<usize> {
        let ns = space.map(|s| s.ns.clone());
        self.run(py, move |store| store.clear(ns.as_ref()))
    }

    /// How blocks of this namespace are coded below memory: a codec, and `(planes, heads, elements a
    /// head)` of each layer. `None`: they are written as they are.
    fn set_coding(
        &self,
        py: Python<'_>,
        space: &Space,
        codec: Option<&str>,
        element: &str,
        layers: Vec<(u32, u32, u32)>,
    ) -> PyResult<()> {
        let coding = codec
            .map(|name| codecs::coding(py, name, element, &layers))
            .transpose()?;
        self.run(py, |store| store.set_coding(&space.ns, coding))
    }

    /// From now on the blocks of a namespace count to another one.
    fn count_to(&self, py: Python<'_>, space: &Space, owner: &Space) -> PyResult<()> {
        self.run(py, |store| store.count_to(&space.ns, &owner.ns))
    }

    /// What a namespace may hold: bytes guaranteed and bytes at most of each tier, fastest first.
    fn set_quota(
        &self,
        py: Python<'_>,
        space: &Space,
        guaranteed: Vec<u64>,
        cap: Vec<Option<u64>>,
        priority: i32,
        ttl: Option<f64>,
    ) -> PyResult<()> {
        let quota = Quota {
            guaranteed,
            cap,
            priority,
            ttl: ttl.map(Duration::from_secs_f64),
        };
        self.run(py, |store| store.set_quota(&space.ns, &quota))
    }

    /// The state of a namespace, as nested dicts of numbers.
    fn namespace_report<'py>(
        &self,
        py: Python<'py>,
        space: &Space,
    ) -> PyResult<Bound<'py, PyDict>> {
        let report = self.run(py, |store| store.namespace_report(&space.ns))?;
        report::namespace_dict(py, &report)
    }

    /// Makes everything durable.
    fn flush(&self, py: Python<'_>, timeout: Seconds) -> PyResult<()> {
        let until = timeout.until(py)?;
        self.run(py, |store| store.flush(until))
    }

    /// Flushes and ends the store.
    fn close(&self, py: Python<'_>, timeout: Seconds) -> PyResult<()> {
        let until = timeout.until(py)?;
        if self.home.is_stale() {
            return Ok(()); // the parent's store is not this process's to close
        }
        self.run(py, |store| store.close(until))
    }

    /// Starts to load blocks.
    fn prefetch(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Keys,
        to: &str,
        deadline: Seconds,
        priority: i32,
    ) -> PyResult<Job> {
        let until = match deadline.0 {
            None => None,
            Some(_) => Some(deadline.until(py)?),
        };
        let goal = match to {
            HBM => Goal::Hbm,
            "cxl" => Goal::Memory(1),
            _ => Goal::Memory(0),
        };
        let job = self.run(py, |store| {
            store.prefetch(&space.ns, &slices(&keys), goal, until, priority)
        })?;
        Ok(Job::new(job))
    }

    /// What the thread that copies to HBM works from; `None` without such a tier.
    fn feed(&self, py: Python<'_>) -> PyResult<Option<Feed>> {
        self.run(py, |store| Ok(store.feed().map(Feed::new)))
    }

    /// Pins those of these blocks that lie in HBM, for a read of this part; with `take`, for somebody who may write to them.
    fn place(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Keys,
        layers: Option<(u32, u32)>,
        tokens: Option<(u32, u32)>,
        take: bool,
    ) -> PyResult<Vec<Option<Placed>>> {
        let part = selection(layers, tokens);
        let places = self.run(py, |store| {
            store.place(&space.ns, &slices(&keys), &part, take)
        })?;
        Ok(places.into_iter().map(|p| p.map(Placed::new)).collect())
    }

    /// Lends memory to reads from NVMe.
    fn register_region(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<Region> {
        Region::new(py, buffer, |start, len, keep| {
            // SAFETY: `keep` holds the buffer, and every operation holds `keep`.
            self.run(py, move |store| unsafe {
                store.register_region(start as *mut u8, len, keep)
            })
        })
    }

    /// As `put_many`; posts `token` when done.
    #[expect(clippy::too_many_arguments, reason = "the verb's own")]
    fn start_put_many(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Keys,
        datas: &Bound<'_, PyAny>,
        parents: Parents,
        replaces: Option<Key>,
        importance: Vec<f32>,
        timeout: Seconds,
        to: &Completions,
        token: u64,
    ) -> PyResult<Operation> {
        let views = views(space, datas, false)?;
        same_length(py, keys.len(), views.len(), parents.len(), importance.len())?;
        let until = timeout.until(py)?;
        // The worker must not touch Python objects: it gets copies of the keys, and addresses.
        let keys: Vec<Vec<u8>> = keys.iter().map(|k| k.to_vec()).collect();
        let parents: Vec<Option<Vec<u8>>> = parents
            .iter()
            .map(|p| p.as_ref().map(|p| p.to_vec()))
            .collect();
        let replaces = replaces.map(|r| r.to_vec());
        let sources: Vec<Out> = views.iter().map(View::out).collect();
        let ns = space.ns.clone();
        let started = Operation::start(views, to, token, Outcome::Puts);
        self.start(py, started, move |store, finisher| {
            let inner = store.clone();
            store.write_later(Box::new(move || {
                let bytes: Vec<&[u8]> = sources
                    .iter()
                    // SAFETY: the operation keeps the caller's buffers until it has finished.
                    .map(|source| unsafe { std::slice::from_raw_parts(source.ptr, source.len) })
                    .collect();
                let blocks = blocks(&keys, &bytes, &parents, replaces.as_ref(), &importance);
                finisher.finish(inner.put_many(&ns, &blocks, until));
            }))
        })
    }

    /// As `get_into`; posts `token` when done.
    #[expect(clippy::too_many_arguments, reason = "the verb's own")]
    fn start_get_into(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Keys,
        outs: &Bound<'_, PyAny>,
        layers: Option<(u32, u32)>,
        tokens: &Bound<'_, PyAny>,
        timeout: Seconds,
        to: &Completions,
        token: u64,
    ) -> PyResult<Operation> {
        let views = views(space, outs, true)?;
        let until = timeout.until(py)?;
        let parts = Selections::new(space, keys.len(), layers, tokens)?;
        let targets = targets(&views).map_err(|e| from_core(py, &e))?;
        let started = Operation::start(views, to, token, Outcome::Gots);
        self.start_reading(py, space, &keys, until, started, move |store, ns, keys| {
            // SAFETY: the operation keeps the caller's buffers until it has finished.
            unsafe { store.get_each_into(ns, keys, &targets, &parts.all(), until) }
        })
    }

    /// As `lease`; posts `token` when done.
    #[expect(clippy::too_many_arguments, reason = "the verb's own")]
    fn start_lease(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Keys,
        verify: bool,
        timeout: Seconds,
        to: &Completions,
        token: u64,
    ) -> PyResult<Operation> {
        let until = timeout.until(py)?;
        let started = Operation::start(Vec::new(), to, token, Outcome::Leases);
        self.start_reading(py, space, &keys, until, started, move |store, ns, keys| {
            store.lease(ns, keys, verify, until)
        })
    }

    /// As `pin`; posts `token` when done.
    fn start_pin(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Keys,
        timeout: Seconds,
        to: &Completions,
        token: u64,
    ) -> PyResult<Operation> {
        let until = timeout.until(py)?;
        let started = Operation::start(Vec::new(), to, token, Outcome::Flags);
        self.start_reading(py, space, &keys, until, started, move |store, ns, keys| {
            store.pin(ns, keys, until)
        })
    }

    /// As `flush`; posts `token` when done.
    fn start_flush(
        &self,
        py: Python<'_>,
        timeout: Seconds,
        to: &Completions,
        token: u64,
    ) -> PyResult<Operation> {
        let until = timeout.until(py)?;
        let started = Operation::start(Vec::new(), to, token, Outcome::Unit);
        self.start(py, started, move |store, finisher| {
            let inner = store.clone();
            store.write_later(Box::new(move || finisher.finish(inner.flush(until))))
        })
    }

    /// The state of everything, as nested dicts of numbers.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = self.run(py, |store| {
            store.check_open()?;
            Ok(store.report())
        })?;
        report::dict(py, &report)
    }
}
