//! Paths that are missing, come back, or are raced for; threads that do not start; clocks that jump.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::Mutex;
use kvtier_codec::image::{PAGE, Shape};

use super::common::{id, is_intact, put, read, start_put};
use super::model::{BYTES, Frozen, open, sim, try_open};
use crate::commit::{self, Committer};
use crate::device::sim::{Fault, Op as SimOp, SimDevice};
use crate::engine::EngineKind;
use crate::{Device, ErrorKind, NvmeTier, Options, place};

/// Opens with every request to the first device failing.
fn open_without(devices: &[Arc<SimDevice>], errno: i32) -> Result<Arc<NvmeTier>, crate::Error> {
    let first = devices[0].count(SimOp::Read);
    for nth in first..first + 600 {
        devices[0].inject(SimOp::Read, nth, Fault::Errno(errno));
    }
    let as_devices = devices.iter().map(|d| d.clone() as Arc<dyn Device>);
    let options = Options::new(vec![], BYTES * devices.len() as u64);
    let opened = NvmeTier::open_on(as_devices.collect(), options);
    for nth in first..first + 600 {
        devices[0].forget(SimOp::Read, nth);
    }
    opened.map(|(tier, _)| tier)
}

#[test]
fn a_path_that_is_dead_at_open_is_bypassed_and_its_blocks_come_back_with_it() {
    let devices = [sim(1), sim(2), sim(3)];
    let (tier, _) = open(&devices);
    for n in 0..9 {
        put(&tier, id(n), 5000);
    }
    tier.close(None).unwrap();

    let tier = open_without(&devices, libc::EIO).unwrap();
    let stats = tier.stats();
    assert_eq!((stats.failed_paths, stats.recovered), (1, 6));
    let third = open(&[sim(9)]).0.capacity_pages();
    assert_eq!(
        tier.capacity_pages(),
        2 * third,
        "only what is there counts"
    );
    // Some ids again, and others; the missing path has copies of them with the same ids.
    let slots: Vec<_> = (0..12).map(|n| put(&tier, id(n), 6000)).collect();
    assert!(slots.iter().all(|s| s.path < 2 && s.generation > 1 << 32));
    tier.close(None).unwrap();

    let (tier, recovered) = open(&devices);
    assert_eq!(tier.stats().failed_paths, 0);
    let mut ids: Vec<_> = recovered.iter().map(|r| r.id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!((ids.len(), recovered.len()), (12, 12), "each id once");
    for block in &recovered {
        assert_eq!(block.shape.payload(), 6000, "the newer copy");
        assert!(is_intact(block, &read(&tier, block.slot).unwrap()));
    }
    tier.flush(None).unwrap();
    assert_eq!(
        tier.used_pages(),
        12 * 2,
        "the older copies gave their pages back"
    );
}

#[test]
fn two_paths_that_were_missing_in_turn_still_give_each_id_once() {
    let devices = [sim(1), sim(2)];
    open(&devices).0.close(None).unwrap();
    for _ in 0..2 {
        let tier = open_without(&devices, libc::ENXIO).unwrap();
        put(&tier, id(1), 5000);
        tier.close(None).unwrap();
        let turned = [devices[1].clone(), devices[0].clone()];
        let tier = open_without(&turned, libc::ENXIO).unwrap();
        put(&tier, id(1), 5000); // perhaps with the same generation
        tier.close(None).unwrap();
    }
    let (tier, recovered) = open(&devices);
    assert_eq!(recovered.len(), 1);
    assert!(is_intact(
        &recovered[0],
        &read(&tier, recovered[0].slot).unwrap()
    ));
}

#[test]
fn no_path_left_or_a_mistake_fails_the_open() {
    let devices = [sim(1), sim(2)];
    open(&devices).0.close(None).unwrap();
    assert_eq!(
        open_without(&devices[..1], libc::EIO).err().unwrap().kind(),
        ErrorKind::Io
    );
    let denied = open_without(&devices, libc::EACCES).err().unwrap();
    assert_eq!(
        denied.kind(),
        ErrorKind::Io,
        "permissions are to be put right: {denied}"
    );
    let foreign = Arc::new(SimDevice::from_image(vec![b'x'; BYTES as usize], 1));
    let mixed = vec![devices[0].clone() as Arc<dyn Device>, foreign.clone()];
    let error = NvmeTier::open_on(mixed, Options::new(vec![], 2 * BYTES))
        .err()
        .unwrap();
    assert_eq!(error.kind(), ErrorKind::Damaged);
    assert!(foreign.image().iter().all(|&b| b == b'x'), "untouched");
}

#[test]
fn when_a_committer_cannot_start_the_others_are_stopped_and_nothing_is_kept() {
    let devices = [sim(1), sim(2), sim(3)];
    let mut volumes = Vec::new();
    let mut committers = Vec::new();
    for device in &devices {
        crate::recover::format(&**device, BYTES, "sim").unwrap();
        let mut found = place::recover(&**device, "sim", BYTES).unwrap();
        let limits = crate::engine::Limits {
            inflight_bytes: 1 << 20,
            emulate_gbs: None,
            clock: Arc::new(crate::SystemClock),
        };
        let engine = crate::engine::start(EngineKind::Threads, device.clone(), &limits).unwrap();
        let volume = crate::volume::Volume::new(
            0,
            "sim".into(),
            device.clone(),
            engine,
            limits.clock,
            &mut found,
        );
        let volume = Arc::new(volume);
        committers.push(Committer::new(volume.clone(), &found, || 1));
        volumes.push(volume);
    }
    let left = Mutex::new(1);
    let started = commit::start(committers, |committer| {
        if *left.lock() == 0 {
            return Err(std::io::Error::from_raw_os_error(libc::EAGAIN));
        }
        *left.lock() -= 1;
        commit::spawn(committer)
    });
    assert!(started.is_err());
    crate::tier::close(&volumes, Vec::new(), None).unwrap();
    drop(volumes);
    for device in &devices {
        while Arc::strong_count(device) > 1 {
            std::thread::yield_now(); // until the threads have ended
        }
    }
}

#[test]
fn two_who_saw_the_last_place_do_not_both_get_it() {
    let (tier, _) = open(&[sim(1)]);
    let volume = tier.volumes()[0].clone();
    let mut slots: Vec<_> = std::iter::from_fn(|| tier.reserve(1)).collect();
    tier.abandon(slots.pop().unwrap());
    assert!(
        volume.load(1).is_some() && volume.load(1).is_some(),
        "both look"
    );
    assert!(volume.reserve(1, 1 << 20).is_some());
    assert_eq!(volume.reserve(1, (1 << 20) + 1), None);
}

#[test]
fn a_clock_that_is_set_back_bypasses_no_path_for_ever() {
    let device = sim(1);
    let start = Instant::now() + Duration::from_secs(1 << 20);
    let clock = Arc::new(Frozen(Mutex::new(start)));
    let options = Options {
        clock: clock.clone(),
        ..Options::new(vec![], BYTES)
    };
    let (tier, _) = try_open(std::slice::from_ref(&device), options);
    let first = device.count(SimOp::Write);
    for nth in first..first + 3 {
        device.inject(SimOp::Write, nth, Fault::Errno(libc::EIO));
    }
    for n in 0..3 {
        let (_, answer) = start_put(&tier, id(n), 100).unwrap();
        answer.recv().unwrap().unwrap_err();
    }
    assert!(tier.reserve(1).is_none(), "bypassed");
    *clock.0.lock() = start - Duration::from_secs(1 << 19);
    put(&tier, id(1), 100);
    *clock.0.lock() = start + Duration::from_secs(1 << 30);
    put(&tier, id(2), 100);
    tier.close(None).unwrap();
}

#[test]
fn a_clock_that_is_set_back_stops_no_emulated_device() {
    let device = sim(1);
    let start = Instant::now() + Duration::from_secs(1 << 20);
    let clock = Arc::new(Frozen(Mutex::new(start)));
    let options = Options {
        clock: clock.clone(),
        emulate_gbs: Some(1.0),
        ..Options::new(vec![], BYTES)
    };
    let (tier, _) = try_open(&[device], options);
    // The device is busy for microseconds, not for days: each time that the clock moves a little,
    // the engine may look again.
    for back in [0, 1 << 19] {
        *clock.0.lock() = start - Duration::from_secs(back);
        let (_, answer) = start_put(&tier, id(back), 3 * PAGE).unwrap();
        let answered = loop {
            *clock.0.lock() += Duration::from_micros(100);
            match answer.recv_timeout(Duration::from_millis(1)) {
                Ok(answered) => break answered,
                Err(_) => continue,
            }
        };
        answered.unwrap();
    }
    assert_eq!(Shape::new(3 * PAGE, 1).unwrap().pages(), 3);
}

#[test]
fn a_checkpoint_that_cannot_read_the_old_one_gives_the_path_up_and_loses_nothing() {
    let device = sim(1);
    let (tier, _) = open(std::slice::from_ref(&device));
    for n in 0..40 {
        put(&tier, id(n), 4096);
        tier.flush(None).unwrap();
    }
    tier.close(None).unwrap();
    let (superblock, _) = crate::recover::superblock(&*device, "sim").unwrap();
    assert!(superblock.records > 0);
    let (tier, _) = open(std::slice::from_ref(&device));
    let page = superblock.geometry.checkpoint_at(superblock.epoch) / 4096;
    device.fail_page(page, libc::EIO); // from now on, not at open
    let mut n = 100;
    while tier.flush(None).is_ok() {
        if let Some((slot, answer)) = start_put(&tier, id(n), 4096) {
            // The checkpoint may fail between the two: the write is then answered with that.
            if answer.recv().unwrap().is_ok() {
                tier.remove(slot, &id(n));
            }
        }
        n += 1;
    }
    assert_eq!(tier.stats().failed_paths, 1);
    assert!(tier.close(None).is_err());
    // The device recovers: all is there.
    let mended = Arc::new(SimDevice::from_image(device.image(), 1));
    let (tier, recovered) = open(&[mended]);
    assert!((0..40).all(|n| recovered.iter().any(|r| r.id == id(n))));
    assert_eq!(tier.stats().damaged, 0);
    tier.close(None).unwrap();
    // It does not: the block costs its records, and the store goes on.
    let (tier, recovered) = open(std::slice::from_ref(&device));
    assert!(recovered.len() >= 9 && tier.stats().damaged == 1);
    for n in 200..240 {
        let slot = put(&tier, id(n), 4096);
        tier.flush(None).unwrap();
        tier.remove(slot, &id(n));
    }
    assert!(tier.stats().checkpoints > 0, "past the damaged block");
    tier.close(None).unwrap();
    assert_eq!(open(&[device]).0.stats().damaged, 0, "it was left behind");
}

#[test]
fn rot_in_the_old_checkpoint_is_counted_when_the_next_one_meets_it() {
    let device = sim(1);
    let (tier, _) = open(std::slice::from_ref(&device));
    for n in 0..40 {
        put(&tier, id(n), 4096);
        tier.flush(None).unwrap();
    }
    tier.close(None).unwrap();
    let (superblock, _) = crate::recover::superblock(&*device, "sim").unwrap();
    let (tier, _) = open(std::slice::from_ref(&device));
    device.rot(superblock.geometry.checkpoint_at(superblock.epoch) + 300, 1);
    let (before, mut n) = (tier.stats().checkpoints, 100);
    while tier.stats().checkpoints == before {
        let slot = put(&tier, id(n), 4096);
        tier.remove(slot, &id(n));
        tier.flush(None).unwrap();
        n += 1;
    }
    assert_eq!(tier.stats().damaged, 1);
    tier.close(None).unwrap();
    assert_eq!(open(&[device]).0.stats().damaged, 0);
}

#[test]
fn many_quarantined_slots_open_in_linear_time_and_stay_lost() {
    let device = Arc::new(SimDevice::new(64 << 20, 1));
    let as_device = || vec![device.clone() as Arc<dyn Device>];
    let options = Options::new(vec![], 64 << 20);
    let (tier, _) = NvmeTier::open_on(as_device(), options.clone()).unwrap();
    for n in 0..2000 {
        let slot = put(&tier, id(n), 100);
        tier.quarantine(slot, &id(n));
    }
    tier.close(None).unwrap();
    let (tier, _) = NvmeTier::open_on(as_device(), options).unwrap();
    assert_eq!(tier.stats().quarantined_pages, 2000);
}
