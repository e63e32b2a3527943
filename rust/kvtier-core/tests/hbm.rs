//! The HBM tier, over a pool that a test copies into itself: it decides when a copy ends, and how.
#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use common::*;
use kvtier_core::arena::backing::{HugePages, anonymous};
use kvtier_core::arena::{Arena, Pin};
use kvtier_core::config::{Config, Memory};
use kvtier_core::hbm::{Batch, Feed};
use kvtier_core::jobs::{Goal, Job};
use kvtier_core::layout::Selection;
use kvtier_core::load::Miss;
use kvtier_core::put::Put;
use kvtier_core::read::Got;
use kvtier_core::store::{Namespace, Store};

const SIZE: usize = 100_000;
/// Blocks that the pool holds: 25 pages each.
const FIT: u64 = 10;

/// Memory that stands for a device's.
struct Pool(Pin);

// SAFETY: bytes of slots that the tier hands out to one writer at a time; that is what is tested.
unsafe impl Sync for Pool {}

impl Pool {
    fn new(size: u64) -> Arc<Self> {
        let arena = Arena::new(anonymous(size as usize, HugePages::Off, None).unwrap());
        Arc::new(Pool(arena.alloc(arena.pages()).unwrap()))
    }

    fn copy(&self, batch: &Batch) {
        for c in batch.copies() {
            // SAFETY: the source is pinned, the place is the batch's own.
            unsafe { std::ptr::copy_nonoverlapping(c.host, self.0.ptr().add(c.at), c.len) };
        }
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        // SAFETY: inside the pool; the caller holds the place.
        unsafe { std::slice::from_raw_parts(self.0.ptr().add(at), len) }.to_vec()
    }
}

fn pool_size() -> u64 {
    (FIT * 25 * 4096).max(1 << 20)
}

fn open(dram: u64) -> (Arc<Store>, Feed, Arc<Pool>, Namespace) {
    let mut config = Config::new(vec![Memory::dram(dram)], None);
    config.hbm = Some(pool_size());
    let store = Arc::new(Store::open(config).unwrap());
    let feed = store.feed().unwrap();
    (store, feed, Pool::new(pool_size()), opaque(b"hbm"))
}

/// As [`open`], over NVMe, by this clock.
fn open_by(clock: &Arc<TestClock>) -> (Store, Feed, Arc<Pool>, Namespace) {
    let store = over(8 << 20, RamDevice::new(32 << 20), |config| {
        config.nvme.as_mut().unwrap().clock = clock.clone();
        config.hbm = Some(pool_size());
    });
    let feed = store.feed().unwrap();
    (store, feed, Pool::new(pool_size()), opaque(b"hbm"))
}

fn fill(store: &Store, ns: &Namespace, count: u64) -> Vec<[u8; 32]> {
    let names: Vec<_> = (0..count).map(key).collect();
    for (n, name) in (0..).zip(&names) {
        let put = put(store, ns, name, &bytes(n, SIZE), None);
        assert_eq!(put, Put::Stored("dram"));
    }
    names
}

fn lift(store: &Store, ns: &Namespace, names: &[[u8; 32]]) -> Arc<Job> {
    let keys: Vec<&[u8]> = names.iter().map(|n| &n[..]).collect();
    store.prefetch(ns, &keys, Goal::Hbm, None, 0).unwrap()
}

fn got(job: &Job) -> Vec<Got> {
    assert!(job.wait(soon()));
    job.results().unwrap()
}

fn used(store: &Store) -> u64 {
    store.report().tiers[0].used
}

fn place(store: &Store, ns: &Namespace, name: &[u8], take: bool) -> Option<(usize, Box<dyn Send>)> {
    let all = Selection::default();
    let placed = store.place(ns, &[name], &all, take).unwrap().remove(0)?;
    assert_eq!(placed.len(), SIZE);
    Some((placed.at(), Box::new(placed)))
}

/// Copies until the batches hold so many copies together, without finishing them.
fn begin(feed: &Feed, pool: &Pool, count: usize) -> Vec<Batch> {
    let (mut batches, mut begun) = (Vec::new(), 0);
    while begun < count {
        let mut batch = feed.next(true).unwrap();
        pool.copy(&batch);
        batch.verify();
        begun += batch.copies().len();
        batches.push(batch);
    }
    assert_eq!(begun, count);
    batches
}

#[test]
fn a_block_is_in_hbm_once_its_copy_has_ended_and_not_before() {
    let (store, feed, pool, ns) = open(8 << 20);
    let names = fill(&store, &ns, 3);
    let job = lift(&store, &ns, &names);
    let batches = begin(&feed, &pool, 3);
    assert!(!job.is_done());
    assert!(place(&store, &ns, &names[0], false).is_none());
    let keys: Vec<&[u8]> = names.iter().map(|n| &n[..]).collect();
    assert_eq!(store.matching(&ns, &keys).unwrap().tiers, ["dram"; 3]);
    batches.into_iter().for_each(|batch| batch.finish(true));
    assert_eq!(got(&job), [Ok("hbm"); 3]);
    let found = store.matching(&ns, &keys).unwrap();
    assert_eq!(found.tiers, ["hbm"; 3]);
    assert_eq!(found.bytes, [("hbm", 3 * SIZE as u64)]);
    for (n, name) in (0..).zip(&names) {
        let (at, _held) = place(&store, &ns, name, false).unwrap();
        assert_eq!(pool.read(at, SIZE), bytes(n, SIZE));
        assert_eq!(get(&store, &ns, name, SIZE).unwrap(), bytes(n, SIZE));
    }
    let tier = &store.report().tiers[0];
    assert_eq!((tier.name, tier.blocks), ("hbm", 3));
    assert_eq!(tier.used, 3 * 25 * 4096);
    // Asked for again it is there, and nothing is copied.
    assert_eq!(got(&lift(&store, &ns, &names)), [Ok("hbm"); 3]);
    assert!(feed.next(false).unwrap().copies().is_empty());
}

#[test]
fn a_failed_copy_gives_its_slot_back() {
    let (store, feed, pool, ns) = open(8 << 20);
    let names = fill(&store, &ns, 2);
    for dropped in [false, true] {
        let job = lift(&store, &ns, &names[..1]);
        for batch in begin(&feed, &pool, 1) {
            match dropped {
                true => drop(batch),
                false => batch.finish(false),
            }
        }
        assert_eq!(got(&job), [Err(Miss::Device)]);
        assert_eq!((used(&store), store.report().tiers[0].blocks), (0, 0));
        assert!(place(&store, &ns, &names[0], false).is_none());
    }
    assert_eq!(count(&store, "hbm", "errors"), 2);
    assert_eq!(count(&store, "hbm", "set_aside"), 0);
    // The source is as free to leave as before, and the block can be copied again.
    let job = lift(&store, &ns, &names);
    begin(&feed, &pool, 2)
        .into_iter()
        .for_each(|batch| batch.finish(true));
    assert_eq!(got(&job), [Ok("hbm"); 2]);
}

#[test]
fn a_device_that_does_not_answer_is_bypassed_until_it_does() {
    let clock = TestClock::new();
    let (store, feed, pool, ns) = open_by(&clock);
    let names = fill(&store, &ns, 7);
    let first = lift(&store, &ns, &names[..1]);
    begin(&feed, &pool, 1).remove(0).finish(true);
    assert_eq!(got(&first), [Ok("hbm")]);
    let hung = lift(&store, &ns, &names[1..3]);
    let batches = begin(&feed, &pool, 2);
    clock.advance(5);
    // These no thread takes. Nobody says when to stop waiting for any of them.
    let queued = lift(&store, &ns, &names[3..5]);
    assert_eq!(count(&store, "hbm", "set_aside"), 0);
    clock.advance(1);
    assert_eq!(got(&hung), [Err(Miss::Device); 2]);
    assert_eq!(got(&queued), [Err(Miss::Device); 2]);
    assert_eq!(count(&store, "hbm", "set_aside"), 1);
    assert_eq!(count(&store, "hbm", "errors"), 1);
    assert!(feed.next(false).unwrap().copies().is_empty());
    // It is asked for nothing, and readers are served from below; what it may still write to is kept.
    assert_eq!(got(&lift(&store, &ns, &names)), [Err(Miss::Device); 7]);
    assert!(place(&store, &ns, &names[0], false).is_none());
    assert_eq!(
        store.matching(&ns, &[&names[0]]).unwrap().tiers,
        ["dram"; 1]
    );
    assert_eq!(get(&store, &ns, &names[1], SIZE), Ok(bytes(1, SIZE)));
    assert_eq!(used(&store), 3 * 25 * 4096);
    // One copy after the other ends: what it has is right, and it is at work again.
    for batch in batches {
        batch.finish(true);
    }
    assert_eq!(count(&store, "hbm", "set_aside"), 0);
    for n in 0..3u64 {
        let (at, _held) = place(&store, &ns, &names[n as usize], false).unwrap();
        assert_eq!(pool.read(at, SIZE), bytes(n, SIZE));
    }
    let again = lift(&store, &ns, &names[3..]);
    for batch in begin(&feed, &pool, 4) {
        batch.finish(true);
    }
    assert_eq!(got(&again), [Ok("hbm"); 4]);
}

/// Who asks again for a block whose copy did not come back, while it still runs, waits for that one.
#[test]
fn a_copy_that_comes_back_late_is_the_only_one() {
    let clock = TestClock::new();
    let (store, feed, pool, ns) = open_by(&clock);
    let names = fill(&store, &ns, 3);
    let late = |name: &[[u8; 32]]| (lift(&store, &ns, name), begin(&feed, &pool, 1).remove(0));
    let (first, second) = (late(&names[..1]), late(&names[1..2]));
    clock.advance(6);
    assert_eq!(got(&first.0), [Err(Miss::Device)]);
    assert_eq!(got(&second.0), [Err(Miss::Device)]);
    first.1.finish(true); // it answers again
    let again = lift(&store, &ns, &names[1..]);
    begin(&feed, &pool, 1).remove(0).finish(true); // of the last block
    assert!(place(&store, &ns, &names[2], false).is_some() && !again.is_done());
    second.1.finish(true);
    assert_eq!(got(&again), [Ok("hbm"); 2]);
    assert_eq!(used(&store), 3 * 25 * 4096);
}

#[test]
fn a_device_that_only_fails_is_set_aside_and_tried_again_later() {
    let clock = TestClock::new();
    let (store, feed, pool, ns) = open_by(&clock);
    let names = fill(&store, &ns, 4);
    let copied = |n: usize, ok: bool| {
        let job = lift(&store, &ns, &names[n..=n]);
        let batches = begin(&feed, &pool, 1);
        batches.into_iter().for_each(|batch| batch.finish(ok));
        got(&job)[0]
    };
    assert_eq!(copied(0, true), Ok("hbm"));
    let (at, held) = place(&store, &ns, &names[0], false).unwrap();
    for n in 1..4 {
        assert_eq!(count(&store, "hbm", "set_aside"), 0);
        assert_eq!(copied(n, false), Err(Miss::Device));
    }
    // What was copied before is trusted no more, but for whoever uses it already.
    assert_eq!(count(&store, "hbm", "set_aside"), 1);
    assert!(place(&store, &ns, &names[0], false).is_none());
    assert_eq!(pool.read(at, SIZE), bytes(0, SIZE));
    drop(held);
    assert_eq!((used(&store), store.report().tiers[0].blocks), (0, 0));
    // The device is not asked for anything, and readers are served from below.
    assert_eq!(got(&lift(&store, &ns, &names)), [Err(Miss::Device); 4]);
    assert!(feed.next(false).unwrap().copies().is_empty());
    assert_eq!(get(&store, &ns, &names[0], SIZE), Ok(bytes(0, SIZE)));
    // It is tried again, and set aside at once if it fails still.
    clock.advance(11);
    assert_eq!(copied(0, false), Err(Miss::Device));
    assert_eq!(got(&lift(&store, &ns, &names[..1])), [Err(Miss::Device)]);
    clock.advance(11);
    assert_eq!(
        (copied(0, true), copied(1, false)),
        (Ok("hbm"), Err(Miss::Device))
    );
    assert_eq!(count(&store, "hbm", "set_aside"), 0);
    // So do other failures on the device count.
    (0..2).for_each(|_| feed.failed());
    assert_eq!(count(&store, "hbm", "set_aside"), 1);
    assert_eq!(used(&store), 0);
}

#[test]
fn whoever_asks_for_the_same_block_joins_the_one_copy() {
    let (store, feed, pool, ns) = open(8 << 20);
    let names = fill(&store, &ns, 1);
    let jobs = [lift(&store, &ns, &names), lift(&store, &ns, &names)];
    let batches = begin(&feed, &pool, 1);
    let third = lift(&store, &ns, &names);
    // The prefetcher is done with all of them once it is done with a later one.
    assert_eq!(got(&lift(&store, &ns, &[key(99)])), [Err(Miss::Absent)]);
    assert!(feed.next(false).unwrap().copies().is_empty());
    batches.into_iter().for_each(|batch| batch.finish(true));
    for job in jobs.iter().chain([&third]) {
        assert_eq!(got(job), [Ok("hbm")]);
    }
}

#[test]
fn what_is_removed_while_it_is_copied_never_appears() {
    let (store, feed, pool, ns) = open(8 << 20);
    let names = fill(&store, &ns, 1);
    let job = lift(&store, &ns, &names);
    let batches = begin(&feed, &pool, 1);
    assert_eq!(store.remove(&ns, &[&names[0]]).unwrap(), [true]);
    // Another block under its key: the copy of the old one must not become its.
    put(&store, &ns, &names[0], &bytes(77, SIZE), None);
    assert_eq!(
        used(&store),
        25 * 4096,
        "its place is nobody else's before the copy has ended"
    );
    batches.into_iter().for_each(|batch| batch.finish(true));
    assert_eq!(got(&job), [Err(Miss::Absent)]);
    assert!(place(&store, &ns, &names[0], false).is_none());
    assert_eq!(used(&store), 0);
}

#[test]
fn a_source_that_was_scribbled_on_is_a_miss_and_not_a_copy() {
    let (store, feed, pool, ns) = open(8 << 20);
    let names = fill(&store, &ns, 1);
    let lease = leased(&store, &ns, &names[0]);
    // SAFETY: the slot is leased; that somebody writes to it is what is tested.
    unsafe { *lease.ptr().cast_mut() ^= 1 };
    let job = lift(&store, &ns, &names);
    begin(&feed, &pool, 1)
        .into_iter()
        .for_each(|batch| batch.finish(true));
    assert_eq!(got(&job), [Err(Miss::Corrupt)]);
    assert_eq!(store.contains(&ns, &[&names[0]]).unwrap(), [false]);
    assert_eq!(used(&store), 0);
}

#[test]
fn new_copies_take_the_place_of_the_coldest_that_nobody_uses() {
    let (store, feed, pool, ns) = open(16 << 20);
    let names = fill(&store, &ns, 2 * FIT);
    let (first, second) = names.split_at(FIT as usize);
    let lifted = |names: &[[u8; 32]]| {
        let job = lift(&store, &ns, names);
        begin(&feed, &pool, names.len())
            .into_iter()
            .for_each(|batch| batch.finish(true));
        assert!(got(&job).iter().all(|got| *got == Ok("hbm")));
    };
    lifted(first);
    let (at, held) = place(&store, &ns, &first[0], false).unwrap();
    lifted(&second[..FIT as usize - 1]);
    let there = |name: &[u8; 32]| place(&store, &ns, name, false).is_some();
    assert!(there(&first[0]) && !first[1..].iter().any(there));
    assert_eq!(pool.read(at, SIZE), bytes(0, SIZE));
    // Nothing left the store.
    assert!(
        names
            .iter()
            .all(|name| store.contains(&ns, &[name]).unwrap()[0])
    );
    assert_eq!(used(&store), FIT * 25 * 4096);
    // With all of them held there is no room, and the others know it.
    let all: Vec<_> = names
        .iter()
        .filter_map(|name| place(&store, &ns, name, false))
        .collect();
    assert_eq!(all.len() as u64, FIT);
    assert_eq!(
        got(&lift(&store, &ns, &second[FIT as usize - 1..])),
        [Err(Miss::Full)]
    );
    drop((all, held));
    lifted(&second[FIT as usize - 1..]);
}

#[test]
fn a_place_that_was_taken_over_is_nobody_elses() {
    let (store, feed, pool, ns) = open(8 << 20);
    let names = fill(&store, &ns, 1);
    let job = lift(&store, &ns, &names);
    begin(&feed, &pool, 1)
        .into_iter()
        .for_each(|batch| batch.finish(true));
    assert_eq!(got(&job), [Ok("hbm")]);
    let (at, held) = place(&store, &ns, &names[0], true).unwrap();
    assert!(place(&store, &ns, &names[0], false).is_none());
    assert_eq!(used(&store), 25 * 4096);
    let job = lift(&store, &ns, &names);
    let again = begin(&feed, &pool, 1);
    assert_ne!(again[0].copies()[0].at, at);
    again.into_iter().for_each(|batch| batch.finish(true));
    assert_eq!(got(&job), [Ok("hbm")]);
    drop(held);
    assert_eq!(used(&store), 25 * 4096);
}

#[test]
fn removed_blocks_leave_hbm_and_held_ones_with_their_last_user() {
    let (store, feed, pool, ns) = open(8 << 20);
    let names = fill(&store, &ns, 4);
    let job = lift(&store, &ns, &names);
    begin(&feed, &pool, 4)
        .into_iter()
        .for_each(|batch| batch.finish(true));
    got(&job);
    let (at, held) = place(&store, &ns, &names[0], false).unwrap();
    store.remove(&ns, &[&names[0], &names[1]]).unwrap();
    assert_eq!(used(&store), 3 * 25 * 4096);
    assert_eq!(pool.read(at, SIZE), bytes(0, SIZE));
    assert_eq!(store.clear(None).unwrap(), 2);
    drop(held);
    assert_eq!(used(&store), 0);
}

#[test]
fn closing_ends_what_waits_and_leaves_what_runs_to_its_end() {
    let (store, feed, pool, ns) = open(8 << 20);
    let names = fill(&store, &ns, 2);
    let job = lift(&store, &ns, &names[..1]);
    let batches = begin(&feed, &pool, 1);
    let waiting = lift(&store, &ns, &names[1..]);
    assert_eq!(got(&lift(&store, &ns, &[key(99)])), [Err(Miss::Absent)]);
    store.close(soon()).unwrap();
    assert_eq!(
        (got(&job), got(&waiting)),
        (vec![Err(Miss::Cancelled)], vec![Err(Miss::Cancelled)])
    );
    assert!(feed.next(true).is_none());
    // Its source is still there to be read.
    let copies = batches[0].copies();
    // SAFETY: the batch holds its source.
    let source = unsafe { std::slice::from_raw_parts(copies[0].host, SIZE) };
    assert_eq!(source, bytes(0, SIZE));
    drop(store);
    batches.into_iter().for_each(|batch| batch.finish(true));
}

#[test]
fn blocks_on_nvme_come_by_way_of_a_memory_that_holds_few_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let nvme = || {
        let mut options = kvtier_nvme::Options::new(vec![dir.path().to_path_buf()], 64 << 20);
        options.engine = kvtier_nvme::EngineKind::Threads;
        Some(options)
    };
    let ns = opaque(b"hbm");
    let store = Store::open(Config::new(vec![Memory::dram(8 << 20)], nvme())).unwrap();
    let names = fill(&store, &ns, FIT);
    store.close(soon()).unwrap();
    drop(store);
    let mut config = Config::new(vec![Memory::dram(1 << 20)], nvme());
    config.hbm = Some(pool_size());
    let store = Store::open(config).unwrap();
    let (feed, pool) = (store.feed().unwrap(), Pool::new(pool_size()));
    let job = lift(&store, &ns, &names);
    let mut copied = 0;
    while copied < FIT as usize {
        let mut batch = feed.next(true).unwrap();
        pool.copy(&batch);
        batch.verify();
        copied += batch.copies().len();
        batch.finish(true);
    }
    assert!(got(&job).iter().all(|got| *got == Ok("hbm")));
    for (n, name) in (0..).zip(&names) {
        let (at, _held) = place(&store, &ns, name, false).unwrap();
        assert_eq!(pool.read(at, SIZE), bytes(n, SIZE));
    }
}

/// Copies end while their places are fought for: by others that want room, by removals, by readers that
/// hold them. Whoever holds a place finds the bytes of its block there, and in the end all is free.
#[test]
fn completion_against_eviction_removal_and_readers() {
    const KEYS: u64 = 3 * FIT;
    let (store, feed, pool, ns) = open(16 << 20);
    let names: Arc<Vec<_>> = Arc::new((0..KEYS).map(key).collect());
    let reads = Arc::new(AtomicU64::new(0));
    let feed = Arc::new(Mutex::new(feed));
    std::thread::scope(|scope| {
        let copier = scope.spawn({
            let (feed, pool) = (feed.clone(), pool.clone());
            move || {
                let (mut random, mut held, mut fails) = (Random(1), Vec::new(), 0);
                loop {
                    // While batches are held back, it looks at what else there is and goes on.
                    let batch = feed.lock().unwrap().next(held.is_empty());
                    let Some(mut batch) = batch else { return };
                    pool.copy(&batch);
                    batch.verify();
                    held.push(batch);
                    while held.len() > 3 || (!held.is_empty() && random.below(2) == 0) {
                        let at = random.below(held.len() as u64) as usize;
                        // Never three failures in a row: the device would be set aside.
                        fails = if random.below(8) > 0 {
                            0
                        } else {
                            (fails + 1) % 3
                        };
                        held.swap_remove(at).finish(fails == 0);
                    }
                }
            }
        });
        let workers: Vec<_> = (0..3)
            .map(|seed| {
                let (store, pool, ns, names) =
                    (store.clone(), pool.clone(), ns.clone(), names.clone());
                let reads = reads.clone();
                scope.spawn(move || {
                    let mut random = Random(seed + 10);
                    for _ in 0..600 {
                        let n = random.below(KEYS);
                        let name = &names[n as usize];
                        match random.below(8) {
                            0 => drop(store.remove(&ns, &[name]).unwrap()),
                            1..4 => {
                                put(&store, &ns, name, &bytes(n, SIZE), None);
                                got(&lift(&store, &ns, &names[n as usize..][..1]));
                            }
                            take => {
                                if let Some((at, _held)) = place(&store, &ns, name, take == 7) {
                                    assert_eq!(pool.read(at, SIZE), bytes(n, SIZE));
                                    reads.fetch_add(1, Ordering::Relaxed);
                                }
                            }
                        }
                    }
                })
            })
            .collect();
        let ended: Vec<_> = workers.into_iter().map(|w| w.join()).collect();
        store.clear(None).unwrap();
        assert_eq!((used(&store), store.report().tiers[0].blocks), (0, 0));
        store.close(soon()).unwrap();
        copier.join().unwrap();
        ended.into_iter().for_each(|ended| ended.unwrap());
    });
    assert!(reads.load(Ordering::Relaxed) > 20, "{reads:?}");
}
