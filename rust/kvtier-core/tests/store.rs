//! The store's verbs, end to end.

mod common;

use std::time::{Duration, Instant};

use common::*;
use kvtier_core::config::{Config, Memory, MemoryKind};
use kvtier_core::error::Kind;
use kvtier_core::layout::{Layer, Layout, Selection, Tokens};
use kvtier_core::load::Miss;
use kvtier_core::put::{Block, Put};
use kvtier_core::shares::Quota;
use kvtier_core::store::{Namespace, Store};

#[test]
fn what_is_put_is_read_back_whole_and_in_parts() {
    let store = dram(8 << 20);
    let ns = gqa(30, 16);
    for tokens in [16, 5, 1] {
        let data = bytes(tokens as u64, 30 * 2 * 384 * tokens);
        let key = key(tokens as u64);
        assert_eq!(put(&store, &ns, &key, &data, None), Put::Stored("dram"));
        assert_eq!(put(&store, &ns, &key, &data, None), Put::Present("dram"));
        assert_eq!(get(&store, &ns, &key, data.len()), Ok(data.clone()));
        let selection = Selection {
            layers: Some(3..5),
            tokens: Tokens::Range(0..1),
        };
        let want: Vec<u8> = (3..5)
            .flat_map(|layer| (0..2).map(move |plane| (layer * 2 + plane) * 384 * tokens))
            .flat_map(|at| data[at..at + 384].to_vec())
            .collect();
        assert_eq!(
            get_part(&store, &ns, &key, want.len(), &selection),
            Ok(want)
        );
    }
    assert_eq!(get(&store, &ns, &key(99), 10), Err(Miss::Absent));
}

#[test]
fn a_namespace_never_sees_another_ones_blocks() {
    let store = dram(4 << 20);
    let (a, b) = (opaque(b"a"), opaque(b"b"));
    put(&store, &a, &key(1), &bytes(1, 5000), None);
    assert_eq!(get(&store, &b, &key(1), 5000), Err(Miss::Absent));
    assert_eq!(store.clear(Some(&b)).unwrap(), 0);
    assert_eq!(store.clear(Some(&a)).unwrap(), 1);
    assert_eq!(store.report().blocks, 0);
}

#[test]
fn bad_input_is_refused_and_loses_nothing() {
    let store = dram(4 << 20);
    let ns = gqa(2, 4);
    let data = bytes(1, 2 * 2 * 384 * 4);
    put(&store, &ns, &key(1), &data, None);
    let errors = [
        try_put(&store, &ns, &key(2), &data[1..], None).unwrap_err(),
        try_put(&store, &ns, &key(1)[..15], &data, None).unwrap_err(),
        try_put(&store, &ns, &key(1), &data[..2 * 2 * 384 * 3], None).unwrap_err(),
        try_get(&store, &ns, &key(1), data.len() - 1, &Selection::default()).unwrap_err(),
        try_get(
            &store,
            &ns,
            &key(1),
            10,
            &Selection {
                layers: Some(0..3),
                tokens: Tokens::All,
            },
        )
        .unwrap_err(),
    ];
    assert!(
        errors.iter().all(|e| e.kind() == Kind::InvalidBlock),
        "{errors:?}"
    );
    assert_eq!(get(&store, &ns, &key(1), data.len()), Ok(data));
}

#[test]
fn a_block_never_outlives_its_parent() {
    let store = dram(4 << 20);
    let ns = opaque(b"chains");
    let data = |n| bytes(n, 5000);
    assert_eq!(
        put(&store, &ns, &key(2), &data(2), Some(&key(1))),
        Put::Orphan
    );
    put(&store, &ns, &key(1), &data(1), None);
    put(&store, &ns, &key(2), &data(2), Some(&key(1)));
    put(&store, &ns, &key(3), &data(3), Some(&key(2)));
    put(&store, &ns, &key(4), &data(4), Some(&key(1)));
    let lease = store
        .lease(&ns, &[&key(3)], true, soon())
        .unwrap()
        .remove(0)
        .unwrap();
    assert_eq!(store.remove(&ns, &[&key(2)]).unwrap(), [true]);
    let there = store
        .contains(&ns, &[&key(1), &key(2), &key(3), &key(4)])
        .unwrap();
    assert_eq!(there, [true, false, false, true]);
    // SAFETY: the lease keeps the block's bytes.
    let leased = unsafe { std::slice::from_raw_parts(lease.ptr(), lease.len()) };
    assert_eq!(leased, data(3));
}

#[test]
fn a_full_block_replaces_the_partial_one_it_names() {
    let store = dram(4 << 20);
    let ns = gqa(2, 4);
    let partial = bytes(1, 2 * 2 * 384 * 3);
    let full = bytes(2, 2 * 2 * 384 * 4);
    put(&store, &ns, &key(1), &partial, None);
    let block = kvtier_core::put::Block {
        key: &key(2),
        data: &full,
        parent: None,
        replaces: Some(&key(1)),
        importance: 0.0,
    };
    // Even when the full one is there already.
    for want in [Put::Stored("dram"), Put::Present("dram")] {
        assert_eq!(store.put(&ns, &block, soon()).unwrap(), want);
        let there = store.contains(&ns, &[&key(1), &key(2)]).unwrap();
        assert_eq!(there, [false, true]);
        put(&store, &ns, &key(1), &partial, None);
    }
}

#[test]
fn eviction_takes_leaves_first_and_spares_what_is_held() {
    let store = dram_by_age(1 << 20);
    let ns = opaque(b"full");
    let size = 60_000;
    for chain in 0..2 {
        for i in 0..5u64 {
            let parent = i.checked_sub(1).map(|p| key(chain * 100 + p));
            let parent = parent.as_ref().map(|k| &k[..]);
            assert_eq!(
                put(&store, &ns, &key(chain * 100 + i), &bytes(i, size), parent),
                Put::Stored("dram")
            );
        }
    }
    assert!(store.pin(&ns, &[&key(4)], soon()).unwrap()[0]);
    for i in 0..40 {
        assert_eq!(
            put(&store, &ns, &key(1000 + i), &bytes(i, size), None),
            Put::Stored("dram")
        );
    }
    let chain: Vec<[u8; 32]> = (0..5).map(key).collect();
    let keys: Vec<&[u8]> = chain.iter().map(|k| &k[..]).collect();
    assert_eq!(
        store.matching(&ns, &keys).unwrap().blocks,
        5,
        "the pinned leaf keeps its parents"
    );
    assert_eq!(store.matching(&ns, &[&key(100)]).unwrap().blocks, 0);
    let error = try_put(&store, &ns, &key(7), &bytes(7, 2 << 20), None).unwrap_err();
    assert_eq!(error.kind(), Kind::Full);
    assert_eq!(
        store.unpin(&ns, &[&key(4), &key(4)]).unwrap(),
        [true, false]
    );
}

#[test]
fn pins_alone_make_the_store_full() {
    let store = dram(1 << 20);
    let ns = opaque(b"pins");
    let mut leases = Vec::new();
    let error = loop {
        let n = leases.len() as u64;
        match try_put_by(
            &store,
            &ns,
            &key(n),
            &bytes(n, 60_000),
            None,
            Instant::now(),
        ) {
            Ok(_) => leases.push(leased(&store, &ns, &key(n))),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), Kind::Full);
    // On a loaded machine a short deadline has passed at the call: then there is no wait for it.
    let waited = (0..14).any(|n| {
        let late = Instant::now() + Duration::from_millis(1 << n);
        let error = try_put_by(&store, &ns, &key(500), &bytes(1, 60_000), None, late);
        match error.unwrap_err().kind() {
            Kind::Full => false,
            kind => kind == Kind::Deadline,
        }
    });
    assert!(waited, "it was full whatever the deadline");
    leases.pop();
    assert_eq!(
        put(&store, &ns, &key(500), &bytes(1, 60_000), None),
        Put::Stored("dram")
    );
}

/// Where a look at all that is held takes longer than the caller wanted to wait, he did wait.
#[test]
fn a_deadline_that_passes_at_the_first_look_is_one() {
    let store = dram(32 << 20);
    let ns = opaque(b"look");
    let by = |n, deadline| try_put_by(&store, &ns, &key(n), b"small", None, deadline);
    let mut leases = Vec::new();
    while by(leases.len() as u64, Instant::now()).is_ok() {
        leases.push(leased(&store, &ns, &key(leases.len() as u64)));
    }
    // On a loaded machine it has passed at the call, now and then.
    let waited = (0..100).any(|_| {
        let error = by(1 << 20, Instant::now() + Duration::from_micros(50)).unwrap_err();
        error.kind() == Kind::Deadline
    });
    assert!(waited, "full, as if there had been no time at all");
}

#[test]
fn of_what_was_read_together_the_first_is_the_last_to_leave() {
    let store = dram_by_age(2 << 20);
    let ns = opaque(b"order");
    let blocks: Vec<_> = (0..3).map(|n| (key(n), bytes(n, 100_000))).collect();
    for (name, data) in &blocks {
        put(&store, &ns, name, data, None);
    }
    assert!(get_all(&store, &ns, &blocks).iter().all(Result::is_ok));
    let keys: Vec<&[u8]> = blocks.iter().map(|(name, _)| &name[..]).collect();
    let mut left = 3;
    for n in 10..100 {
        put(&store, &ns, &key(n), &bytes(n, 100_000), None);
        let there = store.contains(&ns, &keys).unwrap();
        let now = there.iter().filter(|&&there| there).count();
        assert!(there[..now].iter().all(|&there| there), "{there:?}");
        left = left.min(now);
    }
    assert_eq!(left, 0);
}

#[test]
fn the_times_of_the_puts_of_a_call_are_parts_of_its_own() {
    let store = dram(32 << 20);
    let ns = opaque(b"time");
    let names: Vec<[u8; 32]> = (0..200).map(key).collect();
    let data = bytes(1, 100_000);
    let blocks: Vec<Block<'_>> = names
        .iter()
        .map(|name| Block {
            key: name,
            data: &data,
            parent: None,
            replaces: None,
            importance: 0.0,
        })
        .collect();
    let begun = Instant::now();
    store.put_many(&ns, &blocks, soon()).unwrap();
    let took = begun.elapsed();
    store.put_many(&ns, &blocks, soon()).unwrap();
    let put = store.report().put;
    assert_eq!(put.count, 200, "what was there already is not stored again");
    let sum = put.mean_s * 200.0;
    assert!(sum <= took.as_secs_f64(), "{sum} s in {took:?}");
}

#[test]
fn a_lease_outlives_the_store() {
    let store = dram(2 << 20);
    let ns = opaque(b"lease");
    let data = bytes(1, 100_000);
    put(&store, &ns, &key(1), &data, None);
    let lease = store
        .lease(&ns, &[&key(1)], true, soon())
        .unwrap()
        .remove(0)
        .unwrap();
    store.close(soon()).unwrap();
    assert_eq!(
        try_put(&store, &ns, &key(2), &data, None)
            .unwrap_err()
            .kind(),
        Kind::Closed
    );
    drop(store);
    // SAFETY: the lease keeps the block's bytes.
    let leased = unsafe { std::slice::from_raw_parts(lease.ptr(), lease.len()) };
    assert_eq!(leased, data);
}

#[test]
fn changed_bytes_are_a_miss_and_the_memory_is_not_used_again() {
    let store = dram(2 << 20);
    let ns = opaque(b"scribble");
    for size in [9000, 200_000] {
        put(&store, &ns, &key(size), &bytes(size, size as usize), None);
        let lease = store
            .lease(&ns, &[&key(size)], true, soon())
            .unwrap()
            .remove(0)
            .unwrap();
        // SAFETY: what a careless user of a zero-copy view might do; nobody reads it meanwhile.
        unsafe { *lease.ptr().cast_mut().add(777) ^= 1 };
        drop(lease);
        assert_eq!(
            get(&store, &ns, &key(size), size as usize),
            Err(Miss::Corrupt)
        );
        assert_eq!(store.contains(&ns, &[&key(size)]).unwrap(), [false]);
    }
    let report = store.report();
    assert!(report.tiers[0].quarantined >= 209_000);
    assert_eq!(
        report.tiers[0]
            .counters
            .iter()
            .find(|c| c.0 == "corrupt")
            .unwrap()
            .1,
        2
    );
}

#[test]
fn blocks_demote_to_cxl_and_come_back() {
    let mut cxl = Memory::dram(4 << 20);
    cxl.kind = MemoryKind::Cxl;
    cxl.numa_node = Some(0);
    let store = Store::open(Config::new(vec![Memory::dram(1 << 20), cxl], None)).unwrap();
    let ns = opaque(b"cxl");
    let size = 50_000;
    for i in 0..40 {
        assert_eq!(
            put(&store, &ns, &key(i), &bytes(i, size), None),
            Put::Stored("dram")
        );
    }
    for i in 0..40 {
        assert_eq!(get(&store, &ns, &key(i), size), Ok(bytes(i, size)));
    }
    let report = store.report();
    assert!(report.tiers[1].blocks >= 20, "{report:?}");
    let first = key(0);
    let job = store.prefetch(&ns, &[&first], DRAM, None, 0).unwrap();
    assert!(job.wait(soon()));
    assert_eq!(job.results().unwrap(), [Ok("dram")]);
    assert_eq!(get(&store, &ns, &first, size), Ok(bytes(0, size)));
}

#[test]
fn any_layout_of_mixed_layers_round_trips() {
    let store = dram(16 << 20);
    let layers = vec![
        Layer {
            planes: 2,
            token_bytes: 1024,
        },
        Layer {
            planes: 1,
            token_bytes: 576,
        },
        Layer {
            planes: 2,
            token_bytes: 256,
        },
    ];
    let layout = Layout::new(layers, 64).unwrap();
    let ns = Namespace::new(b"mixed", layout);
    let data = bytes(3, (2048 + 576 + 512) * 64);
    put(&store, &ns, &key(1), &data, None);
    let layer = Selection {
        layers: Some(1..2),
        tokens: Tokens::All,
    };
    assert_eq!(
        get_part(&store, &ns, &key(1), 576 * 64, &layer),
        Ok(data[2048 * 64..(2048 + 576) * 64].to_vec())
    );
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let bad = [
        Config::new(vec![], None),
        Config::new(vec![Memory::dram(4096)], None),
        Config {
            policy: "mru".into(),
            ..Config::new(vec![Memory::dram(1 << 20)], None)
        },
        Config {
            low: 0.99,
            high: 0.5,
            ..Config::new(vec![Memory::dram(1 << 20)], None)
        },
    ];
    for config in bad {
        assert_eq!(Store::open(config).err().unwrap().kind(), Kind::Config);
    }
}

#[test]
fn making_room_for_a_block_spares_its_parent_under_any_policy() {
    const SIZE: usize = 16_000;
    for policy in kvtier_core::policy::NAMES {
        let mut config = Config::new(vec![Memory::dram(2 << 20)], None);
        config.policy = policy.into();
        let store = Store::open(config).unwrap();
        let ns = opaque(b"chains");
        for chain in 0..60 {
            let mut parent = None;
            for n in 0..40 {
                let name = key(chain * 100 + n);
                let put = put(
                    &store,
                    &ns,
                    &name,
                    &bytes(n, SIZE),
                    parent.as_ref().map(|k: &[u8; 32]| &k[..]),
                );
                assert_eq!(
                    put,
                    Put::Stored("dram"),
                    "{policy}: block {n} of chain {chain}"
                );
                parent = Some(name);
            }
        }
    }
}

#[test]
fn a_put_that_waits_goes_on_when_a_lease_ends() {
    let store = dram(1 << 20);
    let ns = opaque(b"waits");
    let size = 400_000;
    let leases: Vec<_> = (0..2)
        .map(|n| {
            put(&store, &ns, &key(n), &bytes(n, size), None);
            leased(&store, &ns, &key(n))
        })
        .collect();
    std::thread::scope(|scope| {
        let putter = scope.spawn(|| put(&store, &ns, &key(9), &bytes(9, size), None));
        drop(leases);
        assert_eq!(putter.join().unwrap(), Put::Stored("dram"));
    });
}

#[test]
fn what_is_pinned_stays_with_its_ancestors_under_any_policy() {
    const SIZE: usize = 40_000;
    for policy in kvtier_core::policy::NAMES {
        let config = Config {
            policy: policy.into(),
            ..Config::new(vec![Memory::dram(1 << 20)], None)
        };
        let store = Store::open(config).unwrap();
        let ns = opaque(b"pinned");
        let chain = put_blocks(&store, &ns, 4, SIZE, true);
        assert!(store.pin(&ns, &[&key(3)], soon()).unwrap()[0]);
        for n in 100..200 {
            put(&store, &ns, &key(n), &bytes(n, SIZE), None);
        }
        assert_eq!(
            store.matching(&ns, &keys(&chain)).unwrap().blocks,
            4,
            "{policy}"
        );
        // Removing is stronger than pinning; and what is put again is not pinned yet.
        store.remove(&ns, &[&key(3)]).unwrap();
        assert_eq!(store.unpin(&ns, &[&key(3)]).unwrap(), [false]);
        put(&store, &ns, &key(3), &chain[3].1, Some(&key(2)));
        assert!(store.pin(&ns, &[&key(3)], soon()).unwrap()[0]);
        for n in 200..300 {
            put(&store, &ns, &key(n), &bytes(n, SIZE), None);
        }
        assert_eq!(
            store.matching(&ns, &keys(&chain)).unwrap().blocks,
            4,
            "{policy}"
        );
        clear_and_check(&store);
    }
}

/// Tables may take three quarters of memory. Of the rest, what is guaranteed leaves room for others.
#[test]
fn guarantees_shrink_where_tables_take_what_others_need() {
    const SIZE: u64 = 2 << 20;
    let store = over(SIZE, RamDevice::new(64 << 20), |_| {});
    let (own, others) = (opaque(b"guaranteed"), opaque(b"others"));
    let promised = SIZE * 3 / 10;
    let quota = Quota {
        guaranteed: vec![promised],
        ..Quota::default()
    };
    store.set_quota(&own, &quota).unwrap();
    let guaranteed = || store.namespace_report(&own).unwrap().shares[0].guaranteed;
    assert_eq!(guaranteed(), promised.next_multiple_of(4096));
    for n in 0..12_000 {
        for ns in [&own, &others] {
            assert_eq!(put(&store, ns, &key(n), &[7], None), Put::Stored("dram"));
        }
        assert_eq!(get(&store, &others, &key(n), 1), Ok(vec![7]));
    }
    let dram = &store.report().tiers[0];
    assert!(guaranteed() <= dram.capacity * 9 / 10, "{dram:?}");
    let kept = store.namespace_report(&own).unwrap().shares[0].bytes;
    assert!(
        kept + 4096 > guaranteed(),
        "{kept} bytes are kept: {dram:?}"
    );
    clear_and_check(&store);
}
