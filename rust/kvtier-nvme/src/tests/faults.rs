//! Devices that fail in several ways at once, and stores over two of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use kvtier_codec::image::{self, Id};

use super::common::sealed;
use super::crash::{BYTES, Life, Promise};
use super::{Random, rounds};
use crate::device::sim::{Fault, Op, SimDevice};
use crate::device::{Device, read_exact};
use crate::tier::merge;
use crate::{ErrorKind, Pages, Recovered, place, recover};

const OPS: [Op; 3] = [Op::Read, Op::Write, Op::Sync];

fn fresh(seed: u64) -> Arc<SimDevice> {
    let device = SimDevice::new(BYTES, seed);
    recover::format(&device, BYTES, "sim").unwrap();
    Arc::new(device)
}

/// Strikes one of the next requests.
fn strike(device: &SimDevice, random: &mut Random, fault: Fault) {
    let ops: &[Op] = match fault {
        Fault::Short(_) | Fault::Torn(_) | Fault::Misdirected(_) => &OPS[..2],
        _ => &OPS,
    };
    let op = ops[random.below(ops.len() as u64) as usize];
    device.inject(op, device.count(op) + random.below(60), fault);
}

/// A device that says when it fails: nothing that was acknowledged is lost.
fn honest(seed: u64) -> Result<(), String> {
    let mut device = fresh(seed);
    let mut random = Random(seed);
    let mut promise = Promise::default();
    for _ in 0..3 {
        // One read fails while the device is opened: it is tried again.
        let nth = device.count(Op::Read) + random.below(12);
        device.inject(Op::Read, nth, Fault::Errno(libc::EINTR));
        let mut life = Life::open(device.clone(), promise.clone(), seed % 2 == 1)?;
        life.tolerant = true;
        for _ in 0..1 + random.below(5) {
            let fault = match random.below(6) {
                0 => Fault::Errno(libc::EIO),
                1 => Fault::Errno(libc::ENOSPC),
                2 => Fault::Errno(libc::EINTR),
                3 => Fault::Errno(libc::EAGAIN),
                4 => Fault::Short(512 * (1 + random.below(20)) as usize),
                _ => Fault::Crash,
            };
            strike(&device, &mut random, fault);
        }
        for _ in 0..80 {
            if !life.step(&mut random) {
                break; // the power is gone, or the path is given up
            }
        }
        promise = life.promise;
        device = Arc::new(device.crash());
        promise = Life::open(device.clone(), promise, false)?.promise;
    }
    Ok(())
}

#[test]
fn a_device_that_says_when_it_fails_loses_nothing_that_was_acknowledged() {
    for seed in 0..rounds(400) {
        honest(seed).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    }
}

/// A block of the journal that a life wrote and a crash tore must not become whole by what the next
/// life writes over a part of it, and a crash keeps only the rest of: it names slots that have other
/// contents by then. Found by `honest`.
#[test]
fn a_torn_journal_block_never_becomes_whole_again() {
    honest(2707).unwrap();
}

/// What a reader would be served: the blocks that match their roots.
fn served(device: &dyn Device) -> Result<Option<Vec<Recovered>>, String> {
    let found = match place::recover(device, "sim", BYTES) {
        Ok(found) => found,
        Err(e) if e.kind() == ErrorKind::Damaged => return Ok(None), // refused, untouched
        Err(e) => return Err(e.to_string()),
    };
    let (blocks, older) = merge(vec![found.blocks.clone()]);
    let ids: BTreeSet<Id> = blocks.iter().map(|b| b.id).collect();
    if ids.len() != blocks.len() {
        return Err("an id is there twice".into());
    }
    let pages = |blocks: &[Recovered]| blocks.iter().map(|b| b.slot.pages).sum::<u32>();
    let lost: BTreeSet<u32> = found
        .lost
        .iter()
        .flat_map(|r| r.start..r.start + r.pages)
        .collect();
    let used = pages(&blocks) + pages(&older) + lost.len() as u32;
    if found.slots.free_pages() + used != found.superblock.geometry.data {
        return Err("pages leaked".into());
    }
    let mut good = Vec::new();
    for block in blocks {
        let mut bytes = Pages::new(block.slot.pages as usize);
        let at = found.superblock.geometry.data_at(block.slot.start);
        read_exact(device, &mut bytes, at).map_err(|e| e.to_string())?;
        let (slot, root) = (block.slot, block.root);
        let verified = image::verify(
            &bytes,
            block.shape,
            root,
            &block.id,
            slot.generation,
            block.codec,
        );
        if verified.is_err() {
            continue; // a miss
        }
        // Zeros behind the payload are nobody's bytes.
        let payload = block.shape.payload();
        let (expected, ..) = sealed(&block.id, slot.generation, payload);
        if expected[..payload] != bytes[..payload] {
            return Err(format!("wrong bytes of generation {}", slot.generation));
        }
        good.push(block);
    }
    Ok(Some(good))
}

/// A device that lies: no wrong byte is served, all pages are accounted for, and what is written
/// once it behaves again is kept. Returns whether it was still served from.
fn lying(seed: u64) -> Result<bool, String> {
    let mut device = fresh(seed);
    let mut random = Random(seed);
    for _ in 0..3 {
        if let Ok(found) = place::recover(&*device, "sim", BYTES) {
            let mut life = Life::over(device.clone(), found, seed % 2 == 1, Arc::default());
            life.tolerant = true;
            for _ in 0..1 + random.below(8) {
                let pages = 1 + random.below(60) as i64;
                let fault = match random.below(9) {
                    0 => Fault::Errno(libc::EIO),
                    1 => Fault::Short(512 * (1 + random.below(20)) as usize),
                    2 | 3 => Fault::Lost,
                    4 => Fault::Torn(512 * random.below(16) as usize),
                    5 => Fault::Misdirected(4096 * pages),
                    6 => Fault::Misdirected(-4096 * pages),
                    7 => Fault::Crash,
                    _ => Fault::Errno(libc::EINTR),
                };
                strike(&device, &mut random, fault);
            }
            for _ in 0..60 {
                if !life.step(&mut random) {
                    break;
                }
            }
        }
        device = Arc::new(device.crash());
        for _ in 0..random.below(4) {
            // Half of it where the metadata is.
            let range = if random.below(2) == 0 {
                60 * 4096
            } else {
                BYTES
            };
            device.rot(random.below(range), random.below(8) as u8);
        }
        let Some(before) = served(&*device)? else {
            return Ok(false);
        };
        // From here on the device behaves: what is put now is there afterwards, beside all the rest.
        let known: BTreeSet<u64> = before.iter().map(|b| b.slot.generation).collect();
        let found = place::recover(&*device, "sim", BYTES).map_err(|e| e.to_string())?;
        let mut life = Life::over(device.clone(), found, false, Arc::default());
        let mut added = BTreeMap::new();
        for _ in 0..6 {
            if let Some((slot, id)) = life.add(&mut random)? {
                added.insert(id, slot.generation); // an older copy of the id goes
            }
        }
        if !life.flush() {
            return Err("a device that behaves fails".into());
        }
        device = Arc::new(device.crash());
        let after = served(&*device)?.ok_or("it is refused now")?;
        let after: BTreeMap<u64, Id> = after.iter().map(|b| (b.slot.generation, b.id)).collect();
        if let Some(gone) = added.values().find(|g| !after.contains_key(g)) {
            return Err(format!("generation {gone} was flushed and is gone"));
        }
        let gone = before
            .iter()
            .find(|b| !after.contains_key(&b.slot.generation) && !added.contains_key(&b.id));
        if let Some(gone) = gone {
            return Err(format!("generation {} is gone", gone.slot.generation));
        }
        assert!(known.len() == before.len());
    }
    Ok(true)
}

#[test]
fn a_device_that_lies_never_makes_us_serve_a_wrong_byte() {
    let (mut served, all) = (0, rounds(400));
    for seed in 0..all {
        served += u64::from(lying(seed).unwrap_or_else(|e| panic!("seed {seed}: {e}")));
    }
    assert!(
        served * 10 > all * 9,
        "only {served} of {all} were served at all"
    );
}

/// Two paths, one store: the power goes at write `crash` of the first path.
fn striped(seed: u64, crash: u64) -> Result<u64, String> {
    let mut devices = [fresh(seed), fresh(seed + 1000)];
    let mut promises = [Promise::default(), Promise::default()];
    let mut random = Random(seed);
    let before = devices[0].count(Op::Write);
    devices[0].inject(Op::Write, before + crash, Fault::Crash);
    let mut requests = 0;
    for round in 0..2 {
        let mut lives = Vec::new();
        let generation = Arc::new(AtomicU64::new(0)); // one over all paths, as in the tier
        for (device, promise) in devices.iter().zip(&promises) {
            let (promise, lazy) = (promise.clone(), seed % 2 == 1);
            let life = Life::open_beside(device.clone(), promise, lazy, generation.clone());
            lives.extend(life.ok()); // the power may go meanwhile
        }
        if lives.len() == 2 {
            for _ in 0..140 {
                let path = random.below(2) as usize;
                if !lives[path].step(&mut random) {
                    break;
                }
            }
            promises = [lives.remove(0).promise, lives.remove(0).promise];
        }
        if round == 0 {
            requests = devices[0].count(Op::Write) - before;
        }
        devices = devices.map(|d| Arc::new(d.crash()));
        let mut blocks = Vec::new();
        for (device, promise) in devices.iter().zip(&mut promises) {
            let life = Life::open(device.clone(), promise.clone(), false)?;
            *promise = life.promise;
            blocks.push(life.found);
        }
        let (merged, older) = merge(blocks);
        let ids: BTreeMap<Id, u64> = merged.iter().map(|b| (b.id, b.slot.generation)).collect();
        if ids.len() != merged.len() || older.iter().any(|o| ids[&o.id] < o.slot.generation) {
            return Err("an id is there twice, or its older copy won".into());
        }
        if !merged.is_sorted_by_key(|b| b.slot.generation) {
            return Err("not in commit order".into());
        }
    }
    Ok(requests)
}

#[test]
fn a_crash_at_any_write_of_a_striped_store_loses_nothing_that_was_promised() {
    for seed in 0..rounds(16) {
        let mut crash = 0;
        loop {
            let requests = striped(seed, crash)
                .unwrap_or_else(|e| panic!("seed {seed}, crash at write {crash}: {e}"));
            crash += 1;
            if crash > requests {
                break;
            }
        }
        assert!(crash > 20, "the run is long enough to mean something");
    }
}

/// Damage to any one page of the metadata: what it costs, and that it is told.
#[test]
fn rot_in_any_one_page_of_the_metadata_costs_no_more_than_that_page_says() {
    let device = fresh(7);
    let mut random = Random(7);
    let mut life = Life::open(device.clone(), Promise::default(), false).unwrap();
    for _ in 0..300 {
        assert!(life.step(&mut random));
    }
    assert!(life.flush());
    drop(life);
    let whole: BTreeSet<u64> = served(&*device)
        .unwrap()
        .unwrap()
        .iter()
        .map(|b| b.slot.generation)
        .collect();
    let (superblock, _) = recover::superblock(&*device, "sim").unwrap();
    assert!(superblock.epoch > 3);
    let geometry = superblock.geometry;
    let journal = geometry.journal_at(0) / 4096;
    for page in 0..journal + geometry.journal {
        for errno in [None, Some(libc::EIO)] {
            let hurt = SimDevice::from_image(device.image(), page);
            match errno {
                None => hurt.rot(page * 4096 + 48, 3),
                Some(errno) => hurt.fail_page(page, errno),
            }
            let rest: BTreeSet<u64> = served(&hurt)
                .unwrap()
                .unwrap()
                .iter()
                .map(|b| b.slot.generation)
                .collect();
            let found = place::recover(&hurt, "sim", BYTES).unwrap();
            match page {
                0 | 1 => assert!(rest == whole, "a superblock has a copy: page {page}"),
                _ if page < journal => {
                    let lost = whole.difference(&rest).count();
                    assert!(lost <= 31);
                    assert!(lost == 0 || found.damaged.len() == 1, "page {page}");
                }
                _ => {} // the end of the journal may be anywhere; see `journal`
            }
        }
    }
}
