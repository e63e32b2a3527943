//! Guarantees, caps, priorities and times to live in HBM, where a thread ends every copy at once. What a
//! copy holds is the other tests' matter.
#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use common::*;
use kvtier_core::config::{Config, Memory};
use kvtier_core::error::Kind;
use kvtier_core::hbm::Placed;
use kvtier_core::jobs::Goal;
use kvtier_core::layout::Selection;
use kvtier_core::load::Miss;
use kvtier_core::read::Got;
use kvtier_core::shares::Quota;
use kvtier_core::store::{Namespace, Store};
use proptest::prelude::*;
use proptest::sample::select;

const PAGE: u64 = 4096;
/// A block, and what the pool holds of them.
const SIZE: u64 = 8 * PAGE;
const FIT: u64 = 32;
const POOL: u64 = FIT * SIZE;

struct Device {
    store: Store,
    copier: Option<JoinHandle<()>>,
}

impl Device {
    fn new(store: Store) -> Self {
        let feed = store.feed().unwrap();
        let copier = std::thread::spawn(move || {
            while let Some(mut batch) = feed.next(true) {
                batch.verify();
                batch.finish(true);
            }
        });
        Device {
            store,
            copier: Some(copier),
        }
    }

    /// What was used last is what stays.
    fn over_dram() -> Self {
        Self::by("lru-leaf")
    }

    fn by(policy: &str) -> Self {
        let mut config = Config::new(vec![Memory::dram(16 << 20)], None);
        config.hbm = Some(POOL);
        config.policy = policy.into();
        Self::new(Store::open(config).unwrap())
    }

    /// What a namespace may hold of HBM.
    fn set(&self, ns: &Namespace, guaranteed: u64, cap: Option<u64>, priority: i32) {
        let quota = Quota {
            guaranteed: vec![guaranteed],
            cap: vec![cap],
            priority,
            ttl: None,
        };
        self.store.set_quota(ns, &quota).unwrap();
    }

    fn put(&self, ns: &Namespace, n: u64, size: u64) {
        put(&self.store, ns, &key(n), &bytes(n, size as usize), None);
    }

    fn lift(&self, ns: &Namespace, numbers: Range<u64>) -> Vec<Got> {
        let keys: Vec<_> = numbers.map(key).collect();
        let keys: Vec<&[u8]> = keys.iter().map(|k| &k[..]).collect();
        let job = self.store.prefetch(ns, &keys, Goal::Hbm, None, 0).unwrap();
        assert!(job.wait(soon()));
        job.results().unwrap()
    }

    /// Puts blocks, and brings them up one by one.
    fn fill(&self, ns: &Namespace, numbers: Range<u64>) {
        for n in numbers {
            self.put(ns, n, SIZE);
            assert_eq!(self.lift(ns, n..n + 1), [Ok("hbm")], "{n}");
        }
    }

    fn is_up(&self, ns: &Namespace, n: u64) -> bool {
        self.store.matching(ns, &[&key(n)]).unwrap().tiers == ["hbm"]
    }

    fn up(&self, ns: &Namespace, numbers: Range<u64>) -> u64 {
        numbers.filter(|&n| self.is_up(ns, n)).count() as u64
    }

    fn place(&self, ns: &Namespace, n: u64, take: bool) -> Option<Placed> {
        let all = Selection::default();
        let mut placed = self.store.place(ns, &[&key(n)], &all, take).unwrap();
        placed.remove(0)
    }

    fn held(&self, ns: &Namespace) -> u64 {
        let report = self.store.namespace_report(ns).unwrap();
        assert_eq!(report.shares[0].tier, "hbm");
        report.shares[0].bytes
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.store.close(soon()).unwrap();
        self.copier.take().unwrap().join().unwrap();
    }
}

#[test]
fn a_scan_leaves_what_is_guaranteed_in_hbm() {
    let device = Device::over_dram();
    let (tenant, scan) = (opaque(b"tenant"), opaque(b"scan"));
    device.set(&tenant, 10 * SIZE, None, 0);
    device.fill(&tenant, 0..20);
    device.fill(&scan, 0..100);
    assert_eq!(device.up(&tenant, 10..20), 10, "the newest are kept");
    assert_eq!(device.held(&tenant), 10 * SIZE);
    // What it lacks of its guarantee, it gets in a tier that others fill.
    device.store.clear(Some(&tenant)).unwrap();
    device.fill(&scan, 0..100);
    device.fill(&tenant, 0..10);
    assert_eq!(device.up(&tenant, 0..10), 10);
    // Its own make room for its own then.
    device.fill(&tenant, 20..60);
    assert_eq!(device.up(&tenant, 50..60), 10);
    let report = device.store.namespace_report(&tenant).unwrap();
    let shares: Vec<_> = report
        .shares
        .iter()
        .map(|s| (s.tier, s.guaranteed))
        .collect();
    assert_eq!(shares, [("hbm", 10 * SIZE), ("dram", 0)]);
}

#[test]
fn a_cap_of_hbm_holds_and_counts_what_leases_took() {
    let device = Device::over_dram();
    let (tenant, other) = (opaque(b"tenant"), opaque(b"other"));
    device.fill(&other, 0..8);
    device.set(&tenant, 0, Some(4 * SIZE), 0);
    for n in 0..20 {
        device.fill(&tenant, n..n + 1);
        assert!(device.held(&tenant) <= 4 * SIZE);
    }
    assert_eq!(
        (device.up(&tenant, 16..20), device.up(&other, 0..8)),
        (4, 8)
    );
    // In no tier below does it matter.
    let keys: Vec<_> = (0..20).map(key).collect();
    let keys: Vec<&[u8]> = keys.iter().map(|k| &k[..]).collect();
    assert_eq!(device.store.contains(&tenant, &keys).unwrap(), [true; 20]);
    let leases: Vec<_> = (16..20).map(|n| device.place(&tenant, n, true)).collect();
    assert!(leases.iter().all(Option::is_some));
    assert_eq!(device.held(&tenant), 0);
    assert_eq!(device.lift(&tenant, 0..1), [Err(Miss::Full)]);
    drop(leases);
    assert_eq!(device.lift(&tenant, 0..1), [Ok("hbm")]);
    // One that is larger than the cap never fits; lowered, it holds at once.
    device.put(&tenant, 99, 5 * SIZE);
    assert_eq!(device.lift(&tenant, 99..100), [Err(Miss::Full)]);
    device.fill(&tenant, 0..4);
    device.set(&tenant, 0, Some(2 * SIZE), 0);
    assert_eq!(device.held(&tenant), 2 * SIZE);
}

#[test]
fn of_what_is_above_guarantees_the_lower_priority_leaves_hbm_first() {
    let device = Device::over_dram();
    let (low, high) = (opaque(b"low"), opaque(b"high"));
    device.set(&low, 4 * SIZE, None, -1);
    device.set(&high, 4 * SIZE, None, 1);
    device.fill(&high, 0..16);
    device.fill(&low, 0..30);
    assert_eq!(device.up(&high, 0..16), 16);
    device.fill(&high, 16..28);
    assert_eq!((device.up(&high, 0..28), device.up(&low, 0..30)), (28, 4));
}

#[test]
fn what_a_namespace_has_in_hbm_becomes_its_share_when_it_gets_a_quota() {
    let device = Device::over_dram();
    let (tenant, scan) = (opaque(b"tenant"), opaque(b"scan"));
    device.fill(&tenant, 0..12);
    device.set(&tenant, 6 * SIZE, None, 0);
    device.fill(&scan, 0..100);
    assert_eq!(
        (device.up(&tenant, 0..12), device.held(&tenant)),
        (6, 6 * SIZE)
    );
    let more = Quota {
        guaranteed: vec![POOL],
        ..Quota::default()
    };
    let error = device.store.set_quota(&scan, &more).unwrap_err();
    assert_eq!(error.kind(), Kind::Config);
    assert!(error.to_string().contains("of the hbm tier"), "{error}");
}

#[test]
fn what_is_too_old_leaves_hbm_first() {
    let clock = TestClock::new();
    let device = Device::new(over(16 << 20, RamDevice::new(32 << 20), |config| {
        config.nvme.as_mut().unwrap().clock = clock.clone();
        config.hbm = Some(POOL);
    }));
    let (brief, other) = (opaque(b"brief"), opaque(b"other"));
    let quota = Quota {
        guaranteed: vec![8 * SIZE],
        ttl: Some(Duration::from_secs(100)),
        ..Quota::default()
    };
    device.store.set_quota(&brief, &quota).unwrap();
    device.fill(&other, 0..16);
    device.fill(&brief, 0..16);
    clock.advance(102);
    assert!(device.place(&brief, 0, false).is_none());
    device.fill(&other, 16..32);
    assert_eq!(device.up(&other, 0..32), 32, "nothing else had to leave");
}

#[derive(Clone, Debug)]
enum Op {
    /// Puts so many blocks and brings them up.
    Lift(usize, u64, u64),
    Hold(usize, u64, bool),
    LetGo,
    Remove(usize, u64),
    Clear(usize),
    Quota(usize),
}

const SPACES: usize = 3;
const KEYS: u64 = 100;

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let name = (0..SPACES, 0..KEYS);
    let op = prop_oneof![
        20 => (name.clone(), 1..30u64).prop_map(|((s, n), c)| Op::Lift(s, n, c)),
        4 => (name.clone(), any::<bool>()).prop_map(|((s, n), take)| Op::Hold(s, n, take)),
        4 => Just(Op::LetGo),
        3 => name.prop_map(|(s, n)| Op::Remove(s, n)),
        1 => (0..SPACES).prop_map(Op::Clear),
        1 => (0..SPACES).prop_map(Op::Quota),
    ];
    prop::collection::vec(op, 1..40)
}

/// Pages of a block.
fn pages(space: usize, n: u64) -> u64 {
    1 + (n * 7 + space as u64) % 16
}

/// What the namespaces are guaranteed, and their caps.
const QUOTAS: [(u64, Option<u64>); SPACES] =
    [(POOL / 4, None), (POOL / 8, Some(POOL / 4)), (0, None)];

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_sequence_breaks_a_guarantee_or_a_cap_of_hbm(ops in ops(), policy in select(&POLICIES[..])) {
        let device = Device::by(policy);
        let spaces: [Namespace; SPACES] = std::array::from_fn(|s| opaque(&[b'h', s as u8]));
        let set = |s: usize| device.set(&spaces[s], QUOTAS[s].0, QUOTAS[s].1, 0);
        (0..SPACES).for_each(set);
        let mut leases: Vec<(usize, u64, bool, Placed)> = Vec::new();
        for op in ops {
            let before: Vec<u64> = spaces.iter().map(|ns| device.held(ns)).collect();
            let mut by = None;
            match op {
                Op::Lift(s, from, count) => {
                    by = Some(s);
                    for n in from..(from + count).min(KEYS) {
                        device.put(&spaces[s], n, pages(s, n) * PAGE);
                        let got = device.lift(&spaces[s], n..n + 1)[0];
                        // Scattered blocks that are held or guaranteed may leave no hole.
                        prop_assert!(got == Ok("hbm") || got == Err(Miss::Full), "{got:?}");
                        let taken = leases.iter().filter(|l| l.0 == s && l.2);
                        let taken: u64 = taken.map(|l| pages(s, l.1) * PAGE).sum();
                        let held = device.held(&spaces[s]) + taken;
                        prop_assert!(held <= QUOTAS[s].1.unwrap_or(POOL), "{held} in {s}");
                    }
                }
                Op::Hold(s, n, take) if leases.len() < 6 => {
                    by = Some(s);
                    let placed = device.place(&spaces[s], n, take);
                    leases.extend(placed.map(|placed| (s, n, take, placed)));
                }
                Op::Hold(..) => {}
                Op::LetGo => drop(leases.pop()),
                Op::Remove(s, n) => {
                    by = Some(s);
                    device.store.remove(&spaces[s], &[&key(n)]).unwrap();
                }
                Op::Clear(s) => {
                    by = Some(s);
                    device.store.clear(Some(&spaces[s])).unwrap();
                }
                Op::Quota(s) => set(s),
            }
            let mut all = 0;
            for (s, ns) in spaces.iter().enumerate() {
                let held = device.held(ns);
                let kept = by == Some(s) || held >= before[s].min(QUOTAS[s].0);
                prop_assert!(kept, "{s} had {}, has {held}", before[s]);
                let up = (0..KEYS).filter(|&n| device.is_up(ns, n));
                prop_assert_eq!(up.map(|n| pages(s, n) * PAGE).sum::<u64>(), held);
                all += held;
            }
            let used = tier(&device.store, "hbm").used;
            prop_assert!(all <= used && used <= POOL);
            if leases.is_empty() {
                prop_assert_eq!(all, used);
            }
        }
        leases.clear();
        device.store.clear(None).unwrap();
        prop_assert_eq!(tier(&device.store, "hbm").used, 0);
    }
}

#[test]
fn copies_of_many_threads_stay_below_their_cap() {
    let device = Arc::new(Device::over_dram());
    let capped = opaque(b"capped");
    device.set(&capped, 0, Some(3 * SIZE), 0);
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let (device, capped) = (&device, &capped);
            scope.spawn(move || {
                for n in 0..60 {
                    let n = 100 * thread + n;
                    device.put(capped, n, SIZE);
                    let got = device.lift(capped, n..n + 1)[0];
                    assert!(matches!(got, Ok("hbm") | Err(Miss::Full)), "{got:?}");
                    assert!(device.held(capped) <= 3 * SIZE);
                }
            });
        }
    });
    assert!(device.held(&capped) > 0);
}
