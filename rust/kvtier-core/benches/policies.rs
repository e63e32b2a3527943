//! What a policy costs: a touch, an eviction with the insertion after it, the longest of them, and
//! memory. `cargo bench -p kvtier-core --bench policies [NAME…]`.

use std::time::{Duration, Instant};

use kvtier_core::policy::{Meta, NAMES, Policy, by_name};

const BLOCKS: u32 = 200_000;
const CHAIN: u32 = 20;
const STEPS: u32 = 2_000_000;

struct Random(u64);

impl Random {
    fn below(&mut self, n: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (((self.0 >> 32) * u64::from(n)) >> 32) as u32
    }
}

fn insert(policy: &mut dyn Policy, block: u32, fingerprint: u64) {
    let parent = (!block.is_multiple_of(CHAIN)).then(|| block - 1);
    let meta = Meta {
        parent,
        fingerprint: fingerprint.wrapping_mul(0x9E37_79B9_7F4A_7C15),
        pages: 1,
        importance: 0.0,
    };
    policy.on_insert(block, &meta);
}

fn main() {
    let asked: Vec<String> = std::env::args().skip(1).collect();
    let asked: Vec<&str> = asked.iter().map(String::as_str).collect();
    println!("policy           ns/touch  ns/eviction  longest eviction, µs  bytes/block");
    for name in NAMES {
        let names = asked.iter().filter(|a| !a.starts_with('-'));
        if names.clone().count() > 0 && !names.clone().any(|&a| a == name) {
            continue;
        }
        let Ok(mut policy) = by_name(name, BLOCKS.into()) else {
            continue;
        };
        let mut random = Random(7);
        for block in 0..BLOCKS {
            insert(&mut *policy, block, block.into());
        }
        // Requests that use whole chains from the tail, short ones far more often than others.
        let hit = |policy: &mut dyn Policy, random: &mut Random| {
            let width = 1 + random.below(BLOCKS / CHAIN);
            let chain = random.below(width) * CHAIN;
            for block in (chain..chain + CHAIN).rev() {
                policy.on_hit(block);
            }
        };
        let started = Instant::now();
        for _ in 0..STEPS / CHAIN {
            hit(&mut *policy, &mut random);
        }
        let touch = started.elapsed() / STEPS;
        let (mut longest, mut total, mut count) = (Duration::ZERO, Duration::ZERO, 0);
        for step in 0..STEPS / CHAIN / 4 {
            hit(&mut *policy, &mut random);
            let mut gone = Vec::new();
            for _ in 0..CHAIN {
                let started = Instant::now();
                if let Some(victim) = policy.victim(&mut |_| true) {
                    policy.on_remove(victim);
                    gone.push(victim);
                }
                let took = started.elapsed();
                longest = longest.max(took);
                total += took;
                count += 1;
            }
            gone.sort_unstable();
            for block in gone {
                insert(
                    &mut *policy,
                    block,
                    (u64::from(step) << 32) | u64::from(block),
                );
            }
        }
        println!(
            "{name:16} {:8} {:12} {:21} {:12}",
            touch.as_nanos(),
            (total / count).as_nanos(),
            longest.as_micros(),
            policy.memory_bytes() / policy.len()
        );
    }
}
