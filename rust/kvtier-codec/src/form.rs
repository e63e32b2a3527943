//! What a segment's bytes mean to a codec: an array `[plane][token][head][dim]` of a dtype.

use crate::image::MAX_PAYLOAD;

/// What an element is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Dtype {
    /// One byte of any kind: nothing lossy is done to it.
    Bytes = 0,
    /// bfloat16.
    Bf16 = 1,
    /// IEEE 754 half.
    Fp16 = 2,
    /// IEEE 754 single.
    Fp32 = 3,
}

impl Dtype {
    /// All there are, by number.
    pub const ALL: [Dtype; 4] = [Dtype::Bytes, Dtype::Bf16, Dtype::Fp16, Dtype::Fp32];

    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            Dtype::Bytes => 1,
            Dtype::Bf16 | Dtype::Fp16 => 2,
            Dtype::Fp32 => 4,
        }
    }

    /// `uint8`, `bf16`, `fp16` or `fp32`.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::Bytes => "uint8",
            Dtype::Bf16 => "bf16",
            Dtype::Fp16 => "fp16",
            Dtype::Fp32 => "fp32",
        }
    }
}

/// The array that a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    /// 2: keys, then values; 1: a latent, which is coded as values are.
    pub planes: u32,
    /// Tokens in a plane.
    pub tokens: u32,
    /// Heads of a token: the parts of it that get scales of their own.
    pub heads: u32,
    /// Elements of a head.
    pub dim: u32,
    /// What an element is.
    pub dtype: Dtype,
}

impl Form {
    /// Bytes without meaning, of which at most [`MAX_PAYLOAD`] make a segment.
    pub fn bytes(len: usize) -> Self {
        Form {
            planes: 1,
            tokens: 1,
            heads: 1,
            dim: len as u32,
            dtype: Dtype::Bytes,
        }
    }

    /// Is this an array of 1 to [`MAX_PAYLOAD`] bytes, in at most two planes?
    pub fn is_valid(&self) -> bool {
        let bytes = [self.tokens, self.heads, self.dim].iter().try_fold(
            u64::from(self.planes) * self.dtype.size() as u64,
            |n, &x| n.checked_mul(u64::from(x)),
        );
        (1..=2).contains(&self.planes) && bytes.is_some_and(|n| n > 0 && n <= MAX_PAYLOAD as u64)
    }

    /// Elements of a token in one plane.
    pub(crate) fn row(&self) -> usize {
        self.heads as usize * self.dim as usize
    }

    /// Bytes of one plane.
    pub fn plane_len(&self) -> usize {
        self.tokens as usize * self.row() * self.dtype.size()
    }

    /// Bytes of the array.
    pub fn raw_len(&self) -> usize {
        self.planes as usize * self.plane_len()
    }

    /// The same with another number of tokens.
    pub fn with_tokens(self, tokens: u32) -> Self {
        Form { tokens, ..self }
    }
}
