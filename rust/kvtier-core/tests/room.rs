//! Room is found wherever a block can leave, however many cannot, whatever the policy.
#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::ops::Range;
use std::time::Instant;

use common::*;
use kvtier_core::config::{Config, Memory};
use kvtier_core::lease::Leased;
use kvtier_core::policy::NAMES;
use kvtier_core::put::Put;
use kvtier_core::shares::Quota;
use kvtier_core::store::{Namespace, Store};

const SIZE: usize = 4000;
const MIB: u64 = 1 << 20;

fn fill(store: &Store, ns: &Namespace, numbers: Range<u64>) {
    for n in numbers {
        let put = put(store, ns, &key(n), &bytes(n, SIZE), None);
        assert_eq!(put, Put::Stored("dram"), "{n}");
    }
}

fn there(store: &Store, ns: &Namespace, numbers: Range<u64>) -> Vec<u64> {
    let is_there = |&n: &u64| store.contains(ns, &[&key(n)]).unwrap()[0];
    numbers.filter(is_there).collect()
}

fn lease(store: &Store, ns: &Namespace, numbers: &[u64]) -> Vec<Leased> {
    let keys: Vec<_> = numbers.iter().map(|&n| key(n)).collect();
    let keys: Vec<&[u8]> = keys.iter().map(|k| &k[..]).collect();
    let leases = store.lease(ns, &keys, false, soon()).unwrap();
    leases.into_iter().map(|lease| lease.unwrap()).collect()
}

/// So that it is the dearest of all.
fn use_often(store: &Store, ns: &Namespace, n: u64) {
    for _ in 0..20 {
        assert!(get(store, ns, &key(n), SIZE).is_ok());
    }
}

#[test]
fn a_few_blocks_among_many_that_are_leased_give_way_at_once() {
    for policy in NAMES {
        let mut config = Config::new(vec![Memory::dram(4 * MIB)], None);
        config.policy = policy.into();
        let (store, ns) = (Store::open(config).unwrap(), opaque(b"leased"));
        let mut all = 0;
        while count(&store, "dram", "evictions") == 0 {
            fill(&store, &ns, all..all + 1);
            all += 1;
        }
        let mut leased = there(&store, &ns, 0..all);
        for n in leased.split_off(leased.len() - 16) {
            use_often(&store, &ns, n);
        }
        let leases = lease(&store, &ns, &leased);
        for n in 10_000..10_050 {
            let data = bytes(n, SIZE);
            let put = try_put_by(&store, &ns, &key(n), &data, None, Instant::now());
            assert!(matches!(put, Ok(Put::Stored("dram"))), "{policy}: {put:?}");
        }
        let left = there(&store, &ns, 0..all);
        assert!(leased.iter().all(|n| left.contains(n)), "{policy}");
        drop(leases);
        clear_and_check(&store);
    }
}

/// What is leased is not written again and again, for each write of it a copy of another one leaves NVMe.
#[test]
fn a_namespace_at_its_caps_makes_room_though_most_of_it_is_leased() {
    for policy in NAMES {
        let store = over(8 * MIB, RamDevice::new(16 * MIB), |config| {
            config.policy = policy.into();
        });
        let ns = opaque(b"capped");
        let quota = Quota {
            cap: vec![Some(MIB), Some(MIB)],
            ..Quota::default()
        };
        store.set_quota(&ns, &quota).unwrap();
        fill(&store, &ns, 0..200);
        use_often(&store, &ns, 199);
        let leases = lease(&store, &ns, &(0..199).collect::<Vec<_>>());
        fill(&store, &ns, 1000..2000);
        let writes = count(&store, "nvme", "writes");
        assert!(writes <= 1001, "{policy}: {writes} writes of 1,001 blocks");
        drop(leases);
        clear_and_check(&store);
    }
}

/// Copies of what is in memory are not pushed out for what a flush keeps; they are passed.
#[test]
fn a_flush_finds_what_lies_on_nvme_alone_among_copies_of_what_is_in_memory() {
    const SIZE: usize = 16_000;
    for policy in NAMES {
        let device = RamDevice::new(8 * MIB);
        let open = || {
            over(16 * MIB, device.clone(), |config| {
                config.policy = policy.into();
            })
        };
        let (store, ns) = (open(), opaque(b"copies"));
        let fill = |store: &Store, numbers: Range<u64>| {
            for n in numbers {
                put(store, &ns, &key(n), &bytes(n, SIZE), None);
            }
        };
        fill(&store, 0..480);
        store.close(soon()).unwrap();
        let store = open();
        for n in 0..440 {
            assert!(get(&store, &ns, &key(n), SIZE).is_ok());
        }
        // 18 find room, the others take that of the 40 that were not read.
        fill(&store, 1000..1050);
        store
            .flush(soon())
            .unwrap_or_else(|e| panic!("{policy}: {e}"));
        assert_eq!(there(&store, &ns, 0..440).len(), 440, "{policy}");
        clear_and_check(&store);
    }
}
