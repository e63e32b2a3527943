//! The store as Python calls it. `kvtier.store` gives it types, defaults and documentation.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtier_core::arena::backing::HugePages;
use kvtier_core::config::{Config, DEFAULT_TIMEOUT, Memory, MemoryKind};
use kvtier_core::error::{Error, Result};
use kvtier_core::load::Miss;
use kvtier_core::put::{Block, Put};
use kvtier_core::read::{Got, Out};
use kvtier_core::store::{self, Store, TierReport};
use kvtier_core::stats::Summary;
use kvtier_nvme::{EngineKind, Options};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyDict;

use crate::buffers::View;
use crate::errors::{from_core, raise};
use crate::lease::Lease;
use crate::ops::{Completions, Finisher, Job, Operation, Outcome};
use crate::space::{Space, selection};

/// Tiers by code.
pub const TIERS: [&str; 3] = ["dram", "cxl", "nvme"];

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

/// The moment `timeout` seconds from now; the default timeout if there is none.
pub fn deadline(py: Python<'_>, timeout: Option<f64>) -> PyResult<Instant> {
    let wait = match timeout {
        None => DEFAULT_TIMEOUT,
        Some(seconds) if seconds >= 0.0 => {
            // A year is as good as for ever, and cannot overflow the clock.
            Duration::from_secs_f64(seconds.min(365.0 * 86_400.0))
        }
        Some(seconds) => {
            return Err(raise(
                py,
                "ConfigError",
                format!("timeout={seconds} was given; seconds from 0 on are allowed, or None for {} s", DEFAULT_TIMEOUT.as_secs()),
            ));
        }
    };
    Ok(Instant::now() + wait)
}

fn views(space: &Space, objects: &Bound<'_, PyAny>, writable: bool) -> PyResult<Vec<View>> {
    objects
        .try_iter()?
        .map(|object| View::new(&object?, space, writable))
        .collect()
}

fn slices(keys: &[PyBackedBytes]) -> Vec<&[u8]> {
    keys.iter().map(|key| &key[..]).collect()
}

fn blocks<'a>(
    keys: &'a [PyBackedBytes],
    datas: &'a [&'a [u8]],
    parents: &'a [Option<PyBackedBytes>],
    replaces: Option<&'a PyBackedBytes>,
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

fn same_length(py: Python<'_>, keys: usize, what: &str, given: usize, optional: bool) -> PyResult<()> {
    if given == keys || (optional && given == 0) {
        return Ok(());
    }
    Err(raise(
        py,
        "InvalidBlockError",
        format!("{given} {what} were given for {keys} keys; one a key is needed"),
    ))
}

/// The native store.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct Core {
    store: Arc<Store>,
}

impl Core {
    fn run<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&Store) -> Result<T> + Send) -> PyResult<T> {
        let store = &self.store;
        py.detach(move || work(store)).map_err(|e| from_core(py, &e))
    }

    fn start(
        &self,
        py: Python<'_>,
        views: Vec<View>,
        to: &Completions,
        token: u64,
        lost: fn(Error) -> Outcome,
        begin: impl FnOnce(Arc<Store>, Finisher) -> Result<()> + Send,
    ) -> PyResult<Operation> {
        let (operation, finisher) = Operation::start(views, to, token, lost);
        let store = self.store.clone();
        // A refusal is the operation's result: the finisher was dropped with the work and said so.
        let refused = py.detach(move || begin(store, finisher));
        match refused {
            Ok(()) => Ok(operation),
            Err(error) => Err(from_core(py, &error)),
        }
    }
}

fn memory(tier: &Bound<'_, PyDict>, kind: MemoryKind) -> PyResult<Memory> {
    let get = |name: &str| tier.get_item(name);
    let size = match get("size")? {
        Some(size) => size.extract()?,
        None => 0,
    };
    let mut memory = Memory {
        kind,
        ..Memory::dram(size)
    };
    if let Some(huge) = get("huge_pages")? {
        memory.huge_pages = match huge.extract::<&str>()? {
            "hugetlb" => HugePages::Hugetlb,
            "off" => HugePages::Off,
            _ => HugePages::Transparent,
        };
    }
    if let Some(prefault) = get("prefault")? {
        memory.prefault = prefault.extract()?;
    }
    if let Some(node) = get("numa_node")? {
        memory.numa_node = node.extract()?;
    }
    if let Some(path) = get("path")? {
        memory.path = path.extract()?;
    }
    if let Some(rate) = get("emulate_gbs")? {
        memory.emulate_gbs = rate.extract()?;
    }
    Ok(memory)
}

fn nvme(tier: &Bound<'_, PyDict>) -> PyResult<Options> {
    let paths: Vec<PathBuf> = match tier.get_item("paths")? {
        Some(paths) => paths.extract()?,
        None => Vec::new(),
    };
    let size = match tier.get_item("size")? {
        Some(size) => size.extract()?,
        None => 0,
    };
    let mut options = Options::new(paths, size);
    if let Some(engine) = tier.get_item("engine")? {
        options.engine = match engine.extract::<&str>()? {
            "io_uring" => EngineKind::IoUring,
            "threads" => EngineKind::Threads,
            _ => EngineKind::Auto,
        };
    }
    if let Some(rate) = tier.get_item("emulate_gbs")? {
        options.emulate_gbs = rate.extract()?;
    }
    Ok(options)
}

#[pymethods]
impl Core {
    /// Opens a store; `tiers` are dicts with `kind`, `size` and what their kind takes.
    #[new]
    #[pyo3(signature = (tiers, policy, verify, high, low, write_budget=None, progress=None))]
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
                "dram" => config.memory.push(memory(tier, MemoryKind::Dram)?),
                "cxl" => config.memory.push(memory(tier, MemoryKind::Cxl)?),
                "nvme" => config.nvme = Some(nvme(tier)?),
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
            let state = p.state.clone();
            Box::new(move |done: usize, total: usize| state.set(done, total)) as _
        });
        let store = py
            .detach(|| Store::open(config))
            .map_err(|e| from_core(py, &e))?;
        Ok(Core {
            store: Arc::new(store),
        })
    }

    #[expect(clippy::too_many_arguments, reason = "the verb's own")]
    fn put_many(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Vec<PyBackedBytes>,
        datas: &Bound<'_, PyAny>,
        parents: Vec<Option<PyBackedBytes>>,
        replaces: Option<PyBackedBytes>,
        importance: Vec<f32>,
        timeout: Option<f64>,
    ) -> PyResult<Vec<u8>> {
        let views = views(space, datas, false)?;
        same_length(py, keys.len(), "blocks", views.len(), false)?;
        same_length(py, keys.len(), "parents", parents.len(), true)?;
        same_length(py, keys.len(), "importance scores", importance.len(), true)?;
        let until = deadline(py, timeout)?;
        let bytes: Vec<&[u8]> = views.iter().map(View::bytes).collect();
        let puts = self.run(py, |store| {
            let blocks = blocks(&keys, &bytes, &parents, replaces.as_ref(), &importance);
            store.put_many(&space.ns, &blocks, until)
        })?;
        Ok(puts.into_iter().map(put_code).collect())
    }

    #[expect(clippy::too_many_arguments, reason = "the verb's own")]
    fn put(
        &self,
        py: Python<'_>,
        space: &Space,
        key: PyBackedBytes,
        data: &Bound<'_, PyAny>,
        parent: Option<PyBackedBytes>,
        replaces: Option<PyBackedBytes>,
        importance: f32,
        timeout: Option<f64>,
    ) -> PyResult<u8> {
        let view = View::new(data, space, false)?;
        let until = deadline(py, timeout)?;
        let bytes = view.bytes();
        let put = self.run(py, |store| {
            let block = Block {
                key: &key,
                data: bytes,
                parent: parent.as_deref(),
                replaces: replaces.as_deref(),
                importance,
            };
            store.put(&space.ns, &block, until)
        })?;
        Ok(put_code(put))
    }

    fn contains(&self, py: Python<'_>, space: &Space, keys: Vec<PyBackedBytes>) -> PyResult<Vec<bool>> {
        self.run(py, |store| store.contains(&space.ns, &slices(&keys)))
    }

    /// `(blocks, tokens, tiers, [(tier, bytes)])`.
    #[expect(clippy::type_complexity, reason = "unpacked at once by the caller")]
    fn matching(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Vec<PyBackedBytes>,
    ) -> PyResult<(usize, u64, Vec<&'static str>, Vec<(&'static str, u64)>)> {
        let found = self.run(py, |store| store.matching(&space.ns, &slices(&keys)))?;
        Ok((found.blocks, found.tokens, found.tiers, found.bytes))
    }

    fn sizes(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Vec<PyBackedBytes>,
        layers: Option<(u32, u32)>,
        tokens: Option<(u32, u32)>,
    ) -> PyResult<Vec<Option<usize>>> {
        let part = selection(layers, tokens);
        self.run(py, |store| store.sizes(&space.ns, &slices(&keys), &part))
    }

    #[expect(clippy::too_many_arguments, reason = "the verb's own")]
    fn get_into(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Vec<PyBackedBytes>,
        outs: &Bound<'_, PyAny>,
        layers: Option<(u32, u32)>,
        tokens: Option<(u32, u32)>,
        timeout: Option<f64>,
    ) -> PyResult<Vec<u8>> {
        let views = views(space, outs, true)?;
        let until = deadline(py, timeout)?;
        let part = selection(layers, tokens);
        let targets: Vec<Out> = views.iter().map(View::out).collect();
        let gots = self.run(py, move |store| {
            // SAFETY: the views keep the caller's memory until after the call.
            unsafe { store.get_into(&space.ns, &slices(&keys), &targets, &part, until) }
        })?;
        Ok(gots.into_iter().map(got_code).collect())
    }

    fn lease(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Vec<PyBackedBytes>,
        verify: bool,
        timeout: Option<f64>,
    ) -> PyResult<Lease> {
        let until = deadline(py, timeout)?;
        let leases = self.run(py, |store| store.lease(&space.ns, &slices(&keys), verify, until))?;
        Ok(Lease::new(leases))
    }

    fn pin(&self, py: Python<'_>, space: &Space, keys: Vec<PyBackedBytes>, timeout: Option<f64>) -> PyResult<Vec<bool>> {
        let until = deadline(py, timeout)?;
        self.run(py, |store| store.pin(&space.ns, &slices(&keys), until))
    }

    fn unpin(&self, py: Python<'_>, space: &Space, keys: Vec<PyBackedBytes>) -> PyResult<Vec<bool>> {
        self.run(py, |store| store.unpin(&space.ns, &slices(&keys)))
    }

    fn remove(&self, py: Python<'_>, space: &Space, keys: Vec<PyBackedBytes>) -> PyResult<Vec<bool>> {
        self.run(py, |store| store.remove(&space.ns, &slices(&keys)))
    }

    fn set_importance(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Vec<PyBackedBytes>,
        scores: Vec<f32>,
    ) -> PyResult<Vec<bool>> {
        self.run(py, |store| store.set_importance(&space.ns, &slices(&keys), &scores))
    }

    fn clear(&self, py: Python<'_>, space: Option<PyRef<'_, Space>>) -> PyResult<usize> {
        let ns = space.map(|s| s.ns.clone());
        self.run(py, move |store| store.clear(ns.as_ref()))
    }

    fn flush(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let until = deadline(py, timeout)?;
        self.run(py, |store| store.flush(until))
    }

    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let until = deadline(py, timeout)?;
        self.run(py, |store| store.close(until))
    }

    fn prefetch(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Vec<PyBackedBytes>,
        to: usize,
        deadline_s: Option<f64>,
        priority: i32,
    ) -> PyResult<Job> {
        let until = match deadline_s {
            None => None,
            given => Some(deadline(py, given)?),
        };
        let job = self.run(py, |store| store.prefetch(&space.ns, &slices(&keys), to, until, priority))?;
        Ok(Job(job))
    }

    fn register_region(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<Region> {
        let view = View::raw(buffer, true)?;
        let (ptr, len) = (view.ptr() as usize, view.len());
        let keep = Arc::new(Lent(Some(view)));
        let held: Arc<dyn std::any::Any + Send + Sync> = keep.clone();
        let region = self.run(py, move |store| {
            // SAFETY: `keep` holds the buffer, and every operation holds `keep`.
            unsafe { store.register_region(ptr as *mut u8, len, held) }
        })?;
        Ok(Region { region, len })
    }

    #[expect(clippy::too_many_arguments, reason = "the verb's own")]
    fn start_put_many(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Vec<PyBackedBytes>,
        datas: &Bound<'_, PyAny>,
        parents: Vec<Option<PyBackedBytes>>,
        replaces: Option<PyBackedBytes>,
        importance: Vec<f32>,
        timeout: Option<f64>,
        to: &Completions,
        token: u64,
    ) -> PyResult<Operation> {
        let views = views(space, datas, false)?;
        same_length(py, keys.len(), "blocks", views.len(), false)?;
        same_length(py, keys.len(), "parents", parents.len(), true)?;
        same_length(py, keys.len(), "importance scores", importance.len(), true)?;
        let until = deadline(py, timeout)?;
        // The worker must not touch Python objects: it gets copies of the keys, and addresses.
        let keys: Vec<Vec<u8>> = keys.iter().map(|k| k.to_vec()).collect();
        let parents: Vec<Option<Vec<u8>>> = parents.iter().map(|p| p.as_ref().map(|p| p.to_vec())).collect();
        let replaces = replaces.map(|r| r.to_vec());
        let sources: Vec<Out> = views.iter().map(View::out).collect();
        let ns = space.ns.clone();
        self.start(py, views, to, token, |e| Outcome::Puts(Err(e)), move |store, finisher| {
            let inner = store.clone();
            store.write_later(Box::new(move || {
                let blocks: Vec<Block<'_>> = keys
                    .iter()
                    .zip(&sources)
                    .enumerate()
                    .map(|(i, (key, source))| Block {
                        key,
                        // SAFETY: the operation keeps the caller's buffers until it has finished.
                        data: unsafe { std::slice::from_raw_parts(source.ptr, source.len) },
                        parent: parents.get(i).and_then(|p| p.as_deref()),
                        replaces: replaces.as_deref(),
                        importance: importance.get(i).copied().unwrap_or(0.0),
                    })
                    .collect();
                finisher.finish(Outcome::Puts(inner.put_many(&ns, &blocks, until)));
            }))
        })
    }

    #[expect(clippy::too_many_arguments, reason = "the verb's own")]
    fn start_get_into(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Vec<PyBackedBytes>,
        outs: &Bound<'_, PyAny>,
        layers: Option<(u32, u32)>,
        tokens: Option<(u32, u32)>,
        timeout: Option<f64>,
        to: &Completions,
        token: u64,
    ) -> PyResult<Operation> {
        let views = views(space, outs, true)?;
        let until = deadline(py, timeout)?;
        let part = selection(layers, tokens);
        let targets: Vec<Out> = views.iter().map(View::out).collect();
        let keys: Vec<Vec<u8>> = keys.iter().map(|k| k.to_vec()).collect();
        let ns = space.ns.clone();
        self.start(py, views, to, token, |e| Outcome::Gots(Err(e)), move |store, finisher| {
            let inner = store.clone();
            let wanted = keys.clone();
            let wanted: Vec<&[u8]> = wanted.iter().map(|k| &k[..]).collect();
            let work_ns = ns.clone();
            store.after_loading(&ns, &wanted, until, Box::new(move || {
                let keys: Vec<&[u8]> = keys.iter().map(|k| &k[..]).collect();
                // SAFETY: the operation keeps the caller's buffers until it has finished.
                let gots = unsafe { inner.get_into(&work_ns, &keys, &targets, &part, until) };
                finisher.finish(Outcome::Gots(gots));
            }))
        })
    }

    #[expect(clippy::too_many_arguments, reason = "the verb's own")]
    fn start_lease(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Vec<PyBackedBytes>,
        verify: bool,
        timeout: Option<f64>,
        to: &Completions,
        token: u64,
    ) -> PyResult<Operation> {
        let until = deadline(py, timeout)?;
        let keys: Vec<Vec<u8>> = keys.iter().map(|k| k.to_vec()).collect();
        let ns = space.ns.clone();
        self.start(py, Vec::new(), to, token, |e| Outcome::Leases(Err(e)), move |store, finisher| {
            let inner = store.clone();
            let wanted = keys.clone();
            let wanted: Vec<&[u8]> = wanted.iter().map(|k| &k[..]).collect();
            let work_ns = ns.clone();
            store.after_loading(&ns, &wanted, until, Box::new(move || {
                let keys: Vec<&[u8]> = keys.iter().map(|k| &k[..]).collect();
                finisher.finish(Outcome::Leases(inner.lease(&work_ns, &keys, verify, until)));
            }))
        })
    }

    fn start_pin(
        &self,
        py: Python<'_>,
        space: &Space,
        keys: Vec<PyBackedBytes>,
        timeout: Option<f64>,
        to: &Completions,
        token: u64,
    ) -> PyResult<Operation> {
        let until = deadline(py, timeout)?;
        let keys: Vec<Vec<u8>> = keys.iter().map(|k| k.to_vec()).collect();
        let ns = space.ns.clone();
        self.start(py, Vec::new(), to, token, |e| Outcome::Flags(Err(e)), move |store, finisher| {
            let inner = store.clone();
            let wanted = keys.clone();
            let wanted: Vec<&[u8]> = wanted.iter().map(|k| &k[..]).collect();
            let work_ns = ns.clone();
            store.after_loading(&ns, &wanted, until, Box::new(move || {
                let keys: Vec<&[u8]> = keys.iter().map(|k| &k[..]).collect();
                finisher.finish(Outcome::Flags(inner.pin(&work_ns, &keys, until)));
            }))
        })
    }

    fn start_flush(&self, py: Python<'_>, timeout: Option<f64>, to: &Completions, token: u64) -> PyResult<Operation> {
        let until = deadline(py, timeout)?;
        self.start(py, Vec::new(), to, token, |e| Outcome::Unit(Err(e)), move |store, finisher| {
            let inner = store.clone();
            store.write_later(Box::new(move || {
                finisher.finish(Outcome::Unit(inner.flush(until)));
            }))
        })
    }

    /// The state of everything, as nested dicts of numbers.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = py.detach(|| self.store.report());
        let out = PyDict::new(py);
        out.set_item("blocks", report.blocks)?;
        out.set_item("metadata_bytes", report.metadata)?;
        out.set_item("engine", report.engine)?;
        for (name, value) in &report.counters {
            out.set_item(name, value)?;
        }
        out.set_item("put", summary(py, &report.put)?)?;
        out.set_item("load", summary(py, &report.load)?)?;
        let tiers = PyDict::new(py);
        for tier in &report.tiers {
            tiers.set_item(tier.name, tier_dict(py, tier)?)?;
        }
        out.set_item("tiers", tiers)?;
        Ok(out)
    }
}

fn tier_dict<'py>(py: Python<'py>, tier: &TierReport) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    out.set_item("size_bytes", tier.size)?;
    out.set_item("capacity_bytes", tier.capacity)?;
    out.set_item("used_bytes", tier.used)?;
    out.set_item("blocks", tier.blocks)?;
    out.set_item("prefaulted_bytes", tier.prefaulted)?;
    out.set_item("quarantined_bytes", tier.quarantined)?;
    out.set_item("emulated", tier.emulated)?;
    for (name, value) in &tier.counters {
        out.set_item(name, value)?;
    }
    out.set_item("get", summary(py, &tier.get)?)?;
    Ok(out)
}

fn summary<'py>(py: Python<'py>, s: &Summary) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    out.set_item("count", s.count)?;
    out.set_item("mean_s", s.mean_s)?;
    out.set_item("p50_s", s.p50_s)?;
    out.set_item("p99_s", s.p99_s)?;
    Ok(out)
}

/// The caller's memory, lent to operations. Rust threads may drop it: then it is given back by the
/// next call that comes from Python.
struct Lent(Option<View>);

static RETURNED: parking_lot::Mutex<Vec<View>> = parking_lot::Mutex::new(Vec::new());

impl Drop for Lent {
    fn drop(&mut self) {
        RETURNED.lock().extend(self.0.take());
    }
}

/// Gives back memory that was lent and is no longer used. Called with the interpreter attached.
fn give_back() {
    let views = std::mem::take(&mut *RETURNED.lock());
    drop(views);
}

/// Memory of the caller that NVMe reads go straight into.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct Region {
    region: Arc<store::Region>,
    len: usize,
}

#[pymethods]
impl Region {
    /// Bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.len
    }

    /// Operations that still use the memory. After a call that gave `deadline`, its buffer is the
    /// store's until this is 0.
    fn in_flight(&self) -> usize {
        give_back();
        self.region.in_flight()
    }
}

/// How far prefaulting is, for any thread to wait on.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct Progress {
    state: Arc<ProgressState>,
}

#[derive(Default)]
struct ProgressState {
    /// Bytes done and in all; `None` until prefaulting begins.
    at: parking_lot::Mutex<Option<(usize, usize)>>,
    changed: parking_lot::Condvar,
}

impl ProgressState {
    fn set(&self, done: usize, total: usize) {
        let mut at = self.at.lock();
        let before = at.map_or(0, |(done, _)| done);
        *at = Some((done.max(before), total));
        self.changed.notify_all();
    }
}

#[pymethods]
impl Progress {
    #[new]
    fn new() -> Self {
        Progress {
            state: Arc::default(),
        }
    }

    /// Waits until all is done (true) or `timeout` seconds passed; calls `report(done, total)` on
    /// the way.
    #[pyo3(signature = (report, timeout))]
    fn wait(&self, py: Python<'_>, report: Option<Bound<'_, PyAny>>, timeout: Option<f64>) -> PyResult<bool> {
        let until = deadline(py, timeout)?;
        let mut seen = None;
        loop {
            let state = &self.state;
            let (at, in_time) = py.detach(|| {
                let mut at = state.at.lock();
                let mut in_time = true;
                while *at == seen && in_time {
                    in_time = !state.changed.wait_until(&mut at, until).timed_out();
                }
                (*at, in_time)
            });
            if at != seen
                && let (Some(report), Some(at)) = (&report, at)
            {
                report.call1(at)?;
            }
            seen = at;
            match at {
                Some((done, total)) if done >= total => return Ok(true),
                _ if !in_time => return Ok(false),
                _ => py.check_signals()?,
            }
        }
    }
}
