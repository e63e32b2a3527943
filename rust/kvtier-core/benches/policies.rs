//! What a policy costs: a touch, an eviction, the longest of them, and memory. All runs do the same,
//! and each eviction counts as in the fastest of them: what the machine did meanwhile is no pause of
//! the policy, which would come in every run. `cargo bench -p kvtier-core --bench policies [NAME…]`.

use std::time::{Duration, Instant};

use kvtier_core::policy::{Meta, NAMES, Policy, by_name};

const BLOCKS: u32 = 200_000;
const CHAIN: u32 = 20;
const STEPS: u32 = 2_000_000;
const RUNS: u32 = 3;

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

struct Cost {
    touch: Duration,
    evictions: Vec<Duration>,
    bytes: usize,
}

fn measure(name: &str) -> Cost {
    let mut policy = by_name(name, BLOCKS.into()).expect("one of NAMES");
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
    let mut evictions = Vec::with_capacity(STEPS as usize / 4);
    for step in 0..STEPS / CHAIN / 4 {
        hit(&mut *policy, &mut random);
        let mut gone = Vec::new();
        for _ in 0..CHAIN {
            let started = Instant::now();
            if let Some(victim) = policy.victim(&mut |_| true) {
                policy.on_remove(victim);
                gone.push(victim);
            }
            evictions.push(started.elapsed());
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
    Cost {
        touch,
        evictions,
        bytes: policy.memory_bytes() / policy.len(),
    }
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
        let mut runs = (0..RUNS).map(|_| measure(name));
        let Some(mut best) = runs.next() else {
            continue;
        };
        for run in runs {
            best.touch = best.touch.min(run.touch);
            for (least, took) in best.evictions.iter_mut().zip(run.evictions) {
                *least = took.min(*least);
            }
        }
        let total: Duration = best.evictions.iter().sum();
        println!(
            "{name:16} {:8} {:12} {:21} {:12}",
            best.touch.as_nanos(),
            (total / best.evictions.len() as u32).as_nanos(),
            best.evictions.iter().max().map_or(0, Duration::as_micros),
            best.bytes
        );
    }
}
