//! The tier against a plain map, and what it promises about slots and failing devices.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::Mutex;
use kvtier_codec::image::Id;
use proptest::prelude::*;

use super::common::{answer, id, is_intact, put, read, sealed, start_put, write_of};
use crate::device::sim::{Fault, Op as SimOp, SimDevice};
use crate::{Clock, Device, ErrorKind, NvmeTier, Options, Recovered, Slot};

pub const BYTES: u64 = 1 << 20;

pub fn open(devices: &[Arc<SimDevice>]) -> (Arc<NvmeTier>, Vec<Recovered>) {
    try_open(devices, Options::new(vec![], BYTES * devices.len() as u64))
}

pub fn try_open(devices: &[Arc<SimDevice>], options: Options) -> (Arc<NvmeTier>, Vec<Recovered>) {
    let devices = devices
        .iter()
        .map(|d| d.clone() as Arc<dyn Device>)
        .collect();
    NvmeTier::open_on(devices, options).unwrap()
}

pub fn sim(seed: u64) -> Arc<SimDevice> {
    Arc::new(SimDevice::new(BYTES, seed))
}

pub fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_millis(30))
}

#[derive(Clone, Debug)]
enum Step {
    Put(u64, usize),
    Remove(u64),
    Flush,
    Reopen,
    PowerCut,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0u64..30, 1usize..90_000).prop_map(|(id, payload)| Step::Put(id, payload)),
        4 => (0u64..30).prop_map(Step::Remove),
        1 => Just(Step::Flush),
        1 => Just(Step::Reopen),
        1 => Just(Step::PowerCut),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_tier_agrees_with_a_map(steps in prop::collection::vec(step(), 1..120)) {
        let mut devices = [sim(1), sim(2)];
        let (mut tier, recovered) = open(&devices);
        prop_assert!(recovered.is_empty());
        let capacity = tier.capacity_pages();
        let mut model: HashMap<Id, Slot> = HashMap::new();
        for step in steps {
            match step {
                Step::Put(number, payload) => {
                    let key = id(number);
                    let Some((slot, answer)) = start_put(&tier, key, payload) else {
                        prop_assert!(tier.used_pages() > 0);
                        continue;
                    };
                    answer.recv().unwrap().unwrap();
                    if let Some(old) = model.insert(key, slot) {
                        tier.remove(old, &key);
                    }
                }
                Step::Remove(number) => {
                    if let Some(slot) = model.remove(&id(number)) {
                        tier.remove(slot, &id(number));
                        tier.remove(slot, &id(number)); // a second time is nothing
                    }
                }
                Step::Flush => tier.flush(None).unwrap(),
                Step::Reopen | Step::PowerCut => {
                    if matches!(step, Step::Reopen) {
                        tier.close(None).unwrap();
                    } else {
                        tier.flush(None).unwrap();
                        devices = devices.map(|d| Arc::new(d.crash()));
                    }
                    let (again, recovered) = open(&devices);
                    tier = again;
                    let found: HashMap<Id, Slot> = recovered.iter().map(|r| (r.id, r.slot)).collect();
                    prop_assert_eq!(&found, &model);
                    for block in &recovered {
                        prop_assert!(is_intact(block, &read(&tier, block.slot).unwrap()));
                    }
                }
            }
            let pages: u32 = model.values().map(|slot| slot.pages).sum();
            prop_assert!(tier.used_pages() >= u64::from(pages));
        }
        tier.flush(None).unwrap();
        let pages: u32 = model.values().map(|slot| slot.pages).sum();
        prop_assert_eq!(tier.used_pages(), u64::from(pages));
        prop_assert_eq!((tier.capacity_pages(), tier.free_soon_pages()), (capacity, 0));
    }
}

#[test]
fn blocks_come_back_oldest_first_and_each_id_once() {
    let devices = [sim(1), sim(2)];
    let (tier, _) = open(&devices);
    let slots: Vec<Slot> = [1, 2, 3, 1].map(|n| put(&tier, id(n), 5000)).to_vec();
    assert!(
        slots.iter().any(|s| s.path == 0) && slots.iter().any(|s| s.path == 1),
        "striped"
    );
    tier.close(None).unwrap();
    let (tier, recovered) = open(&devices);
    assert_eq!(
        recovered.iter().map(|r| r.slot).collect::<Vec<_>>(),
        slots[1..]
    );
    assert_eq!(tier.stats().dropped, 1);
    tier.flush(None).unwrap();
    assert_eq!(tier.used_pages(), 6, "the older copy gave its pages back");
}

#[test]
fn a_removed_slot_is_reused_only_after_its_record_is_durable() {
    let device = sim(1);
    let (tier, _) = open(std::slice::from_ref(&device));
    let all = tier.capacity_pages() as u32;
    let slot = put(&tier, id(1), (all - 2) as usize * 4096); // and a page for the table
    tier.flush(None).unwrap();
    device.inject(SimOp::Sync, device.count(SimOp::Sync), Fault::Hang);
    tier.remove(slot, &id(1));
    assert_eq!(tier.flush(soon()).unwrap_err().kind(), ErrorKind::Deadline);
    assert_eq!(tier.reserve(all - 1), None);
    assert_eq!(
        (tier.free_pages(), tier.free_soon_pages()),
        (1, u64::from(all - 1))
    );
    device.release();
    tier.flush(None).unwrap();
    assert!(tier.reserve(all - 1).is_some());
}

#[test]
fn a_held_slot_is_not_reused() {
    let (tier, _) = open(&[sim(1)]);
    let all = tier.capacity_pages() as u32;
    let slot = put(&tier, id(1), all as usize * 4096 - 4096);
    let (one, two) = (tier.hold(slot), tier.hold(slot));
    tier.remove(slot, &id(1));
    tier.flush(None).unwrap();
    drop(one);
    assert_eq!(tier.reserve(all), None);
    assert_eq!(tier.free_soon_pages(), u64::from(all));
    assert!(read(&tier, slot).is_ok(), "its bytes are still there");
    drop(two);
    assert!(tier.reserve(all).is_some());
}

#[test]
fn quarantined_pages_stay_lost_over_restarts_and_checkpoints() {
    let devices = [sim(1)];
    let (tier, _) = open(&devices);
    let slot = put(&tier, id(1), 4096);
    let hold = tier.hold(slot);
    tier.quarantine(slot, &id(1));
    tier.flush(None).unwrap();
    drop(hold);
    tier.close(None).unwrap();
    let (tier, recovered) = open(&devices);
    assert!(recovered.is_empty());
    // So many single commits that checkpoints have replaced the journal.
    for n in 0..60 {
        let other = put(&tier, id(n), 4096);
        assert_ne!(other.start, slot.start);
        tier.remove(other, &id(n));
        tier.flush(None).unwrap();
    }
    assert!(tier.stats().checkpoints > 2);
    tier.close(None).unwrap();
    let (tier, _) = open(&devices);
    let all = tier.capacity_pages();
    assert_eq!(
        (tier.stats().quarantined_pages, tier.free_pages()),
        (1, all - 1)
    );
    assert_eq!(tier.reserve(all as u32), None);
}

#[test]
fn a_window_names_owners_only_once_they_are_known() {
    let (tier, _) = open(&[sim(1)]);
    let all = tier.capacity_pages() as u32;
    let slots: Vec<Slot> = (0..all / 4)
        .map(|n| put(&tier, id(u64::from(n)), 4 * 4096))
        .collect();
    assert!(tier.window(5).is_empty(), "nobody owns them yet");
    for (owner, &slot) in slots.iter().enumerate() {
        tier.set_owner(slot, owner as u32);
    }
    assert_eq!(tier.window(5).len(), 2, "without any hole, too");
    tier.remove(slots[10], &id(10));
    tier.flush(None).unwrap();
    let window = tier.window(8);
    assert!(window == [9] || window == [11], "{window:?}");
    tier.remove(slots[window[0] as usize], &id(u64::from(window[0])));
    tier.flush(None).unwrap();
    assert!(tier.reserve(8).is_some());
}

#[test]
fn there_are_never_more_blocks_than_the_metadata_holds() {
    let (tier, _) = open(&[sim(1)]);
    let slots: Vec<Slot> = std::iter::from_fn(|| tier.reserve(1)).collect();
    assert_eq!(slots.len() as u64, tier.max_blocks());
    assert!(tier.free_pages() > 0);
    tier.abandon(slots[0]);
    tier.abandon(slots[0]); // a second time is nothing
    assert!(tier.reserve(1).is_some());
}

/// A clock that stands still until it is moved.
pub struct Frozen(pub Mutex<Instant>);

impl Clock for Frozen {
    fn now(&self) -> Instant {
        *self.0.lock()
    }
}

#[test]
fn a_path_that_refuses_writes_is_bypassed_for_a_while() {
    let devices = [sim(1), sim(2)];
    let clock = Arc::new(Frozen(Mutex::new(Instant::now())));
    let options = Options {
        clock: clock.clone(),
        ..Options::new(vec![], 2 * BYTES)
    };
    let (tier, _) = try_open(&devices, options);
    let first = devices[0].count(SimOp::Write);
    for nth in first..first + 100 {
        devices[0].inject(SimOp::Write, nth, Fault::Errno(libc::ENOSPC));
    }
    let mut failed = 0;
    for n in 0..20 {
        let (slot, answer) = start_put(&tier, id(n), 9000).unwrap();
        if let Err(e) = answer.recv().unwrap() {
            assert_eq!((slot.path, e.kind()), (0, ErrorKind::Full));
            failed += 1;
        }
    }
    assert_eq!(
        (failed, tier.stats().failed_paths, tier.stats().write_errors),
        (3, 1, 3)
    );
    assert_eq!(
        tier.used_pages(),
        17 * 3,
        "failed writes gave their slots back"
    );
    *clock.0.lock() += Duration::from_secs(11);
    assert_eq!(tier.stats().failed_paths, 0, "it gets another chance");
    tier.close(None).unwrap();
    assert_eq!(open(&devices).1.len(), 17);
}

#[test]
fn a_path_whose_metadata_cannot_be_written_still_serves_reads() {
    let devices = [sim(1), sim(2)];
    let (tier, _) = open(&devices);
    let slots = [put(&tier, id(1), 5000), put(&tier, id(2), 5000)];
    tier.flush(None).unwrap();
    devices[0].inject(
        SimOp::Sync,
        devices[0].count(SimOp::Sync),
        Fault::Errno(libc::EIO),
    );
    let broken = slots.iter().find(|s| s.path == 0).copied().unwrap();
    tier.remove(broken, &id(1));
    let error = tier.flush(None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains("device 0"), "{error}");
    assert_eq!(tier.stats().failed_paths, 1);
    for n in 3..10 {
        assert_eq!(put(&tier, id(n), 5000).path, 1);
    }
    for &slot in &slots {
        read(&tier, slot).unwrap();
    }
    assert_eq!(tier.close(None).unwrap_err().kind(), ErrorKind::Io);
}

#[test]
fn a_failed_read_is_an_error_and_the_next_one_is_not() {
    let device = sim(1);
    let (tier, _) = open(std::slice::from_ref(&device));
    let slot = put(&tier, id(1), 9000);
    device.inject(
        SimOp::Read,
        device.count(SimOp::Read),
        Fault::Errno(libc::EIO),
    );
    assert_eq!(
        read(&tier, slot).err().map(|e| e.kind()),
        Some(ErrorKind::Io)
    );
    assert!(read(&tier, slot).is_ok());
    assert_eq!((tier.stats().read_errors, tier.stats().reads), (1, 1));
}

#[test]
fn what_makes_no_sense_is_refused_before_it_reaches_the_device() {
    let (tier, _) = open(&[sim(1)]);
    let slot = tier.reserve(2).unwrap();
    let (done, refused) = answer();
    tier.write(write_of(slot, id(1), 9000, done)); // three pages
    assert_eq!(
        refused.recv().unwrap().unwrap_err().kind(),
        ErrorKind::Config
    );
    assert_eq!(tier.used_pages(), 0);
    let (done, refused) = answer();
    tier.write(write_of(slot, id(1), 5000, done)); // no longer reserved
    assert_eq!(
        refused.recv().unwrap().unwrap_err().kind(),
        ErrorKind::Config
    );
    let beyond = Slot {
        start: u32::MAX - 1,
        ..slot
    };
    assert_eq!(
        read(&tier, beyond).err().map(|e| e.kind()),
        Some(ErrorKind::Config)
    );
    assert_eq!((tier.reserve(0), tier.reserve(u32::MAX)), (None, None));
}

#[test]
fn a_block_removed_while_it_is_written_leaves_nothing_behind() {
    let device = sim(1);
    let (tier, _) = open(std::slice::from_ref(&device));
    device.inject(SimOp::Write, device.count(SimOp::Write), Fault::Hang);
    let (slot, answer) = start_put(&tier, id(1), 9000).unwrap();
    tier.remove(slot, &id(1));
    assert_eq!((tier.used_pages(), tier.free_soon_pages()), (3, 3));
    device.release();
    assert!(answer.recv().unwrap().is_err());
    assert_eq!((tier.used_pages(), tier.free_soon_pages()), (0, 0));
    tier.close(None).unwrap();
    assert!(open(&[device]).1.is_empty());
}

#[test]
fn close_returns_by_its_deadline_when_the_device_hangs() {
    let device = sim(1);
    let (tier, _) = open(std::slice::from_ref(&device));
    put(&tier, id(1), 5000);
    tier.flush(None).unwrap();
    device.inject(SimOp::Write, device.count(SimOp::Write), Fault::Hang);
    let (_, answer) = start_put(&tier, id(2), 5000).unwrap();
    assert_eq!(tier.close(soon()).unwrap_err().kind(), ErrorKind::Deadline);
    assert!(tier.reserve(1).is_none() && answer.try_recv().is_err());
    let crashed = Arc::new(device.crash());
    device.release();
    answer.recv().unwrap().unwrap();
    assert_eq!(open(&[crashed]).1.len(), 1);
}

#[test]
fn a_callback_may_do_all_but_wait() {
    let device = sim(1);
    let (tier, _) = open(std::slice::from_ref(&device));
    let slot = tier.reserve(2).unwrap();
    let (last, (tell, told)) = (tier.clone(), std::sync::mpsc::channel());
    let done = Box::new(move |result: Result<(), crate::Error>| {
        result.unwrap();
        let again = last.reserve(2).unwrap();
        last.abandon(again);
        last.remove(slot, &id(1));
        tell.send((
            last.flush(None).unwrap_err().kind(),
            last.close(None).unwrap_err().kind(),
        ))
        .unwrap();
        drop(last); // the last owner, perhaps: that closes the tier
        drop(tell);
    });
    tier.write(write_of(slot, id(1), 5000, done));
    drop(tier);
    assert_eq!(told.recv(), Ok((ErrorKind::Config, ErrorKind::Config)));
    while Arc::strong_count(&device) > 1 {
        std::thread::yield_now(); // until the threads have ended
    }
    assert!(open(&[device]).1.is_empty());
}

#[test]
fn after_close_everything_is_refused() {
    let (tier, _) = open(&[sim(1)]);
    let slot = put(&tier, id(1), 5000);
    let reserved = tier.reserve(2).unwrap();
    tier.close(None).unwrap();
    tier.close(None).unwrap();
    let (done, refused) = answer();
    tier.write(write_of(reserved, id(2), 5000, done));
    assert_eq!(
        refused.recv().unwrap().unwrap_err().kind(),
        ErrorKind::Closed
    );
    assert!(read(&tier, slot).is_err() && tier.reserve(1).is_none());
    tier.remove(slot, &id(1));
    assert_eq!(tier.flush(None).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn damage_to_one_superblock_or_one_checkpoint_block_costs_no_more_than_that() {
    let device = sim(1);
    let (tier, _) = open(std::slice::from_ref(&device));
    for n in 0..40 {
        put(&tier, id(n), 4096);
        tier.flush(None).unwrap(); // enough single commits for checkpoints
    }
    assert!(tier.stats().checkpoints > 1);
    tier.close(None).unwrap();
    let image = device.image();
    assert!(
        image[..4096] == image[4096..8192],
        "a superblock has a copy"
    );
    let whole = open(std::slice::from_ref(&device)).1.len();
    assert_eq!(whole, 40);
    let superblock = crate::recover::superblock(&*device, "sim").unwrap().0;
    // The older copy: nothing is lost.
    let harmless = Arc::new(SimDevice::from_image(device.image(), 1));
    harmless.rot((superblock.epoch + 1) % 2 * 4096 + 40, 1);
    assert_eq!(open(&[harmless]).1.len(), 40);
    // The copy of the epoch in force: the other copy says the same. Both are whole afterwards.
    let newer = Arc::new(SimDevice::from_image(device.image(), 1));
    newer.rot(superblock.epoch % 2 * 4096 + 40, 1);
    let (tier, recovered) = open(std::slice::from_ref(&newer));
    assert_eq!((recovered.len(), tier.stats().damaged), (40, 1));
    assert!(
        recovered
            .iter()
            .all(|block| is_intact(block, &read(&tier, block.slot).unwrap()))
    );
    tier.close(None).unwrap();
    assert_eq!(open(&[newer]).0.stats().damaged, 0);
    // A block of the checkpoint: its records are lost, the others are not.
    let partly = Arc::new(SimDevice::from_image(device.image(), 1));
    partly.rot(superblock.geometry.checkpoint_at(superblock.epoch) + 300, 1);
    let rest = open(&[partly]).1.len();
    assert!((40 - 31..40).contains(&rest), "{rest}");
}

#[test]
fn the_helpers_of_these_tests_see_a_difference() {
    let (image, shape, root) = sealed(&id(1), 7, 70_000);
    let (other, ..) = sealed(&id(1), 8, 70_000);
    assert!(image[..70_000] != other[..70_000]);
    assert!(kvtier_codec::image::verify(&image, shape, root, &id(1), 7, 3).is_ok());
}
