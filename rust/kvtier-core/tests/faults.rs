//! Devices that fail, hang, lose power or change bytes: never a wrong byte, never a stuck store.
#![allow(clippy::unwrap_used, reason = "tests may panic")]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use kvtier_core::error::Kind;
use kvtier_core::layout::{Selection, Tokens};
use kvtier_core::load::Miss;
use kvtier_core::put::Put;
use kvtier_core::read::Out;
use kvtier_core::store::{Namespace, Store};
use kvtier_nvme::Device;
use kvtier_nvme::device::sim::{Fault, Op, SimDevice};

const SIZE: usize = 40_000;

fn sim(bytes: u64, seed: u64) -> Arc<SimDevice> {
    Arc::new(SimDevice::new(bytes, seed))
}

/// Where `data` lies on the device.
fn place(device: &SimDevice, data: &[u8]) -> usize {
    let image = device.image();
    let found = image.chunks(4096).position(|page| page == &data[..4096]);
    found.expect("the block is on the device") * 4096
}

fn is_there(store: &Store, ns: &Namespace, n: u64) -> bool {
    store.contains(ns, &[&key(n)]).unwrap()[0]
}

#[test]
fn what_was_flushed_survives_a_loss_of_power() {
    let ns = opaque(b"power");
    for seed in 0..6 {
        let device = sim(8 << 20, seed);
        let store = over(2 << 20, device.clone(), |_| ());
        let mut blocks = put_blocks(&store, &ns, 50, SIZE, true);
        store.flush(soon()).unwrap();
        store.remove(&ns, &[&key(45)]).unwrap();
        store.flush(soon()).unwrap();
        // These may be lost, and so may their half.
        for n in 100..140 {
            let data = bytes(n, SIZE);
            put(&store, &ns, &key(n), &data, None);
            blocks.push((key(n), data));
        }
        let after = Arc::new(device.crash());
        drop(store);
        let store = over(2 << 20, after, |_| ());
        let gots = get_all(&store, &ns, &blocks);
        assert!(gots[..45].iter().all(|got| got.is_ok()), "{gots:?}");
        assert!(
            gots[45..50].iter().all(|got| *got == Err(Miss::Absent)),
            "{gots:?}"
        );
        assert_eq!(count(&store, "nvme", "corrupt"), 0);
        clear_and_check(&store);
    }
}

#[test]
fn a_failed_device_is_bypassed_and_the_store_goes_on() {
    let device = sim(8 << 20, 1);
    let ns = opaque(b"failed");
    let store = over(1 << 20, device.clone(), |_| ());
    let blocks = put_blocks(&store, &ns, 40, SIZE, false);
    store.flush(soon()).unwrap();
    device.inject(Op::Write, device.count(Op::Write), Fault::Crash);
    for n in 100..300 {
        let put = put(&store, &ns, &key(n), &bytes(n, SIZE), None);
        assert_eq!(put, Put::Stored("dram"));
        assert_eq!(get(&store, &ns, &key(n), SIZE), Ok(bytes(n, SIZE)));
        audit(&store);
    }
    // Old blocks that lay on it only are misses from now on, and counted.
    let gots = get_all(&store, &ns, &blocks);
    assert!(gots.contains(&Err(Miss::Device)), "{gots:?}");
    let again = get_all(&store, &ns, &blocks);
    assert!(
        again
            .iter()
            .all(|got| matches!(got, Ok("dram") | Err(Miss::Absent))),
        "{again:?}"
    );
    assert!(count(&store, "nvme", "errors") > 0);
    assert!(
        count(&store, "dram", "evictions") > 0,
        "what cannot be written is dropped"
    );
    assert_eq!(store.flush(soon()).unwrap_err().kind(), Kind::Storage);
    assert!(store.close(soon()).is_err());
}

#[test]
fn writes_that_fail_now_and_then_lose_nothing_that_is_said_to_be_kept() {
    let device = sim(8 << 20, 2);
    let ns = opaque(b"flaky");
    let store = over(8 << 20, device.clone(), |_| ());
    let blocks = put_blocks(&store, &ns, 20, SIZE, false);
    let next = device.count(Op::Write);
    // The first ones: no record is written before some block was.
    for n in [0, 1] {
        device.inject(Op::Write, next + n, Fault::Errno(libc_eio()));
    }
    let error = store.flush(soon()).unwrap_err();
    assert_eq!(error.kind(), Kind::Storage, "{error}");
    store.flush(soon()).unwrap();
    let after = Arc::new(device.crash());
    drop(store);
    let store = over(2 << 20, after, |_| ());
    assert!(get_all(&store, &ns, &blocks).iter().all(|got| got.is_ok()));
}

fn libc_eio() -> i32 {
    5
}

#[test]
fn a_device_that_hangs_is_bypassed_until_it_answers() {
    let device = GateDevice::new(8 << 20);
    let clock = TestClock::new();
    let ns = opaque(b"hangs");
    let store = over(1 << 20, device.clone(), |config| {
        config.nvme.as_mut().unwrap().clock = clock.clone();
    });
    device.close(false, true);
    let mut n = 0;
    while try_put_by(&store, &ns, &key(n), &bytes(n, SIZE), None, Instant::now()).is_ok() {
        n += 1;
    }
    eventually("a write hangs", || device.is_waited_for());
    clock.advance(60);
    for n in 100..150 {
        assert_eq!(
            put(&store, &ns, &key(n), &bytes(n, SIZE), None),
            Put::Stored("dram")
        );
        assert_eq!(get(&store, &ns, &key(n), SIZE), Ok(bytes(n, SIZE)));
    }
    audit(&store);
    device.open();
    eventually("writes come back", || store.flush(soon()).is_ok());
    assert!(count(&store, "nvme", "writes") > 0);
    clear_and_check(&store);
    store.close(soon()).unwrap();
}

#[test]
fn what_is_written_and_stays_is_no_room_that_will_come() {
    let device = GateDevice::new(16 << 20);
    let (kept, ns) = (opaque(b"kept"), opaque(b"leaves"));
    let store = over(4 << 20, device.clone(), |config| {
        (config.high, config.low) = (1.0, 1.0);
    });
    // The flush takes what was put first; so much of it is under way as the store keeps ahead.
    put_blocks(&store, &kept, 10, SIZE, false);
    device.close(false, true);
    std::thread::scope(|scope| {
        let flushed = scope.spawn(|| store.flush(soon()));
        eventually("writes hang", || total(&store, "writing") == 10);
        let mut n = 0;
        while try_put_by(&store, &ns, &key(n), &bytes(n, SIZE), None, Instant::now()).is_ok() {
            n += 1;
        }
        let (store, ns) = (&store, &ns);
        let waiting = scope.spawn(move || put(store, ns, &key(n), &bytes(n, SIZE), None));
        eventually("blocks leave for a put that waits", || {
            total(store, "writing") > 10
        });
        device.open();
        assert_eq!(waiting.join().unwrap(), Put::Stored("dram"));
        flushed.join().unwrap().unwrap();
    });
    assert_eq!(count(&store, "dram", "evictions"), 0);
    clear_and_check(&store);
}

#[test]
fn close_returns_by_its_deadline_though_the_device_hangs() {
    let device = GateDevice::new(8 << 20);
    let ns = opaque(b"close");
    let store = over(2 << 20, device.clone(), |_| ());
    put_blocks(&store, &ns, 10, SIZE, false);
    let lease = store
        .lease(&ns, &[&key(3)], true, soon())
        .unwrap()
        .remove(0)
        .unwrap();
    device.close(true, true);
    let error = store
        .close(Instant::now() + Duration::from_millis(50))
        .unwrap_err();
    assert_eq!(error.kind(), Kind::Deadline, "{error}");
    store.close(soon()).unwrap();
    drop(store);
    // SAFETY: the lease keeps the block's bytes, even now.
    let leased = unsafe { std::slice::from_raw_parts(lease.ptr(), lease.len()) };
    assert!(leased == bytes(3, SIZE));
    device.open(); // the threads that are left over may end
}

#[test]
fn close_with_reads_and_puts_under_way_ends_them() {
    let device = GateDevice::new(8 << 20);
    let ns = opaque(b"ends");
    let store = over(2 << 20, device.clone(), |_| ());
    let blocks = put_blocks(&store, &ns, 60, SIZE, false);
    store.close(soon()).unwrap();
    let store = over(1 << 20, device.clone(), |_| ());
    device.close(true, false);
    let names: Vec<&[u8]> = blocks.iter().map(|b| &b.0[..]).collect();
    let job = store.prefetch(&ns, &names, DRAM, None, 0).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let done = tell.clone();
    job.on_done(Box::new(move || done.send("prefetch").unwrap()));
    let read = Box::new(move || tell.send("read").unwrap());
    store.after_loading(&ns, &names[..3], soon(), read).unwrap();
    std::thread::scope(|scope| {
        let (store, ns, blocks) = (&store, &ns, &blocks);
        let reader = scope.spawn(move || {
            let all = Selection::default();
            match try_get(store, ns, &key(0), SIZE, &all) {
                Ok(Ok((got, _))) => assert!(got == blocks[0].1),
                Ok(Err(_)) => {}
                Err(error) => assert_eq!(error.kind(), Kind::Closed),
            }
        });
        let putter = scope.spawn(move || {
            (100..).find_map(|n| {
                let put = try_put_by(store, ns, &key(n), &bytes(n, SIZE), None, soon());
                put.err().map(|error| error.kind())
            })
        });
        eventually("reads are under way", || total(store, "loads") > 0);
        let closer = scope.spawn(move || store.close(soon()));
        assert_eq!(putter.join().unwrap(), Some(Kind::Closed));
        device.open();
        reader.join().unwrap();
        closer.join().unwrap().unwrap();
    });
    let mut ended = [told.recv().unwrap(), told.recv().unwrap()];
    ended.sort_unstable();
    assert_eq!(ended, ["prefetch", "read"]);
    assert!(job.is_done());
}

#[test]
fn changed_bytes_on_nvme_are_a_miss_whichever_way_they_are_read() {
    let layers = 12;
    let tokens = 32;
    let ns = gqa(layers, tokens as u32);
    let len = layers * 2 * 384 * tokens;
    let data = bytes(1, len);
    let memory = Arc::new(Aligned::new(len.next_multiple_of(4096)));
    for (way, at) in [
        ("whole", 5),
        ("lease", len - 1),
        ("prefetch", 70_000),
        ("layer", 100_000),
        ("region", 33),
        ("flush", 9),
    ] {
        let device = sim(4 << 20, 3);
        let store = over(1 << 20, device.clone(), |_| ());
        put(&store, &ns, &key(1), &data, None);
        put(&store, &ns, &key(2), &bytes(2, len), Some(&key(1)));
        store.close(soon()).unwrap();
        let store = over(1 << 20, device.clone(), |_| ());
        device.rot((place(&device, &data) + at) as u64, 3);
        let layer = at / (2 * 384 * tokens);
        match way {
            "whole" => assert_eq!(get(&store, &ns, &key(1), len), Err(Miss::Corrupt)),
            "lease" => {
                let leased = store.lease(&ns, &[&key(1)], false, soon()).unwrap();
                assert!(matches!(leased[0], Err(Miss::Corrupt)));
            }
            "prefetch" => {
                let job = store.prefetch(&ns, &[&key(1)], DRAM, None, 0).unwrap();
                assert!(job.wait(soon()));
                assert_eq!(job.results().unwrap(), [Err(Miss::Corrupt)]);
            }
            "layer" => {
                // Another layer is still right; this one is not.
                let other = Selection {
                    layers: Some(0..1),
                    tokens: Tokens::All,
                };
                let want = data[..2 * 384 * tokens].to_vec();
                assert_eq!(
                    get_part(&store, &ns, &key(1), want.len(), &other),
                    Ok(want.clone())
                );
                let layer = layer as u32;
                let bad = Selection {
                    layers: Some(layer..layer + 1),
                    tokens: Tokens::Range(0..1),
                };
                assert_eq!(
                    get_part(&store, &ns, &key(1), 2 * 384, &bad),
                    Err(Miss::Corrupt)
                );
            }
            "region" => {
                // SAFETY: `memory` is kept by the region and its operations.
                let region = unsafe {
                    store.register_region(memory.ptr(), len.next_multiple_of(4096), memory.clone())
                };
                let _region = region.unwrap();
                let out = Out {
                    ptr: memory.ptr(),
                    len,
                };
                // SAFETY: the place lies in the region.
                let got = unsafe {
                    store.get_into(&ns, &[&key(1)], &[out], &Selection::default(), soon())
                };
                assert_eq!(got.unwrap(), [Err(Miss::Corrupt)]);
            }
            _ => {
                // A copy in memory serves on, though the one below is bad and unseen.
                let device = sim(4 << 20, 3);
                let store = over(1 << 20, device.clone(), |_| ());
                put(&store, &ns, &key(1), &data, None);
                store.flush(soon()).unwrap();
                device.rot((place(&device, &data) + at) as u64, 3);
                assert_eq!(get(&store, &ns, &key(1), len), Ok(data.clone()));
                continue;
            }
        }
        assert!(!is_there(&store, &ns, 1), "{way}");
        assert!(!is_there(&store, &ns, 2), "{way}: its follower is useless");
        assert_eq!(get(&store, &ns, &key(1), len), Err(Miss::Absent), "{way}");
        assert_eq!(count(&store, "nvme", "corrupt"), 1, "{way}");
        let lost = tier(&store, "nvme").quarantined as usize;
        eventually("the slot is given up", || {
            tier(&store, "nvme").quarantined as usize >= len
        });
        assert!(lost <= 2 * len);
        // Put again, it lies elsewhere, and is right.
        put(&store, &ns, &key(1), &data, None);
        store.close(soon()).unwrap();
        let store = over(1 << 20, device, |_| ());
        assert_eq!(get(&store, &ns, &key(1), len), Ok(data.clone()), "{way}");
        clear_and_check(&store);
    }
}

#[test]
fn a_lease_that_was_written_to_never_reaches_the_device() {
    // One segment, and one a layer.
    for (size, ns) in [(SIZE, opaque(b"scribble")), (30 * 2 * 384 * 8, gqa(30, 8))] {
        let device = RamDevice::new(8 << 20);
        let store = over(4 << 20, device.clone(), |_| ());
        let scribble = |n: u64| {
            let lease = store
                .lease(&ns, &[&key(n)], true, soon())
                .unwrap()
                .remove(0)
                .unwrap();
            // SAFETY: what a careless user might do; nobody reads it meanwhile.
            unsafe { *lease.ptr().cast_mut().add(777) ^= 1 };
        };
        put(&store, &ns, &key(1), &bytes(1, size), None);
        put(&store, &ns, &key(2), &bytes(2, size), None);
        scribble(1);
        store.flush(soon()).unwrap();
        assert!(!is_there(&store, &ns, 1), "there is no good copy");
        assert_eq!(count(&store, "dram", "corrupt"), 1);
        assert_eq!(count(&store, "nvme", "writes"), 1);
        // With a good copy below, that one serves.
        scribble(2);
        assert_eq!(get(&store, &ns, &key(2), size), Ok(bytes(2, size)));
        assert_eq!(count(&store, "dram", "corrupt"), 2);
        assert_eq!(get(&store, &ns, &key(1), size), Err(Miss::Absent));
        assert!(tier(&store, "dram").quarantined >= 2 * size as u64);
        audit(&store);
        clear_and_check(&store);
    }
}

#[test]
fn reads_that_fail_are_misses_and_the_others_are_not() {
    let device = sim(8 << 20, 4);
    let ns = opaque(b"reads");
    let store = over(4 << 20, device.clone(), |_| ());
    let blocks = put_blocks(&store, &ns, 30, SIZE, false);
    store.close(soon()).unwrap();
    let store = over(4 << 20, device.clone(), |_| ());
    let next = device.count(Op::Read);
    for n in [2, 5, 11] {
        device.inject(Op::Read, next + n, Fault::Errno(libc_eio()));
    }
    device.inject(Op::Read, next + 7, Fault::Torn(4096));
    device.inject(Op::Read, next + 9, Fault::Misdirected(8192));
    let gots = get_all(&store, &ns, &blocks);
    let misses = |miss| gots.iter().filter(|got| **got == Err(miss)).count();
    assert_eq!(
        (misses(Miss::Device), misses(Miss::Corrupt)),
        (3, 2),
        "{gots:?}"
    );
    assert_eq!(gots.iter().filter(|got| got.is_ok()).count(), 25);
    assert_eq!(store.report().blocks, 25);
    assert!(device.len() == 8 << 20);
    clear_and_check(&store);
}
