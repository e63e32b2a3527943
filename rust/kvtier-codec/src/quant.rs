//! The lossy part of a codec: one plane, to few bits and back.
//!
//! A plane `[token][head][dim]` becomes *parts*, one after another. By token (values, latents):
//! low bytes of the words, high bytes of them, numbers; a word, 16 bits, belongs to a token and a
//! head, or with 4 bits to 32 of its channels. By channel (keys): low and high bytes of the
//! scales, low and high bytes of the minima, numbers; a scale belongs to a channel of a head in a
//! group of tokens. Numbers lie as the elements did; of 4-bit ones, those of up to 32 channels
//! share bytes, the first half of them in the low bits.
//!
//! All of it is branch-free loops over tiles of fixed width, compiled once for each instruction
//! set; [`Level`] says which one runs.

use std::ops::Range as Span;

use crate::form::Form;
use crate::simd::Level;

mod element;
mod kernel;
mod lanes;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod neon;
mod word;
#[cfg(target_arch = "x86_64")]
mod x86;

/// How a plane is coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// 8 bits, one word a token and head.
    Int8Token,
    /// 8 bits, a scale and a minimum for each channel of up to 16 tokens.
    Int8Channel,
    /// 4 bits, one word for 32 channels of a token.
    Int4Token,
    /// 4 bits, a scale and a minimum for each channel of up to 32 tokens.
    Int4Channel,
    /// `float8_e4m3fn`, one scale a token and head.
    E4m3,
    /// `float8_e5m2`, one scale a token and head.
    E5m2,
}

/// The largest finite half.
const LARGEST: u32 = 0x7bff;

impl Scheme {
    fn bits(self) -> usize {
        match self {
            Scheme::Int4Token | Scheme::Int4Channel => 4,
            _ => 8,
        }
    }

    /// Tokens of a group; `None`: by token.
    fn group(self, tokens: usize) -> Option<usize> {
        match self {
            Scheme::Int8Channel => Some(tokens.min(16)),
            Scheme::Int4Channel => Some(tokens.min(32)),
            _ => None,
        }
    }

    /// Channels that share a word.
    fn span(self, dim: usize) -> usize {
        if self == Scheme::Int4Token { 32 } else { dim }
    }

    /// The bytes of each part of a plane, in order.
    pub fn parts(self, form: &Form) -> Vec<usize> {
        let (tokens, heads, dim) = (form.tokens as usize, form.heads as usize, form.dim as usize);
        let numbers = tokens * heads * packed(dim, self.bits());
        match self.group(tokens) {
            Some(group) => {
                let scales = tokens.div_ceil(group) * heads * dim;
                vec![scales, scales, scales, scales, numbers]
            }
            None => {
                let words = tokens * heads * dim.div_ceil(self.span(dim));
                vec![words, words, numbers]
            }
        }
    }

    /// Codes one plane into its parts. False: it holds numbers that are not finite, or too large
    /// for a scale of 16 bits; `out` is rubbish then.
    ///
    /// # Panics
    /// If the lengths disagree, or the elements are plain bytes.
    pub fn encode(self, level: Level, form: &Form, src: &[u8], out: &mut [u8]) -> bool {
        assert_eq!(src.len(), form.plane_len());
        assert_eq!(out.len(), self.parts(form).iter().sum::<usize>());
        #[cfg(target_arch = "x86_64")]
        if let Some(lanes) = x86::Avx512::at(level) {
            return lanes.encode(self, form, src, out);
        } else if let Some(lanes) = x86::Avx2::at(level) {
            return lanes.encode(self, form, src, out);
        }
        #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
        if let Some(lanes) = neon::Neon::at(level) {
            return kernel::encode(lanes, self, form, src, out);
        }
        let _ = level;
        kernel::encode(lanes::Portable, self, form, src, out)
    }

    /// Decodes some tokens of a plane. Any bytes decode to something.
    ///
    /// # Panics
    /// If the lengths disagree, or the elements are plain bytes.
    pub fn decode(
        self,
        level: Level,
        form: &Form,
        parts: &[u8],
        tokens: Span<usize>,
        dst: &mut [u8],
    ) {
        assert!(tokens.start <= tokens.end && tokens.end <= form.tokens as usize);
        assert_eq!(parts.len(), self.parts(form).iter().sum::<usize>());
        let selected = form.with_tokens(tokens.len() as u32);
        assert_eq!(dst.len(), selected.plane_len());
        #[cfg(target_arch = "x86_64")]
        if let Some(lanes) = x86::Avx512::at(level) {
            return lanes.decode(self, form, parts, tokens, dst);
        } else if let Some(lanes) = x86::Avx2::at(level) {
            return lanes.decode(self, form, parts, tokens, dst);
        }
        #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
        if let Some(lanes) = neon::Neon::at(level) {
            return kernel::decode(lanes, self, form, parts, tokens, dst);
        }
        let _ = level;
        kernel::decode(lanes::Portable, self, form, parts, tokens, dst);
    }
}

/// Bytes of one head's numbers.
#[inline(always)]
fn packed(dim: usize, bits: usize) -> usize {
    if bits == 8 {
        dim
    } else {
        dim / 32 * 16 + (dim % 32).div_ceil(2)
    }
}
