//! Every fault of the simulated device against the whole store: a crash at each write of a run, and
//! one fault of each kind at each request. After it, a restart: no wrong byte, no half block, no
//! child without its parent, nothing flushed that is gone, the books balanced, all pages free again.
//!
//! `KVTIER_ROUNDS` multiplies the seeds.
#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::*;
use kvtier_core::config::{Config, Memory};
use kvtier_core::error::{Error, Kind};
use kvtier_core::load::Miss;
use kvtier_core::put::Put;
use kvtier_core::store::{Namespace, Store};
use kvtier_nvme::device::sim::{Fault, Op, SimDevice};
use kvtier_nvme::{Device, EngineKind, NvmeTier, Options};

const DEVICE: u64 = 4 << 20;
/// Less than the blocks of a run, so the mover has work.
const MEMORY: u64 = 1 << 20;
const CHAINS: u64 = 6;
const LENGTH: u64 = 6;
const STEPS: usize = 45;
const EIO: i32 = 5;
const EINTR: i32 = 4;
const EAGAIN: i32 = 11;
const ENOSPC: i32 = 28;

/// A device whose requests take their time, so that they complete in another order than they began.
struct Late {
    device: Arc<SimDevice>,
    turns: AtomicU64,
}

impl Late {
    fn dawdle(&self) {
        let turn = self.turns.fetch_add(1, Ordering::Relaxed);
        (0..turn.wrapping_mul(0x9E37_79B9) % 97).for_each(|_| std::thread::yield_now());
    }
}

impl Device for Late {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.dawdle();
        let done = self.device.read_at(buf, offset);
        self.dawdle();
        done
    }
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        self.dawdle();
        let done = self.device.write_at(buf, offset);
        self.dawdle();
        done
    }
    fn sync(&self) -> io::Result<()> {
        self.dawdle();
        self.device.sync()
    }
    fn len(&self) -> u64 {
        self.device.len()
    }
}

/// Opens a store over these devices, by that policy, or says why not. A device that does not answer for so
/// long is given up.
fn open_within(
    devices: &[Arc<SimDevice>],
    (policy, late): (&str, bool),
    patience: Duration,
) -> Result<Store, Error> {
    let mut options = Options::new(Vec::new(), DEVICE * devices.len() as u64);
    options.engine = EngineKind::Threads;
    options.patience = patience;
    let mut config = Config::new(vec![Memory::dram(MEMORY)], Some(options.clone()));
    config.policy = policy.into();
    let dressed = |device: &Arc<SimDevice>| -> Arc<dyn Device> {
        let (device, turns) = (device.clone(), AtomicU64::new(0));
        if late {
            Arc::new(Late { device, turns })
        } else {
            device
        }
    };
    let tier = NvmeTier::open_on(devices.iter().map(dressed).collect(), options)?;
    Store::assemble(config, Some(tier))
}

/// Block `i` of a chain in this version.
fn block(place: (u64, u64), version: u64) -> Vec<u8> {
    let (chain, i) = place;
    let n = chain * LENGTH + i;
    let len = 700 + (n * 7 + version * 5) as usize % 6 * 30_000;
    bytes(n * 1000 + version, len)
}

fn name(place: (u64, u64)) -> [u8; 32] {
    key(place.0 * LENGTH + place.1)
}

/// What may be there after a restart.
#[derive(Clone, Default)]
struct Ledger {
    /// The versions that each block may have; 0 is none.
    allowed: BTreeMap<(u64, u64), Vec<u64>>,
    current: BTreeMap<(u64, u64), u64>,
}

impl Ledger {
    fn set(&mut self, place: (u64, u64), version: u64) {
        self.current.insert(place, version);
        let allowed = self.allowed.entry(place).or_insert_with(|| vec![0]);
        if !allowed.contains(&version) {
            allowed.push(version);
        }
    }

    fn version(&self, place: (u64, u64)) -> u64 {
        self.current.get(&place).copied().unwrap_or(0)
    }

    fn gone(&mut self, from: (u64, u64)) {
        for i in from.1..LENGTH {
            if self.version((from.0, i)) != 0 {
                self.set((from.0, i), 0);
            }
        }
    }

    fn flushed(&mut self) {
        for (place, &version) in &self.current {
            self.allowed.insert(*place, vec![version]);
        }
    }
}

/// How much of what the store says must hold while this fault strikes.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Trust {
    /// Nothing may be noticed.
    All,
    /// Blocks may be lost, and misses and errors say so.
    Flushed,
    /// Anything may be lost; what is served is right.
    Bytes,
}

struct Run<'a> {
    store: &'a Store,
    ns: &'a Namespace,
    ledger: Ledger,
    random: Random,
    fresh: u64,
    trust: Trust,
    patience: Duration,
}

impl Run<'_> {
    fn until(&self) -> Instant {
        Instant::now() + self.patience
    }

    /// False: the device is done for.
    fn step(&mut self) -> bool {
        let chain = self.random.below(CHAINS);
        match self.random.below(12) {
            0..6 => self.put(chain),
            6..8 => {
                let there = (0..LENGTH).filter(|&i| self.ledger.version((chain, i)) != 0);
                if let Some(i) = there.max() {
                    let at = (chain, self.random.below(i + 1));
                    self.store.remove(self.ns, &[&name(at)]).unwrap();
                    self.ledger.gone(at);
                }
                true
            }
            8..10 => self.get(chain),
            _ => self.flush(),
        }
    }

    fn put(&mut self, chain: u64) -> bool {
        let i = (0..LENGTH).find(|&i| self.ledger.version((chain, i)) == 0);
        let Some(i) = i else { return true };
        self.fresh += 1;
        let at = (chain, i);
        let parent = (i > 0).then(|| name((chain, i - 1)));
        let parent = parent.as_ref().map(|k| &k[..]);
        let data = block(at, self.fresh);
        match try_put_by(self.store, self.ns, &name(at), &data, parent, self.until()) {
            Ok(Put::Stored(_)) => self.ledger.set(at, self.fresh),
            Ok(Put::Orphan) if self.trust != Trust::All => self.ledger.gone((chain, i - 1)),
            Err(e) if self.trust != Trust::All => {
                assert!(matches!(e.kind(), Kind::Full | Kind::Deadline), "{e}");
                return false;
            }
            other => panic!("{other:?}"),
        }
        audit(self.store);
        true
    }

    fn get(&mut self, chain: u64) -> bool {
        for i in 0..LENGTH {
            let at = (chain, i);
            let version = self.ledger.version(at);
            match look(self.store, self.ns, at, self.until()) {
                Ok(data) => assert!(data == block(at, version), "wrong bytes of {at:?}"),
                Err(Miss::Absent) if version == 0 => {}
                Err(miss) => {
                    assert!(self.trust != Trust::All, "{at:?}: {miss:?}");
                    if matches!(miss, Miss::Deadline | Miss::Full) {
                        return false; // it hangs
                    }
                    self.ledger.gone(at);
                }
            }
        }
        true
    }

    /// Sees what the store has let go by itself, because the device failed it.
    fn notice(&mut self) {
        let places: Vec<_> = self.ledger.current.keys().copied().collect();
        for at in places {
            if self.ledger.version(at) != 0 && !is_there(self.store, self.ns, at) {
                assert!(self.trust != Trust::All, "{at:?} was evicted");
                self.ledger.gone(at);
            }
        }
    }

    fn flush(&mut self) -> bool {
        match self.store.flush(self.until()) {
            Ok(()) => {
                // What is there now has not left meanwhile: it is durable.
                self.notice();
                self.ledger.flushed();
                true
            }
            Err(e) => {
                assert!(self.trust != Trust::All, "{e}");
                self.trust == Trust::Bytes
            }
        }
    }
}

fn is_there(store: &Store, ns: &Namespace, at: (u64, u64)) -> bool {
    store.contains(ns, &[&name(at)]).unwrap()[0]
}

/// The bytes of a block, whatever its version.
fn look(store: &Store, ns: &Namespace, at: (u64, u64), by: Instant) -> Result<Vec<u8>, Miss> {
    let leased = store.lease(ns, &[&name(at)], true, by).unwrap().remove(0)?;
    // SAFETY: the lease keeps the block's bytes.
    Ok(unsafe { std::slice::from_raw_parts(leased.ptr(), leased.len()) }.to_vec())
}

/// Checks a store that was opened again against what may be there; then what is there is what must be.
fn verify(store: &Store, ns: &Namespace, ledger: &mut Ledger, trust: Trust) {
    let mut pages = 0;
    let mut found = 0;
    for chain in 0..CHAINS {
        for i in 0..LENGTH {
            let at = (chain, i);
            let allowed = ledger.allowed.get(&at).cloned().unwrap_or(vec![0]);
            match look(store, ns, at, soon()) {
                Ok(data) => {
                    let version = (1..200).find(|&v| data == block(at, v));
                    let version = version.unwrap_or_else(|| panic!("wrong bytes of {at:?}"));
                    let known = allowed.contains(&version) || trust == Trust::Bytes;
                    assert!(known, "{at:?} is back in version {version} of {allowed:?}");
                    assert!(i == 0 || is_there(store, ns, (chain, i - 1)), "an orphan");
                    ledger.set(at, version);
                    found += 1;
                    pages += data.len().div_ceil(4096) as u64;
                }
                Err(miss) => {
                    let lost = allowed.contains(&0) || trust == Trust::Bytes;
                    assert!(lost, "{at:?} was flushed and is {miss:?}");
                    assert!(trust == Trust::Bytes || miss == Miss::Absent, "{miss:?}");
                    ledger.set(at, 0);
                }
            }
        }
    }
    if trust != Trust::Bytes {
        // Orphans that were dropped at the start free their slots with the next group.
        store.flush(soon()).unwrap();
        let nvme = tier(store, "nvme");
        assert_eq!((nvme.blocks, store.report().blocks), (found, found));
        assert_eq!(nvme.used, pages * 4096 + nvme.quarantined);
        assert!(nvme.quarantined == 0 || trust != Trust::All);
        assert_eq!(count(store, "nvme", "corrupt"), 0);
    }
    audit(store);
}

struct Case {
    seed: u64,
    paths: u64,
    late: bool,
    fault: Option<(Op, u64, Fault)>,
    trust: Trust,
    /// The power goes at the end, instead of a close.
    crash: bool,
}

impl Case {
    /// How its stores are opened: by one policy, then by the other, from one request to the next.
    fn way(&self) -> (&'static str, bool) {
        let nth = self.fault.map_or(0, |fault| fault.1);
        (POLICIES[(self.seed + nth) as usize % 2], self.late)
    }

    fn open(&self, devices: &[Arc<SimDevice>]) -> Result<Store, Error> {
        open_within(devices, self.way(), Duration::from_secs(120))
    }

    /// Lives through it; returns how many requests of the fault's kind there were before the restart.
    fn run(&self) -> u64 {
        let ns = opaque(b"matrix");
        let device = |n| Arc::new(SimDevice::new(DEVICE, self.seed * 10 + n));
        let devices: Vec<_> = (0..self.paths).map(device).collect();
        drop(self.open(&devices).unwrap()); // formats
        let op = self.fault.map_or(Op::Write, |f| f.0);
        let before = devices[0].count(op);
        let mut patience = Duration::from_secs(30);
        if let Some((op, nth, fault)) = self.fault {
            devices[0].inject(op, before + nth, fault);
            if fault == Fault::Hang {
                patience = Duration::from_millis(30);
            }
        }
        let mut ledger = Ledger::default();
        let store = match open_within(&devices, self.way(), patience) {
            Ok(store) => Some(store),
            Err(e) => {
                assert!(self.trust != Trust::All, "{e}");
                None
            }
        };
        if let Some(store) = &store {
            let mut run = Run {
                store,
                ns: &ns,
                ledger,
                random: Random(self.seed),
                fresh: 0,
                trust: self.trust,
                patience,
            };
            (0..STEPS).all(|_| run.step());
            if !self.crash {
                run.notice();
                match store.close(soon()) {
                    Ok(()) => run.ledger.flushed(),
                    Err(e) => assert!(self.trust != Trust::All, "{e}"),
                }
            }
            ledger = run.ledger;
        }
        let requests = devices[0].count(op) - before;
        let after = |d: &Arc<SimDevice>| Arc::new(d.crash());
        let mut devices: Vec<_> = {
            let crashed = devices.iter().map(after).collect();
            devices.iter().for_each(|d| d.release());
            drop(store);
            crashed
        };
        if self.crash {
            // The power goes again, while it is opened or soon after.
            devices[0].inject(Op::Write, self.seed % 7, Fault::Crash);
            drop(self.open(&devices));
            devices = devices.iter().map(after).collect();
        }
        self.afterwards(&devices, &ns, ledger);
        requests
    }

    /// The device behaves: all that must hold holds, and the store works.
    fn afterwards(&self, devices: &[Arc<SimDevice>], ns: &Namespace, mut ledger: Ledger) {
        let store = match self.open(devices) {
            Ok(store) => store,
            Err(e) => {
                let refused = self.trust == Trust::Bytes && e.kind() == Kind::Corrupt;
                assert!(refused, "{e}");
                return;
            }
        };
        verify(&store, ns, &mut ledger, self.trust);
        let fresh = (100, bytes(7, 10_000));
        put(&store, ns, &key(fresh.0), &fresh.1, None);
        store.close(soon()).unwrap();
        drop(store);
        let store = self.open(devices).unwrap();
        assert!(get(&store, ns, &key(fresh.0), fresh.1.len()).as_ref() == Ok(&fresh.1));
        clear_and_check(&store);
        store.close(soon()).unwrap();
        drop(store);
        let store = self.open(devices).unwrap();
        assert_eq!(store.report().blocks, 0, "what was cleared stays away");
    }

    /// Strikes each request in turn, every `step`th of them. Returns how many it struck.
    fn each(mut self, op: Op, fault: Fault, step: u64) -> u64 {
        let (mut nth, mut runs) = (0, 0);
        loop {
            self.fault = Some((op, nth, fault));
            let result = std::panic::catch_unwind(|| self.run());
            let Ok(requests) = result else {
                let Case { seed, trust, .. } = self;
                panic!("seed {seed}, {fault:?} at {op:?} {nth}, {trust:?}");
            };
            if requests <= nth {
                return runs; // it never came to that request
            }
            runs += 1;
            nth += step;
        }
    }
}

fn rounds() -> u64 {
    let given = std::env::var("KVTIER_ROUNDS").ok();
    given.map_or(1, |n| n.parse().expect("KVTIER_ROUNDS is a number"))
}

fn case(seed: u64, trust: Trust, crash: bool) -> Case {
    Case {
        seed,
        paths: 1 + seed % 2,
        late: seed % 3 == 2,
        fault: None,
        trust,
        crash,
    }
}

#[test]
fn a_crash_at_every_write_or_barrier_loses_nothing_that_was_flushed() {
    for seed in 0..3 * rounds() {
        for op in [Op::Write, Op::Sync] {
            let runs = case(seed, Trust::Flushed, true).each(op, Fault::Crash, 1);
            assert!(runs > 5, "the run is long enough to mean something: {runs}");
        }
    }
}

#[test]
fn a_crash_while_a_request_hangs_loses_nothing_that_was_flushed() {
    for seed in 0..2 * rounds() {
        for op in [Op::Write, Op::Sync] {
            case(seed, Trust::Flushed, true).each(op, Fault::Hang, 5);
        }
    }
}

#[test]
fn what_passes_is_not_noticed() {
    let passing = [
        Fault::Errno(EINTR),
        Fault::Errno(EAGAIN),
        Fault::Short(512),
        Fault::Short(4096),
        Fault::Short(5000),
    ];
    for seed in 0..2 * rounds() {
        for (i, fault) in passing.into_iter().enumerate() {
            for op in [Op::Read, Op::Write] {
                case(seed + i as u64, Trust::All, i % 2 == 0).each(op, fault, 4);
            }
        }
    }
}

#[test]
fn requests_that_fail_lose_nothing_that_was_flushed() {
    for seed in 0..2 * rounds() {
        for crash in [false, true] {
            case(seed, Trust::Flushed, crash).each(Op::Write, Fault::Errno(EIO), 3);
            case(seed, Trust::Flushed, crash).each(Op::Write, Fault::Errno(ENOSPC), 5);
            case(seed, Trust::Flushed, crash).each(Op::Sync, Fault::Errno(EIO), 2);
            case(seed, Trust::Flushed, crash).each(Op::Read, Fault::Errno(EIO), 2);
        }
    }
}

#[test]
fn a_device_that_lies_never_makes_a_wrong_hit() {
    let lies = [
        Fault::Lost,
        Fault::Torn(512),
        Fault::Torn(4096),
        Fault::Misdirected(4096),
        Fault::Misdirected(-8192),
        Fault::Misdirected(40 * 4096),
    ];
    for seed in 0..rounds() {
        for (i, fault) in lies.into_iter().enumerate() {
            for crash in [false, true] {
                let seed = seed + i as u64;
                case(seed, Trust::Bytes, crash).each(Op::Write, fault, 4);
                case(seed, Trust::Bytes, crash).each(Op::Read, fault, 4);
            }
        }
        case(seed, Trust::Bytes, true).each(Op::Sync, Fault::Lost, 2);
    }
}
