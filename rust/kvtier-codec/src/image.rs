//! The image of a block: what a slot holds, the same in every tier.
//!
//! ```text
//! payload ‖ zeros to a 16-byte boundary ‖ segment table ‖ zeros to a 4 KiB boundary
//! ```
//!
//! A *segment* is the part of the payload that is checked as a whole (a layer). Its table entry is
//! 16 bytes, little endian: offset `u32`, length `u32`, XXH3-64 `u64`. A 128-bit [`Root`] over the
//! block's id, the slot's generation, the lengths and the table is kept *outside* the slot (in the
//! index and in the journal), so a slot that holds another block's bytes, or an older
//! generation's, never verifies.
//!
//! A payload of at most [`WHOLE`] bytes is one segment and stores no table: a reader fetches all of
//! it and rebuilds the single entry. This keeps small slots free of a table page, and reading the
//! whole costs no more than reading a part of it.

use crate::checksum::{hash64, hash128};

/// Slots, images and device transfers are multiples of this many bytes.
pub const PAGE: usize = 4096;

/// Payloads up to this many bytes are checked as one segment and store no table.
pub const WHOLE: usize = 64 << 10;

/// Bytes of one table entry.
pub const ENTRY: usize = 16;

/// The largest payload.
pub const MAX_PAYLOAD: usize = 256 << 20;

/// Identifies a block everywhere: BLAKE3 of namespace and key.
pub type Id = [u8; 32];

/// Rounds up to a multiple of [`PAGE`].
pub const fn page_ceil(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE)
}

/// One entry of the segment table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte of the segment within the payload.
    pub offset: u32,
    /// Bytes in the segment.
    pub len: u32,
    /// XXH3-64 of those bytes, seed 0.
    pub checksum: u64,
}

impl Segment {
    /// The entry's stored form.
    pub fn to_bytes(self) -> [u8; ENTRY] {
        let mut out = [0; ENTRY];
        out[..4].copy_from_slice(&self.offset.to_le_bytes());
        out[4..8].copy_from_slice(&self.len.to_le_bytes());
        out[8..].copy_from_slice(&self.checksum.to_le_bytes());
        out
    }

    /// Reads an entry's stored form.
    pub fn from_bytes(bytes: &[u8; ENTRY]) -> Self {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Segment {
            offset: word(0),
            len: word(4),
            checksum: u64::from(word(8)) | u64::from(word(12)) << 32,
        }
    }
}

/// The sizes that fix an image: the payload's bytes and how many segments it is checked in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    payload: u32,
    segments: u32,
}

impl Shape {
    /// The shape of a payload that its owner divides into `segments` parts (at least one).
    ///
    /// `None` if the payload is empty or larger than [`MAX_PAYLOAD`], or has fewer bytes than parts.
    pub fn new(payload: usize, segments: usize) -> Option<Self> {
        if payload == 0 || payload > MAX_PAYLOAD || segments == 0 || segments > payload {
            return None;
        }
        let segments = if payload <= WHOLE { 1 } else { segments };
        Some(Shape {
            payload: payload as u32,
            segments: segments as u32,
        })
    }

    /// Payload bytes.
    pub fn payload(self) -> usize {
        self.payload as usize
    }

    /// Segments that are checked one by one.
    pub fn segments(self) -> usize {
        self.segments as usize
    }

    /// Bytes of the stored table: zero where the block is a single segment.
    pub fn table_len(self) -> usize {
        if self.segments == 1 {
            0
        } else {
            self.segments() * ENTRY
        }
    }

    /// Where the table starts in the image.
    pub fn table_offset(self) -> usize {
        self.payload().next_multiple_of(ENTRY)
    }

    /// Bytes of the whole image, a multiple of [`PAGE`].
    pub fn image_len(self) -> usize {
        page_ceil(self.table_offset() + self.table_len())
    }

    /// Pages of the whole image.
    pub fn pages(self) -> u32 {
        (self.image_len() / PAGE) as u32
    }
}

/// 128 bits that a reader holds and a slot must match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Root(pub [u8; 16]);

impl Root {
    /// The root of the block `id` stored at `generation` under `codec` with this segment `table`
    /// in its stored form.
    pub fn new(id: &Id, generation: u64, codec: u16, shape: Shape, table: &[u8]) -> Self {
        let mut head = [0u8; 32 + 8 + 4 + 4 + 2];
        head[..32].copy_from_slice(id);
        head[32..40].copy_from_slice(&generation.to_le_bytes());
        head[40..44].copy_from_slice(&shape.payload.to_le_bytes());
        head[44..48].copy_from_slice(&shape.segments.to_le_bytes());
        head[48..].copy_from_slice(&codec.to_le_bytes());
        // Most tables fit beside the head: hash both in one pass, without the heap.
        let mut small = [0u8; 1024];
        let len = head.len() + table.len();
        let hash = if len <= small.len() {
            small[..head.len()].copy_from_slice(&head);
            small[head.len()..len].copy_from_slice(table);
            hash128(&small[..len])
        } else {
            hash128(&[&head[..], table].concat())
        };
        Root(hash.to_le_bytes())
    }

    /// As [`Root::new`], over a table that was read.
    pub fn over(table: &[Segment], id: &Id, generation: u64, codec: u16, shape: Shape) -> Self {
        if let [one] = table {
            return Root::new(id, generation, codec, shape, &one.to_bytes());
        }
        let mut stored = Vec::with_capacity(table.len() * ENTRY);
        for segment in table {
            stored.extend_from_slice(&segment.to_bytes());
        }
        Root::new(id, generation, codec, shape, &stored)
    }
}

/// Why an image, or a part of it, is not what was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// The table (with id, generation and lengths) does not give the root.
    Table,
    /// The table is the right one, but this segment's bytes are not.
    Segment(u32),
}

/// Writes the table behind the payload and zeros the rest of the image.
///
/// `image` holds the payload at its start and is `shape.image_len()` bytes long; `segments` has
/// `shape.segments()` entries. Returns the root.
///
/// # Panics
/// If the lengths disagree.
pub fn seal(
    image: &mut [u8],
    shape: Shape,
    id: &Id,
    generation: u64,
    codec: u16,
    segments: &[Segment],
) -> Root {
    assert_eq!(image.len(), shape.image_len());
    assert_eq!(segments.len(), shape.segments());
    let tail = &mut image[shape.payload()..];
    tail.fill(0);
    if shape.table_len() == 0 {
        return Root::new(id, generation, codec, shape, &segments[0].to_bytes());
    }
    let start = shape.table_offset();
    for (i, segment) in segments.iter().enumerate() {
        image[start + i * ENTRY..][..ENTRY].copy_from_slice(&segment.to_bytes());
    }
    Root::new(
        id,
        generation,
        codec,
        shape,
        &image[start..start + shape.table_len()],
    )
}

/// The segment table of an image: stored, or rebuilt from a payload that is one segment.
///
/// `tail` holds the image from `tail_at` on, and must reach from the table's start (or, without a
/// table, from the payload's first byte) to its end.
///
/// # Panics
/// If `tail` does not cover what is needed.
pub fn table(tail: &[u8], tail_at: usize, shape: Shape) -> Vec<Segment> {
    if shape.table_len() == 0 {
        return vec![Segment {
            offset: 0,
            len: shape.payload,
            checksum: hash64(&tail[..shape.payload() - tail_at]),
        }];
    }
    let start = shape.table_offset() - tail_at;
    tail[start..start + shape.table_len()]
        .chunks_exact(ENTRY)
        .map(|entry| {
            let mut bytes = [0; ENTRY];
            bytes.copy_from_slice(entry);
            Segment::from_bytes(&bytes)
        })
        .collect()
}

/// Does `table` give `root`, and do its segments tile the payload without gap or overlap?
pub fn table_matches(
    table: &[Segment],
    root: Root,
    shape: Shape,
    id: &Id,
    generation: u64,
    codec: u16,
) -> bool {
    let mut next = 0u64;
    for segment in table {
        if u64::from(segment.offset) != next {
            return false;
        }
        next += u64::from(segment.len);
    }
    table.len() == shape.segments()
        && next == shape.payload() as u64
        && Root::over(table, id, generation, codec, shape) == root
}

/// Verifies a whole image: root, then table, then every segment. Returns the table.
///
/// # Panics
/// If `image` is shorter than `shape.image_len()`.
pub fn verify(
    image: &[u8],
    shape: Shape,
    root: Root,
    id: &Id,
    generation: u64,
    codec: u16,
) -> Result<Vec<Segment>, Mismatch> {
    let table = table(image, 0, shape);
    if !table_matches(&table, root, shape, id, generation, codec) {
        return Err(if shape.table_len() == 0 {
            Mismatch::Segment(0)
        } else {
            Mismatch::Table
        });
    }
    if shape.table_len() == 0 {
        return Ok(table); // building the table hashed the payload already
    }
    for (i, s) in table.iter().enumerate() {
        if hash64(&image[s.offset as usize..][..s.len as usize]) != s.checksum {
            return Err(Mismatch::Segment(i as u32));
        }
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sealed(payload: usize, segments: usize) -> (Vec<u8>, Shape, Root) {
        let shape = Shape::new(payload, segments).unwrap();
        let mut image: Vec<u8> = (0..shape.image_len())
            .map(|i| (i * 31 + i / 251) as u8)
            .collect();
        let n = shape.segments();
        let table: Vec<Segment> = (0..n)
            .map(|i| {
                let (from, to) = (payload * i / n, payload * (i + 1) / n);
                Segment {
                    offset: from as u32,
                    len: (to - from) as u32,
                    checksum: hash64(&image[from..to]),
                }
            })
            .collect();
        let root = seal(&mut image, shape, &[7; 32], 9, 0, &table);
        (image, shape, root)
    }

    #[test]
    fn small_payloads_need_no_table_page() {
        for payload in [1, 4096, WHOLE] {
            let shape = Shape::new(payload, payload.min(30)).unwrap();
            assert_eq!((shape.segments(), shape.table_len()), (1, 0));
            assert_eq!(shape.image_len(), page_ceil(payload));
        }
        let shape = Shape::new(WHOLE + PAGE, 10).unwrap();
        assert_eq!(shape.image_len(), WHOLE + 2 * PAGE);
    }

    #[test]
    fn impossible_shapes_are_refused() {
        for (payload, segments) in [(0, 1), (MAX_PAYLOAD + 1, 1), (4096, 0), (3, 4)] {
            assert_eq!(Shape::new(payload, segments), None);
        }
    }

    #[test]
    fn another_identity_never_verifies() {
        let (image, shape, root) = sealed(WHOLE * 2, 5);
        assert!(verify(&image, shape, root, &[7; 32], 9, 0).is_ok());
        assert!(verify(&image, shape, root, &[8; 32], 9, 0).is_err());
        assert!(verify(&image, shape, root, &[7; 32], 8, 0).is_err());
        assert!(verify(&image, shape, root, &[7; 32], 9, 1).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_changed_byte_of_payload_or_table_is_seen(
            payload in 1usize..200_000, segments in 1usize..40, at in any::<prop::sample::Index>(), bit in 0u8..8,
        ) {
            let (mut image, shape, root) = sealed(payload, segments.min(payload));
            prop_assert!(verify(&image, shape, root, &[7; 32], 9, 0).is_ok());
            let covered = shape.payload() + shape.table_len();
            let i = at.index(covered);
            let i = if i < payload { i } else { shape.table_offset() + i - payload };
            image[i] ^= 1 << bit;
            prop_assert!(verify(&image, shape, root, &[7; 32], 9, 0).is_err());
        }
    }
}
