//! The checkpoint: the old one and the journal, less what is gone, streamed into the other area.

use std::io;

use kvtier_codec::image::PAGE;

use crate::buf::Pages;
use crate::device::{Device, write_all};
use crate::journal::{self, CHUNK, Journal, read_pages};
use crate::record::{PER_BLOCK, Place, Record, Series, decode_block, encode_block};
use crate::superblock::Superblock;

/// A checkpoint in the making. It goes in steps, between which records may be committed.
pub struct Checkpoint {
    old: Superblock,
    new: Superblock,
    /// Blocks of the old checkpoint that were read.
    read: u64,
    /// The next journal block to read.
    sequence: u64,
    /// Blocks of the new checkpoint that were written.
    written: u64,
    /// Records that are not written yet.
    records: Vec<Record>,
    /// Blocks of the old checkpoint that were damaged when the path was opened.
    holes: Vec<u64>,
    /// Blocks that were whole then, or were written since, and are damaged now.
    pub damaged: u64,
}

impl Checkpoint {
    /// Starts a checkpoint of all that is in `journal` now.
    pub fn start(old: &Superblock, journal: &Journal, generation: u64, holes: &[u64]) -> Self {
        let (sequence, chain) = journal.position();
        Checkpoint {
            old: *old,
            new: Superblock {
                epoch: old.epoch + 1,
                records: 0,
                sequence,
                chain,
                generation,
                ..*old
            },
            read: 0,
            sequence: old.sequence,
            written: 0,
            records: Vec::new(),
            holes: holes.to_vec(),
            damaged: 0,
        }
    }

    /// Goes one step; returns the superblock that is in force once the checkpoint is complete.
    ///
    /// `retain` drops the records of what is gone. It may already know of changes later than the
    /// checkpoint's place in the journal: recovery replays those over it and finds them done.
    ///
    /// # Errors
    /// Also if a block cannot be read that could be: what it says would be lost, and may come back
    /// with the device.
    pub fn step(
        &mut self,
        device: &dyn Device,
        retain: impl FnOnce(&mut Vec<Record>),
    ) -> io::Result<Option<Superblock>> {
        let mut found = Vec::new();
        let old_blocks = self.old.records.div_ceil(PER_BLOCK as u64);
        if self.read < old_blocks {
            let to = (self.read + CHUNK).min(old_blocks);
            let known = |sequence| self.holes.contains(&sequence);
            for (sequence, block) in read(device, &self.old, self.read, to, known)? {
                match block {
                    Some(records) => found.extend(records),
                    None if self.holes.contains(&sequence) => {}
                    None => {
                        tracing::warn!(
                            "checkpoint block {sequence} is damaged: its records are lost"
                        );
                        self.damaged += 1;
                    }
                }
            }
            self.read = to;
        } else if self.sequence < self.new.sequence {
            let damaged;
            (self.sequence, damaged) = journal::reread(
                device,
                &self.old,
                self.sequence,
                self.new.sequence,
                &mut found,
            )?;
            self.damaged += damaged;
        }
        retain(&mut found);
        self.records.append(&mut found);
        let complete = self.read == old_blocks && self.sequence == self.new.sequence;
        let full = self.records.len() / PER_BLOCK * PER_BLOCK;
        let ready = if complete { self.records.len() } else { full };
        self.write(device, ready)?;
        if !complete {
            return Ok(None);
        }
        device.sync()?; // the checkpoint is durable before a superblock names it
        write_superblock(device, &self.new, self.new.home())?;
        device.sync()?; // and the superblock before the journal is overwritten
        // From here on the old epoch is of no use. The next barrier makes this durable, and one
        // comes before anything else is written to this copy.
        write_superblock(device, &self.new, 1 - self.new.home())?;
        Ok(Some(self.new))
    }

    fn write(&mut self, device: &dyn Device, count: usize) -> io::Result<()> {
        let blocks = count.div_ceil(PER_BLOCK);
        if blocks == 0 {
            return Ok(());
        }
        if self.new.records + count as u64 > self.new.geometry.max_blocks {
            return Err(io::Error::other(
                "more records than the checkpoint area holds",
            ));
        }
        let mut buf = Pages::new(blocks);
        for ((block, part), sequence) in buf
            .chunks_exact_mut(PAGE)
            .zip(self.records[..count].chunks(PER_BLOCK))
            .zip(self.written..)
        {
            encode_block(block, &place(&self.new, sequence), part);
        }
        let at = self.new.geometry.checkpoint_at(self.new.epoch) + self.written * PAGE as u64;
        write_all(device, &buf, at)?;
        self.written += blocks as u64;
        self.new.records += count as u64;
        self.records.drain(..count);
        Ok(())
    }
}

/// The blocks `from..to` of the checkpoint that `superblock` names; `None` for a damaged one. One
/// that cannot be read is an error unless `tolerated`.
pub fn read(
    device: &dyn Device,
    superblock: &Superblock,
    from: u64,
    to: u64,
    tolerated: impl Fn(u64) -> bool,
) -> io::Result<Vec<(u64, Option<Vec<Record>>)>> {
    let geometry = &superblock.geometry;
    let mut buf = Pages::new((to - from) as usize);
    let at = geometry.checkpoint_at(superblock.epoch) + from * PAGE as u64;
    read_pages(device, &mut buf, at, |page| tolerated(from + page))?;
    Ok(buf
        .chunks_exact(PAGE)
        .zip(from..to)
        .map(|(block, sequence)| {
            let found = decode_block(block, &place(superblock, sequence), geometry.data);
            (sequence, found.map(|(records, _)| records))
        })
        .collect())
}

/// Writes a superblock over one of the two copies.
pub fn write_superblock(device: &dyn Device, superblock: &Superblock, copy: u64) -> io::Result<()> {
    let mut page = Pages::new(1);
    superblock.encode(&mut page);
    write_all(device, &page, copy * PAGE as u64)
}

/// Blocks of a checkpoint stand alone, so that one damaged block costs its own records only.
fn place(superblock: &Superblock, sequence: u64) -> Place {
    Place {
        uuid: superblock.uuid,
        series: Series::Checkpoint(superblock.epoch),
        sequence,
        chain: 0,
    }
}
