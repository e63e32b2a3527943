//! The whole store in orders that shuttle chooses: locks, atomics and threads are its own, every step
//! of each is a place to switch. What never ends is found as a deadlock: there is no time, so a
//! waiter who is not told waits for ever. Run by `scripts/races.sh`.
//!
//! `KVTIER_ROUNDS` multiplies the orders.
#![cfg(shuttle)]
#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::*;
use kvtier_core::arena::backing::{HugePages, anonymous};
use kvtier_core::arena::{Arena, Pin};
use kvtier_core::config::{Config, Memory};
use kvtier_core::error::Kind;
use kvtier_core::hbm::Feed;
use kvtier_core::jobs::Goal;
use kvtier_core::put::{Block, Put};
use kvtier_core::shares::Quota;
use kvtier_core::store::{Namespace, Store};
use kvtier_nvme::{Clock, Device};
use shuttle::thread;

const KEYS: u64 = 6;
/// Three or four of the blocks fit into memory.
const MEMORY: u64 = 1 << 20;
const BLOCK: usize = 250_000;
const DEVICE: u64 = 4 << 20;

fn orders(scenario: fn(u64)) {
    let rounds: usize = std::env::var("KVTIER_ROUNDS").map_or(1, |n| n.parse().unwrap());
    let run = |depth: Option<usize>, orders: usize| {
        // The same scenario again and again, and in turn what each thread does.
        let turn = AtomicU64::new(0);
        let next = move || scenario(turn.fetch_add(1, Ordering::Relaxed));
        match depth {
            None => shuttle::check_random(next, orders),
            Some(depth) => shuttle::check_pct(next, orders, depth),
        }
    };
    run(None, 500 * rounds);
    run(Some(3), 500 * rounds);
}

fn memory() -> Memory {
    Memory {
        prefault: false,
        ..Memory::dram(MEMORY)
    }
}

/// In turn what has an order that can be foretold, and what learns.
fn policy(turn: u64) -> String {
    ["lru-leaf", "auto"][turn as usize % 2].into()
}

fn in_memory(turn: u64) -> Config {
    Config {
        policy: policy(turn),
        ..Config::new(vec![memory()], None)
    }
}

fn data(n: u64) -> Vec<u8> {
    bytes(n, BLOCK)
}

/// One thread's part: a few verbs over a few keys, whatever the others do.
fn work(store: &Store, ns: &Namespace, seed: u64, steps: usize) {
    let mut random = Random(seed);
    for _ in 0..steps {
        let n = random.below(KEYS);
        let name = key(n);
        let closed = |kind: Kind| assert_eq!(kind, Kind::Closed);
        match random.below(8) {
            0..3 => {
                let block = Block {
                    key: &name,
                    data: &data(n),
                    parent: None,
                    replaces: None,
                    importance: 0.0,
                };
                match store.put_many(ns, &[block], soon()) {
                    Ok(puts) => assert_ne!(puts[0], Put::Deadline),
                    Err(error) => closed(error.kind()),
                }
            }
            3..5 => match try_get(store, ns, &name, BLOCK, &Default::default()) {
                Ok(Ok((got, _))) => assert!(got == data(n), "wrong bytes"),
                Ok(Err(_)) => {}
                Err(error) => closed(error.kind()),
            },
            5 => match store.lease(ns, &[&name], false, soon()) {
                Ok(leases) => {
                    for leased in leases.into_iter().flatten() {
                        thread::yield_now();
                        // SAFETY: the lease keeps the block's bytes.
                        let got = unsafe { std::slice::from_raw_parts(leased.ptr(), leased.len()) };
                        assert!(got == data(n), "a lease of wrong bytes");
                    }
                }
                Err(error) => closed(error.kind()),
            },
            6 => match store.remove(ns, &[&name]) {
                Ok(_) => {}
                Err(error) => closed(error.kind()),
            },
            _ => match store.prefetch(ns, &[&name], DRAM, None, 0) {
                Ok(job) => assert!(job.wait(soon()), "a prefetch that never ends"),
                Err(error) => closed(error.kind()),
            },
        }
    }
}

/// A chain is put in one call while its first block's parent is removed.
fn chain_and_removal(turn: u64) {
    let store = Arc::new(Store::open(in_memory(turn)).unwrap());
    let ns = opaque(b"chain");
    let names: Vec<[u8; 32]> = (0..3).map(key).collect();
    let data = bytes(1, 4096); // several fit into what is done together
    put(&store, &ns, &names[0], &data, None);
    let remover = {
        let (store, ns) = (store.clone(), ns.clone());
        thread::spawn(move || store.remove(&ns, &[&key(0)]).unwrap())
    };
    let block = |n: usize| Block {
        key: &names[n],
        data: &data,
        parent: Some(&names[n - 1]),
        replaces: None,
        importance: 0.0,
    };
    let puts = store.put_many(&ns, &[block(1), block(2)], soon()).unwrap();
    remover.join().unwrap();
    assert!(
        puts.iter()
            .all(|put| matches!(put, Put::Stored(_) | Put::Orphan))
    );
    let keys: Vec<&[u8]> = names.iter().map(|name| &name[..]).collect();
    assert_eq!(store.contains(&ns, &keys).unwrap(), [false; 3], "{puts:?}");
    store.close(soon()).unwrap();
}

fn together(store: Store, turn: u64, threads: u64, steps: usize, close_among: bool) {
    let store = Arc::new(store);
    let ns = opaque(b"races");
    for n in 0..3 {
        put(&store, &ns, &key(n), &data(n), None);
    }
    let workers: Vec<_> = (0..threads)
        .map(|t| {
            let (store, ns) = (store.clone(), ns.clone());
            thread::spawn(move || work(&store, &ns, turn * 10 + t, steps))
        })
        .collect();
    if close_among {
        store.close(soon()).unwrap();
    }
    workers.into_iter().for_each(|w| w.join().unwrap());
    if !close_among {
        for t in store.report().tiers {
            let bad = |name| t.counters.iter().find(|c| c.0 == name).unwrap().1;
            assert_eq!((bad("corrupt"), bad("errors")), (0, 0), "{t:?}");
        }
        audit(&store);
        store.clear(None).unwrap();
        store.flush(soon()).unwrap();
        assert_eq!(store.report().blocks, 0);
    }
    store.close(soon()).unwrap();
}

fn nvme_below(turn: u64) -> Store {
    over(MEMORY, RamDevice::new(DEVICE), |config| {
        config.memory = vec![memory()];
        config.policy = policy(turn);
    })
}

#[test]
fn puts_reads_leases_and_removals_in_memory() {
    orders(|turn| {
        let store = Store::open(in_memory(turn)).unwrap();
        together(store, turn, 3, 5, false);
    });
}

#[test]
fn a_chain_whose_root_is_removed_while_it_is_put() {
    orders(chain_and_removal);
}

#[test]
fn demotion_loads_and_removals_over_nvme() {
    orders(|turn| together(nvme_below(turn), turn, 2, 5, false));
}

/// What is removed is not kept, also for who is just about to pin it.
#[test]
fn a_block_that_is_removed_while_it_is_pinned() {
    orders(|turn| {
        let store = Arc::new(Store::open(Config::new(vec![memory()], None)).unwrap());
        let ns = opaque(b"races");
        put(&store, &ns, &key(0), &data(0), None);
        let used = |store: &Store| store.report().tiers[0].used;
        let one = used(&store);
        let pins = {
            let (store, ns) = (store.clone(), ns.clone());
            thread::spawn(move || drop(store.pin(&ns, &[&key(0)], soon()).unwrap()))
        };
        store.remove(&ns, &[&key(0)]).unwrap();
        let again = turn % 2 > 0;
        if again {
            put(&store, &ns, &key(0), &data(0), None);
        }
        pins.join().unwrap();
        let left = if again { one } else { 0 };
        assert_eq!(used(&store), left, "what was removed takes room");
        if !again {
            assert_eq!(store.unpin(&ns, &[&key(0)]).unwrap(), [false]);
        }
        store.close(soon()).unwrap();
    });
}

/// Memory that stands for a device's. It holds four of the six blocks.
struct Pool(Pin);

// SAFETY: bytes of places that the tier hands out to one writer at a time; that is what is tested.
unsafe impl Sync for Pool {}

impl Pool {
    fn new() -> Arc<Self> {
        let arena = Arena::new(anonymous(MEMORY as usize, HugePages::Off, None).unwrap());
        Arc::new(Pool(arena.alloc(arena.pages()).unwrap()))
    }

    /// The thread that copies: every third batch fails.
    fn serve(&self, feed: &Feed) {
        let mut turn = 0;
        while let Some(mut batch) = feed.next(true) {
            turn += 1;
            for c in batch.copies() {
                // SAFETY: the source is pinned, the place is the batch's own.
                unsafe { std::ptr::copy_nonoverlapping(c.host, self.0.ptr().add(c.at), c.len) };
                thread::yield_now();
            }
            batch.verify();
            batch.finish(turn % 3 > 0);
        }
    }

    fn read(&self, store: &Store, ns: &Namespace, n: u64, take: bool) {
        for placed in store
            .place(ns, &[&key(n)], &Default::default(), take)
            .unwrap()
        {
            let Some(placed) = placed else { continue };
            thread::yield_now();
            // SAFETY: inside the pool, and held.
            let at = unsafe { self.0.ptr().add(placed.at()) };
            // SAFETY: as above.
            let got = unsafe { std::slice::from_raw_parts(at, placed.len()) };
            assert!(got == data(n), "wrong bytes in HBM");
        }
    }
}

/// Completion of copies against eviction, removal, readers and the next copy into the same place.
#[test]
fn copies_to_hbm_among_evictions_removals_and_readers() {
    orders(|turn| {
        let all = Memory {
            size: 2 * MEMORY,
            ..memory()
        };
        let mut config = in_memory(turn);
        (config.memory, config.hbm) = (vec![all], Some(MEMORY));
        let store = Arc::new(Store::open(config).unwrap());
        let (pool, ns, feed) = (Pool::new(), opaque(b"races"), store.feed().unwrap());
        let copier = {
            let pool = pool.clone();
            thread::spawn(move || pool.serve(&feed))
        };
        let workers: Vec<_> = (0..2)
            .map(|t| {
                let (store, ns, pool) = (store.clone(), ns.clone(), pool.clone());
                thread::spawn(move || {
                    let mut random = Random(turn * 10 + t);
                    for _ in 0..4 {
                        let n = random.below(KEYS);
                        match random.below(6) {
                            0 => drop(store.remove(&ns, &[&key(n)]).unwrap()),
                            1..4 => {
                                let _ = try_put(&store, &ns, &key(n), &data(n), None).unwrap();
                                let keys: [&[u8]; 2] = [&key(n), &key((n + 1) % KEYS)];
                                let job = store.prefetch(&ns, &keys, Goal::Hbm, None, 0).unwrap();
                                assert!(job.wait(soon()), "a copy that never ends");
                            }
                            take => pool.read(&store, &ns, n, take == 5),
                        }
                    }
                })
            })
            .collect();
        workers.into_iter().for_each(|w| w.join().unwrap());
        for n in 0..KEYS {
            pool.read(&store, &ns, n, false);
        }
        store.clear(None).unwrap();
        for tier in store.report().tiers {
            assert_eq!((tier.used, tier.blocks), (0, 0), "{tier:?}");
        }
        store.close(soon()).unwrap();
        copier.join().unwrap();
    });
}

/// What two of the blocks take, and no more.
fn two_blocks() -> Quota {
    Quota {
        cap: vec![Some(2 * (BLOCK as u64 + 8192))],
        ..Quota::default()
    }
}

/// Claims to a share come and go, and whoever waits at the cap hears of each.
#[test]
fn a_namespace_at_its_cap() {
    orders(|turn| {
        let store = match turn / 2 % 2 {
            0 => Store::open(in_memory(turn)).unwrap(),
            _ => nvme_below(turn),
        };
        store.set_quota(&opaque(b"races"), &two_blocks()).unwrap();
        together(store, turn, 3, 4, false);
    });
}

/// Each look at it takes longer than what ages are counted in.
struct Slow(Instant, AtomicU32);

impl Clock for Slow {
    fn now(&self) -> Instant {
        let looks = self.1.fetch_add(1, Ordering::Relaxed);
        self.0 + Duration::from_millis(20) * looks
    }
}

/// A block that is stored while somebody looks for it is not older than that look.
#[test]
fn a_look_at_a_block_that_is_being_stored() {
    orders(|_| {
        let clock = Slow(Instant::now(), 0.into());
        let store = over(MEMORY, RamDevice::new(DEVICE), |config| {
            config.memory = vec![memory()];
            config.nvme.as_mut().unwrap().clock = Arc::new(clock);
        });
        let (store, ns) = (Arc::new(store), opaque(b"ages"));
        let quota = Quota {
            ttl: Some(Duration::from_secs(3600)),
            ..Quota::default()
        };
        store.set_quota(&ns, &quota).unwrap();
        let looks = {
            let (store, ns) = (store.clone(), ns.clone());
            thread::spawn(move || {
                for n in 0..3 {
                    store.contains(&ns, &[&key(n)]).unwrap();
                }
            })
        };
        for n in 0..3 {
            put(&store, &ns, &key(n), &bytes(n, 10_000), None);
        }
        looks.join().unwrap();
        for n in 0..3 {
            assert_eq!(store.contains(&ns, &[&key(n)]).unwrap(), [true]);
        }
        store.close(soon()).unwrap();
    });
}

/// Who waits for room in HBM until a copy ends hears of its end, also where it makes no room.
#[test]
fn a_block_that_a_copy_which_ends_makes_no_room_for() {
    orders(|_| {
        let all = Memory {
            size: 4 * MEMORY,
            ..memory()
        };
        let mut config = Config::new(vec![all], None);
        config.hbm = Some(MEMORY);
        let store = Store::open(config).unwrap();
        let (pool, ns, feed) = (Pool::new(), opaque(b"races"), store.feed().unwrap());
        let lift = |n| {
            let job = store.prefetch(&ns, &[&key(n)], Goal::Hbm, None, 0);
            job.unwrap()
        };
        for n in 0..4 {
            put(&store, &ns, &key(n), &data(n), None);
        }
        put(&store, &ns, &key(4), &bytes(4, 2 * BLOCK), None);
        let copier = {
            let pool = pool.clone();
            thread::spawn(move || pool.serve(&feed))
        };
        // Three places of four are somebody's for good; the fourth is copied to.
        let mut mine = Vec::new();
        for n in 0..3 {
            while mine.len() == n as usize {
                assert!(lift(n).wait(soon()));
                let taken = store.place(&ns, &[&key(n)], &Default::default(), true);
                mine.extend(taken.unwrap().into_iter().flatten());
            }
        }
        let (fourth, large) = (lift(3), lift(4));
        assert!(large.wait(soon()), "a copy that never ends");
        assert!(large.results().unwrap()[0].is_err() && fourth.wait(soon()));
        drop(mine);
        store.close(soon()).unwrap();
        copier.join().unwrap();
    });
}

/// A device whose writes wait while it is shut.
struct Gate {
    inner: Arc<RamDevice>,
    shut: shuttle::sync::Mutex<bool>,
    opened: shuttle::sync::Condvar,
}

impl Gate {
    fn shut(&self, shut: bool) {
        *self.shut.lock().unwrap() = shut;
        self.opened.notify_all();
    }
}

impl Device for Gate {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
        self.inner.read_at(buf, offset)
    }
    fn write_at(&self, buf: &[u8], offset: u64) -> std::io::Result<usize> {
        let mut shut = self.shut.lock().unwrap();
        while *shut {
            shut = self.opened.wait(shut).unwrap();
        }
        drop(shut);
        self.inner.write_at(buf, offset)
    }
    fn sync(&self) -> std::io::Result<()> {
        self.inner.sync()
    }
    fn len(&self) -> u64 {
        self.inner.len()
    }
}

/// Who waits for as much room as the device frees at a time is content with less if it is freed by
/// somebody else: the device may hang.
#[test]
fn a_put_that_waits_for_a_device_that_hangs_takes_what_is_removed() {
    const PAGES: usize = 10;
    orders(|_| {
        let device = Arc::new(Gate {
            inner: RamDevice::new(DEVICE),
            shut: shuttle::sync::Mutex::new(false),
            opened: shuttle::sync::Condvar::new(),
        });
        let store = over(MEMORY, device.clone(), |config| {
            (config.low, config.high) = (0.05, 0.1); // a handful is more than a block
            config.memory = vec![memory()];
            config.policy = "lru-leaf".into(); // the oldest are written first
        });
        let (store, ns) = (Arc::new(store), opaque(b"races"));
        device.shut(true);
        let (mut n, mut last) = (0, None);
        for pages in [PAGES, 1] {
            let block = bytes(7, pages * 4096 - 512);
            while try_put_by(&store, &ns, &key(n), &block, None, Instant::now()).is_ok() {
                n += 1;
            }
            last = last.or(Some(n - 1));
        }
        let waiting = {
            let (store, ns) = (store.clone(), ns.clone());
            thread::spawn(move || {
                let block = bytes(7, PAGES * 4096 - 512);
                put(&store, &ns, &key(n), &block, None)
            })
        };
        store.remove(&ns, &[&key(last.unwrap())]).unwrap();
        assert_eq!(waiting.join().unwrap(), Put::Stored("dram"));
        device.shut(false);
        store.close(soon()).unwrap();
    });
}

#[test]
fn closing_while_everybody_is_at_work() {
    orders(|turn| together(nvme_below(turn), turn, 2, 4, true));
}
