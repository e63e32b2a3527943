//! Whole stores against a dict: up to three tiers and HBM, tenants with shares, caps, priorities and times to live, a
//! clock that jumps, a device that fails and heals, and copies to HBM, by either policy.
#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::*;
use kvtier_core::config::{Config, Memory, MemoryKind};
use kvtier_core::error::Kind;
use kvtier_core::jobs::Goal;
use kvtier_core::lease::Leased;
use kvtier_core::load::Miss;
use kvtier_core::put::Put;
use kvtier_core::shares::Quota;
use kvtier_core::store::{Namespace, Store};
use kvtier_nvme::{Device, EngineKind, NvmeTier, Options};
use proptest::prelude::*;
use proptest::sample::select;

const MIB: u64 = 1 << 20;
const SPACES: usize = 4;
const KEYS: u64 = 60;
const LIFE: u64 = 1000;
/// Leases and pins at most; together they are less than any tier holds.
const HOLDS: usize = 3;

/// Sizes of the tiers; 0 is none.
#[derive(Clone, Copy, Debug)]
struct Shape {
    hbm: u64,
    dram: u64,
    cxl: u64,
    nvme: u64,
    /// Pages of the largest block.
    largest: u64,
}

const SHAPES: [Shape; 6] = [
    shape(0, 2, 0, 0, 16),
    shape(0, 2, 0, 6, 16),
    shape(0, 2, 2, 6, 16),
    shape(1, 2, 0, 6, 16),
    // Tiers of few blocks, and the last one smaller than the first.
    shape(1, 3, 1, 2, 24),
    shape(1, 1, 1, 4, 30),
];

const fn shape(hbm: u64, dram: u64, cxl: u64, nvme: u64, largest: u64) -> Shape {
    let (hbm, dram, cxl, nvme) = (hbm * MIB, dram * MIB, cxl * MIB, nvme * MIB);
    Shape {
        hbm,
        dram,
        cxl,
        nvme,
        largest,
    }
}

/// A device that fails while it is told to.
struct Failing(Arc<RamDevice>, AtomicBool);

impl Failing {
    fn check(&self) -> io::Result<()> {
        match self.1.load(Ordering::SeqCst) {
            true => Err(io::Error::from_raw_os_error(5)),
            false => Ok(()),
        }
    }
}

impl Device for Failing {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.check()?;
        self.0.read_at(buf, offset)
    }
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        self.check()?;
        self.0.write_at(buf, offset)
    }
    fn sync(&self) -> io::Result<()> {
        self.check()?;
        self.0.sync()
    }
    fn len(&self) -> u64 {
        self.0.len()
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// A chain of so many blocks, after that block.
    Put(usize, u64, u64, Option<u64>),
    Get(usize, u64, u64),
    Prefetch(usize, u64, bool),
    Lease(usize, u64),
    Pin(usize, u64),
    LetGo,
    Remove(usize, u64),
    Clear(Option<usize>),
    Flush,
    Restart,
    Jump(u64),
    Fail(bool),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let name = (0..SPACES, 0..KEYS);
    let op = prop_oneof![
        30 => (name.clone(), 1..20u64, prop::option::weighted(0.7, 0..KEYS))
            .prop_map(|((s, n), c, p)| Op::Put(s, n, c, p)),
        12 => (name.clone(), 1..12u64).prop_map(|((s, n), c)| Op::Get(s, n, c)),
        6 => (name.clone(), any::<bool>()).prop_map(|((s, n), up)| Op::Prefetch(s, n, up)),
        3 => name.clone().prop_map(|(s, n)| Op::Lease(s, n)),
        3 => name.clone().prop_map(|(s, n)| Op::Pin(s, n)),
        6 => Just(Op::LetGo),
        4 => name.prop_map(|(s, n)| Op::Remove(s, n)),
        1 => prop::option::of(0..SPACES).prop_map(Op::Clear),
        3 => Just(Op::Flush),
        2 => Just(Op::Restart),
        3 => (1..LIFE).prop_map(Op::Jump),
        1 => Just(Op::Jump(100 * LIFE)),
        2 => any::<bool>().prop_map(Op::Fail),
    ];
    prop::collection::vec(op, 1..80)
}

struct Known {
    parent: Option<u64>,
    version: u64,
    born: u64,
}

enum Hold {
    Lease(Leased, Vec<u8>),
    Pin(usize, u64),
}

struct Run {
    shape: Shape,
    policy: &'static str,
    device: Option<Arc<Failing>>,
    clock: Arc<TestClock>,
    now: u64,
    store: Option<Arc<Store>>,
    copier: Option<JoinHandle<()>>,
    spaces: [Namespace; SPACES],
    map: HashMap<(usize, u64), Known>,
    holds: Vec<Hold>,
    version: u64,
    /// The device failed since the store was opened, so that blocks may be gone and places lost.
    failed: bool,
}

impl Run {
    fn new(shape: Shape, policy: &'static str) -> Self {
        let device = (shape.nvme > 0)
            .then(|| Arc::new(Failing(RamDevice::new(shape.nvme), AtomicBool::new(false))));
        let mut run = Run {
            shape,
            policy,
            device,
            clock: TestClock::new(),
            now: 0,
            store: None,
            copier: None,
            spaces: std::array::from_fn(|s| opaque(&[b'w', s as u8])),
            map: HashMap::new(),
            holds: Vec::new(),
            version: 0,
            failed: false,
        };
        run.open();
        run
    }

    fn store(&self) -> &Store {
        self.store.as_ref().unwrap()
    }

    fn open(&mut self) {
        let mut memory = vec![Memory::dram(self.shape.dram)];
        if self.shape.cxl > 0 {
            memory.push(Memory {
                kind: MemoryKind::Cxl,
                ..Memory::dram(self.shape.cxl)
            });
        }
        let options = self.device.as_ref().map(|device| {
            let mut options = Options::new(Vec::new(), device.len());
            options.engine = EngineKind::Threads;
            options.clock = self.clock.clone();
            options
        });
        let mut config = Config::new(memory, options.clone());
        config.policy = self.policy.into();
        config.hbm = (self.shape.hbm > 0).then_some(self.shape.hbm);
        let tier = options.map(|options| {
            let device: Arc<dyn Device> = self.device.clone().unwrap();
            NvmeTier::open_on(vec![device], options).unwrap()
        });
        let store = Arc::new(Store::assemble(config, tier).unwrap());
        self.copier = store.feed().map(|feed| {
            std::thread::spawn(move || {
                let mut turn = 0;
                while let Some(mut batch) = feed.next(true) {
                    turn += 1;
                    batch.verify();
                    batch.finish(turn % 7 > 0);
                }
            })
        });
        self.store = Some(store);
        for s in 0..SPACES {
            if let Some(quota) = self.quota(s) {
                self.store().set_quota(&self.spaces[s], &quota).unwrap();
            }
        }
        self.failed = false;
    }

    fn close(&mut self) {
        self.holds.clear();
        if let Some(store) = self.store.take() {
            let closed = store.close(soon());
            if let Err(error) = closed {
                let expected = self.failed || error.kind() == Kind::Full;
                assert!(expected && error.kind() != Kind::Deadline, "{error}");
            }
        }
        if let Some(copier) = self.copier.take() {
            copier.join().unwrap();
        }
    }

    /// Ages begin anew. What a device that failed did not write may be gone, or be back: all of it is cleared.
    fn restart(&mut self) {
        let failed = self.failed;
        self.close();
        self.open();
        if failed {
            clear_and_check(self.store());
            self.map.clear();
        }
        let now = self.now;
        self.map.values_mut().for_each(|known| known.born = now);
    }

    /// One with a share and a cap of each tier, one that lives for a while and leaves last, one that leaves
    /// first, one of no quota.
    fn quota(&self, s: usize) -> Option<Quota> {
        let Shape {
            hbm,
            dram,
            cxl,
            nvme,
            ..
        } = self.shape;
        let tiers = [hbm, dram, cxl, nvme];
        let tiers = tiers.iter().filter(|&&size| size > 0);
        let holds = dram / 8 >= self.shape.largest * 4096;
        match s {
            0 | 2 if !holds => None,
            0 => Some(Quota {
                guaranteed: tiers.clone().map(|size| size / 8).collect(),
                cap: tiers.map(|size| Some(size / 2)).collect(),
                ..Quota::default()
            }),
            1 => Some(Quota {
                ttl: Some(Duration::from_secs(LIFE)),
                priority: 5,
                ..Quota::default()
            }),
            2 => Some(Quota {
                guaranteed: tiers.map(|size| size / 8).collect(),
                priority: -5,
                ..Quota::default()
            }),
            _ => None,
        }
    }

    fn data(&self, s: usize, n: u64, version: u64) -> Vec<u8> {
        let pages = 1 + (n * 7 + s as u64 * 3) % self.shape.largest;
        bytes(version, pages as usize * 4096 - 600)
    }

    fn is_there(&self, s: usize, n: u64) -> bool {
        self.store().contains(&self.spaces[s], &[&key(n)]).unwrap()[0]
    }

    fn is_old(&self, s: usize, known: &Known) -> bool {
        // Memory alone goes by the clock of the machine.
        self.device.is_some() && s == 1 && self.now - known.born > LIFE + 1
    }

    /// What is held, and what precedes it, may stand in the way of a large block, or leave too little of a cap.
    fn patience(&self) -> Duration {
        match self.holds.is_empty() {
            true => Duration::from_secs(30),
            false => Duration::from_millis(20),
        }
    }

    fn put(&mut self, s: usize, n: u64, parent: Option<u64>) -> bool {
        self.version += 1;
        let parent_there = parent.is_none_or(|p| self.is_there(s, p));
        let data = self.data(s, n, self.version);
        let parent_key = parent.map(key);
        let put = try_put_by(
            self.store(),
            &self.spaces[s],
            &key(n),
            &data,
            parent_key.as_ref().map(|k| &k[..]),
            Instant::now() + self.patience(),
        );
        match put {
            Ok(Put::Stored(_)) => {
                assert!(parent_there, "{s} {n} follows nothing");
                self.forget(s, n);
                let (version, born) = (self.version, self.now);
                let known = Known {
                    parent,
                    version,
                    born,
                };
                self.map.insert((s, n), known);
                true
            }
            Ok(Put::Present(_)) => true,
            Ok(Put::Orphan) => false,
            Err(error) if !self.holds.is_empty() => {
                let expected = matches!(error.kind(), Kind::Full | Kind::Deadline);
                assert!(expected, "{error}");
                false
            }
            other => panic!("{s} {n}: {other:?}: {:#?}", self.store().report()),
        }
    }

    fn forget(&mut self, s: usize, n: u64) {
        self.map.remove(&(s, n));
        let children = self
            .map
            .iter()
            .filter(|(name, known)| name.0 == s && known.parent == Some(n));
        let children: Vec<u64> = children.map(|(name, _)| name.1).collect();
        children.into_iter().for_each(|n| self.forget(s, n));
        self.holds.retain(|hold| match hold {
            Hold::Pin(space, number) => (*space, *number) != (s, n),
            Hold::Lease(..) => true,
        });
    }

    fn get(&mut self, s: usize, numbers: std::ops::Range<u64>) {
        let wanted: Vec<u64> = numbers
            .filter(|&n| self.map.contains_key(&(s, n)))
            .collect();
        let blocks: Vec<_> = wanted
            .iter()
            .map(|&n| (key(n), self.data(s, n, self.map[&(s, n)].version)))
            .collect();
        let deadline = Instant::now() + self.patience();
        let gots = get_all_by(self.store(), &self.spaces[s], &blocks, deadline);
        for (&n, got) in wanted.iter().zip(gots) {
            match got {
                Ok(_) => assert!(!self.is_old(s, &self.map[&(s, n)]), "{n} is too old"),
                Err(Miss::Absent) => {}
                Err(Miss::Full | Miss::Deadline) => assert!(!self.holds.is_empty()),
                Err(miss) => assert!(self.failed && miss == Miss::Device, "{miss:?}"),
            }
        }
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Put(s, first, count, after) => {
                let mut parent = after.filter(|&p| p < first);
                for n in first..(first + count).min(KEYS) {
                    if !self.put(s, n, parent) {
                        break;
                    }
                    parent = Some(n);
                }
            }
            Op::Get(s, n, count) => self.get(s, n..(n + count).min(KEYS)),
            Op::Prefetch(s, n, up) => {
                let goal = if up && self.shape.hbm > 0 {
                    Goal::Hbm
                } else {
                    DRAM
                };
                let (one, other) = (key(n), key((n + 1) % KEYS));
                let keys: [&[u8]; 2] = [&one, &other];
                let job = self.store().prefetch(&self.spaces[s], &keys, goal, None, 0);
                assert!(job.unwrap().wait(soon()), "a prefetch that never ends");
            }
            Op::Lease(s, n) if self.holds.len() < HOLDS => {
                let leases = self
                    .store()
                    .lease(&self.spaces[s], &[&key(n)], true, soon());
                if let Ok(lease) = leases.unwrap().remove(0) {
                    let data = self.data(s, n, self.map[&(s, n)].version);
                    self.holds.push(Hold::Lease(lease, data));
                }
            }
            Op::Pin(s, n) if self.holds.len() < HOLDS => {
                if self
                    .store()
                    .pin(&self.spaces[s], &[&key(n)], soon())
                    .unwrap()[0]
                {
                    self.holds.push(Hold::Pin(s, n));
                }
            }
            Op::Lease(..) | Op::Pin(..) => {}
            Op::LetGo => match self.holds.pop() {
                Some(Hold::Lease(lease, data)) => {
                    // SAFETY: the lease keeps the block's bytes.
                    let got = unsafe { std::slice::from_raw_parts(lease.ptr(), lease.len()) };
                    assert!(got == data, "a lease changed");
                }
                Some(Hold::Pin(s, n)) => {
                    let unpinned = self.store().unpin(&self.spaces[s], &[&key(n)]).unwrap()[0];
                    // One that was too old, or that its device lost, left whoever pinned it.
                    assert!(unpinned || s == 1 || self.failed);
                }
                None => {}
            },
            Op::Remove(s, n) => {
                let there = self.is_there(s, n);
                let removed = self.store().remove(&self.spaces[s], &[&key(n)]);
                assert_eq!(removed.unwrap(), [there]);
                self.forget(s, n);
            }
            Op::Clear(space) => {
                let ns = space.map(|s| &self.spaces[s]);
                self.store().clear(ns).unwrap();
                let gone = |s: usize| space.is_none_or(|space| space == s);
                self.map.retain(|name, _| !gone(name.0));
                self.holds.retain(|hold| match hold {
                    Hold::Pin(s, _) => !gone(*s),
                    Hold::Lease(..) => true,
                });
            }
            Op::Flush => {
                if let Err(error) = self.store().flush(soon()) {
                    let expected = error.kind() == Kind::Full || self.failed;
                    assert!(expected && error.kind() != Kind::Deadline, "{error}");
                }
            }
            Op::Restart => {
                if let Some(device) = &self.device {
                    device.1.store(false, Ordering::SeqCst);
                }
                self.restart();
            }
            Op::Jump(seconds) => {
                // Else a write under way would count as one that hangs.
                while total(self.store(), "writing") > 0 {
                    std::thread::yield_now();
                }
                self.clock.advance(seconds);
                self.now += seconds;
            }
            Op::Fail(fail) => {
                if let Some(device) = &self.device {
                    device.1.store(fail, Ordering::SeqCst);
                    self.failed |= fail;
                }
            }
        }
        self.check();
    }

    fn check(&self) {
        audit(self.store());
        let report = self.store().report();
        for (i, tier) in report.tiers.iter().enumerate() {
            let shares = report.namespaces.iter().map(|ns| &ns.shares[i]);
            assert_eq!(shares.clone().map(|s| s.blocks).sum::<u64>(), tier.blocks);
            for share in shares {
                assert!(share.bytes <= share.cap.unwrap_or(u64::MAX), "{share:?}");
            }
            assert!(
                tier.counters.iter().all(|c| c.0 != "corrupt" || c.1 == 0),
                "{tier:?}"
            );
        }
        for s in 0..SPACES {
            for n in 0..KEYS {
                // A look lets what is too old go: the child first, then it has no parent.
                let there = self.is_there(s, n);
                let Some(known) = self.map.get(&(s, n)) else {
                    assert!(!there, "{s} {n} was removed");
                    continue;
                };
                assert!(!there || !self.is_old(s, known), "{s} {n} is too old");
                if let (true, Some(parent)) = (there, known.parent) {
                    let alone = !self.is_there(s, parent) && self.is_there(s, n);
                    assert!(!alone, "{s} {n} outlives {parent}");
                }
            }
        }
    }

    fn end(mut self) {
        if let Some(device) = &self.device {
            device.1.store(false, Ordering::SeqCst);
        }
        (0..SPACES).for_each(|s| self.get(s, 0..KEYS));
        self.restart();
        (0..SPACES).for_each(|s| self.get(s, 0..KEYS));
        clear_and_check(self.store());
        self.close();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_time: 30_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_whole_store_is_a_dict_that_forgets(
        ops in ops(),
        shape in select(&SHAPES[..]),
        policy in select(&POLICIES[..]),
    ) {
        let mut run = Run::new(shape, policy);
        ops.iter().for_each(|op| run.step(op));
        run.end();
    }
}
