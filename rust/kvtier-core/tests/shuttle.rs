//! The whole store in orders that shuttle chooses: locks, atomics and threads are its own, every step
//! of each is a place to switch. What never ends is found as a deadlock: there is no time, so a
//! waiter who is not told waits for ever. Run by `scripts/races.sh`.
//!
//! `KVTIER_ROUNDS` multiplies the orders.
#![cfg(shuttle)]
#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::sync::Arc;

use common::*;
use kvtier_core::config::{Config, Memory};
use kvtier_core::error::Kind;
use kvtier_core::put::{Block, Put};
use kvtier_core::store::{Namespace, Store};
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
        let turn = std::sync::atomic::AtomicU64::new(0);
        let next = move || scenario(turn.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
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

fn nvme_below() -> Store {
    over(MEMORY, RamDevice::new(DEVICE), |config| {
        config.memory = vec![memory()];
    })
}

#[test]
fn puts_reads_leases_and_removals_in_memory() {
    orders(|turn| {
        let store = Store::open(Config::new(vec![memory()], None)).unwrap();
        together(store, turn, 3, 5, false);
    });
}

#[test]
fn demotion_loads_and_removals_over_nvme() {
    orders(|turn| together(nvme_below(), turn, 2, 5, false));
}

#[test]
fn closing_while_everybody_is_at_work() {
    orders(|turn| together(nvme_below(), turn, 2, 4, true));
}
