//! Several threads do everything at once; every hit is verified, and the books balance at the end.
#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::*;
use kvtier_core::config::{Memory, MemoryKind};
use kvtier_core::layout::{Selection, Tokens};
use kvtier_core::put::{Block, Put};
use kvtier_core::read::Out;
use kvtier_core::store::{Namespace, Store};

const KEYS: u64 = 160;

/// A namespace with the size of its blocks: by the key's number.
struct Space {
    ns: Namespace,
    seed: u64,
    size: fn(u64) -> usize,
}

impl Space {
    fn data(&self, n: u64) -> Vec<u8> {
        bytes(self.seed + n, (self.size)(n))
    }
}

fn spaces() -> [Space; 3] {
    [
        Space {
            ns: opaque(b"small"),
            seed: 1000,
            size: |n| 4096 + n as usize * 100,
        },
        Space {
            ns: opaque(b"large"),
            seed: 2000,
            size: |n| 40_000 + n as usize % 7 * 45_000,
        },
        Space {
            ns: gqa(30, 16),
            seed: 3000,
            size: |n| 30 * 2 * 384 * (1 + n as usize % 16),
        },
    ]
}

struct Worker<'a> {
    store: &'a Store,
    spaces: &'a [Space; 3],
    random: Random,
    buffers: HashMap<usize, Vec<u8>>,
}

impl Worker<'_> {
    fn deadline(&mut self) -> Instant {
        match self.random.below(3) {
            0 => Instant::now(),
            _ => Instant::now() + Duration::from_secs(20),
        }
    }

    fn step(&mut self) {
        let store = self.store;
        let space = &self.spaces[self.random.below(3) as usize];
        let ns = &space.ns;
        let n = self.random.below(KEYS);
        let name = key(n);
        match self.random.below(100) {
            0..40 => {
                // A tree: n follows n / 2. Often its parent has gone.
                let parent = (n > 0 && self.random.below(4) > 0).then(|| key(n / 2));
                let data = space.data(n);
                let replaces = key(self.random.below(KEYS));
                let block = Block {
                    key: &name,
                    data: &data,
                    parent: parent.as_ref().map(|p| &p[..]),
                    replaces: (self.random.below(20) == 0).then_some(&replaces[..]),
                    importance: 0.5,
                };
                let deadline = self.deadline();
                let put = store.put_many(ns, &[block], deadline).unwrap()[0];
                assert_ne!(put, Put::Deadline, "nothing is held that long");
            }
            40..70 => self.get(space, n),
            70..76 => self.get_part(space, n),
            76..82 => {
                let count = 1 + self.random.below(6);
                let names: Vec<[u8; 32]> = (0..count).map(|i| key((n + i) % KEYS)).collect();
                let names: Vec<&[u8]> = names.iter().map(|k| &k[..]).collect();
                let verify = self.random.below(2) == 0;
                let deadline = self.deadline();
                for (i, leased) in store
                    .lease(ns, &names, verify, deadline)
                    .unwrap()
                    .into_iter()
                    .enumerate()
                {
                    if let Ok(leased) = leased {
                        let want = space.data((n + i as u64) % KEYS);
                        // SAFETY: the lease keeps the block's bytes.
                        let got = unsafe { std::slice::from_raw_parts(leased.ptr(), leased.len()) };
                        assert!(got == want, "a lease of wrong bytes");
                    }
                }
            }
            82..90 => {
                let names: Vec<[u8; 32]> = (0..8).map(|i| key((n + i) % KEYS)).collect();
                let names: Vec<&[u8]> = names.iter().map(|k| &k[..]).collect();
                let priority = self.random.below(3) as i32;
                let job = store.prefetch(ns, &names, DRAM, None, priority).unwrap();
                match self.random.below(3) {
                    0 => job.cancel(),
                    1 => assert!(job.wait(soon()), "a prefetch that never ends"),
                    _ => {}
                }
            }
            90..93 => {
                store.remove(ns, &[&name]).unwrap();
            }
            93..95 => {
                let deadline = self.deadline();
                if store.pin(ns, &[&name], deadline).unwrap()[0] {
                    self.get(space, n);
                    store.unpin(ns, &[&name]).unwrap();
                }
            }
            95 => store.flush(soon()).unwrap_or_else(|e| {
                assert_eq!(e.kind(), kvtier_core::error::Kind::Full, "{e}");
            }),
            96 => {
                let found = store.matching(ns, &[&name]).unwrap();
                assert!(found.blocks <= 1);
            }
            97 => {
                store.set_importance(ns, &[&name], &[1.0]).unwrap();
            }
            98 if self.random.below(10) == 0 => {
                store.clear(Some(ns)).unwrap();
            }
            _ => audit(store),
        }
    }

    fn get(&mut self, space: &Space, n: u64) {
        let count = 1 + self.random.below(5);
        let blocks: Vec<([u8; 32], Vec<u8>)> = (0..count)
            .map(|i| (n + i) % KEYS)
            .map(|n| (key(n), space.data(n)))
            .collect();
        get_all(self.store, &space.ns, &blocks);
    }

    fn get_part(&mut self, space: &Space, n: u64) {
        let tokens = (1 + n % 16) as usize;
        let layer = self.random.below(30) as usize;
        let token = self.random.below(tokens as u64) as usize;
        if space.ns.layout.is_opaque() {
            return;
        }
        let selection = Selection {
            layers: Some(layer as u32..layer as u32 + 1),
            tokens: Tokens::Range(token as u32..token as u32 + 1),
        };
        let out = self
            .buffers
            .entry(2 * 384)
            .or_insert_with(|| vec![0; 2 * 384]);
        let target = Out {
            ptr: out.as_mut_ptr(),
            len: out.len(),
        };
        let name = key(n);
        // SAFETY: the buffer is this thread's own and lives through the call.
        let got = unsafe {
            self.store
                .get_into(&space.ns, &[&name], &[target], &selection, soon())
        }
        .unwrap()[0];
        if got.is_ok() {
            let want = space.data(n);
            for plane in 0..2 {
                let at = ((layer * 2 + plane) * tokens + token) * 384;
                assert!(
                    out[plane * 384..][..384] == want[at..at + 384],
                    "a wrong part"
                );
            }
        }
    }
}

fn stress(store: Store, threads: u64, steps: usize, seed: u64) {
    let store = Arc::new(store);
    let spaces = spaces();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|t| {
                let (store, spaces) = (&store, &spaces);
                scope.spawn(move || {
                    let mut worker = Worker {
                        store,
                        spaces,
                        random: Random(seed * 100 + t),
                        buffers: HashMap::new(),
                    };
                    (0..steps).for_each(|_| worker.step());
                })
            })
            .collect();
        let auditor = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                audit(&store);
                std::thread::yield_now();
            }
        });
        let ends: Vec<_> = workers.into_iter().map(|w| w.join()).collect();
        done.store(true, Ordering::Relaxed);
        auditor.join().unwrap();
        ends.into_iter().for_each(|end| end.unwrap());
    });
    for t in store.report().tiers {
        let corrupt = t.counters.iter().find(|c| c.0 == "corrupt").unwrap().1;
        let errors = t.counters.iter().find(|c| c.0 == "errors").unwrap().1;
        assert_eq!((corrupt, errors), (0, 0), "{t:?}");
    }
    clear_and_check(&store);
    store.close(soon()).unwrap();
    store.close(soon()).unwrap();
}

#[test]
fn over_dram_alone() {
    for policy in POLICIES {
        let store = tiered(policy, vec![Memory::dram(4 << 20)], None);
        stress(store, 4, 2000, 1);
    }
}

#[test]
fn over_dram_and_nvme() {
    for policy in POLICIES {
        let dir = tempfile::tempdir().unwrap();
        let options = nvme(dir.path(), 24 << 20);
        let store = tiered(policy, vec![Memory::dram(4 << 20)], Some(options));
        stress(store, 4, 1250, 2);
    }
}

#[test]
fn over_dram_and_a_smaller_nvme() {
    for policy in POLICIES {
        let store = over(6 << 20, RamDevice::new(4 << 20), |config| {
            config.policy = policy.into();
        });
        stress(store, 4, 1000, 3);
    }
}

#[test]
fn over_three_tiers_with_another_policy() {
    for policy in POLICIES {
        let dir = tempfile::tempdir().unwrap();
        let cxl = Memory {
            kind: MemoryKind::Cxl,
            ..Memory::dram(3 << 20)
        };
        let options = nvme(dir.path(), 16 << 20);
        let store = tiered(policy, vec![Memory::dram(3 << 20), cxl], Some(options));
        stress(store, 4, 500, 4);
    }
    for policy in ["s3-fifo-leaf", "lru", "s3-fifo"] {
        let store = over(4 << 20, RamDevice::new(12 << 20), |config| {
            config.policy = policy.into();
        });
        stress(store, 3, 800, 5);
    }
}
