//! What `auto` keeps in memory and on NVMe, beside `lru-leaf`.

use super::*;

/// Reads blocks that lie on NVMe, one call a block, and says how many were in memory already.
fn found_in_memory(store: &Store, ns: &Namespace, blocks: &[([u8; 32], Vec<u8>)]) -> usize {
    let found = blocks.iter().map(|block| {
        let got = get_all(store, ns, std::slice::from_ref(block));
        usize::from(got[0].unwrap() == "dram")
    });
    found.sum()
}

#[test]
fn what_is_read_once_from_nvme_does_not_push_out_what_auto_knows_to_be_used() {
    const SIZE: usize = 16_000;
    let found = |policy: &str| {
        let ns = opaque(b"scan");
        let store = over(8 << 20, RamDevice::new(64 << 20), |config| {
            config.policy = policy.into();
        });
        let all = put_blocks(&store, &ns, 240 + 1500, SIZE, false);
        store.flush(soon()).unwrap();
        let (used, scan) = all.split_at(240);
        for _ in 0..8 {
            found_in_memory(&store, &ns, used);
        }
        // Each of them is used again, but seldom: a scan as long as memory comes between.
        let mut found = 0;
        for (n, once) in scan.iter().enumerate() {
            found_in_memory(&store, &ns, std::slice::from_ref(once));
            found += found_in_memory(&store, &ns, &used[n % 240..][..1]);
        }
        audit(&store);
        found
    };
    let (auto, lru) = (found("auto"), found("lru-leaf"));
    assert!(auto >= 1000 && lru <= 600, "{auto} and {lru} of 1500");
}

#[test]
fn a_loop_over_more_than_memory_holds_is_served_by_all_of_it_under_auto() {
    let ns = opaque(b"loop");
    let in_turn = |policy: &str| {
        let store = over(8 << 20, RamDevice::new(32 << 20), |config| {
            config.policy = policy.into();
        });
        let all = put_blocks(&store, &ns, 300, SIZE, false);
        store.flush(soon()).unwrap();
        let rounds = (0..8).map(|_| found_in_memory(&store, &ns, &all));
        let last = rounds.last().unwrap();
        let (blocks, demoted) = (tier(&store, "dram").blocks as usize, || {
            (
                count(&store, "nvme", "writes"),
                count(&store, "dram", "demotions"),
            )
        });
        let before = demoted();
        found_in_memory(&store, &ns, &all);
        assert_eq!(demoted(), before, "and nothing moves to and fro");
        (last, blocks)
    };
    let (found, blocks) = in_turn("auto");
    assert!(found * 10 >= blocks * 8, "{found}, with {blocks} there");
    assert_eq!(in_turn("lru-leaf").0, 0);
}

#[test]
fn what_never_comes_back_is_not_written_over_what_does() {
    const SIZE: usize = 16_000;
    const USED: u64 = 400;
    let run = |policy: &str| {
        let ns = opaque(b"once");
        let store = over(4 << 20, RamDevice::new(8 << 20), |config| {
            config.policy = policy.into();
        });
        let (mut found, steps) = (0, 8 * USED);
        for n in 0..steps {
            // In turn what is used again, and what is not; together they are more than both tiers hold.
            let used = key(n % USED);
            let out = get_all(&store, &ns, &[(used, bytes(n % USED, SIZE))]);
            match out[0] {
                Ok(_) => found += 1,
                Err(_) => drop(put(&store, &ns, &used, &bytes(n % USED, SIZE), None)),
            }
            let once = USED + n;
            put(&store, &ns, &key(once), &bytes(once, SIZE), None);
        }
        audit(&store);
        (found, count(&store, "nvme", "writes"), steps)
    };
    let (auto, lru) = (run("auto"), run("lru-leaf"));
    assert!(auto.0 * 2 > auto.2, "{auto:?} and {lru:?}");
    assert!(auto.1 * 2 < lru.1, "{auto:?} and {lru:?}");
}
