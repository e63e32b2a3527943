//! Helpers of the store's tests.
#![allow(dead_code, reason = "each test binary uses some of them")]
#![allow(clippy::unwrap_used, reason = "tests may panic")]

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use kvtier_core::config::{Config, Memory, MemoryKind};
use kvtier_core::error::Result;
use kvtier_core::jobs::Goal;
use kvtier_core::layout::{Layer, Layout, Selection};
use kvtier_core::lease::Leased;
use kvtier_core::load::Miss;
use kvtier_core::put::{Block, Put};
use kvtier_core::read::{Got, Out};
use kvtier_core::store::{Namespace, Store, TierReport};
use kvtier_nvme::{Clock, Device, EngineKind, NvmeTier, Options};

/// The policies that models of whole stores are run with: one that learns, and one whose order is plain.
pub const POLICIES: [&str; 2] = ["auto", "lru-leaf"];

/// Where prefetches bring blocks.
pub const DRAM: Goal = Goal::Memory(0);

/// A deadline that a working store never reaches.
pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// A store with one DRAM tier.
pub fn dram(size: u64) -> Store {
    Store::open(Config::new(vec![Memory::dram(size)], None)).unwrap()
}

/// As [`dram`], where what was used last is what stays.
pub fn dram_by_age(size: u64) -> Store {
    let mut config = Config::new(vec![Memory::dram(size)], None);
    config.policy = "lru-leaf".into();
    Store::open(config).unwrap()
}

/// A namespace of `layers` layers, 384 bytes a token and plane.
pub fn gqa(layers: usize, block_tokens: u32) -> Namespace {
    let layer = Layer {
        planes: 2,
        token_bytes: 384,
    };
    Namespace::new(
        b"gqa",
        Layout::new(vec![layer; layers], block_tokens).unwrap(),
    )
}

/// A namespace of opaque blocks.
pub fn opaque(identity: &[u8]) -> Namespace {
    Namespace::new(identity, Layout::opaque())
}

/// Key number `n`.
pub fn key(n: u64) -> [u8; 32] {
    std::array::from_fn(|i| if i < 8 { n.to_le_bytes()[i] } else { 0xA5 })
}

/// `len` bytes that depend on `seed` and on their place.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

pub fn try_put_by(
    store: &Store,
    ns: &Namespace,
    key: &[u8],
    data: &[u8],
    parent: Option<&[u8]>,
    deadline: Instant,
) -> Result<Put> {
    let block = Block {
        key,
        data,
        parent,
        replaces: None,
        importance: 0.0,
    };
    store.put(ns, &block, deadline)
}

pub fn try_put(
    store: &Store,
    ns: &Namespace,
    key: &[u8],
    data: &[u8],
    parent: Option<&[u8]>,
) -> Result<Put> {
    try_put_by(store, ns, key, data, parent, soon())
}

pub fn put(store: &Store, ns: &Namespace, key: &[u8], data: &[u8], parent: Option<&[u8]>) -> Put {
    try_put(store, ns, key, data, parent).unwrap()
}

pub fn try_get(
    store: &Store,
    ns: &Namespace,
    key: &[u8],
    len: usize,
    selection: &Selection,
) -> Result<std::result::Result<(Vec<u8>, &'static str), Miss>> {
    let mut out = vec![0u8; len];
    let outs = [Out {
        ptr: out.as_mut_ptr(),
        len,
    }];
    // SAFETY: `out` has `len` bytes and lives through the call.
    let got = unsafe { store.get_into(ns, &[key], &outs, selection, soon()) }?[0];
    Ok(got.map(|tier| (out, tier)))
}

pub fn get_part(
    store: &Store,
    ns: &Namespace,
    key: &[u8],
    len: usize,
    selection: &Selection,
) -> std::result::Result<Vec<u8>, Miss> {
    try_get(store, ns, key, len, selection)
        .unwrap()
        .map(|(bytes, _)| bytes)
}

pub fn get(
    store: &Store,
    ns: &Namespace,
    key: &[u8],
    len: usize,
) -> std::result::Result<Vec<u8>, Miss> {
    get_part(store, ns, key, len, &Selection::default())
}

/// A small generator of repeatable numbers.
pub struct Random(pub u64);

impl Random {
    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Looks again and again until `holds`; for what happens soon after a call returned.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = soon();
    while !holds() {
        assert!(Instant::now() < deadline, "still not so: {what}");
        std::thread::yield_now();
    }
}

/// NVMe in this directory.
pub fn nvme(dir: &Path, size: u64) -> Options {
    Options::new(vec![dir.to_owned()], size)
}

/// A store of these tiers, by this policy.
pub fn tiered(policy: &str, memory: Vec<Memory>, options: Option<Options>) -> Store {
    let mut config = Config::new(memory, options);
    config.policy = policy.into();
    Store::open(config).unwrap()
}

/// DRAM over NVMe.
pub fn two_tiers(memory: u64, options: Options) -> Store {
    Store::open(Config::new(vec![Memory::dram(memory)], Some(options))).unwrap()
}

/// DRAM, CXL memory on node 0, NVMe.
pub fn three_tiers(memory: u64, cxl: u64, options: Options) -> Store {
    let cxl = Memory {
        kind: MemoryKind::Cxl,
        numa_node: Some(0),
        ..Memory::dram(cxl)
    };
    let config = Config::new(vec![Memory::dram(memory), cxl], Some(options));
    Store::open(config).unwrap()
}

/// A device in memory, for tests that need many blocks and no faults.
pub struct RamDevice(Mutex<Vec<u8>>);

impl RamDevice {
    pub fn new(bytes: u64) -> Arc<Self> {
        Arc::new(RamDevice(Mutex::new(vec![0; bytes as usize])))
    }
}

impl Device for RamDevice {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let at = offset as usize;
        buf.copy_from_slice(&self.0.lock().unwrap()[at..at + buf.len()]);
        Ok(buf.len())
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        let at = offset as usize;
        self.0.lock().unwrap()[at..at + buf.len()].copy_from_slice(buf);
        Ok(buf.len())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn len(&self) -> u64 {
        self.0.lock().unwrap().len() as u64
    }
}

/// DRAM over a device of the test's own.
pub fn over(memory: u64, device: Arc<dyn Device>, config: impl FnOnce(&mut Config)) -> Store {
    let mut options = Options::new(Vec::new(), device.len());
    options.engine = EngineKind::Threads;
    let mut settings = Config::new(vec![Memory::dram(memory)], Some(options));
    config(&mut settings);
    let options = settings.nvme.clone().unwrap();
    let tier = NvmeTier::open_on(vec![device], options).unwrap();
    Store::assemble(settings, Some(tier)).unwrap()
}

/// Time that a test can advance.
pub struct TestClock {
    start: Instant,
    ahead: AtomicU64,
}

impl TestClock {
    pub fn new() -> Arc<Self> {
        Arc::new(TestClock {
            start: Instant::now(),
            ahead: AtomicU64::new(0),
        })
    }

    pub fn advance(&self, seconds: u64) {
        self.ahead.fetch_add(seconds, Ordering::SeqCst);
    }
}

impl Clock for TestClock {
    fn now(&self) -> Instant {
        self.start + Duration::from_secs(self.ahead.load(Ordering::SeqCst))
    }
}

/// A tier's report.
pub fn tier(store: &Store, name: &str) -> TierReport {
    let report = store.report();
    report
        .tiers
        .into_iter()
        .find(|t| t.name == name)
        .unwrap_or_else(|| panic!("no tier {name}"))
}

/// One counter of a tier.
pub fn count(store: &Store, name: &str, counter: &str) -> u64 {
    let tier = tier(store, name);
    let found = tier.counters.iter().find(|c| c.0 == counter);
    found.unwrap_or_else(|| panic!("no {counter}")).1
}

/// One counter of the store.
pub fn total(store: &Store, counter: &str) -> u64 {
    let report = store.report();
    let found = report.counters.iter().find(|c| c.0 == counter);
    found.unwrap_or_else(|| panic!("no {counter}")).1
}

/// Where each of these blocks is found, or why it is not; hits are compared with `want`.
pub fn get_all(store: &Store, ns: &Namespace, blocks: &[([u8; 32], Vec<u8>)]) -> Vec<Got> {
    get_all_by(store, ns, blocks, soon())
}

/// As [`get_all`], until a deadline.
pub fn get_all_by(
    store: &Store,
    ns: &Namespace,
    blocks: &[([u8; 32], Vec<u8>)],
    deadline: Instant,
) -> Vec<Got> {
    let mut outs: Vec<Vec<u8>> = blocks.iter().map(|(_, data)| vec![0; data.len()]).collect();
    let targets: Vec<Out> = outs
        .iter_mut()
        .map(|out| Out {
            ptr: out.as_mut_ptr(),
            len: out.len(),
        })
        .collect();
    let keys: Vec<&[u8]> = blocks.iter().map(|(key, _)| &key[..]).collect();
    let all = Selection::default();
    // SAFETY: each target is a vector of its own that lives through the call.
    let gots = unsafe { store.get_into(ns, &keys, &targets, &all, deadline) }.unwrap();
    for ((got, out), (key, want)) in gots.iter().zip(&outs).zip(blocks) {
        assert!(got.is_err() || out == want, "wrong bytes of {key:?}");
    }
    gots
}

/// A lease of one block that is there, without a check of its bytes.
pub fn leased(store: &Store, ns: &Namespace, key: &[u8]) -> Leased {
    let mut leases = store.lease(ns, &[key], false, soon()).unwrap();
    leases.remove(0).unwrap()
}

/// What must hold of the accounts at any moment.
pub fn audit(store: &Store) {
    let report = store.report();
    for t in &report.tiers {
        assert!(t.used <= t.capacity, "{t:?}");
        assert!(t.capacity <= t.size, "{t:?}");
    }
    let first = report.tiers.iter().find(|t| t.name == "dram").unwrap();
    let given_up = first.size - first.capacity - first.quarantined;
    assert!(
        report.metadata <= given_up,
        "{} bytes beside blocks, {given_up} given up for them",
        report.metadata
    );
}

/// Removes everything; then no page may be in use.
pub fn clear_and_check(store: &Store) {
    store.clear(None).unwrap();
    store.flush(soon()).unwrap();
    let report = store.report();
    assert_eq!(report.blocks, 0);
    for t in &report.tiers {
        assert_eq!(t.blocks, 0, "{t:?}");
    }
    for t in report.tiers {
        eventually(&format!("all of {} is free", t.name), || {
            let now = tier(store, t.name);
            let lost = if t.name == "nvme" { now.quarantined } else { 0 };
            now.used == lost
        });
    }
}

/// A device in memory whose reads and writes can be made to wait.
pub struct GateDevice {
    inner: Arc<RamDevice>,
    /// (reads wait, writes wait)
    closed: Mutex<(bool, bool)>,
    opened: Condvar,
    /// Requests that wait.
    waiting: AtomicU64,
    /// Offsets of the reads so far, in order.
    reads: Mutex<Vec<u64>>,
}

impl GateDevice {
    pub fn new(bytes: u64) -> Arc<Self> {
        Arc::new(GateDevice {
            inner: RamDevice::new(bytes),
            closed: Mutex::new((false, false)),
            opened: Condvar::new(),
            waiting: AtomicU64::new(0),
            reads: Mutex::default(),
        })
    }

    pub fn close(&self, reads: bool, writes: bool) {
        *self.closed.lock().unwrap() = (reads, writes);
    }

    pub fn open(&self) {
        self.close(false, false);
        self.opened.notify_all();
    }

    pub fn take_reads(&self) -> Vec<u64> {
        std::mem::take(&mut *self.reads.lock().unwrap())
    }

    /// Does any request wait?
    pub fn is_waited_for(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    fn pass(&self, shut: impl Fn(&(bool, bool)) -> bool) {
        let mut closed = self.closed.lock().unwrap();
        while shut(&closed) {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            closed = self.opened.wait(closed).unwrap();
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Device for GateDevice {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.reads.lock().unwrap().push(offset);
        self.pass(|closed| closed.0);
        self.inner.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        self.pass(|closed| closed.1);
        self.inner.write_at(buf, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }

    fn len(&self) -> u64 {
        self.inner.len()
    }
}

/// Memory whose first byte is page aligned.
pub struct Aligned {
    bytes: Vec<u8>,
    at: usize,
}

impl Aligned {
    pub fn new(len: usize) -> Self {
        let bytes = vec![0u8; len + 4096];
        let at = bytes.as_ptr().align_offset(4096);
        Aligned { bytes, at }
    }

    pub fn ptr(&self) -> *mut u8 {
        self.bytes.as_ptr().wrapping_add(self.at).cast_mut()
    }
}

/// Blocks `0..count`, each of `len` bytes, put one after another, each the parent of the next if
/// `chained`.
pub fn put_blocks(
    store: &Store,
    ns: &Namespace,
    count: u64,
    len: usize,
    chained: bool,
) -> Vec<([u8; 32], Vec<u8>)> {
    let mut blocks: Vec<([u8; 32], Vec<u8>)> = Vec::new();
    for n in 0..count {
        let parent = blocks.last().filter(|_| chained).map(|b| b.0);
        let parent = parent.as_ref().map(|k| &k[..]);
        let data = bytes(n, len);
        let done = put(store, ns, &key(n), &data, parent);
        assert!(
            matches!(done, Put::Stored(_)),
            "block {n}: {done:?}, {} in the store",
            store.report().blocks
        );
        blocks.push((key(n), data));
    }
    blocks
}

/// The keys of these blocks.
pub fn keys(blocks: &[([u8; 32], Vec<u8>)]) -> Vec<&[u8]> {
    blocks.iter().map(|b| &b.0[..]).collect()
}
