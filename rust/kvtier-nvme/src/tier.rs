//! The front: slots, reads and writes over one or several paths.

use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::thread;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::Mutex;
use kvtier_codec::image::{Id, PAGE, Root, Shape};

use crate::buf::IoBuf;
use crate::clock::{Clock, SystemClock};
use crate::commit::{self, Committer};
use crate::device::Device;
use crate::device::lock::Lock;
use crate::engine::{self, Engine, EngineKind};
use crate::error::{Error, ErrorKind};
use crate::open;
use crate::place;
use crate::record::{Change, Record};
use crate::recover;
use crate::volume::Volume;

/// How to open the tier.
#[derive(Clone)]
pub struct Options {
    /// Directories or block devices; a block lies on one of them.
    pub paths: Vec<PathBuf>,
    /// Bytes over all paths together, in equal shares.
    pub size: u64,
    /// Which engine moves the bytes.
    pub engine: EngineKind,
    /// Slow every path down to so many 1e9 bytes per second.
    pub emulate_gbs: Option<f64>,
    /// Bytes in flight per path; one operation may always go.
    pub inflight_bytes: usize,
    /// Tells the time.
    pub clock: Arc<dyn Clock>,
    /// How long a path may take to be opened.
    pub patience: Duration,
}

impl Options {
    /// The defaults over `paths` with `size` bytes in all.
    pub fn new(paths: Vec<PathBuf>, size: u64) -> Self {
        Options {
            paths,
            size,
            engine: EngineKind::Auto,
            emulate_gbs: None,
            inflight_bytes: 8 << 20,
            clock: Arc::new(SystemClock),
            patience: Duration::from_secs(120),
        }
    }

    /// Bytes for each of `paths` paths, and whether the options make sense at all.
    fn share(&self, paths: usize) -> Result<u64, Error> {
        if paths == 0 || paths > usize::from(u8::MAX) {
            return Err(Error::new(
                ErrorKind::Config,
                format!("{paths} paths: give 1 to 255"),
            ));
        }
        if let Some(gbs) = self.emulate_gbs
            && !(gbs.is_finite() && gbs >= 1e-3)
        {
            return Err(Error::new(
                ErrorKind::Config,
                format!("emulate_gbs is {gbs}: give 0.001 (1e9 bytes per second) or more, or none"),
            ));
        }
        let share = self.size / paths as u64;
        Ok(share - share % PAGE as u64)
    }
}

/// A run of pages on one path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Which path.
    pub path: u8,
    /// First page within that path's data area.
    pub start: u32,
    /// Pages in the slot.
    pub pages: u32,
    /// Distinguishes this use of the pages from all others.
    pub generation: u64,
}

/// Called once, on an engine's thread, when an operation has completed.
pub type Done = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// A block found at open.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recovered {
    /// The block's id.
    pub id: Id,
    /// First half of the parent's id.
    pub parent: Option<[u8; 16]>,
    /// Tag of the namespace.
    pub namespace: u64,
    /// Where it lies.
    pub slot: Slot,
    /// The lengths of what is stored.
    pub shape: Shape,
    /// How its payload is encoded; 0: as it is.
    pub codec: u16,
    /// The block's own lengths; `shape` where it is not encoded.
    pub plain: Shape,
    /// Its score when it was written.
    pub importance: f32,
    /// What its image must match.
    pub root: Root,
}

/// A block to write: a full image, `shape.image_len()` bytes.
pub struct Write {
    /// A reserved slot of `shape.pages()` pages.
    pub slot: Slot,
    /// The block's id.
    pub id: Id,
    /// First half of the parent's id.
    pub parent: Option<[u8; 16]>,
    /// Tag of the namespace.
    pub namespace: u64,
    /// The lengths of what is stored.
    pub shape: Shape,
    /// How its payload is encoded; 0: as it is.
    pub codec: u16,
    /// The block's own lengths; `shape` where it is not encoded.
    pub plain: Shape,
    /// Its score.
    pub importance: f32,
    /// What its image matches.
    pub root: Root,
    /// The image.
    pub buf: IoBuf,
    /// Called when the bytes are readable.
    pub done: Done,
}

/// A part of a slot to read.
pub struct Read {
    /// The slot.
    pub slot: Slot,
    /// First byte within the slot, a multiple of 4096.
    pub offset: u32,
    /// Bytes to read, a multiple of 4096.
    pub len: u32,
    /// Where they go.
    pub buf: IoBuf,
    /// Keeps the slot from being reused until the read has completed.
    pub hold: SlotHold,
    /// Goes ahead of reads that nobody waits for yet.
    pub urgent: bool,
    /// Until then, whoever starts it has nothing else to do: it may complete on his thread before the call
    /// returns.
    pub attended: Option<Instant>,
    /// Called when the bytes are there.
    pub done: Done,
}

/// While it lives, the slot is not reused.
pub struct SlotHold {
    volume: Arc<Volume>,
    slot: Slot,
}

impl Drop for SlotHold {
    fn drop(&mut self) {
        self.volume.unhold(self.slot);
    }
}

/// While it lives, its memory is registered with the engines (and stays mapped).
pub struct Registration {
    _region: IoBuf,
    engines: Vec<(Arc<dyn Engine>, Vec<u16>)>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        for (engine, regions) in &self.engines {
            engine.unregister(regions);
        }
    }
}

/// Counters since open, over all paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Completed reads.
    pub reads: u64,
    /// Completed writes.
    pub writes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written, metadata not counted.
    pub write_bytes: u64,
    /// Failed reads.
    pub read_errors: u64,
    /// Failed writes.
    pub write_errors: u64,
    /// Barriers.
    pub syncs: u64,
    /// Journal records made durable.
    pub journal_records: u64,
    /// Journal blocks written.
    pub journal_blocks: u64,
    /// Checkpoints made.
    pub checkpoints: u64,
    /// Blocks found at open.
    pub recovered: u64,
    /// Entries dropped at open: overlapped, or an older copy of the same id.
    pub dropped: u64,
    /// Pages that are never used again.
    pub quarantined_pages: u64,
    /// Paths that are bypassed now, those that were not there at open included.
    pub failed_paths: u64,
    /// Damage to the metadata that was met, at open and since; most of it costs blocks.
    pub damaged: u64,
}

/// How long dropping the tier without [`NvmeTier::close`] waits for the devices.
const DROP_PATIENCE: Duration = Duration::from_secs(10);

/// The NVMe tier: slots, reads and writes over one or several paths.
///
/// No method but [`NvmeTier::open`], [`NvmeTier::flush`] and [`NvmeTier::close`] waits for a
/// device; all others may be called from a [`Done`] callback.
pub struct NvmeTier {
    volumes: Vec<Arc<Volume>>,
    locks: Mutex<Vec<Lock>>,
    generation: Arc<AtomicU64>,
    closed: AtomicBool,
    missing: u64,
    damaged: u64,
    dropped: u64,
    recovered: u64,
}

impl NvmeTier {
    /// Opens the paths, each created where it is not there yet, and recovers what they hold: every
    /// id once, in commit order, the oldest first.
    ///
    /// Reads the metadata only. The slots of recovered blocks cannot be named by
    /// [`NvmeTier::window`] before [`NvmeTier::set_owner`] was called for them.
    ///
    /// # Errors
    /// [`ErrorKind::Locked`] if a path is in use, [`ErrorKind::NewerFormat`] or
    /// [`ErrorKind::Damaged`] if what is there is not to be touched, [`ErrorKind::Config`] if it was
    /// made with another size, [`ErrorKind::Full`] if the space cannot be allocated.
    /// [`ErrorKind::Deadline`] if a path does not answer within `options.patience`, [`ErrorKind::Io`]
    /// if one fails. Of several paths those whose device is missing, broken or silent are bypassed,
    /// and counted in [`Stats::failed_paths`], as long as one is left.
    pub fn open(options: Options) -> Result<(Arc<NvmeTier>, Vec<Recovered>), Error> {
        let share = options.share(options.paths.len())?;
        let mut seen = HashSet::new();
        if let Some(twice) = options.paths.iter().find(|path| !seen.insert(*path)) {
            return Err(Error::new(
                ErrorKind::Config,
                format!("{} is given twice: give each path once", twice.display()),
            ));
        }
        let places = options.paths.iter().cloned();
        let openers = places.map(|path| {
            let name = path.display().to_string();
            let open = move || place::open(&path, share).map(|(device, lock)| (device, Some(lock)));
            (name, Box::new(open) as open::Opener)
        });
        Self::over(open::all(openers, share, &options)?, &options)
    }

    /// As [`NvmeTier::open`], over devices instead of `options.paths`; blank ones are formatted.
    pub fn open_on(
        devices: Vec<Arc<dyn Device>>,
        options: Options,
    ) -> Result<(Arc<NvmeTier>, Vec<Recovered>), Error> {
        let share = options.share(devices.len())?;
        let openers = devices.into_iter().enumerate().map(|(i, device)| {
            let name = format!("device {i}");
            let called = name.clone();
            let open = move || {
                if recover::is_blank(&*device, &called)? {
                    recover::format(&*device, share, &called)?;
                }
                Ok((device, None))
            };
            (name, Box::new(open) as open::Opener)
        });
        Self::over(open::all(openers, share, &options)?, &options)
    }

    /// The tier over paths that were opened.
    pub(crate) fn over(
        opened: open::Opened,
        options: &Options,
    ) -> Result<(Arc<NvmeTier>, Vec<Recovered>), Error> {
        let generation = Arc::new(AtomicU64::new(opened.generation()));
        let missing = opened.missing;
        let mut volumes: Vec<Arc<Volume>> = Vec::new();
        let (mut locks, mut blocks, mut committers) = (Vec::new(), Vec::new(), Vec::new());
        let (mut dropped, mut damaged) = (0, 0);
        for (index, path) in opened.paths.into_iter().enumerate() {
            let index = index as u8; // `share` allows 255
            let open::Ready {
                name,
                device,
                lock,
                engine,
                mut found,
            } = path;
            let clock = options.clock.clone();
            let volume = Arc::new(Volume::new(index, name, device, engine, clock, &mut found));
            dropped += found.overlapped.len() as u64;
            damaged += found.damaged.len() as u64;
            let next = generation.clone();
            let committer =
                Committer::new(volume.clone(), &found, move || next.load(Ordering::Relaxed));
            committers.push(committer);
            volumes.push(volume);
            locks.extend(lock);
            blocks.push(found.blocks);
        }
        if let Err(e) = commit::start(committers, commit::spawn) {
            // None of the threads that did start may go on without the lock.
            let patience = Some(Instant::now() + DROP_PATIENCE);
            let _ = close(&volumes, locks, patience); // what failed is told by `e`
            return Err(Error::io("cannot start the committer thread", e));
        }
        let (recovered, older) = merge(blocks);
        for old in &older {
            volumes[usize::from(old.slot.path)].leave(old.slot, &old.id, Change::Remove);
        }
        let tier = NvmeTier {
            volumes,
            locks: Mutex::new(locks),
            generation,
            closed: AtomicBool::new(false),
            missing,
            damaged,
            dropped: dropped + older.len() as u64,
            recovered: recovered.len() as u64,
        };
        Ok((Arc::new(tier), recovered))
    }

    /// Takes a slot of `pages` pages on the path with room and the least to write; `None` if no
    /// path has a hole that large, or if there are as many blocks as the metadata can hold.
    pub fn reserve(&self, pages: u32) -> Option<Slot> {
        if pages == 0 {
            return None;
        }
        let mut choice: Vec<_> = self
            .volumes
            .iter()
            .filter_map(|volume| volume.load(pages).map(|load| (load, volume)))
            .collect();
        choice.sort_unstable_by_key(|&(load, _)| load);
        let generation = self.generation.fetch_add(1, Ordering::Relaxed);
        choice
            .iter()
            .find_map(|(_, volume)| volume.reserve(pages, generation))
    }

    /// Says who owns a slot, once its block is published: [`NvmeTier::window`] may name it then.
    pub fn set_owner(&self, slot: Slot, owner: u32) {
        self.volume(slot).set_owner(slot, owner);
    }

    /// The owners to evict so that a hole of `pages` pages appears, as few pages as possible: best
    /// around the holes there are, else anywhere. Empty if too much is being written, has no owner
    /// yet or is lost.
    pub fn window(&self, pages: u32) -> Vec<u32> {
        let windows = self
            .volumes
            .iter()
            .filter_map(|volume| volume.window(pages));
        windows
            .min_by_key(|&(cost, _)| cost)
            .map_or(Vec::new(), |(_, owners)| owners)
    }

    /// Gives back a slot that was reserved and never written to. It is free at once.
    pub fn abandon(&self, slot: Slot) {
        self.volume(slot).abandon(slot);
    }

    /// Writes a block. `done(Ok)` means that its bytes can be read; its record becomes durable soon
    /// after, or by [`NvmeTier::flush`]. After `done(Err)` the slot is free.
    pub fn write(&self, write: Write) {
        self.volume(write.slot).write(write);
    }

    /// Keeps a slot from being reused, even if it is removed.
    pub fn hold(&self, slot: Slot) -> SlotHold {
        let volume = self.volume(slot).clone();
        volume.hold(slot);
        SlotHold { volume, slot }
    }

    /// Reads a part of a slot. Nothing is verified: the caller has the root.
    pub fn read(&self, read: Read) {
        self.volume(read.slot).read(read);
    }

    /// Removes a block. Its slot is free when the record of that is durable and nobody holds it.
    pub fn remove(&self, slot: Slot, id: &Id) {
        self.volume(slot).leave(slot, id, Change::Remove);
    }

    /// Removes a block whose pages are never to be used again.
    pub fn quarantine(&self, slot: Slot, id: &Id) {
        self.volume(slot).leave(slot, id, Change::Quarantine);
    }

    /// Waits until all earlier writes and removals are durable.
    ///
    /// # Errors
    /// [`ErrorKind::Deadline`] if they are not by then; [`ErrorKind::Io`] if a path has failed;
    /// [`ErrorKind::Config`] in a [`Done`] callback, which would wait for itself.
    pub fn flush(&self, deadline: Option<Instant>) -> Result<(), Error> {
        refuse_in_callback()?;
        on_all(&self.volumes, |volume| volume.flush(deadline))
    }

    /// Waits until all earlier removals, and all writes that are complete, are durable: the slots of
    /// removed blocks that nobody holds are free then.
    ///
    /// # Errors
    /// As [`NvmeTier::flush`].
    pub fn commit(&self, deadline: Option<Instant>) -> Result<(), Error> {
        refuse_in_callback()?;
        on_all(&self.volumes, |volume| volume.commit(deadline))
    }

    /// Flushes, stops the threads and gives the paths free for others.
    ///
    /// With a device that hangs it returns at the deadline: what is in flight there keeps its
    /// memory and never completes, and the locks are kept until the process ends.
    ///
    /// # Errors
    /// As [`NvmeTier::flush`]. But for a callback's, the tier is closed in any case.
    pub fn close(&self, deadline: Option<Instant>) -> Result<(), Error> {
        refuse_in_callback()?;
        if self.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        close(
            &self.volumes,
            std::mem::take(&mut *self.locks.lock()),
            deadline,
        )
    }

    /// Pages that blocks can use, those that are quarantined included.
    pub fn capacity_pages(&self) -> u64 {
        self.volumes
            .iter()
            .map(|v| u64::from(v.geometry.data))
            .sum()
    }

    /// Pages that are not free.
    pub fn used_pages(&self) -> u64 {
        self.capacity_pages() - self.free_pages()
    }

    /// Pages that can be reserved now, if a hole is large enough.
    pub fn free_pages(&self) -> u64 {
        self.volumes.iter().map(|v| v.gauges().free).sum()
    }

    /// Pages of removed blocks that are not free yet.
    pub fn free_soon_pages(&self) -> u64 {
        self.volumes.iter().map(|v| v.gauges().free_soon).sum()
    }

    /// Pages of the largest slot that could ever be.
    pub fn max_slot_pages(&self) -> u32 {
        self.volumes
            .iter()
            .map(|v| v.geometry.data)
            .max()
            .unwrap_or(0)
    }

    /// Most blocks at a time.
    pub fn max_blocks(&self) -> u64 {
        self.volumes.iter().map(|v| v.geometry.max_blocks).sum()
    }

    /// Counters since open.
    pub fn stats(&self) -> Stats {
        let mut stats = Stats {
            recovered: self.recovered,
            dropped: self.dropped,
            failed_paths: self.missing,
            damaged: self.damaged,
            ..Stats::default()
        };
        for volume in &self.volumes {
            let (c, gauges) = (&volume.counters, volume.gauges());
            for (to, from) in [
                (&mut stats.reads, &c.reads),
                (&mut stats.writes, &c.writes),
                (&mut stats.read_bytes, &c.read_bytes),
                (&mut stats.write_bytes, &c.write_bytes),
                (&mut stats.read_errors, &c.read_errors),
                (&mut stats.write_errors, &c.write_errors),
                (&mut stats.syncs, &c.syncs),
                (&mut stats.journal_records, &c.journal_records),
                (&mut stats.journal_blocks, &c.journal_blocks),
                (&mut stats.checkpoints, &c.checkpoints),
                (&mut stats.damaged, &c.damaged),
            ] {
                *to += from.load(Ordering::Relaxed);
            }
            stats.quarantined_pages += gauges.lost;
            stats.failed_paths += u64::from(gauges.bypassed);
        }
        stats
    }

    /// The engine that moves the bytes.
    pub fn engine_name(&self) -> &'static str {
        self.volumes.first().map_or("none", |v| v.engine.name())
    }

    /// Registers memory with the engines, so that transfers to and from it cost less CPU time.
    ///
    /// It happens on the engine's thread, which faults in what is not there yet: prefault first.
    /// Where the memlock limit forbids it, the memory is used unregistered.
    pub fn register(&self, region: IoBuf) -> Registration {
        let register = |v: &Arc<Volume>| {
            let regions = v.engine.register(region.ptr() as usize, region.len());
            (v.engine.clone(), regions)
        };
        Registration {
            engines: self.volumes.iter().map(register).collect(),
            _region: region,
        }
    }

    /// Bytes of memory that the tier's own tables take, roughly.
    pub fn memory_bytes(&self) -> u64 {
        self.volumes.iter().map(|v| v.gauges().memory).sum()
    }

    #[cfg(test)]
    pub(crate) fn volumes(&self) -> &[Arc<Volume>] {
        &self.volumes
    }

    fn volume(&self, slot: Slot) -> &Arc<Volume> {
        &self.volumes[usize::from(slot.path)]
    }
}

impl Drop for NvmeTier {
    fn drop(&mut self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let volumes = std::mem::take(&mut self.volumes);
        let locks = std::mem::take(&mut *self.locks.lock());
        let stopping = volumes.clone();
        let close = move || {
            if let Err(e) = close(&volumes, locks, Some(Instant::now() + DROP_PATIENCE)) {
                tracing::warn!("the NVMe tier was dropped without close: {e}");
            }
        };
        if !engine::in_callback() {
            return close();
        }
        stopping.iter().for_each(|volume| volume.begin_stop());
        // The last owner was a callback, and closing waits for callbacks.
        if let Err(e) = thread::Builder::new()
            .name("kvtier-close".into())
            .spawn(close)
        {
            tracing::error!("cannot close the NVMe tier: {e}");
        }
    }
}

fn refuse_in_callback() -> Result<(), Error> {
    if engine::in_callback() {
        return Err(Error::new(
            ErrorKind::Config,
            "flush and close wait for callbacks, so they cannot be called in one",
        ));
    }
    Ok(())
}

/// Waits on each volume, also where an earlier one fails.
fn on_all(
    volumes: &[Arc<Volume>],
    wait: impl Fn(&Volume) -> Result<(), Error>,
) -> Result<(), Error> {
    // All at once, so that none has to wait for another that hangs.
    volumes.iter().for_each(|volume| volume.hasten());
    let waited: Vec<_> = volumes.iter().map(|volume| wait(volume)).collect();
    waited.into_iter().collect()
}

pub(crate) fn close(
    volumes: &[Arc<Volume>],
    locks: Vec<Lock>,
    deadline: Option<Instant>,
) -> Result<(), Error> {
    volumes.iter().for_each(|volume| volume.refuse());
    let flushed = on_all(volumes, |volume| volume.flush(deadline));
    volumes.iter().for_each(|volume| volume.begin_stop());
    let mut all = true;
    for volume in volumes {
        all &= volume.stop(deadline);
    }
    if all {
        return flushed;
    }
    // For as long as the process lives.
    static KEPT: Mutex<Vec<Lock>> = Mutex::new(Vec::new());
    KEPT.lock().extend(locks);
    flushed.and_then(|()| {
        Err(Error::new(
            ErrorKind::Deadline,
            "a device did not answer by the deadline: its requests are left in flight, and the \
             paths stay locked until this process ends",
        ))
    })
}

/// The blocks of all paths in commit order, every id once; and the older copies of the others.
pub(crate) fn merge(paths: Vec<Vec<Record>>) -> (Vec<Recovered>, Vec<Recovered>) {
    let mut merged: Vec<Recovered> = Vec::with_capacity(paths.iter().map(Vec::len).sum());
    let mut paths: Vec<_> = paths
        .into_iter()
        .map(|p| p.into_iter().peekable())
        .collect();
    // Generations are given out by one counter, so they order the paths against each other.
    while let Some((_, path)) = (0..paths.len())
        .filter_map(|i| paths[i].peek().map(|r| (r.generation, i)))
        .min()
    {
        if let Some(record) = paths[path].next()
            && let Change::Add(entry) = record.change
        {
            merged.push(Recovered {
                id: record.id,
                parent: entry.parent,
                namespace: entry.namespace,
                slot: Slot {
                    path: path as u8,
                    start: record.start,
                    pages: record.pages,
                    generation: record.generation,
                },
                shape: entry.shape,
                codec: entry.codec,
                plain: entry.plain,
                importance: entry.importance,
                root: entry.root,
            });
        }
    }
    // While a path is missing, its generations may be given out again: so the slot decides.
    let newest: HashMap<Id, Slot> = merged.iter().map(|block| (block.id, block.slot)).collect();
    if newest.len() == merged.len() {
        return (merged, Vec::new());
    }
    merged
        .into_iter()
        .partition(|block| newest.get(&block.id) == Some(&block.slot))
}
