//! What a put that must make room costs, by the number of namespaces with a quota that the victim is
//! chosen among. `cargo bench -p kvtier-core --bench quotas`.

use std::time::{Duration, Instant};

use kvtier_core::config::{Config, Memory};
use kvtier_core::error::Result;
use kvtier_core::layout::Layout;
use kvtier_core::put::Block;
use kvtier_core::shares::Quota;
use kvtier_core::store::{Namespace, Store};

const MEMORY: u64 = 128 << 20;
const BLOCK: usize = 4096;
const LARGE: usize = 64 * BLOCK;

/// What the namespaces are guaranteed together, as a share of the tier, and what each has a cap of.
struct Case {
    name: &'static str,
    block: usize,
    guaranteed: f64,
    cap: Option<u64>,
    /// All puts are of one namespace, which has nothing left to give.
    one: bool,
}

fn main() -> Result<()> {
    let cases = [
        Case {
            name: "no guarantees",
            block: BLOCK,
            guaranteed: 0.0,
            cap: None,
            one: false,
        },
        Case {
            name: "half is guaranteed",
            block: BLOCK,
            guaranteed: 0.45,
            cap: None,
            one: false,
        },
        Case {
            name: "all is guaranteed",
            block: BLOCK,
            guaranteed: 0.89,
            cap: None,
            one: false,
        },
        Case {
            name: "one puts, half is guaranteed",
            block: BLOCK,
            guaranteed: 0.45,
            cap: None,
            one: true,
        },
        Case {
            name: "large blocks, all is guaranteed",
            block: LARGE,
            guaranteed: 0.89,
            cap: None,
            one: false,
        },
        Case {
            name: "at their caps",
            block: BLOCK,
            guaranteed: 0.0,
            cap: Some(MEMORY / 512),
            one: false,
        },
    ];
    println!("case                            namespaces  ns/put  median  99.9 %, µs  longest, µs");
    for case in cases {
        for count in [1, 16, 255] {
            run(&case, count)?;
        }
    }
    Ok(())
}

fn run(case: &Case, count: u32) -> Result<()> {
    let store = Store::open(Config::new(vec![Memory::dram(MEMORY)], None))?;
    let spaces: Vec<Namespace> = (0..count)
        .map(|n| Namespace::new(&n.to_le_bytes(), Layout::opaque()))
        .collect();
    let each = (MEMORY as f64 * case.guaranteed / f64::from(count)) as u64;
    for space in &spaces {
        let quota = Quota {
            guaranteed: vec![each],
            cap: vec![case.cap.map(|cap| cap.max(each))],
            ..Quota::default()
        };
        store.set_quota(space, &quota)?;
    }
    let data = vec![7; case.block];
    let warm = 3 * MEMORY / case.block as u64;
    let puts = (2 * warm).max(8_000);
    let mut took = Vec::with_capacity(puts as usize);
    for n in 0..warm + puts {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&n.to_le_bytes());
        let turn = if case.one && n >= warm {
            0
        } else {
            n as usize % spaces.len()
        };
        let block = Block {
            key: &key,
            data: &data,
            parent: None,
            replaces: None,
            importance: 0.0,
        };
        let started = Instant::now();
        store.put(&spaces[turn], &block, started + Duration::from_secs(10))?;
        if n >= warm {
            took.push(started.elapsed());
        }
    }
    let total: Duration = took.iter().sum();
    took.sort_unstable();
    let longest = took.last().map_or(0, Duration::as_micros);
    println!(
        "{:31} {count:10} {:7} {:7} {:11} {longest:12}",
        case.name,
        total.as_nanos() / took.len() as u128,
        took[took.len() / 2].as_nanos(),
        took[took.len() * 999 / 1000].as_micros(),
    );
    Ok(())
}
