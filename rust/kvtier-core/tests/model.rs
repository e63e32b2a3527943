//! The store against a plain map: whatever is done, in whatever order.
#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use kvtier_core::config::Memory;
use kvtier_core::error::Kind;
use kvtier_core::layout::{Selection, Tokens};
use kvtier_core::lease::Leased;
use kvtier_core::put::Put;
use kvtier_core::store::{Namespace, Store};
use proptest::prelude::*;
use proptest::sample::select;

const MEMORY: u64 = 16 << 20;
const NVME: u64 = 64 << 20;
const KEYS: u64 = 24;
const LAYERS: usize = 14;

/// 4 KiB, 60 KiB, up to 336 KiB in layers and tokens, 1 MiB.
fn spaces() -> [Namespace; 4] {
    [
        opaque(b"4k"),
        opaque(b"60k"),
        gqa(LAYERS, 32),
        opaque(b"1m"),
    ]
}

fn tokens(n: u64) -> usize {
    8 * (1 + n as usize % 4)
}

fn size(space: usize, n: u64) -> usize {
    [4096, 61_440, LAYERS * 2 * 384 * tokens(n), 1 << 20][space]
}

/// A block, by the number of its namespace and its own.
type Name = (usize, u64);

#[derive(Clone, Debug)]
enum Op {
    Put(usize, u64, Option<u64>),
    Get(usize, u64),
    GetPart(u64, usize, usize),
    Lease(usize, u64),
    Unlease(usize),
    Pin(usize, u64),
    Unpin(usize, u64),
    Prefetch(usize, u64),
    Remove(usize, u64),
    /// Many new blocks, so that others leave.
    Press(usize, u64),
    Flush,
    Clear(usize),
    Restart,
}

fn ops(restart: bool) -> impl Strategy<Value = Vec<Op>> {
    let space = 0..4usize;
    let key = 0..KEYS;
    let name = (space.clone(), key.clone());
    let op = prop_oneof![
        30 => (name.clone(), prop::option::weighted(0.8, key.clone())).prop_map(|((s, n), p)| Op::Put(s, n, p)),
        12 => name.clone().prop_map(|(s, n)| Op::Get(s, n)),
        6 => (key.clone(), 0..LAYERS, 0..32usize).prop_map(|(n, l, t)| Op::GetPart(n, l, t)),
        5 => name.clone().prop_map(|(s, n)| Op::Lease(s, n)),
        5 => any::<usize>().prop_map(Op::Unlease),
        3 => name.clone().prop_map(|(s, n)| Op::Pin(s, n)),
        3 => name.clone().prop_map(|(s, n)| Op::Unpin(s, n)),
        6 => name.clone().prop_map(|(s, n)| Op::Prefetch(s, n)),
        5 => name.prop_map(|(s, n)| Op::Remove(s, n)),
        8 => (space.clone(), 1..12u64).prop_map(|(s, n)| Op::Press(s, n)),
        3 => Just(Op::Flush),
        1 => space.prop_map(Op::Clear),
        3 => Just(if restart { Op::Restart } else { Op::Flush }),
    ];
    prop::collection::vec(op, 1..120)
}

/// What was put and not removed.
struct Known {
    parent: Option<u64>,
    data: Vec<u8>,
}

struct Run {
    policy: &'static str,
    store: Store,
    nvme: Option<Arc<RamDevice>>,
    spaces: [Namespace; 4],
    map: HashMap<Name, Known>,
    leases: Vec<(Name, Leased, Vec<u8>)>,
    pins: HashMap<Name, usize>,
    version: u64,
    pressed: u64,
}

impl Run {
    fn new(policy: &'static str, nvme: Option<Arc<RamDevice>>) -> Self {
        Run {
            policy,
            store: Self::open(policy, &nvme),
            nvme,
            spaces: spaces(),
            map: HashMap::new(),
            leases: Vec::new(),
            pins: HashMap::new(),
            version: 0,
            pressed: 1000,
        }
    }

    fn open(policy: &str, nvme: &Option<Arc<RamDevice>>) -> Store {
        match nvme {
            None => tiered(policy, vec![Memory::dram(MEMORY)], None),
            Some(device) => over(MEMORY, device.clone(), |config| {
                config.policy = policy.into();
            }),
        }
    }

    /// Blocks that somebody holds and nobody removed: these, and all before them, must stay.
    fn held(&self) -> HashSet<Name> {
        let mut held = HashSet::new();
        let leased = self.leases.iter().map(|lease| lease.0);
        for name in leased.chain(self.pins.keys().copied()) {
            let mut at = Some(name.1);
            while let Some(n) = at {
                let Some(known) = self.map.get(&(name.0, n)) else {
                    break;
                };
                held.insert((name.0, n));
                at = known.parent;
            }
        }
        held
    }

    fn is_there(&self, (space, n): Name) -> bool {
        self.store
            .contains(&self.spaces[space], &[&key(n)])
            .unwrap()[0]
    }

    /// A generous deadline, unless leases and pins may make the wait a vain one.
    fn deadline(&self) -> Instant {
        let all = Duration::from_secs(30);
        let patience = if self.held().is_empty() {
            all
        } else {
            Duration::from_millis(2)
        };
        Instant::now() + patience
    }

    fn put(&mut self, space: usize, n: u64, parent: Option<u64>) {
        self.version += 1;
        let data = bytes(self.version, size(space, n));
        let parent_key = parent.map(key);
        let before = self.is_there((space, n));
        let there = parent.is_none_or(|p| self.is_there((space, p)));
        let sure = parent.is_none_or(|p| self.held().contains(&(space, p)));
        let name = key(n);
        let put = try_put_by(
            &self.store,
            &self.spaces[space],
            &name,
            &data,
            parent_key.as_ref().map(|k| &k[..]),
            self.deadline(),
        );
        match put {
            Ok(Put::Present(_)) => assert!(before),
            Ok(Put::Stored(tier)) => {
                assert!(!before && there && tier == "dram");
                self.forget(space, n); // it had been evicted, and what followed it too
                self.map.insert((space, n), Known { parent, data });
            }
            Ok(Put::Orphan) => assert!(!(before || there && sure)),
            Err(error) => {
                assert!(
                    matches!(error.kind(), Kind::Full | Kind::Deadline),
                    "{error}"
                );
                assert!(
                    !self.held().is_empty() || !self.leases.is_empty(),
                    "{error}"
                );
            }
            other => panic!("{other:?}"),
        }
    }

    /// Takes a block and its followers out of the map.
    fn forget(&mut self, space: usize, n: u64) {
        self.map.remove(&(space, n));
        self.pins.remove(&(space, n));
        let followers: Vec<u64> = self
            .map
            .iter()
            .filter(|((s, _), known)| *s == space && known.parent == Some(n))
            .map(|((_, n), _)| *n)
            .collect();
        followers.into_iter().for_each(|n| self.forget(space, n));
    }

    fn get(&self, space: usize, n: u64, selection: &Selection, len: usize) -> Option<Vec<u8>> {
        let got = try_get(&self.store, &self.spaces[space], &key(n), len, selection);
        match got.unwrap() {
            Ok((bytes, _)) => Some(bytes),
            Err(miss) => {
                assert_eq!(miss.name(), "absent");
                None
            }
        }
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Put(space, n, parent) => {
                // Only forwards, so that no chain is a ring.
                let parent = parent.filter(|&p| p < n);
                self.put(space, n, parent);
            }
            Op::Get(space, n) => {
                let got = self.get(space, n, &Selection::default(), size(space, n));
                if let Some(got) = got {
                    assert!(got == self.map[&(space, n)].data, "wrong bytes");
                }
            }
            Op::GetPart(n, layer, token) => {
                let all = tokens(n);
                let token = token % all;
                let selection = Selection {
                    layers: Some(layer as u32..layer as u32 + 1),
                    tokens: Tokens::Range(token as u32..all as u32),
                };
                let len = (all - token) * 384;
                if let Some(got) = self.get(2, n, &selection, 2 * len) {
                    let data = &self.map[&(2, n)].data;
                    for plane in 0..2 {
                        let at = ((layer * 2 + plane) * all + token) * 384;
                        assert!(
                            got[plane * len..][..len] == data[at..at + len],
                            "a wrong part"
                        );
                    }
                }
            }
            Op::Lease(space, n) => {
                let deadline = self.deadline();
                let ns = &self.spaces[space];
                let leased = self.store.lease(ns, &[&key(n)], true, deadline).unwrap();
                if let Some(Ok(leased)) = leased.into_iter().next() {
                    let data = self.map[&(space, n)].data.clone();
                    self.leases.push(((space, n), leased, data));
                }
            }
            Op::Unlease(which) => {
                if !self.leases.is_empty() {
                    let lease = self.leases.swap_remove(which % self.leases.len());
                    check_lease(&lease);
                }
            }
            Op::Pin(space, n) => {
                let deadline = self.deadline();
                let pinned = self.store.pin(&self.spaces[space], &[&key(n)], deadline);
                if pinned.unwrap()[0] {
                    *self.pins.entry((space, n)).or_default() += 1;
                }
            }
            Op::Unpin(space, n) => {
                let unpinned = self.store.unpin(&self.spaces[space], &[&key(n)]).unwrap()[0];
                let count = self.pins.get(&(space, n)).copied().unwrap_or(0);
                assert_eq!(unpinned, count > 0);
                match count {
                    0 => {}
                    1 => drop(self.pins.remove(&(space, n))),
                    _ => drop(self.pins.insert((space, n), count - 1)),
                }
            }
            Op::Prefetch(space, n) => {
                let ns = &self.spaces[space];
                let job = self.store.prefetch(ns, &[&key(n)], DRAM, None, 0).unwrap();
                assert!(job.wait(soon()));
                if job.results().unwrap()[0].is_ok() {
                    assert!(self.is_there((space, n)));
                }
            }
            Op::Remove(space, n) => {
                let there = self.is_there((space, n));
                let removed = self.store.remove(&self.spaces[space], &[&key(n)]);
                assert_eq!(removed.unwrap(), [there]);
                self.forget(space, n);
            }
            Op::Press(space, count) => {
                let count = count * [200, 20, 4, 1][space];
                for n in self.pressed..self.pressed + count {
                    self.put(space, n, None);
                }
                for n in self.pressed..self.pressed + count {
                    // Nothing is asked of them any more; they leave as others come.
                    if self.nvme.is_some() {
                        self.store.remove(&self.spaces[space], &[&key(n)]).unwrap();
                        self.forget(space, n);
                    }
                }
                self.pressed += count;
            }
            Op::Flush => self.store.flush(soon()).unwrap(),
            Op::Clear(space) => {
                self.store.clear(Some(&self.spaces[space])).unwrap();
                self.map.retain(|name, _| name.0 != space);
                self.pins.retain(|name, _| name.0 != space);
            }
            Op::Restart => {
                self.store.close(soon()).unwrap();
                self.pins.clear();
                self.store = Self::open(self.policy, &self.nvme);
            }
        }
    }

    fn check(&self) {
        audit(&self.store);
        let held = self.held();
        let mut there = 0;
        for (space, _) in self.spaces.iter().enumerate() {
            for n in (0..KEYS).chain(1000..self.pressed) {
                let Some(known) = self.map.get(&(space, n)) else {
                    assert!(!self.is_there((space, n)), "{space}/{n} was removed");
                    continue;
                };
                if self.is_there((space, n)) {
                    there += 1;
                    if let Some(parent) = known.parent {
                        assert!(
                            self.is_there((space, parent)),
                            "{space}/{n} outlives {parent}"
                        );
                    }
                } else {
                    assert!(!held.contains(&(space, n)), "{space}/{n} is held");
                    assert!(self.nvme.is_none(), "{space}/{n} is gone: NVMe had room");
                }
            }
        }
        assert_eq!(self.store.report().blocks, there, "nothing else is there");
    }

    fn end(mut self) {
        let mut names: Vec<Name> = self.map.keys().copied().collect();
        names.sort_unstable();
        for (space, n) in names {
            let got = self.get(space, n, &Selection::default(), size(space, n));
            if let Some(got) = got {
                assert!(got == self.map[&(space, n)].data, "wrong bytes");
            }
        }
        self.leases.drain(..).for_each(|lease| check_lease(&lease));
        clear_and_check(&self.store);
        self.store.close(soon()).unwrap();
    }
}

fn check_lease((_, leased, data): &(Name, Leased, Vec<u8>)) {
    // SAFETY: the lease keeps the block's bytes.
    let bytes = unsafe { std::slice::from_raw_parts(leased.ptr(), leased.len()) };
    assert!(bytes == data, "a lease changed");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn dram_alone_is_a_map_that_forgets(ops in ops(false), policy in select(&POLICIES[..])) {
        let mut run = Run::new(policy, None);
        for op in &ops {
            run.step(op);
            run.check();
        }
        run.end();
    }

    #[test]
    fn dram_over_nvme_is_a_map(ops in ops(true), policy in select(&POLICIES[..])) {
        let mut run = Run::new(policy, Some(RamDevice::new(NVME)));
        for op in &ops {
            run.step(op);
            run.check();
        }
        run.end();
    }
}

/// The share of the DRAM tier's capacity that is payload.
fn payload_share(store: &Store, blocks: &[(usize, u64)]) -> f64 {
    let spaces = spaces();
    let resident: usize = blocks
        .iter()
        .filter(|&&(space, n)| {
            let found = store.matching(&spaces[space], &[&key(n)]).unwrap();
            found.tiers.first() == Some(&"dram")
        })
        .map(|&(space, n)| size(space, n))
        .sum();
    resident as f64 / tier(store, "dram").capacity as f64
}

/// Phases of other sizes than before, one after another and mixed; none may meet a full store.
/// Returns the share of payload at the end of each phase, as some looks found it.
fn shift_sizes(store: &Store) -> Vec<Vec<f64>> {
    const LOOKS: usize = 16;
    let spaces = spaces();
    let phases: [&[usize]; 8] = [&[0], &[3], &[1], &[2], &[0, 3], &[3], &[0, 1, 2, 3], &[0]];
    let mut random = Random(7);
    let mut all: Vec<(usize, u64)> = Vec::new();
    let mut shares = Vec::new();
    for phase in phases {
        let (mut looks, mut bytes_put) = (Vec::new(), 0);
        while looks.len() < LOOKS {
            // As many bytes of each size, 1 MiB at a time, in no order.
            let space = phase[random.below(phase.len() as u64) as usize];
            for _ in 0..(1 << 20) / size(space, 0) {
                let n = all.len() as u64;
                let data = bytes(n, size(space, n));
                let put = put(store, &spaces[space], &key(n), &data, None);
                assert_eq!(put, Put::Stored("dram"));
                all.push((space, n));
                bytes_put += data.len();
            }
            audit(store);
            if bytes_put > 2 * MEMORY as usize {
                looks.push(payload_share(store, &all));
            }
        }
        shares.push(looks);
    }
    shares
}

#[test]
fn after_any_shift_of_sizes_dram_is_full_of_payload() {
    for looks in shift_sizes(&dram(MEMORY)) {
        assert!(looks.iter().all(|&share| share >= 0.9), "{looks:.3?}");
    }
}

#[test]
fn after_any_shift_of_sizes_dram_over_nvme_is_full_of_payload() {
    for looks in shift_sizes(&over(MEMORY, RamDevice::new(48 << 20), |_| ())) {
        // Blocks on their way down leave room that the next look may find empty.
        let best = looks.iter().copied().fold(0.0, f64::max);
        let mean = looks.iter().sum::<f64>() / looks.len() as f64;
        assert!(best >= 0.9 && mean >= 0.8, "{looks:.3?}");
    }
}
