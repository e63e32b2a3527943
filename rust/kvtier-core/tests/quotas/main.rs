//! Guarantees, caps, priorities and times to live of namespaces, and their accounts.
#![allow(clippy::unwrap_used, reason = "tests may panic")]

#[path = "../common/mod.rs"]
mod common;
mod model;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use kvtier_core::error::Kind;
use kvtier_core::layout::Selection;
use kvtier_core::load::Miss;
use kvtier_core::put::Put;
use kvtier_core::shares::Quota;
use kvtier_core::store::{Namespace, NamespaceReport, Store};

const MIB: u64 = 1 << 20;
const SIZE: usize = 32 << 10;

fn quota(guaranteed: &[u64], cap: &[u64]) -> Quota {
    Quota {
        guaranteed: guaranteed.to_vec(),
        cap: cap.iter().map(|&cap| Some(cap)).collect(),
        ..Quota::default()
    }
}

fn state(store: &Store, ns: &Namespace) -> NamespaceReport {
    store.namespace_report(ns).unwrap()
}

fn bytes_in(store: &Store, ns: &Namespace, tier: usize) -> u64 {
    state(store, ns).shares[tier].bytes
}

fn counter(store: &Store, ns: &Namespace, name: &str) -> u64 {
    let state = state(store, ns);
    state.counters.iter().find(|c| c.0 == name).unwrap().1
}

fn fill(store: &Store, ns: &Namespace, numbers: std::ops::Range<u64>) {
    for n in numbers {
        assert!(matches!(
            put(store, ns, &key(n), &bytes(n, SIZE), None),
            Put::Stored(_)
        ));
    }
}

fn there(store: &Store, ns: &Namespace, numbers: std::ops::Range<u64>) -> usize {
    let keys: Vec<_> = numbers.map(key).collect();
    let keys: Vec<&[u8]> = keys.iter().map(|k| &k[..]).collect();
    let there = store.contains(ns, &keys).unwrap();
    there.into_iter().filter(|&t| t).count()
}

#[test]
fn a_scan_takes_no_more_than_what_is_above_a_guarantee() {
    let store = dram_by_age(8 * MIB);
    let (tenant, scan) = (opaque(b"tenant"), opaque(b"scan"));
    store.set_quota(&tenant, &quota(&[2 * MIB], &[])).unwrap();
    fill(&store, &tenant, 0..160);
    assert!(
        bytes_in(&store, &tenant, 0) > 4 * MIB,
        "what is free is anybody's"
    );
    fill(&store, &scan, 0..2000);
    let left = bytes_in(&store, &tenant, 0);
    assert!(
        (2 * MIB..2 * MIB + 2 * SIZE as u64).contains(&left),
        "{left}"
    );
    assert_eq!(there(&store, &tenant, 96..160), 64, "the newest are kept");
    // Its own blocks make room for its own once it has what it is guaranteed.
    fill(&store, &tenant, 1000..1064);
    assert_eq!(there(&store, &tenant, 1000..1064), 64);
    assert!(bytes_in(&store, &tenant, 0) >= 2 * MIB);
}

#[test]
fn a_namespace_within_its_guarantee_finds_room_in_a_full_tier() {
    let store = dram(8 * MIB);
    let (tenant, scan) = (opaque(b"tenant"), opaque(b"scan"));
    fill(&store, &scan, 0..2000);
    store.set_quota(&tenant, &quota(&[6 * MIB], &[])).unwrap();
    fill(&store, &tenant, 0..192);
    assert_eq!(there(&store, &tenant, 0..192), 192);
}

#[test]
fn a_cap_is_never_passed_and_makes_its_own_blocks_leave() {
    let store = dram_by_age(8 * MIB);
    let (tenant, other) = (opaque(b"tenant"), opaque(b"other"));
    fill(&store, &other, 0..64);
    store.set_quota(&tenant, &quota(&[], &[MIB])).unwrap();
    for n in 0..200 {
        fill(&store, &tenant, n..n + 1);
        assert!(bytes_in(&store, &tenant, 0) <= MIB);
    }
    assert_eq!(there(&store, &tenant, 168..200), 32, "the newest are kept");
    assert_eq!(there(&store, &other, 0..64), 64, "and nobody else's left");
    let large = vec![1; 2 * MIB as usize];
    let error = try_put(&store, &tenant, &key(7000), &large, None).unwrap_err();
    assert_eq!(error.kind(), Kind::Full);
    // Lowered, it holds at once.
    store.set_quota(&tenant, &quota(&[], &[MIB / 2])).unwrap();
    assert!(bytes_in(&store, &tenant, 0) <= MIB / 2);
    assert_eq!(counter(&store, &tenant, "evicted"), 184);
}

#[test]
fn a_block_above_its_cap_on_nvme_does_not_chase_the_others_away() {
    let store = over(4 * MIB, RamDevice::new(16 * MIB), |_| ());
    let tenant = opaque(b"tenant");
    store
        .set_quota(&tenant, &quota(&[0, 0], &[4 * MIB, MIB / 2]))
        .unwrap();
    fill(&store, &tenant, 0..8);
    store.flush(soon()).unwrap();
    let before = bytes_in(&store, &tenant, 1);
    let large = vec![1; MIB as usize];
    put(&store, &tenant, &key(99), &large, None);
    assert_eq!(store.flush(soon()).unwrap_err().kind(), Kind::Full);
    fill(&store, &opaque(b"other"), 100..220); // they leave DRAM, and the large one the store
    assert_eq!(there(&store, &tenant, 99..100), 0);
    assert_eq!(bytes_in(&store, &tenant, 1), before);
    assert_eq!(there(&store, &tenant, 0..8), 8);
    audit_accounts(&store);
}

#[test]
fn what_is_held_at_a_cap_makes_its_namespace_full_and_no_other() {
    let store = dram(8 * MIB);
    let (tenant, other) = (opaque(b"tenant"), opaque(b"other"));
    store.set_quota(&tenant, &quota(&[], &[MIB])).unwrap();
    fill(&store, &tenant, 0..32);
    let keys: Vec<_> = (0..32).map(key).collect();
    let keys: Vec<&[u8]> = keys.iter().map(|k| &k[..]).collect();
    let leases = store.lease(&tenant, &keys, false, soon()).unwrap();
    let data = bytes(99, SIZE);
    let more = || try_put_by(&store, &tenant, &key(99), &data, None, Instant::now());
    assert_eq!(more().unwrap_err().kind(), Kind::Full);
    fill(&store, &other, 0..64);
    drop(leases);
    assert!(matches!(more().unwrap(), Put::Stored(_)));
}

#[test]
fn of_what_is_above_guarantees_the_lower_priority_leaves_first() {
    let store = dram(8 * MIB);
    let (low, high) = (opaque(b"low"), opaque(b"high"));
    for (ns, priority) in [(&low, -1), (&high, 1)] {
        let quota = Quota {
            priority,
            ..quota(&[MIB], &[])
        };
        store.set_quota(ns, &quota).unwrap();
    }
    fill(&store, &high, 0..100);
    fill(&store, &low, 0..100);
    // A namespace without a quota is of priority 0.
    let plain = opaque(b"plain");
    fill(&store, &plain, 0..32);
    assert_eq!(there(&store, &high, 0..100), 100);
    assert_eq!(there(&store, &plain, 0..32), 32);
    fill(&store, &high, 100..190);
    let left = bytes_in(&store, &low, 0);
    assert!((MIB..MIB + 2 * SIZE as u64).contains(&left), "{left}");
    assert_eq!(there(&store, &high, 0..190), 190);
    assert!(there(&store, &plain, 0..32) < 32, "they were next");
}

#[test]
fn more_than_a_tier_cannot_be_guaranteed() {
    let store = dram(8 * MIB);
    let (a, b) = (opaque(b"a"), opaque(b"b"));
    store.set_quota(&a, &quota(&[4 * MIB], &[])).unwrap();
    let error = store.set_quota(&b, &quota(&[4 * MIB], &[])).unwrap_err();
    assert_eq!(error.kind(), Kind::Config);
    let text = error.to_string();
    assert!(text.contains("4 MiB") && text.contains("dram"), "{text}");
    assert_eq!(state(&store, &b).shares[0].guaranteed, 0);
    store.set_quota(&b, &quota(&[3 * MIB], &[])).unwrap();
    // Its own share does not count twice.
    store.set_quota(&a, &quota(&[3 * MIB], &[])).unwrap();
    store.set_quota(&b, &quota(&[4 * MIB], &[])).unwrap();
    let error = store.set_quota(&b, &quota(&[4 * MIB], &[MIB])).unwrap_err();
    assert_eq!(error.kind(), Kind::Config);
}

#[test]
fn a_namespace_keeps_its_blocks_and_their_order_when_it_gets_a_quota() {
    let store = dram(8 * MIB);
    let (tenant, scan) = (opaque(b"tenant"), opaque(b"scan"));
    let blocks = put_blocks(&store, &tenant, 64, SIZE, true);
    store.set_quota(&tenant, &quota(&[MIB], &[])).unwrap();
    fill(&store, &scan, 0..1000);
    let there = get_all(&store, &tenant, &blocks);
    let kept = there.iter().take_while(|got| got.is_ok()).count();
    assert!(
        (32..40).contains(&kept),
        "{kept} from the head of the chain on"
    );
    assert!(there[kept..].iter().all(|got| *got == Err(Miss::Absent)));
    audit(&store);
}

#[test]
fn what_counts_to_a_namespace_is_of_its_share_whenever_that_is_said() {
    for order in 0..3 {
        let clock = TestClock::new();
        let store = timed(&clock, &RamDevice::new(32 * MIB));
        let (tenant, beside, scan) = (opaque(b"tenant"), opaque(b"beside"), opaque(b"scan"));
        let quota = Quota {
            ttl: Some(Duration::from_secs(100)),
            ..quota(&[MIB, 0], &[2 * MIB, 4 * MIB])
        };
        let steps: [&dyn Fn(); 3] = [
            &|| store.set_quota(&tenant, &quota).unwrap(),
            &|| store.count_to(&beside, &tenant).unwrap(),
            &|| {
                fill(&store, &beside, 0..16);
                fill(&store, &tenant, 0..16);
                get(&store, &tenant, &key(0), SIZE).unwrap();
                get(&store, &beside, &key(0), SIZE).unwrap();
            },
        ];
        (0..3).for_each(|n| steps[(n + order) % 3]());
        assert_eq!(bytes_in(&store, &tenant, 0), MIB, "{order}");
        assert_eq!(state(&store, &beside).shares, state(&store, &tenant).shares);
        fill(&store, &scan, 0..300);
        assert_eq!(bytes_in(&store, &tenant, 0), MIB);
        assert_eq!(
            (there(&store, &tenant, 0..16), there(&store, &beside, 0..16)),
            (16, 16)
        );
        fill(&store, &beside, 100..200);
        assert!(bytes_in(&store, &tenant, 0) <= 2 * MIB);
        assert!(bytes_in(&store, &tenant, 1) <= 4 * MIB);
        // A use of what is beside is no use of the namespace, unless it was before that was said.
        assert_eq!(counter(&store, &tenant, "hits"), 1);
        clock.advance(200);
        assert_eq!(
            there(&store, &beside, 0..200) + there(&store, &tenant, 0..16),
            0
        );
        audit_accounts(&store);
    }
}

#[test]
fn many_quotas_are_as_many_as_can_be() {
    let store = dram(8 * MIB);
    for n in 0..255u32 {
        store
            .set_quota(&opaque(&n.to_le_bytes()), &quota(&[], &[MIB]))
            .unwrap();
    }
    let error = store
        .set_quota(&opaque(b"more"), &quota(&[], &[MIB]))
        .unwrap_err();
    assert_eq!(error.kind(), Kind::Config);
}

/// DRAM over NVMe, with a clock that the test moves.
fn timed(clock: &Arc<TestClock>, device: &Arc<RamDevice>) -> Store {
    timed_by("lru-leaf", clock, device)
}

fn timed_by(policy: &str, clock: &Arc<TestClock>, device: &Arc<RamDevice>) -> Store {
    over(4 * MIB, device.clone(), |config| {
        config.nvme.as_mut().unwrap().clock = clock.clone();
        config.policy = policy.into();
    })
}

fn living(seconds: u64) -> Quota {
    Quota {
        ttl: Some(Duration::from_secs(seconds)),
        ..Quota::default()
    }
}

/// Does something with a block, and says whether it was there.
type Verb<'a> = &'a dyn Fn(&[u8]) -> bool;

#[test]
fn a_block_that_is_too_old_is_a_miss_for_every_verb() {
    let clock = TestClock::new();
    let store = timed(&clock, &RamDevice::new(16 * MIB));
    let (tenant, other) = (opaque(b"tenant"), opaque(b"other"));
    store.set_quota(&tenant, &living(100)).unwrap();
    let verbs: [Verb<'_>; 7] = [
        &|k| store.contains(&tenant, &[k]).unwrap()[0],
        &|k| store.matching(&tenant, &[k]).unwrap().blocks == 1,
        &|k| get(&store, &tenant, k, SIZE).is_ok(),
        &|k| store.lease(&tenant, &[k], false, soon()).unwrap()[0].is_ok(),
        &|k| store.pin(&tenant, &[k], soon()).unwrap()[0],
        &|k| store.set_importance(&tenant, &[k], &[1.0]).unwrap()[0],
        &|k| store.remove(&tenant, &[k]).unwrap()[0],
    ];
    for (n, verb) in verbs.iter().enumerate() {
        let n = 10 * n as u64;
        fill(&store, &tenant, n..n + 1);
        let child = |n| put(&store, &tenant, &key(n), &bytes(n, SIZE), Some(&key(n - 1)));
        clock.advance(60);
        assert!(matches!(child(n + 1), Put::Stored(_)));
        assert_eq!(get(&store, &tenant, &key(n), SIZE), Ok(bytes(n, SIZE)));
        clock.advance(41);
        assert!(!verb(&key(n)), "verb {n}");
        assert_eq!(
            there(&store, &tenant, n..n + 2),
            0,
            "its child went with it"
        );
        // The key is free again, and no parent.
        assert_eq!(child(n + 1), Put::Orphan);
        fill(&store, &tenant, n..n + 1);
        assert_eq!(get(&store, &tenant, &key(n), SIZE), Ok(bytes(n, SIZE)));
    }
    fill(&store, &other, 0..1);
    clock.advance(1_000_000);
    assert_eq!(there(&store, &other, 0..1), 1);
    assert!(counter(&store, &tenant, "expired") >= 14);
}

#[test]
fn what_is_too_old_leaves_first_whatever_is_guaranteed() {
    let clock = TestClock::new();
    let store = dram_like(&clock);
    let (tenant, other) = (opaque(b"tenant"), opaque(b"other"));
    let quota = Quota {
        ttl: Some(Duration::from_secs(100)),
        ..quota(&[2 * MIB], &[])
    };
    store.set_quota(&tenant, &quota).unwrap();
    fill(&store, &other, 0..40);
    fill(&store, &tenant, 0..60);
    // A shard is looked through again a 64th of a time to live after the last look, at the latest.
    clock.advance(102);
    fill(&store, &other, 40..100);
    assert_eq!(
        there(&store, &other, 0..100),
        100,
        "nothing else had to leave"
    );
    assert!(bytes_in(&store, &tenant, 0) < MIB);
}

/// 4 MiB of DRAM over an NVMe tier that takes nothing, for its clock.
fn dram_like(clock: &Arc<TestClock>) -> Store {
    over(4 * MIB, RamDevice::new(MIB), |config| {
        config.nvme.as_mut().unwrap().clock = clock.clone();
        config.write_budget = Some(1);
    })
}

#[test]
fn after_a_restart_ages_and_quotas_begin_anew() {
    let clock = TestClock::new();
    let device = RamDevice::new(16 * MIB);
    let ns = opaque(b"tenant");
    let store = timed(&clock, &device);
    store.set_quota(&ns, &living(100)).unwrap();
    fill(&store, &ns, 0..20);
    clock.advance(90);
    store.close(soon()).unwrap();
    let store = timed(&clock, &device);
    assert_eq!(there(&store, &ns, 0..20), 20);
    store.set_quota(&ns, &living(100)).unwrap();
    clock.advance(90);
    assert_eq!(there(&store, &ns, 0..20), 20);
    clock.advance(11);
    assert_eq!(there(&store, &ns, 0..20), 0);
    // A cap that is lower than what lies there holds at once.
    fill(&store, &ns, 0..40);
    store.close(soon()).unwrap();
    let store = timed(&clock, &device);
    let state = state(&store, &ns);
    assert_eq!(state.shares[1].blocks, 40);
    store.set_quota(&ns, &quota(&[0, 0], &[MIB, MIB])).unwrap();
    assert!(bytes_in(&store, &ns, 1) <= MIB);
    assert_eq!(
        there(&store, &ns, 0..40) as u64 * SIZE as u64,
        bytes_in(&store, &ns, 1)
    );
}

#[test]
fn every_tier_keeps_its_own_guarantee_and_cap() {
    let device = RamDevice::new(16 * MIB);
    let store = over(4 * MIB, device, |_| ());
    let (tenant, capped, scan) = (opaque(b"tenant"), opaque(b"capped"), opaque(b"scan"));
    store
        .set_quota(&tenant, &quota(&[MIB, 4 * MIB], &[]))
        .unwrap();
    store
        .set_quota(&capped, &quota(&[0, 0], &[MIB, 2 * MIB]))
        .unwrap();
    fill(&store, &tenant, 0..200);
    for n in 0..200 {
        fill(&store, &capped, n..n + 1);
        assert!(bytes_in(&store, &capped, 0) <= MIB && bytes_in(&store, &capped, 1) <= 2 * MIB);
    }
    fill(&store, &scan, 0..1000);
    store.flush(soon()).ok();
    assert!(bytes_in(&store, &tenant, 0) >= MIB);
    assert!(bytes_in(&store, &tenant, 1) >= 4 * MIB);
    audit_accounts(&store);
}

/// What the namespaces hold is what the tiers hold.
fn audit_accounts(store: &Store) {
    audit(store);
    let report = store.report();
    for (i, tier) in report.tiers.iter().enumerate() {
        let shares = report.namespaces.iter().map(|ns| &ns.shares[i]);
        assert_eq!(shares.clone().map(|s| s.blocks).sum::<u64>(), tier.blocks);
        if report.tiers.len() == 1 {
            let bytes: u64 = shares.map(|s| s.bytes).sum();
            assert!(bytes <= tier.used, "{bytes} of {tier:?}");
        }
    }
}

/// Each brings policies with it, which grow with its first block by more than a block more of another does.
#[test]
fn the_tables_of_many_namespaces_are_charged_for_as_they_come() {
    for policy in POLICIES {
        let store = timed_by(policy, &TestClock::new(), &RamDevice::new(16 * MIB));
        for n in 0..40u64 {
            let ns = opaque(&n.to_le_bytes());
            store.set_quota(&ns, &quota(&[], &[MIB])).unwrap();
            audit_accounts(&store);
            fill(&store, &ns, 0..2);
            for _ in 0..3 {
                assert!(get(&store, &ns, &key(0), SIZE).is_ok());
            }
            audit_accounts(&store);
        }
    }
}

#[test]
fn threads_that_put_at_once_stay_below_their_caps() {
    let store = over(4 * MIB, RamDevice::new(16 * MIB), |_| ());
    let capped = opaque(b"capped");
    store
        .set_quota(&capped, &quota(&[0, 0], &[MIB, 2 * MIB]))
        .unwrap();
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let (store, capped) = (&store, &capped);
            scope.spawn(move || {
                for n in 0..150 {
                    let n = 1000 * thread + n;
                    fill(store, capped, n..n + 1);
                    let back = thread * 1000 + (n * 7919) % 150;
                    let part = Selection::default();
                    let _ = get_part(store, capped, &key(back), SIZE, &part);
                    for share in state(store, capped).shares {
                        assert!(share.bytes <= share.cap.unwrap(), "{share:?}");
                    }
                }
            });
        }
    });
    audit_accounts(&store);
}
