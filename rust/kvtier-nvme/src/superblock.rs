//! The superblock: who wrote the path, how it is divided, and where recovery starts.
//!
//! There are two copies. Epoch `e` is first written over copy `e % 2` and names checkpoint area
//! `e % 2`, so the epoch in force, and what it names, are never written to; once it is durable it
//! is written over the other copy too, so damage to one copy costs nothing.

use std::fmt;

use kvtier_codec::image::PAGE;

use crate::error::{Error, ErrorKind};
use crate::record::{get, get_u32, get_u64, put};
use crate::units::Bytes;

/// The format this code writes, and the newest it reads.
pub const VERSION: u32 = 1;

/// The smallest path.
pub const MIN_BYTES: u64 = 1 << 20;

/// Data bytes per block that the metadata is sized for.
const BYTES_PER_BLOCK: u64 = 16 << 10;
const MIN_JOURNAL: u64 = 16;

/// Epochs, sequences and generations stay below this, so that counting on never overflows.
pub(crate) const MAX_COUNT: u64 = 1 << 62;

const MAGIC: [u8; 8] = *b"KVTIERNV";
/// All fields and the CRC lie in one 512-byte sector, which a device writes whole or not at all.
const SECTOR: usize = 512;
const CRC_AT: usize = SECTOR - 4;

/// How a path is divided, in pages: superblocks, two checkpoint areas, journal, data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Pages of the whole path.
    pub total: u64,
    /// Pages of one checkpoint area.
    pub checkpoint: u64,
    /// Pages of the journal ring.
    pub journal: u64,
    /// Pages of the data area.
    pub data: u32,
    /// Most blocks at a time.
    pub max_blocks: u64,
}

impl Geometry {
    /// How `bytes` are divided.
    pub fn new(bytes: u64) -> Result<Self, Error> {
        let total = bytes / PAGE as u64;
        let max_blocks = bytes / BYTES_PER_BLOCK;
        let checkpoint = max_blocks.div_ceil(crate::record::PER_BLOCK as u64);
        let journal = checkpoint.max(MIN_JOURNAL);
        let data = total.saturating_sub(2 + 2 * checkpoint + journal);
        match u32::try_from(data) {
            Ok(data) if bytes >= MIN_BYTES && data < u32::MAX => Ok(Geometry {
                total,
                checkpoint,
                journal,
                data,
                max_blocks,
            }),
            _ => Err(Error::new(
                ErrorKind::Config,
                format!(
                    "{} on one path: allowed are 1 MiB to 16 TiB; \
                     give another size or another number of paths",
                    Bytes(bytes)
                ),
            )),
        }
    }

    /// First byte of the checkpoint area of `epoch`.
    pub fn checkpoint_at(&self, epoch: u64) -> u64 {
        (2 + epoch % 2 * self.checkpoint) * PAGE as u64
    }

    /// Where the journal block `sequence` lies.
    pub fn journal_at(&self, sequence: u64) -> u64 {
        (2 + 2 * self.checkpoint + sequence % self.journal) * PAGE as u64
    }

    /// Where `page` of the data area lies.
    pub fn data_at(&self, page: u32) -> u64 {
        (2 + 2 * self.checkpoint + self.journal + u64::from(page)) * PAGE as u64
    }
}

/// What a superblock says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Identity of this format of the path.
    pub uuid: [u8; 16],
    /// Counts the checkpoints.
    pub epoch: u64,
    /// How the path is divided.
    pub geometry: Geometry,
    /// Records in the checkpoint.
    pub records: u64,
    /// The journal block after the checkpoint.
    pub sequence: u64,
    /// Its chain.
    pub chain: u64,
    /// No slot written before had this generation or a higher one.
    pub generation: u64,
}

/// Why a page is not a superblock to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// All zeros.
    Blank,
    /// Written by a newer version of kvtier.
    Newer(u32),
    /// Something else, or torn.
    Invalid,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Blank => f.write_str("blank"),
            Refusal::Newer(version) => write!(f, "of format version {version}"),
            Refusal::Invalid => f.write_str("not a superblock, or a damaged one"),
        }
    }
}

impl Superblock {
    /// The superblock of a path that holds nothing.
    pub fn fresh(uuid: [u8; 16], geometry: Geometry, epoch: u64) -> Self {
        Superblock {
            uuid,
            epoch,
            geometry,
            records: 0,
            sequence: 0,
            chain: 0,
            generation: 1,
        }
    }

    /// The copy that this epoch is written to first.
    pub fn home(&self) -> u64 {
        self.epoch % 2
    }

    /// Writes the stored form over the 4 KiB `page`.
    pub fn encode(&self, page: &mut [u8]) {
        debug_assert_eq!(page.len(), PAGE);
        page.fill(0);
        put(page, 0, &MAGIC);
        put(page, 8, &VERSION.to_le_bytes());
        put(page, 16, &self.uuid);
        for (at, word) in [
            (32, self.epoch),
            (40, self.geometry.total),
            (48, self.geometry.checkpoint),
            (56, self.geometry.journal),
            (64, u64::from(self.geometry.data)),
            (72, self.geometry.max_blocks),
            (80, self.records),
            (88, self.sequence),
            (96, self.chain),
            (104, self.generation),
        ] {
            put(page, at, &word.to_le_bytes());
        }
        let crc = crc32fast::hash(&page[..CRC_AT]);
        put(page, CRC_AT, &crc.to_le_bytes());
    }

    /// Reads the 4 KiB `page`.
    pub fn decode(page: &[u8]) -> Result<Self, Refusal> {
        if page.iter().all(|&b| b == 0) {
            return Err(Refusal::Blank);
        }
        // Magic, version and CRC keep their places in every version.
        if get(page, 0) != MAGIC || crc32fast::hash(&page[..CRC_AT]) != get_u32(page, CRC_AT) {
            return Err(Refusal::Invalid);
        }
        let version = get_u32(page, 8);
        if version > VERSION {
            return Err(Refusal::Newer(version));
        }
        let word = |at| get_u64(page, at);
        let superblock = Superblock {
            uuid: get(page, 16),
            epoch: word(32),
            geometry: Geometry {
                total: word(40),
                checkpoint: word(48),
                journal: word(56),
                data: u32::try_from(word(64)).map_err(|_| Refusal::Invalid)?,
                max_blocks: word(72),
            },
            records: word(80),
            sequence: word(88),
            chain: word(96),
            generation: word(104),
        };
        let mut again = vec![0; PAGE];
        superblock.encode(&mut again);
        let g = &superblock.geometry;
        let sound = again == page
            && g.total < 1 << 40
            && Geometry::new(g.total * PAGE as u64).is_ok_and(|sound| sound == *g)
            && superblock.records <= g.max_blocks
            && [superblock.epoch, superblock.sequence, superblock.generation]
                .iter()
                .all(|&count| count < MAX_COUNT);
        if sound {
            Ok(superblock)
        } else {
            Err(Refusal::Invalid)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Superblock {
        Superblock {
            records: 5,
            sequence: 77,
            chain: 0xfeed,
            generation: 99,
            ..Superblock::fresh([3; 16], Geometry::new(64 << 20).unwrap(), 8)
        }
    }

    #[test]
    fn a_superblock_comes_back_and_every_flipped_bit_is_refused() {
        let mut page = vec![0; PAGE];
        example().encode(&mut page);
        assert_eq!(Superblock::decode(&page), Ok(example()));
        for bit in 0..PAGE * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::decode(&page).is_err(), "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(Superblock::decode(&vec![0; PAGE]), Err(Refusal::Blank));
    }

    #[test]
    fn numbers_that_no_store_could_have_are_refused() {
        let good = example();
        for bad in [
            Superblock {
                epoch: u64::MAX - 1,
                ..good
            },
            Superblock {
                sequence: u64::MAX,
                ..good
            },
            Superblock {
                generation: u64::MAX,
                ..good
            },
            Superblock {
                records: good.geometry.max_blocks + 1,
                ..good
            },
            Superblock {
                geometry: Geometry {
                    max_blocks: 1 << 50,
                    ..good.geometry
                },
                ..good
            },
            Superblock {
                geometry: Geometry {
                    journal: 1,
                    ..good.geometry
                },
                ..good
            },
            Superblock {
                geometry: Geometry {
                    data: good.geometry.data - 1,
                    ..good.geometry
                },
                ..good
            },
        ] {
            let mut page = vec![0; PAGE];
            bad.encode(&mut page);
            assert_eq!(Superblock::decode(&page), Err(Refusal::Invalid), "{bad:?}");
        }
    }

    #[test]
    fn a_newer_version_is_named() {
        let mut page = vec![0; PAGE];
        example().encode(&mut page);
        put(&mut page, 8, &2u32.to_le_bytes());
        let crc = crc32fast::hash(&page[..CRC_AT]);
        put(&mut page, CRC_AT, &crc.to_le_bytes());
        assert_eq!(Superblock::decode(&page), Err(Refusal::Newer(2)));
    }

    #[test]
    fn the_metadata_is_small_and_the_parts_fit() {
        for bytes in [MIN_BYTES, (3 << 20) + 1, 64 << 20, 100 << 30, 16 << 40] {
            let g = Geometry::new(bytes).unwrap();
            assert!(g.data_at(g.data) <= bytes);
            assert!(bytes < 64 << 20 || u64::from(g.data) * 1000 >= g.total * 975);
            assert_eq!(
                g.checkpoint_at(1) - g.checkpoint_at(0),
                g.checkpoint * PAGE as u64
            );
            assert_eq!(g.journal_at(g.journal), g.journal_at(0));
        }
        assert!(Geometry::new(MIN_BYTES - 1).is_err());
        assert!(Geometry::new(20 << 40).is_err());
    }
}
