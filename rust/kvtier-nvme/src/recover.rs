//! Recovery: from what is on a device to what its data area holds. Reads metadata only.

use std::collections::{HashMap, HashSet};
use std::io;

use kvtier_codec::image::PAGE;

use crate::buf::Pages;
use crate::checkpoint::{self, write_superblock};
use crate::device::{Device, read_exact};
use crate::error::{Error, ErrorKind};
use crate::journal::{self, CHUNK, Journal};
use crate::record::{Change, PER_BLOCK, Record};
use crate::slots::{BUSY, LOST, Slots};
use crate::superblock::{Geometry, MIN_BYTES, Refusal, Superblock, VERSION};
use crate::units::Bytes;

/// What a device holds.
pub struct Found {
    /// The superblock in force.
    pub superblock: Superblock,
    /// The journal, ready to be continued.
    pub journal: Journal,
    /// The records of the blocks, in commit order.
    pub blocks: Vec<Record>,
    /// The records of what is never used again.
    pub lost: Vec<Record>,
    /// Records whose slots a newer one claims.
    pub overlapped: Vec<Record>,
    /// The pages that all of this leaves free; those of blocks are [`BUSY`].
    pub slots: Slots,
    /// No slot was written with this generation or a higher one.
    pub generation: u64,
    /// One line for each damage met.
    pub damaged: Vec<String>,
    /// Blocks of the checkpoint that are damaged.
    pub holes: Vec<u64>,
}

/// Writes the metadata of an empty store over the first `bytes` of `device`.
pub fn format(device: &dyn Device, bytes: u64, name: &str) -> Result<(), Error> {
    format_as(device, bytes, name, new_uuid())
}

/// As [`format`], with a given identity.
pub fn format_as(device: &dyn Device, bytes: u64, name: &str, uuid: [u8; 16]) -> Result<(), Error> {
    let geometry = Geometry::new(bytes)?;
    if device.len() < bytes {
        return Err(Error::new(
            ErrorKind::Config,
            format!(
                "{name} has {}: {} do not fit",
                Bytes(device.len()),
                Bytes(bytes)
            ),
        ));
    }
    for epoch in 0..2 {
        let superblock = Superblock::fresh(uuid, geometry, epoch);
        write_superblock(device, &superblock, superblock.home())
            .and_then(|()| device.sync())
            .map_err(|e| Error::io(format!("cannot format {name}"), e))?;
    }
    Ok(())
}

/// Has nobody ever written to the start of `device`?
pub fn is_blank(device: &dyn Device, name: &str) -> Result<bool, Error> {
    let mut start = Pages::new((MIN_BYTES.min(device.len()) as usize / PAGE).max(1));
    let mut unread = read_exact(device, &mut start, 0).err();
    if unread.is_some() {
        // One damaged page does not hide a store.
        start.fill(0);
        for (page, at) in start.chunks_exact_mut(PAGE).zip((0..).step_by(PAGE)) {
            if let Err(e) = read_exact(device, page, at) {
                page.fill(0);
                unread = Some(e);
            }
        }
    }
    let blank = start.iter().all(|&b| b == 0);
    match unread {
        Some(e) if blank => Err(Error::io(format!("cannot read the start of {name}"), e)),
        _ => Ok(blank),
    }
}

/// The superblock in force, and what is wrong with the other copy.
pub fn superblock(device: &dyn Device, name: &str) -> Result<(Superblock, Option<String>), Error> {
    let mut copies = Vec::new();
    let mut unread = None;
    for copy in 0..2u64 {
        let mut page = Pages::new(1);
        copies.push(match read_exact(device, &mut page, copy * PAGE as u64) {
            Ok(()) => Superblock::decode(&page).and_then(|s| {
                if s.geometry.total * PAGE as u64 <= device.len() {
                    Ok(s)
                } else {
                    Err(Refusal::Invalid)
                }
            }),
            Err(e) => {
                unread = Some(e);
                Err(Refusal::Invalid)
            }
        });
    }
    for copy in &copies {
        if let Err(Refusal::Newer(version)) = copy {
            return Err(Error::new(
                ErrorKind::NewerFormat,
                format!(
                    "{name} has format version {version}, this kvtier reads up to {VERSION}: \
                     use the newer kvtier, or give another path. Nothing was changed"
                ),
            ));
        }
    }
    let best = copies.iter().flatten().max_by_key(|s| s.epoch).copied();
    match (best, unread) {
        (Some(best), _) => {
            let other = copies.iter().enumerate().find_map(|(copy, c)| {
                c.as_ref()
                    .err()
                    .map(|why| format!("superblock {copy} is {why}"))
            });
            Ok((best, other))
        }
        (None, Some(e)) => Err(Error::io(
            format!("cannot read the superblocks of {name}"),
            e,
        )),
        (None, None) => Err(Error::new(
            ErrorKind::Damaged,
            format!(
                "{name} is not a kvtier store, or both its superblocks are damaged{}: remove it to \
                 start anew, or give another path. Nothing was changed",
                blank(&copies),
            ),
        )),
    }
}

/// Makes a device ready for another life that writes to it. What was found must be durable.
pub fn prepare(device: &dyn Device, found: &Found) -> io::Result<()> {
    mirror(device, &found.superblock)?;
    found.journal.wipe_ahead(device)
}

/// Writes the superblock in force over whichever copy does not hold it: the next epoch is written over
/// one of them.
fn mirror(device: &dyn Device, superblock: &Superblock) -> io::Result<()> {
    let mut wanted = Pages::new(1);
    superblock.encode(&mut wanted);
    for copy in [superblock.home(), 1 - superblock.home()] {
        let mut page = Pages::new(1);
        if read_exact(device, &mut page, copy * PAGE as u64).is_err() || page[..] != wanted[..] {
            write_superblock(device, superblock, copy)?;
            device.sync()?;
        }
    }
    Ok(())
}

fn blank(copies: &[Result<Superblock, Refusal>]) -> &'static str {
    let blank = |copy: &Result<Superblock, Refusal>| matches!(copy, Err(Refusal::Blank));
    if copies.iter().all(blank) {
        " (they are blank)"
    } else {
        ""
    }
}

/// Reads checkpoint and journal.
pub fn recover(device: &dyn Device, superblock: &Superblock) -> Found {
    let (mut damaged, mut holes) = (Vec::new(), Vec::new());
    let mut state = Replay {
        generation: superblock.generation,
        ..Replay::default()
    };
    let blocks = superblock.records.div_ceil(PER_BLOCK as u64);
    for from in (0..blocks).step_by(CHUNK as usize) {
        let to = (from + CHUNK).min(blocks);
        let chunk = checkpoint::read(device, superblock, from, to, |_| true);
        for (sequence, block) in chunk.into_iter().flatten() {
            match block {
                Some(records) => records.into_iter().for_each(|r| state.apply(r)),
                None => {
                    damaged.push(format!("checkpoint block {sequence} is damaged"));
                    holes.push(sequence);
                }
            }
        }
    }
    let (journal, broken) = journal::replay(device, superblock, |r| state.apply(r));
    if broken {
        let (end, _) = journal.position();
        damaged.push(format!(
            "journal block {end} is damaged: what was recorded from there on is lost"
        ));
    }
    let (blocks, overlapped, slots) = state.settle(superblock.geometry.data);
    for record in &overlapped {
        damaged.push(format!(
            "pages {}+{} are claimed twice",
            record.start, record.pages
        ));
    }
    Found {
        superblock: *superblock,
        journal,
        blocks,
        lost: state.lost,
        overlapped,
        slots,
        generation: state.generation,
        damaged,
        holes,
    }
}

/// Stands for the number of a block in a claim of pages that are never used again.
const LOST_CLAIM: usize = usize::MAX;

/// The changes so far.
#[derive(Default)]
struct Replay {
    /// Added blocks; `None` where one is gone again.
    blocks: Vec<Option<Record>>,
    /// Their places in `blocks`, by generation.
    places: HashMap<u64, usize>,
    lost: Vec<Record>,
    /// Their generations.
    known_lost: HashSet<u64>,
    generation: u64,
}

impl Replay {
    fn apply(&mut self, record: Record) {
        self.generation = self.generation.max(record.generation.saturating_add(1));
        if let Change::Add(_) = record.change {
            // A generation is given out once: of two records with one, the later counts.
            if let Some(old) = self.places.insert(record.generation, self.blocks.len()) {
                self.blocks[old] = None;
            }
            self.blocks.push(Some(record));
            return;
        }
        if let Some(&place) = self.places.get(&record.generation)
            && self.blocks[place].is_some_and(|r| r.start == record.start)
        {
            self.blocks[place] = None;
            self.places.remove(&record.generation);
        }
        // A checkpoint that ran while the slot was quarantined holds this record already.
        if record.change == Change::Quarantine && self.known_lost.insert(record.generation) {
            self.lost.push(record);
        }
    }

    /// Divides the data area: what is lost goes first, then newer records go before older ones.
    fn settle(&mut self, data: u32) -> (Vec<Record>, Vec<Record>, Slots) {
        self.places = HashMap::new();
        let mut blocks: Vec<Record> = std::mem::take(&mut self.blocks)
            .into_iter()
            .flatten()
            .collect();
        let lost = self
            .lost
            .iter()
            .map(|r| (r.start, r.pages, u64::MAX, LOST_CLAIM));
        let mut claims: Vec<(u32, u32, u64, usize)> = blocks
            .iter()
            .enumerate()
            .map(|(i, r)| (r.start, r.pages, r.generation, i))
            .chain(lost)
            .collect();
        claims.sort_unstable();
        let mut kept: Vec<(u32, u32, u64, usize)> = Vec::with_capacity(claims.len());
        let mut losers = Vec::new();
        for claim in claims {
            match kept.last_mut() {
                Some(last)
                    if last.3 == LOST_CLAIM
                        && claim.3 == LOST_CLAIM
                        && last.0 + last.1 > claim.0 =>
                {
                    last.1 = last.1.max(claim.0 + claim.1 - last.0);
                }
                Some(last) if last.0 + last.1 > claim.0 => {
                    let loser = if claim.2 > last.2 {
                        std::mem::replace(last, claim)
                    } else {
                        claim
                    };
                    losers.push(loser.3);
                }
                _ => kept.push(claim),
            }
        }
        let mut slots = Slots::new(data);
        for (start, pages, _, i) in kept {
            let owner = if i == LOST_CLAIM { LOST } else { BUSY };
            let free = slots.alloc_at(start, pages, owner);
            debug_assert!(free, "claims were made disjoint");
        }
        losers.sort_unstable();
        let overlapped = losers.iter().map(|&i| blocks[i]).collect();
        let mut index = 0;
        blocks.retain(|_| {
            index += 1;
            losers.binary_search(&(index - 1)).is_err()
        });
        (blocks, overlapped, slots)
    }
}

/// Sixteen bytes that no other format has.
fn new_uuid() -> [u8; 16] {
    use std::hash::{BuildHasher, RandomState};
    let random = [
        RandomState::new().hash_one(1),
        RandomState::new().hash_one(2),
    ];
    let now = std::time::SystemTime::now();
    let seed = format!("{random:?} {now:?} {}", std::process::id());
    crate::record::get(blake3::hash(seed.as_bytes()).as_bytes(), 0)
}
