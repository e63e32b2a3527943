//! The 128-byte record, and the 4 KiB blocks of records that journal and checkpoint are made of.

use kvtier_codec::checksum::hash64;
use kvtier_codec::image::{Id, PAGE, Root, Shape};

use crate::superblock::MAX_COUNT;

/// Bytes of a record, and of a block's header.
pub const RECORD: usize = 128;

/// Records in a block.
pub const PER_BLOCK: usize = PAGE / RECORD - 1;

const MAGIC: [u8; 8] = *b"KVTRECS\x01";
const CRC_AT: usize = RECORD - 4;

/// One change of what the data area holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Record {
    /// What happens to the slot.
    pub change: Change,
    /// First page of the slot.
    pub start: u32,
    /// Pages of the slot.
    pub pages: u32,
    /// The slot's generation.
    pub generation: u64,
    /// The block's id.
    pub id: Id,
}

/// What happens to a slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// It holds this block from now on.
    Add(Entry),
    /// It is free.
    Remove,
    /// It holds nothing and is never used again.
    Quarantine,
}

/// What is known of a stored block beside its id and its slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Entry {
    /// First half of the parent's id.
    pub parent: Option<[u8; 16]>,
    /// Tag of the namespace.
    pub namespace: u64,
    /// The lengths of what is stored.
    pub shape: Shape,
    /// How the payload is encoded; 0: as it is.
    pub codec: u16,
    /// The block's own lengths; `shape` where it is not encoded.
    pub plain: Shape,
    /// The block's score.
    pub importance: f32,
    /// What the image must match.
    pub root: Root,
}

/// Copies `bytes` to `at`.
pub(crate) fn put(out: &mut [u8], at: usize, bytes: &[u8]) {
    out[at..at + bytes.len()].copy_from_slice(bytes);
}

/// The `N` bytes at `at`.
pub(crate) fn get<const N: usize>(from: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&from[at..at + N]);
    out
}

pub(crate) fn get_u32(from: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(get(from, at))
}

pub(crate) fn get_u64(from: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(get(from, at))
}

impl Record {
    /// The stored form.
    pub fn to_bytes(self) -> [u8; RECORD] {
        let mut out = [0; RECORD];
        out[0] = match self.change {
            Change::Add(_) => 1,
            Change::Remove => 2,
            Change::Quarantine => 3,
        };
        if let Change::Add(entry) = self.change {
            out[1] = u8::from(entry.parent.is_some());
            put(&mut out, 2, &entry.codec.to_le_bytes());
            put(&mut out, 4, &entry.importance.to_le_bytes());
            put(&mut out, 8, &entry.namespace.to_le_bytes());
            put(&mut out, 48, &entry.parent.unwrap_or_default());
            put(&mut out, 64, &entry.root.0);
            put(&mut out, 96, &(entry.shape.payload() as u32).to_le_bytes());
            put(
                &mut out,
                100,
                &(entry.shape.segments() as u32).to_le_bytes(),
            );
            // Zero where the two are the same, as they were in the first files of this version.
            if entry.plain != entry.shape {
                let plain = entry.plain;
                put(&mut out, 104, &(plain.payload() as u32).to_le_bytes());
                put(&mut out, 108, &(plain.segments() as u32).to_le_bytes());
            }
        }
        put(&mut out, 16, &self.id);
        put(&mut out, 80, &self.generation.to_le_bytes());
        put(&mut out, 88, &self.start.to_le_bytes());
        put(&mut out, 92, &self.pages.to_le_bytes());
        let crc = crc32fast::hash(&out[..CRC_AT]);
        put(&mut out, CRC_AT, &crc.to_le_bytes());
        out
    }

    /// Reads the stored form; `None` if it is not exactly what [`Record::to_bytes`] writes for a
    /// slot within `data_pages`.
    pub fn from_bytes(bytes: &[u8; RECORD], data_pages: u32) -> Option<Self> {
        if crc32fast::hash(&bytes[..CRC_AT]) != get_u32(bytes, CRC_AT) {
            return None;
        }
        let pages = get_u32(bytes, 92);
        let change = match bytes[0] {
            1 => {
                let shape = Shape::new(get_u32(bytes, 96) as usize, get_u32(bytes, 100) as usize)?;
                if shape.pages() != pages {
                    return None;
                }
                let plain = match get_u32(bytes, 104) as usize {
                    0 => shape,
                    payload => Shape::new(payload, get_u32(bytes, 108) as usize)?,
                };
                Change::Add(Entry {
                    parent: (bytes[1] == 1).then(|| get(bytes, 48)),
                    namespace: get_u64(bytes, 8),
                    shape,
                    codec: u16::from_le_bytes(get(bytes, 2)),
                    plain,
                    importance: f32::from_le_bytes(get(bytes, 4)),
                    root: Root(get(bytes, 64)),
                })
            }
            2 => Change::Remove,
            3 => Change::Quarantine,
            _ => return None,
        };
        let record = Record {
            change,
            start: get_u32(bytes, 88),
            pages,
            generation: get_u64(bytes, 80),
            id: get(bytes, 16),
        };
        let inside = pages > 0
            && record.generation < MAX_COUNT
            && record
                .start
                .checked_add(pages)
                .is_some_and(|end| end <= data_pages);
        // Encoding again catches reserved bytes that are not zero, whatever the version that adds them.
        (inside && record.to_bytes() == *bytes).then_some(record)
    }
}

/// Which sequence of blocks a block belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Series {
    /// The journal.
    Journal,
    /// The checkpoint that this superblock epoch made active.
    Checkpoint(u64),
}

impl Series {
    fn to_words(self) -> (u32, u64) {
        match self {
            Series::Journal => (1, 0),
            Series::Checkpoint(epoch) => (2, epoch),
        }
    }
}

/// Where a block stands: it is valid in this place and in no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Identity of the format.
    pub uuid: [u8; 16],
    /// The series.
    pub series: Series,
    /// Number within the series.
    pub sequence: u64,
    /// Digest of the block before it, which rules out a leftover of an abandoned continuation.
    pub chain: u64,
}

/// Fills the 4 KiB `block` with `records` (at most [`PER_BLOCK`]); returns the chain for the next.
pub fn encode_block(block: &mut [u8], place: &Place, records: &[Record]) -> u64 {
    debug_assert!(block.len() == PAGE && records.len() <= PER_BLOCK);
    block.fill(0);
    let (series, epoch) = place.series.to_words();
    put(block, 8, &MAGIC);
    put(block, 16, &place.uuid);
    put(block, 32, &epoch.to_le_bytes());
    put(block, 40, &place.sequence.to_le_bytes());
    put(block, 48, &place.chain.to_le_bytes());
    put(block, 56, &series.to_le_bytes());
    put(block, 60, &(records.len() as u32).to_le_bytes());
    for (i, record) in records.iter().enumerate() {
        put(block, (i + 1) * RECORD, &record.to_bytes());
    }
    let checksum = hash64(&block[8..]);
    put(block, 0, &checksum.to_le_bytes());
    checksum
}

/// The records of `block` and the chain for the next, if the block is whole and stands at `place`.
pub fn decode_block(block: &[u8], place: &Place, data_pages: u32) -> Option<(Vec<Record>, u64)> {
    let (series, epoch) = place.series.to_words();
    let count = get_u32(block, 60) as usize;
    // Not a CRC: one over records that end with their own CRC is the same whatever they say, so a
    // block torn between two of its sectors would pass.
    let checksum = hash64(&block[8..]);
    let whole = get_u64(block, 0) == checksum
        && get(block, 8) == MAGIC
        && get(block, 16) == place.uuid
        && get_u64(block, 32) == epoch
        && get_u64(block, 40) == place.sequence
        && get_u64(block, 48) == place.chain
        && get_u32(block, 56) == series
        && (1..=PER_BLOCK).contains(&count);
    if !whole {
        return None;
    }
    let records: Option<Vec<Record>> = (1..=count)
        .map(|i| Record::from_bytes(&get(block, i * RECORD), data_pages))
        .collect();
    Some((records?, checksum))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn any_record(data_pages: u32) -> impl Strategy<Value = Record> {
        let entry = (
            any::<Option<[u8; 16]>>(),
            any::<u64>(),
            1usize..200_000,
            1usize..50,
            any::<u16>(),
            -1e9f32..1e9,
            any::<[u8; 16]>(),
        );
        (0u8..3, entry, any::<[u8; 32]>(), 0..MAX_COUNT, any::<u32>()).prop_map(
            move |(kind, e, id, generation, at)| {
                let shape = Shape::new(e.2, e.3.min(e.2)).unwrap();
                Record {
                    change: match kind {
                        0 => Change::Add(Entry {
                            parent: e.0,
                            namespace: e.1,
                            shape,
                            codec: e.4,
                            plain: match e.4 % 2 {
                                0 => shape,
                                _ => Shape::new(e.2 * 2, e.3).unwrap_or(shape),
                            },
                            importance: e.5,
                            root: Root(e.6),
                        }),
                        1 => Change::Remove,
                        _ => Change::Quarantine,
                    },
                    start: at % (data_pages - shape.pages()),
                    pages: shape.pages(),
                    generation,
                    id,
                }
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn a_record_comes_back_and_no_flipped_bit_passes(record in any_record(1000), bit in 0usize..RECORD * 8) {
            let mut bytes = record.to_bytes();
            prop_assert_eq!(Record::from_bytes(&bytes, 1000), Some(record));
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(Record::from_bytes(&bytes, 1000), None);
        }

        #[test]
        fn a_slot_outside_the_data_area_is_refused(record in any_record(1000)) {
            prop_assert_eq!(Record::from_bytes(&record.to_bytes(), record.start + record.pages - 1), None);
        }
    }

    #[test]
    fn a_block_torn_between_sectors_of_equal_records_is_refused() {
        let record = |generation| Record {
            change: Change::Quarantine,
            start: 1,
            pages: 1,
            generation,
            id: [0; 32],
        };
        let place = Place {
            uuid: [1; 16],
            series: Series::Journal,
            sequence: 7,
            chain: 8,
        };
        let (mut old, mut new) = (vec![0; PAGE], vec![0; PAGE]);
        encode_block(&mut old, &place, &[record(1); 20]);
        encode_block(&mut new, &place, &[record(2); 20]);
        new[512..1024].copy_from_slice(&old[512..1024]);
        assert_eq!(decode_block(&new, &place, 100), None);
    }

    #[test]
    fn a_block_is_valid_in_its_place_only_and_every_flipped_bit_is_seen() {
        let record = Record {
            change: Change::Remove,
            start: 3,
            pages: 4,
            generation: 5,
            id: [6; 32],
        };
        let place = Place {
            uuid: [1; 16],
            series: Series::Journal,
            sequence: 7,
            chain: 8,
        };
        let mut block = vec![0; PAGE];
        let next = encode_block(&mut block, &place, &[record; PER_BLOCK]);
        let read = |block: &[u8], place: &Place| decode_block(block, place, 100);
        assert_eq!(read(&block, &place), Some((vec![record; PER_BLOCK], next)));
        for other in [
            Place {
                uuid: [2; 16],
                ..place
            },
            Place {
                series: Series::Checkpoint(0),
                ..place
            },
            Place {
                sequence: 8,
                ..place
            },
            Place { chain: 9, ..place },
        ] {
            assert_eq!(read(&block, &other), None);
        }
        for bit in 0..PAGE * 8 {
            block[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(read(&block, &place), None, "bit {bit}");
            block[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
