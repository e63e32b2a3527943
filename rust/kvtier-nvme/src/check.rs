//! Looking at a path without serving from it.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvtier_codec::image::{self, PAGE};

use crate::buf::Pages;
use crate::clock::SystemClock;
use crate::commit::Committer;
use crate::device::file::FileDevice;
use crate::device::{Device, lock, read_exact};
use crate::engine::{self, EngineKind, Limits, uring};
use crate::error::Error;
use crate::place;
use crate::record::{self, Change, Entry, Record};
use crate::recover::{self, Found};
use crate::superblock::{Superblock, VERSION};
use crate::tier::Slot;
use crate::units::Bytes;
use crate::volume::Volume;

/// What [`check`] found.
#[derive(Clone, Debug, Default)]
pub struct CheckReport {
    /// Blocks whose record is committed.
    pub blocks: u64,
    /// Their payload bytes.
    pub bytes: u64,
    /// Blocks whose bytes do not match their root.
    pub corrupt: u64,
    /// Slots that are never used again.
    pub quarantined: u64,
    /// Blocks whose parent is on none of the paths that were checked.
    pub orphaned: u64,
    /// Blocks that were dropped (only with `repair`): the corrupt ones, and those that follow them.
    pub repaired: u64,
    /// One line for each thing that is damaged.
    pub damaged: Vec<String>,
}

/// What [`inspect`] read.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// Version of the format.
    pub version: u32,
    /// Identity given at format time, hexadecimal.
    pub uuid: String,
    /// Epoch of the superblock in force.
    pub epoch: u64,
    /// Bytes of the whole file or device in use.
    pub size: u64,
    /// Bytes of the data area.
    pub data_bytes: u64,
    /// Most blocks the metadata can hold.
    pub max_blocks: u64,
    /// Blocks whose record is committed.
    pub blocks: u64,
    /// Their payload bytes.
    pub bytes: u64,
    /// Pages of the data area in use.
    pub used_pages: u64,
    /// Slots that are never used again.
    pub quarantined: u64,
    /// Records in the active checkpoint.
    pub checkpoint_records: u64,
    /// Blocks in the journal since the checkpoint.
    pub journal_blocks: u64,
    /// Blocks the journal can hold.
    pub journal_capacity: u64,
    /// Process that has the path open, if any.
    pub holder: Option<u32>,
}

/// What a directory and its file system offer.
#[derive(Clone, Debug)]
pub struct Probe {
    /// Does a real read through io_uring work?
    pub io_uring: bool,
    /// Why, or why not.
    pub io_uring_reason: String,
    /// The alignment O_DIRECT asks for, in bytes; `None` where it is refused.
    pub direct_alignment: Option<u32>,
    /// Why, or why not.
    pub direct_reason: String,
    /// RLIMIT_MEMLOCK in bytes; `None` is unlimited.
    pub memlock: Option<u64>,
    /// What the limit means for registered buffers.
    pub memlock_reason: String,
}

/// Verifies every block of the path against its root; `repair` drops those that do not match, and
/// those that follow them in their chains, which nobody could reach.
///
/// Takes the lock of the path and reads all its data. Of a store with several paths use
/// [`check_all`]: a block's parent may lie on any of them.
///
/// # Errors
/// As for opening the path; and if a repair cannot be written.
pub fn check(path: &Path, repair: bool) -> Result<CheckReport, Error> {
    Ok(check_all(&[path.to_owned()], repair)?.remove(0))
}

/// As [`check`], over all paths of a store; one report for each, in their order.
///
/// # Errors
/// As for [`check`]. Nothing is repaired if one of the paths cannot be opened.
pub fn check_all(paths: &[PathBuf], repair: bool) -> Result<Vec<CheckReport>, Error> {
    let mut opened = Vec::new();
    let mut present = HashSet::new();
    for path in paths {
        let name = path.display().to_string();
        let (device, lock) = place::open_existing(path)?;
        let (superblock, damage) = recover::superblock(&device, &name)?;
        let mut found = recover::recover(&device, &superblock);
        found.damaged.extend(damage);
        present.extend(found.blocks.iter().map(short));
        let device: Arc<dyn Device> = Arc::new(device);
        opened.push((device, lock, name, found));
    }
    let mut reports = Vec::new();
    let mut corrupt = HashSet::new();
    for (path, (device, _, _, found)) in opened.iter_mut().enumerate() {
        let (report, bad) = check_device(&**device, found, &present);
        corrupt.extend(bad.into_iter().map(|generation| (path, generation)));
        reports.push(report);
    }
    if repair && !corrupt.is_empty() {
        let gone = with_followers(opened.iter().map(|(.., found)| found), &corrupt);
        for (path, (device, _lock, name, found)) in opened.into_iter().enumerate() {
            let drops: Vec<Record> = (found.blocks.iter())
                .filter(|r| gone.contains(&(path, r.generation)))
                .copied()
                .collect();
            reports[path].repaired = drops.len() as u64;
            if !drops.is_empty() {
                drop_blocks(&device, &name, found, &drops)?;
            }
        }
    }
    Ok(reports)
}

/// What a block's followers know it by.
fn short(record: &Record) -> [u8; 16] {
    record::get(&record.id, 0)
}

/// Which block: its path and its generation there. Two paths can give out the same one, where one
/// was missing for a while.
type At = (usize, u64);

/// The corrupt blocks, and all that follow them in their chains.
fn with_followers<'a>(
    paths: impl Iterator<Item = &'a Found> + Clone,
    corrupt: &HashSet<At>,
) -> HashSet<At> {
    let blocks = || {
        let paths = paths.clone().enumerate();
        paths.flat_map(|(path, found)| found.blocks.iter().map(move |r| ((path, r.generation), r)))
    };
    let mut followers: HashMap<[u8; 16], Vec<(At, &Record)>> = HashMap::new();
    let mut sound: HashMap<[u8; 16], usize> = HashMap::new();
    for (at, record) in blocks() {
        if let Change::Add(Entry {
            parent: Some(parent),
            ..
        }) = record.change
        {
            followers.entry(parent).or_default().push((at, record));
        }
        *sound.entry(short(record)).or_default() += 1;
    }
    let mut gone = corrupt.clone();
    let mut next: Vec<&Record> = blocks()
        .filter(|(at, _)| corrupt.contains(at))
        .map(|(_, record)| record)
        .collect();
    while let Some(record) = next.pop() {
        let left = sound.entry(short(record)).or_default();
        *left = left.saturating_sub(1);
        if *left > 0 {
            continue; // another copy of it is sound
        }
        for &(at, follower) in followers.get(&short(record)).into_iter().flatten() {
            if gone.insert(at) {
                next.push(follower);
            }
        }
    }
    gone
}

/// The report on a path, and the generations of its corrupt blocks.
fn check_device(
    device: &dyn Device,
    found: &mut Found,
    present: &HashSet<[u8; 16]>,
) -> (CheckReport, Vec<u64>) {
    let superblock = found.superblock;
    let mut report = CheckReport {
        blocks: found.blocks.len() as u64,
        quarantined: found.lost.len() as u64,
        damaged: std::mem::take(&mut found.damaged),
        ..CheckReport::default()
    };
    let mut corrupt = Vec::new();
    for record in &found.blocks {
        let Change::Add(entry) = record.change else {
            continue;
        };
        report.bytes += entry.shape.payload() as u64;
        report.orphaned += u64::from(entry.parent.is_some_and(|p| !present.contains(&p)));
        if let Err(why) = verify(device, &superblock, record, &entry) {
            let id: String = record.id[..8].iter().map(|b| format!("{b:02x}")).collect();
            report
                .damaged
                .push(format!("block {id}… at page {}: {why}", record.start));
            corrupt.push(record.generation);
        }
    }
    report.corrupt = corrupt.len() as u64;
    (report, corrupt)
}

/// Reads a block and compares it with its root.
fn verify(
    device: &dyn Device,
    superblock: &Superblock,
    record: &Record,
    entry: &Entry,
) -> Result<(), String> {
    let mut image = Pages::new(record.pages as usize);
    read_exact(
        device,
        &mut image,
        superblock.geometry.data_at(record.start),
    )
    .map_err(|e| format!("cannot be read ({e})"))?;
    let Entry {
        shape, root, codec, ..
    } = *entry;
    image::verify(&image, shape, root, &record.id, record.generation, codec)
        .map(drop)
        .map_err(|why| format!("does not match its root ({why:?})"))
}

/// Removes blocks as a running store would.
fn drop_blocks(
    device: &Arc<dyn Device>,
    name: &str,
    mut found: Found,
    drops: &[Record],
) -> Result<(), Error> {
    let limits = Limits {
        inflight_bytes: PAGE,
        emulate_gbs: None,
        clock: Arc::new(SystemClock),
    };
    device
        .sync()
        .and_then(|()| recover::prepare(&**device, &found))
        .map_err(|e| Error::io(format!("cannot write the metadata of {name}"), e))?;
    let engine = engine::start(EngineKind::Threads, device.clone(), &limits)?;
    let clock = limits.clock;
    let volume = Volume::new(
        0,
        name.to_owned(),
        device.clone(),
        engine,
        clock,
        &mut found,
    );
    let volume = Arc::new(volume);
    let generation = found.generation;
    let mut committer = Committer::new(volume.clone(), &found, move || generation);
    for record in drops {
        let slot = Slot {
            path: 0,
            start: record.start,
            pages: record.pages,
            generation: record.generation,
        };
        volume.leave(slot, &record.id, Change::Remove);
    }
    while !volume.state.lock().queue.is_empty() {
        committer
            .turn()
            .map_err(|e| Error::io(format!("cannot write the repair of {name}"), e))?;
    }
    Ok(())
}

/// Summarizes superblock, checkpoint and journal, read-only and without the lock.
///
/// What a running store writes meanwhile may be missing.
///
/// # Errors
/// If there is no readable store at `path`.
pub fn inspect(path: &Path) -> Result<Inspection, Error> {
    let name = path.display().to_string();
    let data = place::data_path(path);
    fs::metadata(&data).map_err(|e| place::no_store(path, e))?;
    let device = FileDevice::open(&data, false)?;
    let (superblock, _) = recover::superblock(&device, &name)?;
    let found = recover::recover(&device, &superblock);
    let geometry = superblock.geometry;
    let payload = |r: &Record| match r.change {
        Change::Add(entry) => entry.shape.payload() as u64,
        Change::Remove | Change::Quarantine => 0,
    };
    Ok(Inspection {
        version: VERSION,
        uuid: superblock.uuid.iter().map(|b| format!("{b:02x}")).collect(),
        epoch: superblock.epoch,
        size: geometry.total * PAGE as u64,
        data_bytes: u64::from(geometry.data) * PAGE as u64,
        max_blocks: geometry.max_blocks,
        blocks: found.blocks.len() as u64,
        bytes: found.blocks.iter().map(payload).sum(),
        used_pages: u64::from(found.slots.total() - found.slots.free_pages()),
        quarantined: found.lost.len() as u64,
        checkpoint_records: superblock.records,
        journal_blocks: found.journal.len(),
        journal_capacity: geometry.journal,
        holder: lock::holder(path),
    })
}

/// Finds out what `dir` offers. Makes a small file in it, and removes it again.
pub fn probe(dir: &Path) -> Probe {
    let memlock = uring::memlock();
    let mut probe = Probe {
        io_uring: false,
        io_uring_reason: String::new(),
        direct_alignment: None,
        direct_reason: String::new(),
        memlock,
        memlock_reason: match memlock {
            None => "unlimited: all of the arena can be registered".into(),
            Some(bytes) => format!(
                "{}: memory beyond that is used unregistered, at a little more CPU \
                 time; raise it with `ulimit -l`",
                Bytes(bytes)
            ),
        },
    };
    let file = dir.join(format!("kvtier.probe.{}", std::process::id()));
    match FileDevice::create(&file, PAGE as u64) {
        Err(e) => {
            probe.io_uring_reason = e.to_string();
            probe.direct_reason = e.to_string();
        }
        Ok(device) => {
            (probe.direct_alignment, probe.direct_reason) = device.direct();
            let limits = Limits {
                inflight_bytes: PAGE,
                emulate_gbs: None,
                clock: Arc::new(SystemClock),
            };
            (probe.io_uring, probe.io_uring_reason) =
                match uring::Uring::start(Arc::new(device), &limits) {
                    Ok(_) => (true, "a read through it works".into()),
                    Err(e) => (
                        false,
                        format!(
                            "{e}: the kernel, or a seccomp profile (Docker's default), forbids it"
                        ),
                    ),
                };
        }
    }
    let _ = fs::remove_file(&file); // it is empty and named after this process
    probe
}
