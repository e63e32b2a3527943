//! Blocks on their way between DRAM, CXL memory and NVMe.
#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod auto;
#[path = "../common/mod.rs"]
mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use kvtier_core::config::{Config, Memory, MemoryKind};
use kvtier_core::error::Kind;
use kvtier_core::index::half;
use kvtier_core::layout::{Selection, Tokens};
use kvtier_core::load::Miss;
use kvtier_core::put::Put;
use kvtier_core::read::Out;
use kvtier_core::store::{Namespace, Store};
use kvtier_nvme::{EngineKind, NvmeTier, Options};

const SIZE: usize = 40_000;

fn hits(store: &Store, ns: &Namespace, blocks: &[([u8; 32], Vec<u8>)]) -> usize {
    get_all(store, ns, blocks)
        .iter()
        .filter(|g| g.is_ok())
        .count()
}

#[test]
fn every_block_is_written_once_and_clean_victims_are_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let store = two_tiers(2 << 20, nvme(dir.path(), 16 << 20));
    let ns = opaque(b"once");
    let blocks = put_blocks(&store, &ns, 100, SIZE, false);
    assert!(count(&store, "dram", "demotions") >= 40);
    store.flush(soon()).unwrap();
    assert_eq!(count(&store, "nvme", "writes"), 100);
    assert_eq!(tier(&store, "nvme").blocks, 100);
    for _ in 0..3 {
        assert_eq!(hits(&store, &ns, &blocks), 100);
    }
    assert_eq!(
        count(&store, "nvme", "writes"),
        100,
        "clean blocks are not written again"
    );
    assert!(count(&store, "dram", "drops") >= 100);
    assert_eq!(count(&store, "dram", "evictions"), 0);
    audit(&store);
    clear_and_check(&store);
}

#[test]
fn where_the_index_fills_memory_new_blocks_take_the_place_of_old_ones_and_no_more() {
    let store = over(4 << 20, RamDevice::new(256 << 20), |config| {
        config.policy = "arc".into();
    });
    let (ns, data) = (opaque(b"many"), bytes(1, 4096));
    let mut resident = Vec::new();
    for n in 0..36_000 {
        let put = try_put(&store, &ns, &key(n), &data, None).unwrap();
        assert_eq!(put, Put::Stored("dram"));
        if n % 6_000 == 5_999 {
            resident.push(store.report().blocks);
        }
    }
    let report = store.report();
    let (most, least) = (
        resident.iter().max().unwrap(),
        resident.iter().min().unwrap(),
    );
    assert!(
        *most < 12_000,
        "memory holds the index of all: {resident:?}"
    );
    assert!(
        least * 3 > *most,
        "it forgets what it could keep: {resident:?}"
    );
    assert!(tier(&store, "dram").used + report.metadata <= 4 << 20);
    audit(&store);
    clear_and_check(&store);
}

#[test]
fn a_restart_reads_the_journal_and_not_the_data() {
    let dir = tempfile::tempdir().unwrap();
    let ns = gqa(4, 16);
    let len = 4 * 2 * 384 * 16;
    let store = two_tiers(2 << 20, nvme(dir.path(), 16 << 20));
    let blocks = put_blocks(&store, &ns, 60, len, true);
    store.flush(soon()).unwrap();
    store.close(soon()).unwrap();
    store.close(soon()).unwrap();
    drop(store);

    let store = two_tiers(2 << 20, nvme(dir.path(), 16 << 20));
    assert_eq!(count(&store, "nvme", "recovered"), 60);
    let found = store.matching(&ns, &keys(&blocks)).unwrap();
    assert_eq!(
        (found.blocks, found.tokens),
        (60, 60 * 16),
        "leaves were written first"
    );
    assert_eq!(found.bytes, [("nvme", 60 * len as u64)]);
    assert_eq!(count(&store, "nvme", "reads"), 0);
    let gots = get_all(&store, &ns, &blocks);
    assert!(gots.iter().all(|got| *got == Ok("nvme")), "{gots:?}");
    assert_eq!(count(&store, "nvme", "writes"), 0);
    // What was loaded last is in memory now.
    assert_eq!(get_all(&store, &ns, &blocks[59..]), [Ok("dram")]);
}

#[test]
fn an_open_directory_is_locked() {
    let dir = tempfile::tempdir().unwrap();
    let store = two_tiers(1 << 20, nvme(dir.path(), 4 << 20));
    let config = || Config::new(vec![Memory::dram(1 << 20)], Some(nvme(dir.path(), 4 << 20)));
    let error = Store::open(config()).err().unwrap();
    assert_eq!(error.kind(), Kind::Locked);
    store.close(soon()).unwrap();
    Store::open(config()).unwrap();
}

#[test]
fn blocks_without_their_ancestors_are_dropped_at_restart() {
    let device = RamDevice::new(8 << 20);
    let ns = opaque(b"orphans");
    let store = over(2 << 20, device.clone(), |_| ());
    put_blocks(&store, &ns, 6, SIZE, false);
    store.close(soon()).unwrap();

    let mut options = Options::new(Vec::new(), 8 << 20);
    options.engine = EngineKind::Threads;
    let config = Config::new(vec![Memory::dram(2 << 20)], Some(options.clone()));
    let (tier_below, mut recovered) = NvmeTier::open_on(vec![device], options).unwrap();
    recovered.sort_by_key(|r| (0..6).position(|n| ns.ids(&[&key(n)]).unwrap()[0] == r.id));
    let name = |n: usize| Some(half(&recovered[n].id));
    // 1 follows 0, and comes before it; 2 and 3 form a ring; 4 follows what is not there; 5 it.
    let parents = [None, name(0), name(3), name(2), Some([7; 16]), name(4)];
    for (r, parent) in recovered.iter_mut().zip(parents) {
        r.parent = parent;
    }
    recovered.swap(0, 1);
    let store = Store::assemble(config, Some((tier_below, recovered))).unwrap();
    let all: Vec<[u8; 32]> = (0..6).map(key).collect();
    let all: Vec<&[u8]> = all.iter().map(|k| &k[..]).collect();
    let there = store.contains(&ns, &all).unwrap();
    assert_eq!(there, [true, true, false, false, false, false]);
    assert_eq!(total(&store, "orphans"), 4);
    store.remove(&ns, &[&key(0)]).unwrap();
    assert_eq!(store.report().blocks, 0, "1 went with its parent");
    clear_and_check(&store);
}

#[test]
fn more_entries_than_memory_can_name_are_forgotten_at_restart() {
    let device = RamDevice::new(80 << 20);
    let ns = opaque(b"many");
    let store = over(16 << 20, device.clone(), |_| ());
    put_blocks(&store, &ns, 4000, 100, false);
    store.close(soon()).unwrap();
    let store = over(2 << 20, device, |_| ());
    audit(&store);
    let blocks = store.report().blocks;
    assert!((1000..4000).contains(&blocks), "{blocks}");
    assert_eq!(
        put(&store, &ns, &key(9999), &bytes(1, SIZE), None),
        Put::Stored("dram")
    );
    for n in 10_000..13_000 {
        put(&store, &ns, &key(n), &bytes(n, 100), None);
        audit(&store);
    }
    assert_eq!(get(&store, &ns, &key(12_999), 100), Ok(bytes(12_999, 100)));
}

#[test]
fn one_read_serves_all_who_ask_for_a_block() {
    let device = GateDevice::new(8 << 20);
    let ns = opaque(b"single");
    let store = over(2 << 20, device.clone(), |_| ());
    let blocks = put_blocks(&store, &ns, 1, SIZE, false);
    store.close(soon()).unwrap();
    let store = over(2 << 20, device.clone(), |_| ());
    device.take_reads();
    device.close(true, false);
    let job = store.prefetch(&ns, &[&key(0)], DRAM, None, 0).unwrap();
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..6)
            .map(|i| {
                let (store, ns, blocks) = (&store, &ns, &blocks);
                scope.spawn(move || {
                    if i % 2 == 0 {
                        assert!(get_all(store, ns, blocks)[0].is_ok());
                        return;
                    }
                    let lease = store
                        .lease(ns, &[&key(0)], true, soon())
                        .unwrap()
                        .remove(0)
                        .unwrap();
                    // SAFETY: the lease keeps the block's bytes.
                    let leased = unsafe { std::slice::from_raw_parts(lease.ptr(), lease.len()) };
                    assert!(leased == blocks[0].1);
                })
            })
            .collect();
        eventually("all have asked", || {
            total(&store, "joined") + total(&store, "loads") >= 7
        });
        device.open();
        readers.into_iter().for_each(|r| r.join().unwrap());
    });
    assert!(job.wait(soon()));
    assert_eq!(job.results().unwrap(), [Ok("dram")]);
    assert_eq!(device.take_reads().len(), 1);
    assert_eq!(total(&store, "loads"), 1);
}

/// A store over a device that does one thing at a time, with `count` blocks that lie only there;
/// and where on the device each lies.
fn cold_blocks(device: &Arc<GateDevice>, ns: &Namespace, count: u64) -> (Store, Vec<u64>) {
    let serial = |config: &mut Config| {
        if let Some(options) = &mut config.nvme {
            options.inflight_bytes = 4096;
        }
    };
    let store = over(4 << 20, device.clone(), serial);
    let blocks = put_blocks(&store, ns, count, SIZE, false);
    store.close(soon()).unwrap();
    let store = over(4 << 20, device.clone(), serial);
    device.take_reads();
    for block in blocks {
        assert!(get_all(&store, ns, &[block])[0].is_ok());
    }
    let places = device.take_reads();
    assert_eq!(places.len() as u64, count);
    store.close(soon()).unwrap();
    let store = over(1 << 20, device.clone(), serial);
    device.take_reads();
    (store, places)
}

#[test]
fn prefetches_run_in_their_order_and_urgent_ones_first() {
    let device = GateDevice::new(16 << 20);
    let ns = opaque(b"order");
    let (store, places) = cold_blocks(&device, &ns, 12);
    // Memory is full of leases: the prefetcher waits with its first block.
    let held: Vec<_> = (100..)
        .map_while(|n| {
            let full = try_put_by(&store, &ns, &key(n), &bytes(n, 4096), None, Instant::now());
            full.is_ok().then_some(n)
        })
        .map(|n| leased(&store, &ns, &key(n)))
        .collect();
    assert!(held.len() > 100);
    let names: Vec<[u8; 32]> = (0..12).map(key).collect();
    let names: Vec<&[u8]> = names.iter().map(|k| &k[..]).collect();
    let before = total(&store, "loads");
    let late = store.prefetch(&ns, &names[..6], DRAM, None, 0).unwrap();
    eventually("the first one waits", || total(&store, "loads") > before);
    let later = store.prefetch(&ns, &names[6..8], DRAM, None, 0).unwrap();
    let urgent = store.prefetch(&ns, &names[8..], DRAM, None, 3).unwrap();
    drop(held);
    for job in [&late, &later, &urgent] {
        assert!(job.wait(soon()));
    }
    let mut order: Vec<usize> = device
        .take_reads()
        .iter()
        .map(|at| places.iter().position(|p| p == at).unwrap())
        .collect();
    order.retain(|&n| n != 0); // the one that waited: anywhere, or given up
    assert_eq!(order, [8, 9, 10, 11, 1, 2, 3, 4, 5, 6, 7]);
    assert!(
        urgent
            .results()
            .unwrap()
            .iter()
            .all(|got| *got == Ok("dram"))
    );
}

#[test]
fn reads_do_not_wait_for_writes_where_what_was_read_before_can_make_room() {
    // So large that the writes that may be under way leave the engine threads for reads.
    const SIZE: usize = 120_000;
    let device = GateDevice::new(16 << 20);
    let ns = opaque(b"spent");
    let store = over(4 << 20, device.clone(), |_| ());
    let cold = put_blocks(&store, &ns, 8, SIZE, false);
    store.close(soon()).unwrap();
    let store = over(1 << 20, device.clone(), |_| ());
    device.close(false, true);
    // Memory is full of blocks that cannot be written; one leaves, for the first read.
    let put = |n| try_put_by(&store, &ns, &key(n), &bytes(n, SIZE), None, Instant::now());
    let last = (100..).find(|&n| put(n).is_err()).unwrap() - 1;
    assert_eq!(store.remove(&ns, &[&key(last)]).unwrap(), [true]);
    assert_eq!(get_all(&store, &ns, &cold), [Ok("nvme"); 8]);
    // What was asked for again has earned its place.
    assert_eq!(get_all(&store, &ns, &cold[7..]), [Ok("dram")]);
    let mut out = vec![0; SIZE];
    let target = Out {
        ptr: out.as_mut_ptr(),
        len: SIZE,
    };
    let (all, now) = (Selection::default(), Instant::now());
    // SAFETY: the buffer lives through the call.
    let stuck = unsafe { store.get_into(&ns, &[&key(0)], &[target], &all, now) };
    assert_eq!(stuck.unwrap(), [Err(Miss::Full)]);
    device.open();
    assert_eq!(get_all(&store, &ns, &cold[..1]), [Ok("nvme")]);
    store.close(soon()).unwrap();
}

#[test]
fn a_prefetch_ends_when_it_is_cancelled_or_its_time_is_up() {
    let device = GateDevice::new(16 << 20);
    let ns = opaque(b"ends");
    let (store, _) = cold_blocks(&device, &ns, 6);
    device.close(true, false);
    let names: Vec<[u8; 32]> = (0..6).map(key).collect();
    let names: Vec<&[u8]> = names.iter().map(|k| &k[..]).collect();
    let job = store.prefetch(&ns, &names[..2], DRAM, None, 0).unwrap();
    assert!(job.results().is_none());
    job.cancel();
    assert_eq!(job.results().unwrap(), [Err(Miss::Cancelled); 2]);
    let soon_over = Some(Instant::now() + Duration::from_millis(5));
    let job = store
        .prefetch(&ns, &names[2..], DRAM, soon_over, 0)
        .unwrap();
    assert!(job.wait(soon()));
    assert_eq!(job.results().unwrap(), [Err(Miss::Deadline); 4]);
    let (tell, told) = std::sync::mpsc::channel();
    job.on_done(Box::new(move || tell.send(()).unwrap()));
    told.recv().unwrap();
    let short = Instant::now() + Duration::from_millis(5);
    let mut out = vec![0; SIZE];
    let target = Out {
        ptr: out.as_mut_ptr(),
        len: SIZE,
    };
    // SAFETY: the buffer lives through the call.
    let got = unsafe { store.get_into(&ns, &names[2..3], &[target], &Selection::default(), short) };
    assert_eq!(got.unwrap(), [Err(Miss::Deadline)]);
    device.open();
    eventually("what was asked for arrives all the same", || {
        store.matching(&ns, &names[2..3]).unwrap().tiers == ["dram"]
    });
    let unknown = store.prefetch(&ns, &[&key(77)], DRAM, None, 0).unwrap();
    assert!(unknown.wait(soon()));
    assert_eq!(unknown.results().unwrap(), [Err(Miss::Absent)]);
    clear_and_check(&store);
}

#[test]
fn a_call_may_ask_for_more_than_memory_holds() {
    let device = RamDevice::new(16 << 20);
    let ns = opaque(b"more");
    let store = over(8 << 20, device.clone(), |_| ());
    let blocks = put_blocks(&store, &ns, 80, 100_000, false);
    store.close(soon()).unwrap();
    let store = over(1 << 20, device, |_| ());
    std::thread::scope(|scope| {
        for i in 0..3 {
            let (store, ns, mut blocks) = (&store, &ns, blocks.clone());
            scope.spawn(move || {
                blocks.rotate_left(i * 27);
                assert_eq!(hits(store, ns, &blocks), 80);
            });
        }
    });
    // Leases hold what they have: the rest finds no room.
    let names = keys(&blocks);
    let few = store.lease(&ns, &names[..4], true, soon()).unwrap();
    let leases = store.lease(&ns, &names, true, Instant::now()).unwrap();
    let held = leases.iter().filter(|l| l.is_ok()).count();
    assert!((4..=9).contains(&held), "{held}");
    assert!(
        leases
            .iter()
            .any(|l| matches!(l, Err(Miss::Full | Miss::Deadline)))
    );
    drop((few, leases));
    assert_eq!(hits(&store, &ns, &blocks), 80);
    clear_and_check(&store);
}

#[test]
fn a_part_of_a_block_is_read_past_memory() {
    let dir = tempfile::tempdir().unwrap();
    let (layers, tokens) = (30, 64);
    let ns = gqa(layers, tokens as u32);
    let len = layers * 2 * 384 * tokens;
    let store = two_tiers(8 << 20, nvme(dir.path(), 16 << 20));
    let blocks = put_blocks(&store, &ns, 2, len, false);
    store.close(soon()).unwrap();
    let store = two_tiers(8 << 20, nvme(dir.path(), 16 << 20));
    for (layer, from, to) in [(0..1, 0, 64), (29..30, 3, 9), (7..12, 63, 64)] {
        let selection = Selection {
            layers: Some(layer.start as u32..layer.end as u32),
            tokens: Tokens::Range(from as u32..to as u32),
        };
        for (name, data) in &blocks {
            let want: Vec<u8> = (layer.start * 2..layer.end * 2)
                .flat_map(|plane| {
                    data[(plane * tokens + from) * 384..(plane * tokens + to) * 384].to_vec()
                })
                .collect();
            let got = get_part(&store, &ns, name, want.len(), &selection);
            assert!(got == Ok(want), "{selection:?}");
        }
    }
    let read = count(&store, "nvme", "read_bytes");
    assert!(
        read < len as u64 * 2,
        "{read} bytes were read for small parts of two blocks"
    );
    let all_tokens = Selection {
        layers: None,
        tokens: Tokens::Range(1..2),
    };
    let part = get_part(&store, &ns, &key(0), layers * 2 * 384, &all_tokens).unwrap();
    assert!(
        part.chunks(384)
            .enumerate()
            .all(|(i, c)| c == &blocks[0].1[(i * tokens + 1) * 384..][..384])
    );
    for (layers, tokens) in [(3..4, 5..5), (0..0, 0..1)] {
        let nothing = Selection {
            layers: Some(layers),
            tokens: Tokens::Range(tokens),
        };
        assert_eq!(get_part(&store, &ns, &key(1), 0, &nothing), Ok(Vec::new()));
    }
    // No slot that was used on the way may stay behind.
    clear_and_check(&store);
}

#[test]
fn a_registered_region_is_read_into_directly() {
    let dir = tempfile::tempdir().unwrap();
    let ns = opaque(b"region");
    let store = two_tiers(4 << 20, nvme(dir.path(), 8 << 20));
    let sizes = [4096, 10_000, 70_000, 1 << 20];
    for (n, size) in (0..).zip(sizes) {
        put(&store, &ns, &key(n), &bytes(n, size), None);
    }
    store.close(soon()).unwrap();
    let store = two_tiers(4 << 20, nvme(dir.path(), 8 << 20));
    let memory = Arc::new(Aligned::new(2 << 20));
    // SAFETY: `memory` is kept by the region and its operations, and is not touched but by them.
    let region = unsafe { store.register_region(memory.ptr(), 2 << 20, memory.clone()) }.unwrap();
    let mut places = Vec::new();
    let mut at = 0;
    for size in sizes {
        places.push(Out {
            ptr: memory.ptr().wrapping_add(at),
            len: size,
        });
        at += size.next_multiple_of(4096);
    }
    let names: Vec<[u8; 32]> = (0..4).map(key).collect();
    let names: Vec<&[u8]> = names.iter().map(|k| &k[..]).collect();
    // SAFETY: the places lie in the region and do not overlap.
    let gots =
        unsafe { store.get_into(&ns, &names, &places, &Selection::default(), soon()) }.unwrap();
    assert_eq!(gots, [Ok("nvme"); 4]);
    for (n, out) in (0..).zip(&places) {
        // SAFETY: the reads have completed.
        let got = unsafe { std::slice::from_raw_parts(out.ptr, out.len) };
        assert!(got == bytes(n, out.len), "block {n}");
    }
    assert_eq!(tier(&store, "dram").blocks, 0);
    eventually("nothing uses the region", || region.in_flight() == 0);
    eventually("no scratch is left", || tier(&store, "dram").used == 0);
    drop(region);
    eventually("the region lets its memory go", || {
        Arc::strong_count(&memory) == 1
    });
    assert_eq!(hits(&store, &ns, &[(key(1), bytes(1, 10_000))]), 1);
    assert_eq!(
        tier(&store, "dram").blocks,
        1,
        "without a region it is loaded"
    );
}

#[test]
fn blocks_go_down_three_tiers_and_none_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let ns = opaque(b"three");
    let open = || three_tiers(1 << 20, 2 << 20, nvme(dir.path(), 16 << 20));
    let store = open();
    let blocks = put_blocks(&store, &ns, 150, SIZE, true);
    let found = store.matching(&ns, &keys(&blocks)).unwrap();
    assert_eq!(found.blocks, 150);
    assert!(
        ["dram", "cxl", "nvme"]
            .iter()
            .all(|t| found.tiers.contains(t)),
        "{found:?}"
    );
    for name in ["dram", "cxl", "nvme"] {
        assert_eq!(count(&store, name, "evictions"), 0);
    }
    assert_eq!(hits(&store, &ns, &blocks), 150);
    let at = found.tiers.iter().position(|t| *t == "cxl").unwrap();
    let job = store
        .prefetch(&ns, &[&blocks[at].0], DRAM, None, 0)
        .unwrap();
    assert!(job.wait(soon()) && job.results().unwrap()[0].is_ok());
    audit(&store);
    store.close(soon()).unwrap();
    let store = open();
    assert_eq!(store.matching(&ns, &keys(&blocks)).unwrap().blocks, 150);
    assert_eq!(hits(&store, &ns, &blocks), 150);
    clear_and_check(&store);
}

#[test]
fn reading_a_chain_that_no_tier_holds_whole_does_not_take_it_apart() {
    // NVMe holds 384; what is read lies in both tiers then, so the rest has to go, and no more.
    let store = over(2 << 20, RamDevice::new(6 << 20), |_| ());
    let ns = opaque(b"long");
    // Some fifteen fewer than ever fit: with more, the last one leaves for the next, which follows it.
    let blocks = put_blocks(&store, &ns, 440, 16_000, true);
    let found = store.matching(&ns, &keys(&blocks)).unwrap().blocks;
    assert!(found > 420, "{found}");
    for _ in 0..8 {
        let hits = get_all(&store, &ns, &blocks)
            .iter()
            .filter(|got| got.is_ok())
            .count();
        let left = store.matching(&ns, &keys(&blocks)).unwrap().blocks;
        assert!(left > 320 && hits >= left, "{hits} hits, {left} left");
    }
    audit(&store);
    clear_and_check(&store);
}

#[test]
fn a_copy_that_leaves_a_lower_tier_stays_above() {
    let cxl = Memory {
        kind: MemoryKind::Cxl,
        ..Memory::dram(1 << 20)
    };
    let mut config = Config::new(vec![Memory::dram(4 << 20), cxl], None);
    config.policy = "lru-leaf".into();
    let store = Store::open(config).unwrap();
    let ns = opaque(b"above");
    let blocks = put_blocks(&store, &ns, 110, SIZE, false);
    assert_eq!(store.matching(&ns, &[&key(0)]).unwrap().tiers, ["cxl"]);
    let job = store.prefetch(&ns, &[&key(0)], DRAM, None, 0).unwrap();
    assert!(job.wait(soon()));
    assert_eq!(job.results().unwrap(), [Ok("dram")]);
    for n in 200..260 {
        put(&store, &ns, &key(n), &bytes(n, SIZE), None);
    }
    assert!(
        count(&store, "cxl", "evictions") > 20,
        "all of CXL was replaced"
    );
    assert_eq!(get_all(&store, &ns, &blocks[..1]), [Ok("dram")]);
    audit(&store);
    clear_and_check(&store);
}

#[test]
fn a_smaller_nvme_keeps_what_it_can_and_says_so() {
    let device = RamDevice::new(2 << 20);
    let ns = opaque(b"smaller");
    let store = over(4 << 20, device.clone(), |_| ());
    let blocks = put_blocks(&store, &ns, 60, SIZE, true);
    let error = store.flush(soon()).unwrap_err();
    assert_eq!(error.kind(), Kind::Full, "{error}");
    let writes = count(&store, "nvme", "writes");
    assert!(
        writes < 60,
        "{writes} writes: what does not fit must not chase away what does"
    );
    assert_eq!(hits(&store, &ns, &blocks), 60, "all is still in memory");
    store.close(soon()).unwrap();
    let store = over(4 << 20, device, |_| ());
    let kept = store.matching(&ns, &keys(&blocks)).unwrap().blocks;
    assert!((20..60).contains(&kept), "{kept}");
    assert_eq!(
        store.report().blocks,
        kept as u64,
        "what was kept is a chain from its root"
    );
}

#[test]
fn the_write_budget_is_kept() {
    let clock = TestClock::new();
    let ns = opaque(b"budget");
    let image = SIZE.next_multiple_of(4096) as u64;
    let store = over(1 << 20, RamDevice::new(8 << 20), |config| {
        config.write_budget = Some(24 * 10 * image); // ten blocks an hour
        config.nvme.as_mut().unwrap().clock = clock.clone();
    });
    put_blocks(&store, &ns, 100, SIZE, false);
    // It waits for what is under way, too.
    assert_eq!(store.flush(soon()).unwrap_err().kind(), Kind::Full);
    assert_eq!(count(&store, "nvme", "writes"), 10);
    assert!(total(&store, "over_budget") >= 60);
    clock.advance(3600);
    let _ = store.flush(soon());
    assert_eq!(count(&store, "nvme", "writes"), 20);
    audit(&store);
}

#[test]
fn a_loop_over_more_than_memory_holds_moves_nothing_to_and_fro() {
    let dir = tempfile::tempdir().unwrap();
    let store = three_tiers(2 << 20, 2 << 20, nvme(dir.path(), 32 << 20));
    let ns = opaque(b"loop");
    let blocks = put_blocks(&store, &ns, 100, SIZE, false);
    store.flush(soon()).unwrap();
    let moved = || {
        let moves = |tier| count(&store, tier, "demotions");
        let writes = count(&store, "nvme", "writes");
        (
            moves("dram"),
            moves("cxl"),
            count(&store, "cxl", "inserts"),
            writes,
        )
    };
    let before = moved();
    for _ in 0..4 {
        assert_eq!(hits(&store, &ns, &blocks), 100);
    }
    assert_eq!(
        moved(),
        before,
        "copies that are below are dropped, and come up again"
    );
    audit(&store);
}
