//! Taking bytes out of an image, and proving in the same pass that they are the right ones.

use kvtier_codec::checksum::{copy, copy_hash64_unfenced, hash64};
use kvtier_codec::image::{self, Id, Mismatch, Root, Segment, Shape};

use crate::layout::Piece;

/// What an image must match.
#[derive(Clone, Copy, Debug)]
pub struct Proof<'a> {
    /// The block's id.
    pub id: &'a Id,
    /// The slot's generation; 0 in memory tiers.
    pub generation: u64,
    /// How the payload is encoded.
    pub codec: u16,
    /// The root kept outside the slot.
    pub root: Root,
}

impl Proof<'_> {
    /// Verifies a whole image. Returns the root of the same image in memory.
    pub fn verify(&self, image: &[u8], shape: Shape) -> Result<Root, Mismatch> {
        let (generation, codec) = (self.generation, self.codec);
        let table = image::verify(image, shape, self.root, self.id, generation, codec)?;
        Ok(self.in_memory(&table, shape))
    }

    /// The root, in memory, of an image with this table, which has been found right.
    fn in_memory(&self, table: &[Segment], shape: Shape) -> Root {
        if self.generation == 0 && self.codec == 0 {
            return self.root;
        }
        Root::over(table, self.id, 0, 0, shape)
    }

    fn holds(&self, table: &[Segment], shape: Shape) -> Result<Root, Mismatch> {
        let (generation, codec) = (self.generation, self.codec);
        if image::table_matches(table, self.root, shape, self.id, generation, codec) {
            return Ok(self.in_memory(table, shape));
        }
        Err(if shape.table_len() == 0 {
            Mismatch::Segment(0)
        } else {
            Mismatch::Table
        })
    }
}

/// Copies `pieces` of an image to their places from `out` on.
///
/// # Safety
/// `out` must be valid for writes of the pieces' bytes at their places, and overlap neither them nor
/// anything that others read.
pub unsafe fn copy_out(image: &[u8], pieces: &[Piece], out: *mut u8) {
    for piece in pieces {
        // SAFETY: pieces lie in the payload; `out` has room for each at its place.
        unsafe {
            copy(
                out.add(piece.to),
                image.as_ptr().add(piece.offset),
                piece.len,
            )
        };
    }
}

/// As [`copy_out`], and verifies every segment that the pieces touch. Returns the root of the same
/// image in memory. On a mismatch `out` holds bytes that must not be used. Before others are told of
/// what was copied a [`kvtier_codec::checksum::fence`] must follow.
///
/// # Safety
/// As [`copy_out`].
pub unsafe fn copy_proven(
    image: &[u8],
    shape: Shape,
    proof: Proof<'_>,
    pieces: &[Piece],
    out: *mut u8,
) -> Result<Root, Mismatch> {
    let src = image.as_ptr();
    let payload = shape.payload();
    let whole = matches!(pieces, [piece] if piece.offset == 0 && piece.len == payload);
    if shape.segments() == 1 {
        let checksum = if whole {
            // SAFETY: the payload is `payload` bytes long, and so is `out`.
            unsafe { copy_hash64_unfenced(out, src, payload) }
        } else {
            hash64(&image[..payload])
        };
        let table = [Segment {
            offset: 0,
            len: payload as u32,
            checksum,
        }];
        let root = proof.holds(&table, shape)?;
        if !whole {
            // SAFETY: the caller's contract.
            unsafe { copy_out(image, pieces, out) };
        }
        return Ok(root);
    }
    let table = image::table(image, 0, shape);
    let root = proof.holds(&table, shape)?;
    let check = |i: usize, checksum: u64| {
        if checksum == table[i].checksum {
            Ok(())
        } else {
            Err(Mismatch::Segment(i as u32))
        }
    };
    let copied = |i: usize, at: usize| {
        let (offset, len) = (table[i].offset as usize, table[i].len as usize);
        // SAFETY: the table tiles the payload (`holds` checked it), and `out` has room at `at`.
        check(i, unsafe {
            copy_hash64_unfenced(out.add(at), src.add(offset), len)
        })
    };
    if whole {
        for (i, segment) in table.iter().enumerate() {
            copied(i, segment.offset as usize)?;
        }
        return Ok(root);
    }
    let mut verified = None;
    for piece in pieces {
        let i = piece.segment as usize;
        let segment = table[i];
        let (offset, len) = (segment.offset as usize, segment.len as usize);
        if piece.offset == offset && piece.len == len {
            copied(i, piece.to)?;
        } else {
            if verified != Some(i) {
                check(i, hash64(&image[offset..offset + len]))?;
                verified = Some(i);
            }
            // SAFETY: the piece lies in the payload, and `out` has room at its place.
            unsafe { copy(out.add(piece.to), src.add(piece.offset), piece.len) };
        }
    }
    Ok(root)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Layer, Layout, Selection, Tokens};

    fn block(tokens: usize) -> (Layout, Vec<u8>, Shape, Root) {
        let layer = Layer {
            planes: 2,
            token_bytes: 700,
        };
        let layout = Layout::new(vec![layer; 8], 32).unwrap();
        let shape = layout.shape(8 * 2 * 700 * tokens).unwrap();
        let mut image: Vec<u8> = (0..shape.image_len())
            .map(|i| (i * 7 + i / 255) as u8)
            .collect();
        let table: Vec<Segment> = layout
            .segments(shape)
            .iter()
            .map(|&(offset, len)| Segment {
                offset: offset as u32,
                len: len as u32,
                checksum: hash64(&image[offset..offset + len]),
            })
            .collect();
        let root = image::seal(&mut image, shape, &[1; 32], 0, 0, &table);
        (layout, image, shape, root)
    }

    #[test]
    fn every_selection_is_copied_right_and_a_changed_byte_is_seen_where_it_matters() {
        for tokens in [2, 32] {
            let (layout, image, shape, root) = block(tokens);
            let proof = Proof {
                id: &[1; 32],
                generation: 0,
                codec: 0,
                root,
            };
            for (layers, range) in [
                (None, Tokens::All),
                (Some(2..5), Tokens::All),
                (None, Tokens::Range(1..2)),
                (Some(7..8), Tokens::Range(0..1)),
                (Some(3..3), Tokens::All),
                (None, Tokens::Only(std::iter::once(0..1).collect())),
                (Some(1..3), Tokens::Only(vec![0..1, 1..2])),
                (
                    Some(1..8),
                    Tokens::Only(vec![1..2, tokens as u32 - 1..tokens as u32]),
                ),
                (Some(2..4), Tokens::Only(vec![])),
            ] {
                if matches!(&range, Tokens::Only(all) if all.len() == 2 && all[0].end > all[1].start)
                {
                    continue; // a block of two tokens has not that many
                }
                let selection = Selection {
                    layers,
                    tokens: range,
                };
                let pieces = layout.pieces(shape, &selection).unwrap();
                let extent = layout.extent(shape, &selection, &pieces);
                let copied: usize = pieces.iter().map(|p| p.len).sum();
                assert_eq!(layout.taken(&selection, extent), copied);
                let mut want = vec![0xEE; extent];
                for p in &pieces {
                    want[p.to..p.to + p.len].copy_from_slice(&image[p.offset..p.offset + p.len]);
                }
                let mut out = vec![0xEE; extent];
                // SAFETY: `out` has the extent of the pieces.
                unsafe { copy_proven(&image, shape, proof, &pieces, out.as_mut_ptr()) }.unwrap();
                assert_eq!(out, want);
                let Some(first) = pieces.first() else {
                    continue;
                };
                let mut bad = image.clone();
                bad[first.offset] ^= 1;
                // SAFETY: as above.
                let copied = unsafe { copy_proven(&bad, shape, proof, &pieces, out.as_mut_ptr()) };
                assert!(copied.is_err());
            }
        }
    }
}
