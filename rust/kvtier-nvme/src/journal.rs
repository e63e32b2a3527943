//! The journal: a ring of record blocks, each chained to the one before it.
//!
//! A block is written once and never rewritten in place: a group of records that does not fill its
//! last block leaves it part empty. So no durable record can be torn by a later write.

use std::io;

use kvtier_codec::image::PAGE;

use crate::buf::Pages;
use crate::device::{Device, read_exact, write_all};
use crate::record::{PER_BLOCK, Place, Record, Series, decode_block, encode_block, get_u64};
use crate::superblock::{Geometry, Superblock};

/// Blocks that are read or written at a time.
pub const CHUNK: u64 = 64;

/// Where the journal stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Journal {
    uuid: [u8; 16],
    geometry: Geometry,
    /// The first block that recovery would need.
    head: u64,
    /// The block that is written next, and its chain.
    next: u64,
    chain: u64,
}

impl Journal {
    /// The journal as `superblock` has it, before its blocks are read.
    fn at(superblock: &Superblock) -> Self {
        Journal {
            uuid: superblock.uuid,
            geometry: superblock.geometry,
            head: superblock.sequence,
            next: superblock.sequence,
            chain: superblock.chain,
        }
    }

    /// The position after the last block: what a checkpoint of everything so far names.
    pub fn position(&self) -> (u64, u64) {
        (self.next, self.chain)
    }

    /// Blocks that may be written before a checkpoint has to free some.
    pub fn room(&self) -> u64 {
        self.geometry.journal - self.len()
    }

    /// Blocks that recovery would read.
    #[allow(clippy::len_without_is_empty)] // a number of blocks, not of elements
    pub fn len(&self) -> u64 {
        self.next - self.head
    }

    /// Most blocks in one group: few enough that a checkpoint keeps ahead of the groups.
    pub fn group(&self) -> u64 {
        (self.geometry.journal / 8).clamp(1, CHUNK)
    }

    /// Writes `records` behind the last block, without a barrier; returns how many blocks.
    ///
    /// # Panics
    /// If there is no room: that would destroy records that are still needed.
    pub fn append(&mut self, device: &dyn Device, records: &[Record]) -> io::Result<u64> {
        let count = records.len().div_ceil(PER_BLOCK) as u64;
        assert!(count <= self.room(), "the journal would overflow");
        let mut buf = Pages::new(count as usize);
        let (mut next, mut chain) = self.position();
        for (block, part) in buf.chunks_exact_mut(PAGE).zip(records.chunks(PER_BLOCK)) {
            let place = self.place(next, chain);
            chain = encode_block(block, &place, part);
            next += 1;
        }
        // The ring may end within the group.
        let to_end = self.geometry.journal - self.next % self.geometry.journal;
        let (first, second) = buf.split_at(to_end.min(count) as usize * PAGE);
        write_all(device, first, self.geometry.journal_at(self.next))?;
        if !second.is_empty() {
            write_all(device, second, self.geometry.journal_at(0))?;
        }
        (self.next, self.chain) = (next, chain);
        Ok(count)
    }

    /// Puts zeros behind the last block, where another life may have left blocks or parts of them. One
    /// that a crash tore would otherwise be whole again once this life has written the missing part,
    /// and another crash kept only that of it.
    ///
    /// That reaches as far as damage is looked for, so that it is reported once.
    pub fn wipe_ahead(&self, device: &dyn Device) -> io::Result<()> {
        let mut page = Pages::new(1);
        let mut wiped = false;
        for sequence in self.next..self.next + (2 * self.group()).min(self.room()) {
            let at = self.geometry.journal_at(sequence);
            if read_exact(device, &mut page, at).is_err() || page.iter().any(|&b| b != 0) {
                page.fill(0);
                write_all(device, &page, at)?;
                wiped = true;
            }
        }
        if wiped { device.sync() } else { Ok(()) }
    }

    /// Gives the blocks before `sequence` free, once a checkpoint stands for them.
    pub fn release(&mut self, sequence: u64) {
        self.head = self.head.max(sequence);
    }

    fn place(&self, sequence: u64, chain: u64) -> Place {
        Place {
            uuid: self.uuid,
            series: Series::Journal,
            sequence,
            chain,
        }
    }
}

/// Reads the journal from where `superblock` says up to its end: the first block that is not
/// exactly what must stand there. Also says whether that is no end but damage in the middle.
///
/// What follows damage is not applied: nothing proves that it continues what came before, and is not
/// the leftover of another life.
pub fn replay(
    device: &dyn Device,
    superblock: &Superblock,
    mut each: impl FnMut(Record),
) -> (Journal, bool) {
    let mut journal = Journal::at(superblock);
    let geometry = &superblock.geometry;
    let mut buf = Pages::new(CHUNK as usize);
    while journal.room() > 0 {
        let count = run_length(geometry, journal.next, journal.room());
        read_lossy(
            device,
            &mut buf[..count as usize * PAGE],
            geometry.journal_at(journal.next),
        );
        for block in buf[..count as usize * PAGE].chunks_exact(PAGE) {
            let place = journal.place(journal.next, journal.chain);
            let Some((records, chain)) = decode_block(block, &place, geometry.data) else {
                let broken = goes_on(device, superblock, &journal);
                return (journal, broken);
            };
            records.into_iter().for_each(&mut each);
            (journal.next, journal.chain) = (journal.next + 1, chain);
        }
    }
    (journal, false)
}

/// Are there blocks behind the end that can only have been written after a barrier behind it? A
/// crash leaves at most one group there.
fn goes_on(device: &dyn Device, superblock: &Superblock, journal: &Journal) -> bool {
    let geometry = &superblock.geometry;
    let group = journal.group();
    let mut page = Pages::new(1);
    (group..(2 * group).min(journal.room())).any(|ahead| {
        let sequence = journal.next + ahead;
        read_lossy(device, &mut page, geometry.journal_at(sequence));
        decode_block(&page, &alone(superblock, sequence, &page), geometry.data).is_some()
    })
}

/// The place of a journal block, whatever came before it.
fn alone(superblock: &Superblock, sequence: u64, block: &[u8]) -> Place {
    Place {
        uuid: superblock.uuid,
        series: Series::Journal,
        sequence,
        chain: get_u64(block, 48),
    }
}

/// Reads at most [`CHUNK`] blocks that this process has written or replayed, from `sequence` up to
/// `end`: the records of the intact ones. Returns the sequence after them and how many are damaged.
pub fn reread(
    device: &dyn Device,
    superblock: &Superblock,
    sequence: u64,
    end: u64,
    records: &mut Vec<Record>,
) -> io::Result<(u64, u64)> {
    let geometry = &superblock.geometry;
    let count = run_length(geometry, sequence, end - sequence);
    let mut buf = Pages::new(count as usize);
    read_pages(device, &mut buf, geometry.journal_at(sequence), |_| false)?;
    let mut damaged = 0;
    for (block, sequence) in buf.chunks_exact(PAGE).zip(sequence..) {
        // The chain was proved at replay or made by this process; a damaged block must not hide
        // those behind it.
        let place = alone(superblock, sequence, block);
        match decode_block(block, &place, geometry.data) {
            Some((found, _)) => records.extend(found),
            None => {
                tracing::warn!("journal block {sequence} is damaged: its records are lost");
                damaged += 1;
            }
        }
    }
    Ok((sequence + count, damaged))
}

/// Blocks from `sequence` on that lie side by side, at most [`CHUNK`] and `most`.
fn run_length(geometry: &Geometry, sequence: u64, most: u64) -> u64 {
    let to_end = geometry.journal - sequence % geometry.journal;
    to_end.min(CHUNK).min(most)
}

/// Reads whole pages; one that cannot be read is all zeros, which no block is.
fn read_lossy(device: &dyn Device, buf: &mut [u8], offset: u64) {
    let _ = read_pages(device, buf, offset, |_| true); // tolerating all, it cannot fail
}

/// Reads whole pages. One that cannot be read, at the second try either, is all zeros if `tolerated`.
pub fn read_pages(
    device: &dyn Device,
    buf: &mut [u8],
    offset: u64,
    tolerated: impl Fn(u64) -> bool,
) -> io::Result<()> {
    if read_exact(device, buf, offset).is_ok() {
        return Ok(());
    }
    for (page, i) in buf.chunks_exact_mut(PAGE).zip(0..) {
        let at = offset + i * PAGE as u64;
        if let Err(e) = read_exact(device, page, at) {
            if !tolerated(i) {
                return Err(e);
            }
            tracing::warn!("cannot read the metadata at byte {at}: {e}");
            page.fill(0);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::sim::SimDevice;
    use crate::record::tests::any_record;
    use proptest::prelude::*;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    fn setup() -> (SimDevice, Superblock, Vec<Record>) {
        let geometry = Geometry::new(4 << 20).unwrap();
        let mut runner = TestRunner::deterministic();
        let records = prop::collection::vec(any_record(geometry.data), 120)
            .new_tree(&mut runner)
            .unwrap()
            .current();
        let superblock = Superblock {
            sequence: geometry.journal - 2, // the ring's end comes within the first group
            ..Superblock::fresh([1; 16], geometry, 1)
        };
        (SimDevice::new(4 << 20, 1), superblock, records)
    }

    fn replayed(device: &SimDevice, superblock: &Superblock) -> (Vec<Record>, Journal) {
        let mut found = Vec::new();
        let (journal, broken) = replay(device, superblock, |r| found.push(r));
        assert!(!broken || journal.len() > 0);
        (found, journal)
    }

    #[test]
    fn what_was_appended_is_replayed_in_order() {
        let (device, superblock, records) = setup();
        let (found, mut journal) = replayed(&device, &superblock);
        assert!(found.is_empty() && journal.len() == 0);
        for group in records.chunks(50) {
            journal.append(&device, group).unwrap();
        }
        assert_eq!(replayed(&device, &superblock), (records.clone(), journal));
        let mut again = Vec::new();
        let (end, _) = journal.position();
        let mut at = superblock.sequence;
        while at < end {
            let damaged;
            (at, damaged) = reread(&device, &superblock, at, end, &mut again).unwrap();
            assert_eq!(damaged, 0);
        }
        assert_eq!(again, records);
    }

    #[test]
    fn a_damaged_block_ends_the_replay_and_the_abandoned_rest_is_never_applied() {
        let (device, superblock, records) = setup();
        let mut journal = Journal::at(&superblock);
        journal.append(&device, &records).unwrap(); // four blocks
        device.rot(
            superblock.geometry.journal_at(superblock.sequence + 1) + 700,
            3,
        );
        let (found, mut shorter) = replayed(&device, &superblock);
        assert_eq!(found, records[..PER_BLOCK]);
        // Going on from there makes the old third and fourth block follow a new second one.
        shorter.append(&device, &records[..1]).unwrap();
        let (found, _) = replayed(&device, &superblock);
        assert_eq!(found.len(), PER_BLOCK + 1);
    }

    #[test]
    fn damage_in_the_middle_is_told_from_the_end() {
        let (device, superblock, records) = setup();
        let mut journal = Journal::at(&superblock);
        for record in &records[..10] {
            journal
                .append(&device, std::slice::from_ref(record))
                .unwrap();
        }
        assert_eq!(journal.group(), 2);
        for damaged in 0..10 {
            let device = SimDevice::from_image(device.image(), 1);
            let at = superblock
                .geometry
                .journal_at(superblock.sequence + damaged);
            device.rot(at + 200, 1);
            let (shorter, broken) = replay(&device, &superblock, |_| {});
            assert_eq!(shorter.len(), damaged);
            // Two blocks behind the end can be what a crash left of a group.
            assert_eq!(broken, damaged < 8, "{damaged}");
        }
    }

    #[test]
    #[should_panic(expected = "overflow")]
    fn it_never_overwrites_what_is_needed() {
        let (device, superblock, records) = setup();
        let mut journal = Journal::at(&superblock);
        for _ in 0..=superblock.geometry.journal {
            journal.append(&device, &records[..1]).unwrap();
        }
    }
}
