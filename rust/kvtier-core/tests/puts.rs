//! Several blocks in one call: done some at a time, and never to be told from one after another.
#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use common::*;
use kvtier_codec::image::PAGE;
use kvtier_core::config::Memory;
use kvtier_core::error::Kind;
use kvtier_core::put::{Block, Put};
use kvtier_core::shares::Quota;
use kvtier_core::store::{Namespace, Store};
use proptest::prelude::*;

/// Blocks that the tests draw from: few, so that they meet.
const NAMES: u64 = 48;

/// A block to put: its number, its size, and the numbers of its parent and of what it replaces.
type Draw = (u64, u64, Option<u64>, Option<u64>);

fn draws(most: usize) -> impl Strategy<Value = Vec<Draw>> {
    let name = 0..NAMES;
    let parent = prop::option::weighted(0.6, 0..NAMES);
    let replaces = prop::option::weighted(0.05, 0..NAMES);
    prop::collection::vec((name, 0..12u64, parent, replaces), 1..most)
}

/// Each number has one size, but for a few draws that are wrong.
fn size(number: u64, draw: u64) -> usize {
    let size = [700, 5_000, 66_000][number as usize % 3];
    if draw == 11 { size + 1 } else { size }
}

/// Puts these in one call, or one by one, up to the first error, of which it says the kind.
fn put_all(
    store: &Store,
    ns: &Namespace,
    draws: &[Draw],
    together: bool,
) -> Result<Vec<Put>, Kind> {
    let keys: Vec<[u8; 32]> = (0..NAMES).map(key).collect();
    let data: Vec<Vec<u8>> = draws
        .iter()
        .map(|&(number, draw, ..)| bytes(number, size(number, draw)))
        .collect();
    let blocks: Vec<Block<'_>> = draws
        .iter()
        .zip(&data)
        .map(|(&(number, _, parent, replaces), data)| Block {
            key: &keys[number as usize],
            data,
            parent: parent.map(|p| &keys[p as usize][..]),
            replaces: replaces.map(|r| &keys[r as usize][..]),
            importance: 0.0,
        })
        .collect();
    if together {
        return store.put_many(ns, &blocks, soon()).map_err(|e| e.kind());
    }
    let each = blocks.iter().map(|block| store.put(ns, block, soon()));
    each.collect::<Result<_, _>>().map_err(|e| e.kind())
}

/// Which of all blocks are there; their bytes are compared.
fn there(store: &Store, ns: &Namespace) -> Vec<bool> {
    let all: Vec<_> = (0..NAMES).map(|n| (key(n), bytes(n, size(n, 0)))).collect();
    // Those of a wrong size are there under their name, if at all, and cannot be read as these.
    all.iter()
        .map(
            |(key, data)| match try_get(store, ns, key, data.len(), &Default::default()) {
                Ok(Ok((got, _))) => {
                    assert_eq!(&got, data);
                    true
                }
                Ok(Err(_)) => false,
                Err(error) => {
                    assert_eq!(error.kind(), Kind::InvalidBlock);
                    true
                }
            },
        )
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Where there is room, a call does what its blocks do one by one, and leaves the same behind.
    #[test]
    fn a_call_is_its_blocks_one_by_one(calls in prop::collection::vec(draws(80), 1..4)) {
        let (one, other) = (dram(128 << 20), dram(128 << 20));
        let ns = opaque(b"puts");
        for draws in &calls {
            let got = put_all(&one, &ns, draws, true);
            prop_assert_eq!(got, put_all(&other, &ns, draws, false));
            prop_assert_eq!(there(&one, &ns), there(&other, &ns));
            audit(&one);
        }
        for counter in ["puts", "present", "orphans", "put_bytes"] {
            prop_assert_eq!(total(&one, counter), total(&other, counter), "{}", counter);
        }
    }

    /// Where there is not, no block outlives its parent, the accounts are right, and nothing is kept back.
    #[test]
    fn a_call_without_room_for_all_leaves_what_it_should(
        calls in prop::collection::vec(draws(80), 1..4), policy in 0..POLICIES.len(), capped: bool,
    ) {
        // Of the larger tier several blocks are done together, of the smaller one hardly ever.
        let size = if capped { 8 << 20 } else { 1 << 20 };
        let store = tiered(POLICIES[policy], vec![Memory::dram(size)], None);
        let ns = opaque(b"puts");
        if capped {
            let quota = Quota { cap: vec![Some(200 << 10)], ..Quota::default() };
            store.set_quota(&ns, &quota).unwrap();
        }
        let mut parents = [None; NAMES as usize];
        for mut draws in calls {
            draws.iter_mut().for_each(|draw| draw.1 = 0);
            let puts = put_all(&store, &ns, &draws, true).unwrap();
            for (put, &(number, _, parent, _)) in puts.iter().zip(&draws) {
                if matches!(put, Put::Stored(_)) {
                    parents[number as usize] = parent;
                }
                prop_assert!(*put != Put::Deadline && *put != Put::Full, "nobody holds anything");
            }
            audit(&store);
        }
        let there = there(&store, &ns);
        for (number, parent) in parents.iter().enumerate().filter(|&(n, _)| there[n]) {
            prop_assert!(parent.is_none_or(|p| there[p as usize]), "{} without {:?}", number, parent);
        }
        store.clear(None).unwrap();
        audit(&store);
        prop_assert_eq!(tier(&store, "dram").used, 0, "no slot is left behind");
    }
}

/// Blocks of a page, each with the one before it in this list as its parent.
fn chain<'a>(keys: &'a [[u8; 32]], data: &'a [u8]) -> Vec<Block<'a>> {
    let block = |i: usize| Block {
        key: &keys[i],
        data,
        parent: i.checked_sub(1).map(|before| &keys[before][..]),
        replaces: None,
        importance: 0.0,
    };
    (0..keys.len()).map(block).collect()
}

/// Fills memory with blocks of a page, up to so many, and says which.
fn fill(store: &Store, ns: &Namespace, but: u64, mut stored: impl FnMut(&[u8])) {
    for n in 1000.. {
        let dram = tier(store, "dram");
        if dram.used + (but + 1) * PAGE as u64 > dram.capacity {
            return;
        }
        put(store, ns, &key(n), &bytes(1, PAGE), None);
        stored(&key(n));
    }
}

#[test]
fn a_parent_that_is_there_already_does_not_make_room_for_what_follows_it() {
    // First in, first out: that it is asked for again does not keep it.
    let store = tiered("fifo", vec![Memory::dram(1 << 20)], None);
    let ns = opaque(b"parent");
    let data = bytes(1, PAGE);
    let oldest = [key(0), key(1), key(2)];
    put(&store, &ns, &oldest[0], &data, None);
    fill(&store, &ns, 0, |_| {});
    assert!(store.contains(&ns, &[&oldest[0]]).unwrap()[0]);
    let puts = store.put_many(&ns, &chain(&oldest, &data), soon()).unwrap();
    assert_eq!(
        puts,
        [
            Put::Present("dram"),
            Put::Stored("dram"),
            Put::Stored("dram")
        ]
    );
}

#[test]
fn who_waits_for_room_holds_none() {
    // A MiB for each four blocks that are done together.
    let store = over(4 << 20, RamDevice::new(16 << 20), |config| {
        config.policy = "lru-leaf".into()
    });
    let ns = opaque(b"room");
    let data = bytes(1, PAGE);
    let mut leases = Vec::new();
    fill(&store, &ns, 12, |held| {
        leases.push(leased(&store, &ns, held))
    });
    // All the others are held: only what this call stored itself can go down for the rest. (Some of the room is
    // for the tables, which grow.)
    let keys: Vec<[u8; 32]> = (0..40).map(key).collect();
    let puts = store.put_many(&ns, &chain(&keys, &data), soon()).unwrap();
    assert_eq!(puts, vec![Put::Stored("dram"); keys.len()]);
}
