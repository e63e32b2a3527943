//! Any sequence of verbs of several namespaces with quotas, beside a plain account of each.

use std::collections::HashMap;
use std::sync::Arc;

use kvtier_core::config::Memory;
use proptest::prelude::*;
use proptest::sample::select;

use super::common::*;
use super::*;

#[derive(Clone, Debug)]
enum Op {
    /// A chain of so many blocks, after that block if it is there.
    Put(usize, u64, u64, Option<u64>),
    Get(usize, u64),
    Remove(usize, u64),
    Clear(usize),
    Lease(usize, u64),
    Unlease,
    Flush,
    Restart,
    Wait(u64),
}

const SPACES: usize = 5;
/// The last one counts to this one.
const OWNER: usize = 1;
const KEYS: u64 = 400;
const LIFE: u64 = 1000;

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let name = (0..SPACES, 0..KEYS);
    let op = prop_oneof![
        30 => (name.clone(), 1..30u64, prop::option::of(0..KEYS)).prop_map(|((s, n), c, p)| Op::Put(s, n, c, p)),
        8 => name.clone().prop_map(|(s, n)| Op::Get(s, n)),
        4 => name.clone().prop_map(|(s, n)| Op::Remove(s, n)),
        1 => (0..SPACES).prop_map(Op::Clear),
        3 => name.prop_map(|(s, n)| Op::Lease(s, n)),
        3 => Just(Op::Unlease),
        2 => Just(Op::Flush),
        1 => Just(Op::Restart),
        2 => (1..LIFE).prop_map(Op::Wait),
    ];
    prop::collection::vec(op, 1..60)
}

/// Pages of a block, by its namespace and number.
fn pages(space: usize, n: u64) -> u64 {
    1 + (n * 7 + space as u64) % 16
}

struct Tenants {
    policy: &'static str,
    store: Store,
    device: Option<Arc<RamDevice>>,
    clock: Arc<TestClock>,
    spaces: Vec<Namespace>,
    /// When each block was stored last.
    put: HashMap<(usize, u64), u64>,
    now: u64,
    leases: Vec<kvtier_core::lease::Leased>,
}

impl Tenants {
    fn new(policy: &'static str, device: Option<Arc<RamDevice>>) -> Self {
        let clock = TestClock::new();
        let spaces = (0..SPACES).map(|s| opaque(&[b't', s as u8])).collect();
        let mut tenants = Tenants {
            policy,
            store: dram(MIB),
            device,
            clock,
            spaces,
            put: HashMap::new(),
            now: 0,
            leases: Vec::new(),
        };
        tenants.open();
        tenants
    }

    fn open(&mut self) {
        self.store = match &self.device {
            Some(device) => timed_by(self.policy, &self.clock, device),
            None => tiered(self.policy, vec![Memory::dram(4 * MIB)], None),
        };
        for (space, quota) in self.quotas().iter().enumerate() {
            if let Some(quota) = quota {
                self.store.set_quota(&self.spaces[space], quota).unwrap();
            }
        }
        let (beside, owner) = (&self.spaces[SPACES - 1], &self.spaces[OWNER]);
        self.store.count_to(beside, owner).unwrap();
    }

    /// One with a guarantee, one with a cap too, one with a time to live, one without a quota, one that
    /// counts to the second.
    fn quotas(&self) -> [Option<Quota>; SPACES] {
        let tiers = 1 + usize::from(self.device.is_some());
        let ttl = self.device.is_some().then_some(Duration::from_secs(LIFE));
        [
            Some(quota(&[MIB, 3 * MIB][..tiers], &[])),
            Some(quota(&[MIB / 2, MIB][..tiers], &[MIB, 2 * MIB][..tiers])),
            Some(Quota {
                ttl,
                ..quota(&[MIB / 2, 0][..tiers], &[])
            }),
            None,
            None,
        ]
    }

    fn holds(&self) -> Vec<Vec<u64>> {
        let shares = self.spaces.iter().map(|ns| state(&self.store, ns).shares);
        shares
            .map(|s| s.iter().map(|s| s.bytes).collect())
            .collect()
    }

    fn step(&mut self, op: &Op) {
        // What the step before had to make room for is over.
        eventually("written", || total(&self.store, "writing") == 0);
        let before = self.holds();
        let mut by = None;
        match *op {
            Op::Put(space, first, count, parent) => {
                by = Some(space);
                let ns = &self.spaces[space];
                let mut parent = parent.map(key);
                for n in first..(first + count).min(KEYS) {
                    let data = bytes(n, pages(space, n) as usize * 4096 - 100);
                    let parent_key = parent.as_ref().map(|p| &p[..]);
                    let by = Instant::now() + Duration::from_secs(5);
                    let put = try_put_by(&self.store, ns, &key(n), &data, parent_key, by);
                    match put.unwrap_or_else(|e| panic!("{space}: {e}: {:#?}", self.store.report()))
                    {
                        Put::Stored(_) => drop(self.put.insert((space, n), self.now)),
                        Put::Orphan => break,
                        _ => {}
                    }
                    parent = Some(key(n));
                }
            }
            Op::Get(space, n) => {
                by = Some(space); // it may have to be loaded
                let len = pages(space, n) as usize * 4096 - 100;
                match get(&self.store, &self.spaces[space], &key(n), len) {
                    Ok(data) => {
                        assert!(data == bytes(n, len));
                        let age = self.now - self.put[&(space, n)];
                        let living = space == 2 && self.device.is_some();
                        assert!(!living || age < LIFE, "{age} seconds old");
                    }
                    Err(miss) => assert_eq!(miss, Miss::Absent),
                }
            }
            Op::Remove(space, n) => {
                by = Some(space);
                self.store.remove(&self.spaces[space], &[&key(n)]).unwrap();
            }
            Op::Clear(space) => {
                by = Some(space);
                self.store.clear(Some(&self.spaces[space])).unwrap();
            }
            Op::Lease(space, n) if self.leases.len() < 4 => {
                by = Some(space);
                let ns = &self.spaces[space];
                let leases = self.store.lease(ns, &[&key(n)], true, soon()).unwrap();
                self.leases.extend(leases.into_iter().flatten());
            }
            Op::Lease(..) => {}
            Op::Unlease => drop(self.leases.pop()),
            // Blocks that lie nowhere else make way for those that must be kept.
            Op::Flush => drop(self.store.flush(soon())),
            Op::Restart if self.device.is_some() => {
                let _ = self.store.close(soon());
                self.open();
                // Ages begin anew.
                self.put.values_mut().for_each(|at| *at = self.now);
                return;
            }
            Op::Restart => {}
            Op::Wait(seconds) => {
                self.clock.advance(seconds);
                self.now += seconds;
                return; // what is too old leaves, guaranteed or not
            }
        }
        self.check(before, by);
    }

    fn check(&self, before: Vec<Vec<u64>>, by: Option<usize>) {
        audit_accounts(&self.store);
        let after = self.holds();
        let by = by.map(|by| if by == SPACES - 1 { OWNER } else { by });
        for (space, quota) in self.quotas().iter().enumerate() {
            let Some(quota) = quota else { continue };
            let expiring = quota.ttl.is_some();
            for tier in 0..after[space].len() {
                let (before, after) = (before[space][tier], after[space][tier]);
                if by != Some(space) && !expiring {
                    let kept = before.min(quota.guaranteed[tier]);
                    // The mover may just be at a block that its own namespace's last need named.
                    let last = if self.device.is_some() { 16 * 4096 } else { 0 };
                    assert!(
                        after + last >= kept,
                        "{space} had {before} in {tier}, has {after}"
                    );
                }
                let cap = quota.cap.get(tier).copied().flatten();
                assert!(after <= cap.unwrap_or(u64::MAX), "{space} is above its cap");
            }
        }
        if self.device.is_none() {
            self.recount(0);
        }
    }

    /// Counts again, block by block, where all blocks lie in one tier.
    fn recount(&self, tier: usize) {
        let count = |space: usize| {
            let there = |&n: &u64| {
                self.store
                    .contains(&self.spaces[space], &[&key(n)])
                    .unwrap()[0]
            };
            let there = (0..KEYS).filter(there);
            there.fold((0, 0), |(blocks, sum), n| {
                (blocks + 1, sum + pages(space, n) * 4096)
            })
        };
        for (space, ns) in self.spaces.iter().enumerate() {
            let mut held = count(space);
            if [OWNER, SPACES - 1].contains(&space) {
                let other = count(OWNER + SPACES - 1 - space);
                held = (held.0 + other.0, held.1 + other.1);
            }
            let share = &state(&self.store, ns).shares[tier];
            assert_eq!((share.blocks, share.bytes), held, "{space}");
        }
    }

    fn end(mut self) {
        self.leases.clear();
        for ns in &self.spaces {
            let len = |n| {
                pages(
                    self.spaces
                        .iter()
                        .position(|s| s.tag() == ns.tag())
                        .unwrap(),
                    n,
                )
            };
            let _ = get(&self.store, ns, &key(1), len(1) as usize * 4096 - 100);
        }
        if self.device.is_some() {
            let _ = self.store.close(soon());
            self.open();
            self.recount(1);
        }
        self.store.clear(None).unwrap();
        for ns in &self.spaces {
            let held = state(&self.store, ns).shares;
            assert!(
                held.iter().all(|s| (s.blocks, s.bytes) == (0, 0)),
                "{held:?}"
            );
        }
        audit_accounts(&self.store);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_sequence_breaks_a_guarantee_or_a_cap_in_memory(
        ops in ops(),
        policy in select(&POLICIES[..]),
    ) {
        let mut tenants = Tenants::new(policy, None);
        ops.iter().for_each(|op| tenants.step(op));
        tenants.end();
    }

    #[test]
    fn no_sequence_breaks_a_guarantee_or_a_cap_over_nvme(
        ops in ops(),
        policy in select(&POLICIES[..]),
    ) {
        let mut tenants = Tenants::new(policy, Some(RamDevice::new(12 * MIB)));
        ops.iter().for_each(|op| tenants.step(op));
        tenants.end();
    }
}
