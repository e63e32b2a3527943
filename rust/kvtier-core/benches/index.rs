//! Ten million entries in the index, the tree of prefixes and a policy: what one more takes, and the
//! longest of them. `cargo bench -p kvtier-core --bench index [ENTRIES]`; prints one line of JSON.
//!
//! Takes 2 GB of memory. Whoever else uses the machine's cores makes the longest one longer.

use std::time::{Duration, Instant};

use kvtier_codec::image::Shape;
use kvtier_core::index::{Entry, Index};
use kvtier_core::order::Order;
use kvtier_core::policy::{Meta, by_name};
use kvtier_core::shares::Shares;

const CHAIN: u64 = 64;

fn main() {
    let asked = std::env::args().skip(1).find_map(|arg| arg.parse().ok());
    let count: u64 = asked.unwrap_or(10_000_000);
    let index = Index::default();
    let (Ok(shares), Ok(mut policy), Some(shape)) = (
        Shares::new("fifo", vec![1], false),
        by_name("lru-leaf", count),
        Shape::new(4000, 1),
    ) else {
        return;
    };
    let mut order = Order::new(shares);
    let (mut longest, mut long, mut parent) = (Duration::ZERO, 0u64, None);
    let started = Instant::now();
    for n in 0..count {
        let id = *blake3::hash(&n.to_le_bytes()).as_bytes();
        let begun = Instant::now();
        let mut shard = index.of(&id);
        let h = index.insert(&mut shard, Entry::new(id, 0, shape, 0.0));
        let known = (h, shard.get(h).map_or(0, |entry| entry.epoch));
        drop(shard);
        order.attach(known, parent, 0);
        let meta = Meta {
            parent: parent.map(|p: (u32, u32)| p.0),
            fingerprint: n,
            pages: 1,
            importance: 0.0,
        };
        policy.on_insert(h, &meta);
        parent = (n % CHAIN != CHAIN - 1).then_some(known);
        let taken = begun.elapsed();
        longest = longest.max(taken);
        long += u64::from(taken > Duration::from_millis(5));
    }
    let each = started.elapsed().as_nanos() / u128::from(count);
    let bytes = index.memory_bytes() + order.memory_bytes() + policy.memory_bytes();
    println!(
        "{{\"entries\": {count}, \"longest_s\": {}, \"over_5_ms\": {long}, \"ns_each\": {each}, \"bytes_each\": {}}}",
        longest.as_secs_f64(),
        bytes as u64 / count
    );
}
