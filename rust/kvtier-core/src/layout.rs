//! How the bytes of a block are arranged: layers, planes, tokens.
//!
//! A block is `[layer][plane][token][bytes]`: a layer is one contiguous segment, made of planes (K
//! and V; one for MLA), each holding its tokens one after another. Layers may differ in size.
//! Opaque blocks are a single segment of any length.

use std::ops::Range;

use kvtier_codec::image::{MAX_PAYLOAD, Shape};

use crate::error::{Error, Kind, Result};

/// One layer: `planes` runs, each `token_bytes` bytes a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// 2 for K and V, 1 for a latent.
    pub planes: u32,
    /// Bytes of one token in one plane.
    pub token_bytes: u32,
}

/// The layout of a namespace's blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    layers: Vec<Layer>,
    block_tokens: u32,
    bytes_per_token: usize,
}

/// Which part of a block is wanted: all of it by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Layers, all if absent.
    pub layers: Option<Range<u32>>,
    /// Tokens.
    pub tokens: Tokens,
}

/// Which tokens of a block are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tokens {
    /// Every one.
    #[default]
    All,
    /// These, one after another.
    Range(Range<u32>),
    /// These, in order and apart, each where it would lie among all of them: what lies at the places
    /// of the others is left as it is.
    Only(Vec<Range<u32>>),
}

impl Selection {
    /// Nothing is left out.
    pub fn is_all(&self) -> bool {
        self.layers.is_none() && self.tokens == Tokens::All
    }
}

/// A contiguous part of the payload that a selection copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The segment (layer) it lies in.
    pub segment: u32,
    /// First byte within the payload.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
    /// Where it goes, from the first byte of the destination.
    pub to: usize,
}

impl Layout {
    /// Blocks of any length, one segment each.
    pub fn opaque() -> Self {
        Layout {
            layers: Vec::new(),
            block_tokens: 0,
            bytes_per_token: 0,
        }
    }

    /// Blocks of up to `block_tokens` tokens over these layers.
    pub fn new(layers: Vec<Layer>, block_tokens: u32) -> Result<Self> {
        let bytes_per_token: usize = layers
            .iter()
            .map(|l| l.planes as usize * l.token_bytes as usize)
            .sum();
        let block = bytes_per_token.checked_mul(block_tokens as usize);
        if layers.iter().any(|l| l.planes == 0 || l.token_bytes == 0)
            || block.is_none_or(|bytes| bytes == 0 || bytes > MAX_PAYLOAD)
        {
            return Err(Error::new(
                Kind::Config,
                format!(
                    "a layout of {} layers, {bytes_per_token} bytes a token and {block_tokens} tokens a block was given; a block has at least one token and layer and at most {MAX_PAYLOAD} bytes. Choose fewer tokens a block",
                    layers.len()
                ),
            ));
        }
        Ok(Layout {
            layers,
            block_tokens,
            bytes_per_token,
        })
    }

    /// Bytes are stored as they are, without layers or tokens.
    pub fn is_opaque(&self) -> bool {
        self.layers.is_empty()
    }

    /// Tokens of a full block; 0 if opaque.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// The shape of a block of `payload` bytes.
    pub fn shape(&self, payload: usize) -> Result<Shape> {
        let fits = self.is_opaque()
            || (payload.is_multiple_of(self.bytes_per_token)
                && payload / self.bytes_per_token <= self.block_tokens as usize);
        if let (true, Some(shape)) = (fits, Shape::new(payload, self.layers.len().max(1))) {
            return Ok(shape);
        }
        let allowed = if self.is_opaque() {
            format!("1 to {MAX_PAYLOAD} bytes")
        } else {
            format!(
                "{} bytes ({} tokens of {} bytes), or fewer whole tokens",
                self.bytes_per_token * self.block_tokens as usize,
                self.block_tokens,
                self.bytes_per_token
            )
        };
        Err(Error::new(
            Kind::InvalidBlock,
            format!(
                "a block of {payload} bytes was given; this layout takes {allowed}. Check layout, dtype and shape"
            ),
        ))
    }

    /// Tokens in a block of this shape; 0 if opaque.
    pub fn tokens(&self, shape: Shape) -> u32 {
        shape
            .payload()
            .checked_div(self.bytes_per_token)
            .unwrap_or(0) as u32
    }

    /// Offset and length of each layer in a block of this shape.
    pub fn segments(&self, shape: Shape) -> Vec<(usize, usize)> {
        if shape.segments() == 1 {
            return vec![(0, shape.payload())];
        }
        let tokens = self.tokens(shape) as usize;
        let mut at = 0;
        self.layers
            .iter()
            .map(|layer| {
                let len = (layer.planes * layer.token_bytes) as usize * tokens;
                at += len;
                (at - len, len)
            })
            .collect()
    }

    /// The pieces that `selection` takes from a block of this shape, in order.
    pub fn pieces(&self, shape: Shape, selection: &Selection) -> Result<Vec<Piece>> {
        let whole = |segment| Piece {
            segment,
            offset: 0,
            len: shape.payload(),
            to: 0,
        };
        if selection.is_all() {
            return Ok(vec![whole(0)]);
        }
        let tokens = self.tokens(shape);
        let layers = selection.layers.clone().unwrap_or(self.every_layer());
        let whole_block = 0..tokens;
        let taken = match &selection.tokens {
            Tokens::All => std::slice::from_ref(&whole_block),
            Tokens::Range(range) => std::slice::from_ref(range),
            Tokens::Only(ranges) => ranges,
        };
        let in_place = matches!(selection.tokens, Tokens::Only(_));
        self.check(tokens, &layers, taken)?;
        let mut pieces: Vec<Piece> = Vec::new();
        let (mut base, mut at) = (0, 0);
        for (i, layer) in self.layers.iter().enumerate() {
            let (size, i) = (layer.token_bytes as usize, i as u32);
            for _ in 0..layer.planes {
                let wanted = layers.contains(&i);
                for range in taken.iter().filter(|range| wanted && !range.is_empty()) {
                    let (first, len) = (range.start as usize * size, range.len() * size);
                    let (offset, to) = (base + first, if in_place { at + first } else { at });
                    match pieces.last_mut() {
                        // What follows on in the block does so in the destination.
                        Some(last) if last.segment == i && last.offset + last.len == offset => {
                            last.len += len;
                        }
                        _ => pieces.push(Piece {
                            segment: i,
                            offset,
                            len,
                            to,
                        }),
                    }
                    at += if in_place { 0 } else { len };
                }
                base += size * tokens as usize;
                at += if in_place && wanted {
                    size * tokens as usize
                } else {
                    0
                };
            }
        }
        Ok(pieces)
    }

    fn check(&self, tokens: u32, layers: &Range<u32>, taken: &[Range<u32>]) -> Result<()> {
        let count = self.layers.len() as u32;
        let outside = |range: &Range<u32>, all| range.start > range.end || range.end > all;
        let mixed = taken.windows(2).any(|two| two[0].end > two[1].start);
        let wrong = taken.iter().find(|range| outside(range, tokens) || mixed);
        if wrong.is_none() && !outside(layers, count) {
            return Ok(());
        }
        let given = wrong.or(taken.first()).cloned().unwrap_or_default();
        Err(Error::new(
            Kind::InvalidBlock,
            format!(
                "layers {}..{} and tokens {}..{} were asked for; this block has layers 0..{count} and tokens 0..{tokens}{}",
                layers.start,
                layers.end,
                given.start,
                given.end,
                if self.is_opaque() {
                    ". An opaque layout has neither: ask for whole blocks"
                } else {
                    ""
                }
            ),
        ))
    }

    fn every_layer(&self) -> Range<u32> {
        0..self.layers.len() as u32
    }

    /// Bytes of one token in these layers, all if absent.
    fn token_bytes(&self, layers: Option<&Range<u32>>) -> usize {
        let layers = layers.cloned().unwrap_or(self.every_layer());
        let some = self.layers.get(layers.start as usize..layers.end as usize);
        let each = some.into_iter().flatten();
        each.map(|l| l.planes as usize * l.token_bytes as usize)
            .sum()
    }

    /// Bytes that a destination of `selection` has, of which `pieces` are copied.
    pub fn extent(&self, shape: Shape, selection: &Selection, pieces: &[Piece]) -> usize {
        match selection.tokens {
            Tokens::Only(_) => {
                self.token_bytes(selection.layers.as_ref()) * self.tokens(shape) as usize
            }
            _ => pieces.iter().map(|p| p.len).sum(),
        }
    }

    /// Bytes that `selection` takes from a block, of which its destination has `room`.
    pub fn taken(&self, selection: &Selection, room: usize) -> usize {
        match &selection.tokens {
            Tokens::Only(ranges) => {
                let tokens: usize = ranges.iter().map(|range| range.len()).sum();
                self.token_bytes(selection.layers.as_ref()) * tokens
            }
            _ => room,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gqa() -> Layout {
        let layer = Layer {
            planes: 2,
            token_bytes: 384,
        };
        Layout::new(vec![layer; 30], 16).unwrap()
    }

    #[test]
    fn whole_and_partial_blocks_fit_and_others_do_not() {
        let layout = gqa();
        let full = layout.shape(30 * 2 * 384 * 16).unwrap();
        assert_eq!((full.segments(), layout.tokens(full)), (30, 16));
        assert_eq!(layout.tokens(layout.shape(30 * 2 * 384 * 5).unwrap()), 5);
        for bytes in [0, 1, 30 * 2 * 384 * 17, 30 * 2 * 384 * 16 + 1] {
            let error = layout.shape(bytes).unwrap_err();
            assert_eq!(error.kind(), Kind::InvalidBlock);
        }
    }

    #[test]
    fn pieces_are_what_a_loop_over_tokens_takes() {
        let layout = Layout::new(
            vec![
                Layer {
                    planes: 2,
                    token_bytes: 3,
                },
                Layer {
                    planes: 1,
                    token_bytes: 5,
                },
                Layer {
                    planes: 2,
                    token_bytes: 7,
                },
            ],
            8,
        )
        .unwrap();
        for tokens in 1..=8u32 {
            let shape = layout.shape((6 + 5 + 14) * tokens as usize).unwrap();
            for l0 in 0..=3 {
                for l1 in l0..=3 {
                    for t0 in 0..=tokens {
                        for t1 in t0..=tokens {
                            let selection = Selection {
                                layers: Some(l0..l1),
                                tokens: Tokens::Range(t0..t1),
                            };
                            let got: Vec<usize> = layout
                                .pieces(shape, &selection)
                                .unwrap()
                                .iter()
                                .flat_map(|p| p.offset..p.offset + p.len)
                                .collect();
                            let mut want = Vec::new();
                            let mut at = 0;
                            for (i, layer) in layout.layers.iter().enumerate() {
                                for _ in 0..layer.planes {
                                    for t in 0..tokens {
                                        for _ in 0..layer.token_bytes {
                                            if (l0..l1).contains(&(i as u32))
                                                && (t0..t1).contains(&t)
                                            {
                                                want.push(at);
                                            }
                                            at += 1;
                                        }
                                    }
                                }
                            }
                            assert_eq!(got, want);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn tokens_apart_go_where_they_would_among_all() {
        let layout = Layout::new(
            vec![
                Layer {
                    planes: 2,
                    token_bytes: 3,
                },
                Layer {
                    planes: 1,
                    token_bytes: 5,
                },
            ],
            6,
        )
        .unwrap();
        let shape = layout.shape(11 * 6).unwrap();
        for layers in [0..2, 0..1, 1..2, 1..1] {
            let base = layers.start as usize * 36;
            let all = Selection {
                layers: Some(layers.clone()),
                tokens: Tokens::All,
            };
            let extent: usize = layout
                .pieces(shape, &all)
                .unwrap()
                .iter()
                .map(|p| p.len)
                .sum();
            for mask in 0..64u32 {
                let bits = (0..6).filter(|t| mask >> t & 1 == 1);
                let mut apart: Vec<Range<u32>> = Vec::new();
                for t in bits {
                    match apart.last_mut() {
                        Some(last) if last.end == t => last.end += 1,
                        _ => apart.push(t..t + 1),
                    }
                }
                let each: Vec<Range<u32>> = (0..6)
                    .filter(|t| mask >> t & 1 == 1)
                    .map(|t| t..t + 1)
                    .collect();
                let selection = |ranges| Selection {
                    layers: Some(layers.clone()),
                    tokens: Tokens::Only(ranges),
                };
                let some = selection(apart);
                let pieces = layout.pieces(shape, &some).unwrap();
                assert_eq!(pieces, layout.pieces(shape, &selection(each)).unwrap());
                assert_eq!(layout.extent(shape, &some, &pieces), extent);
                let copied = pieces.iter().map(|p| p.len).sum::<usize>();
                assert_eq!(layout.taken(&some, extent), copied);
                let one: usize = layout.token_bytes(Some(&layers));
                assert_eq!(copied, mask.count_ones() as usize * one);
                assert!(pieces.iter().all(|p| p.to + base == p.offset));
            }
        }
        let bad = [vec![2..3, 1..2], vec![0..2, 1..3], vec![0..2, 5..7]];
        for ranges in bad {
            let selection = Selection {
                layers: None,
                tokens: Tokens::Only(ranges),
            };
            let error = layout.pieces(shape, &selection).unwrap_err();
            assert_eq!(error.kind(), Kind::InvalidBlock);
        }
    }

    #[test]
    fn a_range_outside_the_block_is_refused() {
        let layout = gqa();
        let shape = layout.shape(30 * 2 * 384 * 5).unwrap();
        let bad = Selection {
            layers: None,
            tokens: Tokens::Range(0..6),
        };
        assert_eq!(
            layout.pieces(shape, &bad).unwrap_err().kind(),
            Kind::InvalidBlock
        );
        let opaque = Layout::opaque();
        let bad = Selection {
            layers: Some(0..1),
            tokens: Tokens::All,
        };
        assert!(opaque.pieces(opaque.shape(5000).unwrap(), &bad).is_err());
    }
}
