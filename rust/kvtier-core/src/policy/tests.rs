use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;

fn meta(parent: Option<Handle>) -> Meta {
    Meta {
        parent,
        pages: 1,
        ..Meta::default()
    }
}

fn victims(policy: &mut dyn Policy, n: usize) -> Vec<Handle> {
    let mut out = Vec::new();
    policy.victims(n, &mut |_| true, &mut out);
    out
}

#[test]
fn lru_names_the_longest_unused() {
    let mut lru = Lru::default();
    for h in 0..4 {
        lru.on_insert(h, &meta(None));
    }
    lru.on_hit(0);
    assert_eq!(victims(&mut lru, 3), [1, 2, 3]);
    lru.on_remove(2);
    assert_eq!(victims(&mut lru, 9), [1, 3, 0]);
}

#[test]
fn a_policy_says_what_the_blocks_that_came_cost() {
    for name in NAMES {
        let mut policy = by_name(name, 10_000).unwrap();
        let before = policy.memory_bytes();
        for h in 0..5000 {
            let meta = Meta {
                fingerprint: h.into(),
                ..meta(None)
            };
            policy.on_insert(h, &meta);
        }
        let cost = policy.memory_bytes() - before;
        assert!(cost >= 5000 * size_of::<Handle>(), "{name}: {cost} bytes");
        policy.on_remove(4999);
        let left = policy.memory_bytes() - before;
        assert!(left < cost + cost / 4, "{name}: {cost} bytes, then {left}");
    }
}

#[test]
fn s3_fifo_lets_one_hit_wonders_go_and_keeps_what_comes_back() {
    let mut policy = S3Fifo::new(10);
    for h in 0..5 {
        policy.on_insert(
            h,
            &Meta {
                fingerprint: h.into(),
                ..meta(None)
            },
        );
    }
    policy.on_hit(0);
    policy.on_hit(0);
    assert_eq!(
        victims(&mut policy, 1),
        [1],
        "0 was used twice and moved to the main queue"
    );
    policy.on_remove(1);
    policy.on_insert(
        1,
        &Meta {
            fingerprint: 1,
            ..meta(None)
        },
    );
    assert_eq!(victims(&mut policy, 3), [2, 3, 4], "1 was remembered");
}

#[test]
fn the_leaf_goes_first_and_then_its_parent() {
    let mut policy = Leaf::new(Lru::default());
    for h in 0..4 {
        policy.on_insert(h, &meta(h.checked_sub(1)));
    }
    assert_eq!(victims(&mut policy, 3), [3, 2, 1]);
    policy.on_remove(3);
    policy.on_insert(3, &meta(Some(0)));
    assert_eq!(
        victims(&mut policy, 1),
        [2],
        "both 2 and 3 are leaves, 2 is older"
    );
}

#[test]
fn importance_keeps_what_is_attended_to_and_what_is_dear_to_compute() {
    let mut policy = by_name("importance", 10).unwrap();
    // Three roots: one without a score, one that matters, one that does not.
    for (h, importance) in [(0, 0.0), (1, 9.0), (2, 1.0)] {
        policy.on_insert(
            h,
            &Meta {
                importance,
                ..meta(None)
            },
        );
    }
    assert_eq!(victims(&mut *policy, 3), [2, 0, 1]);
    policy.set_importance(2, 30.0);
    assert_eq!(victims(&mut *policy, 1), [0]);
    // A chain: its end is dearer than a root of the same score.
    let mut policy = by_name("importance", 200).unwrap();
    for h in 0..100 {
        policy.on_insert(h, &meta(h.checked_sub(1)));
    }
    policy.on_insert(100, &meta(None));
    assert_eq!(victims(&mut *policy, 1), [100]);
    // How much dearer is a parameter; at 0 the oldest leaf leaves.
    let mut policy = by_name("importance:0", 200).unwrap();
    for h in 0..100 {
        policy.on_insert(h, &meta(h.checked_sub(1)));
    }
    policy.on_insert(100, &meta(None));
    assert_eq!(victims(&mut *policy, 1), [99]);
}

/// As a store does that finds every block leased: each is named once, whatever the policy and however often
/// they were used, and then once again.
#[test]
fn what_stays_makes_way_until_all_others_were_named() {
    const BLOCKS: u32 = 1000;
    for name in NAMES {
        let mut policy = in_chains(name, &[BLOCKS.into()], false).unwrap().remove(0);
        for h in 0..BLOCKS {
            policy.on_insert(h, &meta(None));
            (0..h % 7).for_each(|_| policy.on_hit(h / 2));
        }
        for round in 0..3 {
            let mut seen = HashSet::new();
            while seen.len() < BLOCKS as usize {
                let mut named = victims(&mut *policy, 7);
                named.truncate(BLOCKS as usize - seen.len());
                assert!(!named.is_empty(), "{name}, round {round}: {}", seen.len());
                for h in named {
                    policy.defer(h);
                    assert!(seen.insert(h), "{name}, round {round}: {h} again");
                }
            }
        }
    }
}

/// As a tier does that fills for the first time.
#[test]
fn a_victim_is_named_however_many_came_before_the_first_search() {
    for name in NAMES {
        let mut policy = by_name(name, 30_000).unwrap();
        for h in 0..30_000 {
            let fingerprint = u64::from(h).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            policy.on_insert(
                h,
                &Meta {
                    fingerprint,
                    ..meta(None)
                },
            );
        }
        assert!(policy.victim(&mut |_| true).is_some(), "{name}");
    }
}

/// The policy of that name over a hundred roots.
fn over_roots(name: &str) -> Box<dyn Policy> {
    let mut policy = by_name(name, 200).unwrap();
    for h in 0..100 {
        policy.on_insert(h, &meta(None));
    }
    policy
}

/// A parent is passed while its child arrives, and is a leaf again when that child has left.
#[test]
fn a_passed_block_may_be_named_as_soon_as_it_was_held_and_let_go() {
    for name in NAMES {
        let mut policy = over_roots(name);
        assert_eq!(policy.victim(&mut |_| false), None, "{name}");
        policy.on_insert(100, &meta(None)); // something that no search has passed yet
        policy.hold(99, true);
        assert_eq!(policy.victim(&mut |_| false), None, "{name}");
        policy.hold(99, false);
        policy.on_insert(101, &meta(None));
        assert_eq!(policy.victim(&mut |h| h == 99), Some(99), "{name}");
    }
}

/// What was passed is asked again a few at a time, unless nothing else can leave.
#[test]
fn a_victim_is_found_behind_others_that_were_used_and_may_not_leave() {
    for name in NAMES {
        let mut policy = over_roots(name);
        let mut named = Vec::new();
        policy.victims(1, &mut |_| false, &mut named);
        assert!(named.is_empty(), "{name}");
        policy.on_hit(0); // it is pinned, and its place is not with those that were passed
        policy.victims(1, &mut |h| h == 99, &mut named);
        assert_eq!(named, [99], "{name}");
    }
}

#[test]
fn auto_learns_which_sessions_come_back() {
    // Blocks under a root of their own, used once and never again, between chains that come back
    // every 200 requests. The tier holds the latter, but LRU keeps what is newest of all.
    let hits = |name: &str| {
        let mut policy = by_name(name, 300).unwrap();
        let mut here: HashSet<Handle> = HashSet::new();
        let mut hits = 0;
        for step in 0..40_000u32 {
            let block = if step % 2 == 0 {
                step / 2 % 200
            } else {
                1000 + step
            };
            if here.contains(&block) {
                hits += u32::from(step > 20_000);
                policy.on_hit(block);
                continue;
            }
            let meta = Meta {
                fingerprint: u64::from(block).wrapping_mul(0x9E37_79B9_7F4A_7C15),
                ..meta(None)
            };
            if here.len() == 300 {
                if !policy.admit(block, &meta) {
                    policy.on_refuse(&meta);
                    continue;
                }
                let victim = victims(&mut *policy, 1)[0];
                policy.on_remove(victim);
                here.remove(&victim);
            }
            policy.on_insert(block, &meta);
            here.insert(block);
        }
        hits
    };
    assert_eq!(hits("lru-leaf"), 0);
    assert!(hits("auto") > 9_000, "{} of 10,000", hits("auto"));
}

#[test]
fn auto_keeps_what_is_newest_where_nothing_ever_came_back() {
    let mut policy = by_name("auto", 500).unwrap();
    for h in 0..5000u32 {
        if policy.len() == 500 {
            let victim = victims(&mut *policy, 1)[0];
            policy.on_remove(victim);
        }
        let fingerprint = u64::from(h).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        policy.on_insert(
            h,
            &Meta {
                fingerprint,
                ..meta(None)
            },
        );
    }
    let here = victims(&mut *policy, 500);
    let new = here.iter().filter(|&&h| h >= 4400).count();
    assert!(new > 450, "{new} of 500 are of the last 600");
}

#[test]
fn unknown_names_say_what_is_allowed() {
    let error = by_name("mru", 10).err().unwrap();
    assert!(error.to_string().contains("lru-leaf"));
    for name in [
        "importance:",
        "importance:-1",
        "importance:inf",
        "importance:x",
        "lru:1",
        "auto:1",
    ] {
        let error = by_name(name, 10).err().expect(name);
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[derive(Clone, Debug)]
enum Op {
    Insert(u8),
    Hit(u8),
    Evict(u8),
    Pin(u8),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(
        prop_oneof![
            3 => any::<u8>().prop_map(Op::Insert),
            3 => any::<u8>().prop_map(Op::Hit),
            2 => (1u8..6).prop_map(Op::Evict),
            1 => any::<u8>().prop_map(Op::Pin),
        ],
        1..200,
    )
}

proptest! {
    /// Told of all hits of a call at once, also of blocks that left meanwhile, a policy thinks what it
    /// does when it is told of one after the other.
    #[test]
    fn hits_of_one_call_are_hits(ops in ops(), hits in 1usize..9, which in 0..NAMES.len()) {
        let mut policies = [(); 2].map(|()| by_name(NAMES[which], 64).unwrap());
        let mut resident = HashSet::new();
        let mut told: Vec<Handle> = Vec::new();
        for op in ops {
            match op {
                Op::Insert(x) if resident.insert(Handle::from(x)) => policies.iter_mut().for_each(|policy| {
                    policy.on_insert(x.into(), &Meta { fingerprint: x.into(), ..meta(None) });
                }),
                Op::Hit(x) => {
                    told.push(x.into());
                    if told.len() == hits {
                        let [one, other] = &mut policies;
                        one.on_hits(&told);
                        told.drain(..).for_each(|h| other.on_hit(h));
                    }
                }
                Op::Evict(n) => {
                    let [one, other] = policies.each_mut().map(|policy| victims(&mut **policy, n.into()));
                    prop_assert_eq!(&one, &other);
                    for h in one {
                        resident.remove(&h);
                        policies.iter_mut().for_each(|policy| policy.on_remove(h));
                    }
                }
                Op::Insert(_) | Op::Pin(_) => {}
            }
            prop_assert_eq!(policies[0].len(), resident.len());
            prop_assert_eq!(policies[0].memory_bytes(), policies[1].memory_bytes());
        }
        let [one, other] = policies.each_mut().map(|policy| victims(&mut **policy, 1000));
        prop_assert_eq!(one, other);
    }

    /// Whatever the policy: it names only what it was told of, nothing twice, nothing that is not
    /// eligible, children before parents where chains count, and all of it if asked for enough.
    #[test]
    fn victims_are_always_legal(ops in ops(), which in 0..NAMES.len()) {
        let name = NAMES[which];
        let mut policy = by_name(name, 64).unwrap();
        let mut resident: HashMap<Handle, Option<Handle>> = HashMap::new();
        let mut pinned: HashSet<Handle> = HashSet::new();
        for op in ops {
            match op {
                Op::Insert(x) if !resident.contains_key(&x.into()) => {
                    let parent = Handle::from(x / 2);
                    let parent = resident.contains_key(&parent).then_some(parent);
                    policy.on_insert(x.into(), &Meta { fingerprint: x.into(), ..meta(parent) });
                    resident.insert(x.into(), parent);
                }
                Op::Hit(x) => policy.on_hit(x.into()),
                Op::Pin(x) => {
                    if !pinned.remove(&x.into()) { pinned.insert(x.into()); }
                }
                Op::Evict(n) => {
                    let mut out = Vec::new();
                    policy.victims(n.into(), &mut |h| !pinned.contains(&h), &mut out);
                    prop_assert!(out.len() <= n.into());
                    for h in out {
                        prop_assert!(!pinned.contains(&h));
                        prop_assert!(resident.remove(&h).is_some(), "{h} is not here, or was named twice");
                        if keeps_chains(name) {
                            prop_assert!(resident.values().all(|p| *p != Some(h)), "{h} still has a child");
                        }
                        policy.on_remove(h);
                    }
                }
                Op::Insert(_) => {}
            }
            prop_assert_eq!(policy.len(), resident.len());
        }
        let mut all = Vec::new();
        policy.victims(1000, &mut |_| true, &mut all);
        let all: HashSet<Handle> = all.into_iter().collect();
        prop_assert_eq!(all, resident.keys().copied().collect::<HashSet<_>>());
    }
    /// The same of tiers above one another, whose blocks come, are copied to another tier, and leave
    /// each by themselves.
    #[test]
    fn victims_are_legal_in_every_tier(
        ops in prop::collection::vec((0u8..5, any::<u8>(), 0usize..3, 0usize..3), 1..200),
        which in 0..NAMES.len(),
        hbm: bool,
    ) {
        let mut tiers = match hbm {
            true => in_chains(NAMES[which], &[64; 3], true).unwrap(),
            false => for_tiers(NAMES[which], &[64; 3]).unwrap(),
        };
        let mut resident: [HashMap<Handle, Option<Handle>>; 3] = Default::default();
        for (what, x, tier, other) in ops {
            let block = Handle::from(x);
            let held = (0..3).find(|&t| resident[t].contains_key(&block));
            let parent = Handle::from(x / 2);
            let known = x > 0 && resident.iter().any(|tier| tier.contains_key(&parent));
            let parent = known.then_some(parent);
            let meta = Meta { fingerprint: x.into(), ..meta(parent) };
            match (what, held) {
                (0, Some(tier)) => {
                    tiers[tier].on_hit(block);
                    for (other, policy) in tiers.iter_mut().enumerate().skip(tier + 1) {
                        if resident[other].contains_key(&block) {
                            policy.on_hit_above(block);
                        }
                    }
                }
                (0, None) if x % 8 == 7 => tiers[0].on_refuse(&meta),
                (0 | 1, None) => {
                    tiers[tier].on_insert(block, &meta);
                    resident[tier].insert(block, parent);
                }
                (1 | 2, Some(_)) if !resident[tier].contains_key(&block) => {
                    tiers[tier].admit(block, &meta);
                    tiers[tier].on_insert(block, &meta);
                    resident[tier].insert(block, parent);
                }
                (3, _) => {
                    tiers[tier].on_remove(block);
                    resident[tier].remove(&block);
                }
                _ => {
                    let mut out = Vec::new();
                    tiers[other].victims(3, &mut |_| true, &mut out);
                    for h in out {
                        prop_assert!(resident[other].remove(&h).is_some(), "{h} is not here, or was named twice");
                        if keeps_chains(NAMES[which]) {
                            prop_assert!(resident[other].values().all(|p| *p != Some(h)), "{h} still has a child");
                        }
                        tiers[other].on_remove(h);
                    }
                }
            }
        }
        for (policy, resident) in tiers.iter_mut().zip(resident) {
            let mut all = Vec::new();
            policy.victims(1000, &mut |_| true, &mut all);
            let all: HashSet<Handle> = all.into_iter().collect();
            prop_assert_eq!(all, resident.keys().copied().collect::<HashSet<_>>());
        }
    }
}

#[test]
fn auto_names_nothing_that_was_used_just_now() {
    // Nothing ever comes back, so what is newest is worth least; yet its request may go on.
    let mut policy = by_name("auto", 4000).unwrap();
    let insert = |policy: &mut Box<dyn Policy>, h: Handle| {
        let fingerprint = u64::from(h).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let meta = Meta {
            fingerprint,
            ..meta(None)
        };
        policy.on_insert(h, &meta);
    };
    for h in 0..20_000 {
        insert(&mut policy, h);
        if h >= 4000 {
            let named = victims(&mut *policy, 1)[0];
            assert!(named + 64 < h, "{named} of {h}");
            policy.on_remove(named);
        }
    }
    assert_eq!(
        victims(&mut *policy, 8000).len(),
        4000,
        "but all if need be"
    );
}

#[test]
fn auto_takes_little_memory_before_it_knows_anything() {
    let tiers = for_tiers("auto", &[1 << 20; 3]).unwrap();
    let bytes: usize = tiers.iter().map(|policy| policy.memory_bytes()).sum();
    assert!(bytes < 24 << 10, "{bytes}: there may be hundreds of shares");
}

#[test]
fn what_auto_remembers_of_what_left_is_bounded_by_memory() {
    let held = 100;
    let [little, much] = [256, 1 << 20].map(|pages| {
        let mut policy = in_chains("auto", &[pages], false).unwrap().remove(0);
        for h in 0..200_000u32 {
            let fingerprint = u64::from(h).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            policy.on_insert(
                h % held,
                &Meta {
                    fingerprint,
                    ..meta(None)
                },
            );
            policy.on_remove((h + 1) % held);
        }
        policy.memory_bytes()
    });
    assert!(little < 100 << 10, "{little}: of 1 MiB");
    assert!(much < 2 << 20, "{much}: of 4 GiB");
}

/// The lower of two tiers holds 1,000 blocks, the upper one half of them, which it names last. Says which.
fn with_copies(tiers: &mut [Box<dyn Policy>]) -> Vec<Handle> {
    for h in 0..1000 {
        let fingerprint = (u64::from(h) + 1) << 40;
        let meta = Meta {
            fingerprint,
            ..meta(None)
        };
        tiers[0].on_insert(h, &meta);
        tiers[1].on_insert(h, &meta);
    }
    let left = victims(&mut *tiers[0], 500);
    left.iter().for_each(|&h| tiers[0].on_remove(h));
    let copies: Vec<_> = (0..1000).filter(|h| !left.contains(h)).collect();
    copies.iter().for_each(|&h| tiers[0].on_hit(h));
    copies
}

#[test]
fn auto_lets_go_of_copies_before_what_lies_nowhere_else() {
    let named = |hbm: bool, gone: bool| {
        let mut tiers = in_chains("auto", &[1000; 2], hbm).unwrap();
        let copies = with_copies(&mut tiers);
        if gone {
            copies.iter().for_each(|&h| tiers[0].on_remove(h));
        }
        let named = victims(&mut *tiers[1], 200);
        let copies = named.iter().filter(|h| copies.contains(h)).count();
        (copies, named.len())
    };
    assert_eq!(named(false, false), (200, 200));
    assert_eq!(named(false, true), (0, 200), "they were used last");
    assert_eq!(named(true, false), (0, 200), "HBM holds nothing else");
}

#[test]
fn what_auto_learns_in_one_tier_is_known_in_the_others() {
    // Two kinds of blocks go down to the lower tier: roots that are used every other round in the
    // upper one, and roots that never are. The lower one sees no use of either.
    let mut tiers = for_tiers("auto", &[400, 400]).unwrap();
    let mut next = 0;
    let mut insert = |tiers: &mut [Box<dyn Policy>], tier: usize| {
        let fingerprint = u64::from(next).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let meta = Meta {
            fingerprint,
            ..meta(None)
        };
        tiers[tier].on_insert(next, &meta);
        next += 1;
        (next - 1, meta)
    };
    let used: Vec<_> = (0..100).map(|_| insert(&mut tiers, 0)).collect();
    let mut once = Vec::new();
    for _ in 0..200 {
        for &(h, _) in &used {
            tiers[0].on_hit(h);
            once.push(insert(&mut tiers, 0));
        }
        for (h, _) in once.drain(..once.len().saturating_sub(100)) {
            tiers[0].on_remove(h);
        }
    }
    for (h, meta) in used.iter().chain(&once) {
        tiers[1].on_insert(*h, meta);
        tiers[0].on_remove(*h);
    }
    let named = victims(&mut *tiers[1], 100);
    let right = named.iter().filter(|h| !used.iter().any(|u| u.0 == **h));
    // But for a few that came just now.
    assert!(right.count() >= 95, "those go first that were never used");
    let (h, meta) = insert(&mut tiers, 0);
    assert!(
        tiers[1].admit(used[0].0, &used[0].1),
        "it would push out one that is worth less"
    );
    assert!(
        !tiers[1].admit(h, &meta),
        "it is worth no more than what is there"
    );
}
