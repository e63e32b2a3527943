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

use crate::element::{Bf16, Element, Fp16, Fp32, Range};
use crate::float::{E4m3, E5m2, F16_MAX, Fp8, ROUND, f16_down, from_f16, scale_up};
use crate::form::{Dtype, Form};
use crate::simd::{Level, versions};

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

/// The widest group of tokens.
const GROUP: usize = 32;

/// Words that are fitted at once.
const FITTED: usize = 32;

/// What no word is above.
const MOST: u32 = 0xffff;

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
        encode(level, self, form, src, out)
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
        decode(level, self, form, parts, tokens, dst);
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

versions! {
    /// [`Scheme::encode`] on one instruction set.
    fn encode(scheme: Scheme, form: &Form, src: &[u8], out: &mut [u8]) -> bool {
        match form.dtype {
            Dtype::Bf16 => encode_as::<Bf16>(scheme, form, src, out),
            Dtype::Fp16 => encode_as::<Fp16>(scheme, form, src, out),
            Dtype::Fp32 => encode_as::<Fp32>(scheme, form, src, out),
            Dtype::Bytes => unreachable!("plain bytes are never made lossy"),
        }
    }
}

versions! {
    /// [`Scheme::decode`] on one instruction set.
    fn decode(scheme: Scheme, form: &Form, parts: &[u8], tokens: Span<usize>, dst: &mut [u8]) -> () {
        match form.dtype {
            Dtype::Bf16 => decode_as::<Bf16>(scheme, form, parts, tokens, dst),
            Dtype::Fp16 => decode_as::<Fp16>(scheme, form, parts, tokens, dst),
            Dtype::Fp32 => decode_as::<Fp32>(scheme, form, parts, tokens, dst),
            Dtype::Bytes => unreachable!("plain bytes are never made lossy"),
        }
    }
}

#[inline(always)]
fn encode_as<E: Element>(scheme: Scheme, form: &Form, src: &[u8], out: &mut [u8]) -> bool {
    match scheme {
        Scheme::Int8Token => encode_tokens::<E, Affine<255>, 64>(scheme, form, src, out),
        Scheme::Int4Token => encode_tokens::<E, Affine<15>, 32>(scheme, form, src, out),
        Scheme::E4m3 => encode_tokens::<E, Scaled<E4m3>, 64>(scheme, form, src, out),
        Scheme::E5m2 => encode_tokens::<E, Scaled<E5m2>, 64>(scheme, form, src, out),
        Scheme::Int8Channel => encode_channels::<E, 8, 64>(scheme, form, src, out),
        Scheme::Int4Channel => encode_channels::<E, 4, 32>(scheme, form, src, out),
    }
}

#[inline(always)]
fn decode_as<E: Element>(
    scheme: Scheme,
    form: &Form,
    parts: &[u8],
    tokens: Span<usize>,
    dst: &mut [u8],
) {
    match scheme {
        Scheme::Int8Token => decode_tokens::<E, Affine<255>, 64>(scheme, form, parts, tokens, dst),
        Scheme::Int4Token => decode_tokens::<E, Affine<15>, 32>(scheme, form, parts, tokens, dst),
        Scheme::E4m3 => decode_tokens::<E, Scaled<E4m3>, 64>(scheme, form, parts, tokens, dst),
        Scheme::E5m2 => decode_tokens::<E, Scaled<E5m2>, 64>(scheme, form, parts, tokens, dst),
        Scheme::Int8Channel => decode_channels::<E, 8, 64>(scheme, form, parts, tokens, dst),
        Scheme::Int4Channel => decode_channels::<E, 4, 64>(scheme, form, parts, tokens, dst),
    }
}

/// What a word of 16 bits says about the numbers that it belongs to.
trait Word: Copy {
    /// Bits of a number.
    const BITS: usize;
    /// The word for numbers from `low` to `high`, between which zero lies; above [`MOST`] where they
    /// are too large.
    fn fit(low: f32, high: f32) -> u32;
    /// What a word says.
    fn read(word: u16) -> Self;
    /// Numbers to bits.
    fn quantise<const W: usize>(self, tile: &[f32; W]) -> [u8; W];
    /// Bits to numbers.
    fn restore<const W: usize>(self, bits: &[u8; W]) -> [f32; W];
}

/// Numbers 0 to `N`, of which one, or a place between two, means zero: x ≈ scale · (n − zero).
///
/// The scale is a half of 5 bits of mantissa, rounded up; the sign bit and the 5 bits below hold
/// where zero is, in steps of (N + 1) / 64. What is stored is n less the zero's whole part, modulo
/// N + 1, so that equal bits mean about equal numbers whatever the word: that compresses.
#[derive(Clone, Copy)]
struct Affine<const N: u8> {
    scale: f32,
    inverse: f32,
    zero: f32,
    shift: u8,
}

impl<const N: u8> Affine<N> {
    const STEP: f32 = (N as f32 + 1.0) / 64.0;
}

impl<const N: u8> Word for Affine<N> {
    const BITS: usize = if N == 255 { 8 } else { 4 };

    #[inline(always)]
    fn fit(low: f32, high: f32) -> u32 {
        let range = high - low;
        let n = f32::from(N);
        let ideal = if range > 0.0 { -low * n / range } else { 0.0 };
        // Towards the middle, so that the longer side costs little.
        let code = if ideal <= n / 2.0 {
            (ideal / Self::STEP).ceil()
        } else {
            (ideal / Self::STEP).floor()
        };
        // Never so far that there is no number left for the other side.
        let most = if high > 0.0 {
            (n / Self::STEP).ceil() - 1.0
        } else {
            63.0
        };
        let code = code.min(most);
        let zero = code * Self::STEP;
        let above = if high > 0.0 { high / (n - zero) } else { 0.0 };
        let below = if low < 0.0 && code > 0.0 {
            -low / zero
        } else {
            0.0
        };
        let scale = scale_up(above.max(below), 5);
        // An exact whole number below 64: its bits, without the checks of a cast.
        let code = (code + ROUND).to_bits() & 63;
        let word = scale | (code & 31) | (code >> 5) << 15;
        if scale <= LARGEST { word } else { u32::MAX }
    }

    #[inline(always)]
    fn read(word: u16) -> Self {
        let scale = from_f16(word & 0x7fe0);
        let code = (word & 31) | (word >> 15) << 5;
        Affine {
            scale,
            inverse: 1.0 / scale,
            zero: f32::from(code) * Self::STEP,
            shift: (f32::from(code) * Self::STEP) as u8,
        }
    }

    #[inline(always)]
    fn quantise<const W: usize>(self, tile: &[f32; W]) -> [u8; W] {
        let mut bits = [0; W];
        for (n, &x) in bits.iter_mut().zip(tile) {
            let number = (x * self.inverse + self.zero) + ROUND;
            *n = (number.to_bits() as u8).wrapping_sub(self.shift) & N;
        }
        bits
    }

    #[inline(always)]
    fn restore<const W: usize>(self, bits: &[u8; W]) -> [f32; W] {
        let mut tile = [0.0; W];
        for (x, &n) in tile.iter_mut().zip(bits) {
            let number = n.wrapping_add(self.shift) & N;
            *x = self.scale * (f32::from(number) - self.zero);
        }
        tile
    }
}

/// A small float of x / scale; the word is the scale, a half.
#[derive(Clone, Copy)]
struct Scaled<F> {
    scale: f32,
    inverse: f32,
    format: std::marker::PhantomData<F>,
}

impl<F: Fp8 + Copy> Word for Scaled<F> {
    const BITS: usize = 8;

    #[inline(always)]
    fn fit(low: f32, high: f32) -> u32 {
        let scale = scale_up(high.max(-low) / F::MAX, 0);
        if scale <= LARGEST { scale } else { u32::MAX }
    }

    #[inline(always)]
    fn read(word: u16) -> Self {
        let scale = from_f16(word);
        Scaled {
            scale,
            inverse: 1.0 / scale,
            format: std::marker::PhantomData,
        }
    }

    #[inline(always)]
    fn quantise<const W: usize>(self, tile: &[f32; W]) -> [u8; W] {
        let mut bits = [0; W];
        for (n, &x) in bits.iter_mut().zip(tile) {
            *n = F::encode(x * self.inverse);
        }
        bits
    }

    #[inline(always)]
    fn restore<const W: usize>(self, bits: &[u8; W]) -> [f32; W] {
        let mut tile = [0.0; W];
        for (x, &n) in tile.iter_mut().zip(bits) {
            *x = F::decode(n) * self.scale;
        }
        tile
    }
}

/// Channels of which 4-bit numbers share bytes.
const BLOCK: usize = 32;

/// A block's numbers, two a byte.
#[inline(always)]
fn pack(bits: [u8; BLOCK]) -> [u8; BLOCK / 2] {
    let mut packed = [0; BLOCK / 2];
    for j in 0..BLOCK / 2 {
        packed[j] = bits[j] | bits[j + BLOCK / 2] << 4;
    }
    packed
}

/// Writes a tile's first `count` numbers. A tile of 4-bit ones has whole blocks of room.
#[inline(always)]
fn store<const W: usize>(bits: &[u8; W], count: usize, width: usize, dst: &mut [u8]) {
    if width == 8 {
        if count == W {
            dst[..W].copy_from_slice(bits);
        } else {
            dst[..count].copy_from_slice(&bits[..count]);
        }
        return;
    }
    if count == W {
        let dst = &mut dst[..W / 2];
        for (dst, bits) in dst
            .as_chunks_mut::<{ BLOCK / 2 }>()
            .0
            .iter_mut()
            .zip(bits.as_chunks::<BLOCK>().0)
        {
            *dst = pack(*bits);
        }
        return;
    }
    for (at, n) in tiles::<BLOCK>(0..count) {
        let half = n.div_ceil(2);
        for j in 0..half {
            let high = if j + half < n { bits[at + j + half] } else { 0 };
            dst[at / 2 + j] = bits[at + j] | high << 4;
        }
    }
}

/// Reads a tile's first `count` numbers.
#[inline(always)]
fn load<const W: usize>(src: &[u8], count: usize, width: usize) -> [u8; W] {
    let mut bits = [0; W];
    if width == 8 {
        if count == W {
            bits.copy_from_slice(&src[..W]);
        } else {
            bits[..count].copy_from_slice(&src[..count]);
        }
        return bits;
    }
    if count == W {
        let src = &src[..W / 2];
        for (bits, src) in bits
            .as_chunks_mut::<BLOCK>()
            .0
            .iter_mut()
            .zip(src.as_chunks::<{ BLOCK / 2 }>().0)
        {
            for j in 0..BLOCK / 2 {
                bits[j] = src[j] & 15;
                bits[j + BLOCK / 2] = src[j] >> 4;
            }
        }
        return bits;
    }
    for (at, n) in tiles::<BLOCK>(0..count) {
        let half = n.div_ceil(2);
        for (j, &byte) in src[at / 2..][..half].iter().enumerate() {
            bits[at + j] = byte & 15;
            if j + half < n {
                bits[at + j + half] = byte >> 4;
            }
        }
    }
    bits
}

/// The start, and the elements, of each tile of `W` in `span`.
#[inline(always)]
fn tiles<const W: usize>(span: Span<usize>) -> impl Iterator<Item = (usize, usize)> {
    let end = span.end;
    span.step_by(W).map(move |at| (at, W.min(end - at)))
}

/// The groups of channels that have a word each, row after row.
struct Groups {
    row: usize,
    from: usize,
    dim: usize,
    span: usize,
}

impl Groups {
    #[inline(always)]
    fn new(dim: usize, span: usize) -> Self {
        Groups {
            row: 0,
            from: 0,
            dim,
            span,
        }
    }

    /// The next one: its row, and its channels.
    #[inline(always)]
    fn next(&mut self) -> (usize, Span<usize>) {
        let (row, from) = (self.row, self.from);
        self.from += self.span;
        if self.from >= self.dim {
            (self.row, self.from) = (row + 1, 0);
        }
        (row, from..self.dim.min(from + self.span))
    }
}

#[inline(always)]
fn encode_tokens<E: Element, Q: Word, const W: usize>(
    scheme: Scheme,
    form: &Form,
    src: &[u8],
    out: &mut [u8],
) -> bool {
    let dim = form.dim as usize;
    let (span, numbers) = (scheme.span(dim), packed(dim, Q::BITS));
    let rows = form.tokens as usize * form.heads as usize;
    let words = rows * dim.div_ceil(span);
    let (low, out) = out.split_at_mut(words);
    let (high, out) = out.split_at_mut(words);
    // Words are fitted many at a time, as a vector of their own.
    let (mut read, mut written) = (Groups::new(dim, span), Groups::new(dim, span));
    for first in (0..words).step_by(FITTED) {
        let count = FITTED.min(words - first);
        let mut ranges = [Range::ZERO; FITTED];
        for range in &mut ranges[..count] {
            let (row, group) = read.next();
            let src = &src[row * dim * E::SIZE..][..dim * E::SIZE];
            for (at, n) in tiles::<W>(group) {
                // A longer loop becomes vector code where a short one is unrolled, and zero is in
                // the range anyway.
                let mut wide = [0.0; 64];
                wide[..W].copy_from_slice(&E::load::<W>(&src[at * E::SIZE..][..n * E::SIZE]));
                range.extend(&wide);
            }
        }
        let (mut fitted, mut fits) = ([0u32; FITTED], true);
        for (word, range) in fitted.iter_mut().zip(&ranges) {
            let (least, most) = range.values();
            *word = Q::fit(least, most);
            fits &= (least >= -E::MAX) & (most <= E::MAX) & (*word <= MOST);
        }
        if !fits {
            return false;
        }
        for (i, &word) in fitted[..count].iter().enumerate() {
            [low[first + i], high[first + i]] = (word as u16).to_le_bytes();
            let word = Q::read(word as u16);
            let (row, group) = written.next();
            let src = &src[row * dim * E::SIZE..][..dim * E::SIZE];
            let out = &mut out[row * numbers..][..numbers];
            for (at, n) in tiles::<W>(group) {
                let tile = E::load::<W>(&src[at * E::SIZE..][..n * E::SIZE]);
                store(
                    &word.quantise(&tile),
                    n,
                    Q::BITS,
                    &mut out[at * Q::BITS / 8..],
                );
            }
        }
    }
    true
}

#[inline(always)]
fn decode_tokens<E: Element, Q: Word, const W: usize>(
    scheme: Scheme,
    form: &Form,
    parts: &[u8],
    tokens: Span<usize>,
    dst: &mut [u8],
) {
    let (heads, dim) = (form.heads as usize, form.dim as usize);
    let (span, numbers) = (scheme.span(dim), packed(dim, Q::BITS));
    let a_row = dim.div_ceil(span);
    let words = form.tokens as usize * heads * a_row;
    let (low, parts) = parts.split_at(words);
    let (high, parts) = parts.split_at(words);
    let first = tokens.start * heads;
    for row in first..tokens.end * heads {
        let parts = &parts[row * numbers..][..numbers];
        let dst = &mut dst[(row - first) * dim * E::SIZE..][..dim * E::SIZE];
        for (i, from) in (0..dim).step_by(span).enumerate() {
            let at = row * a_row + i;
            let word = Q::read(u16::from_le_bytes([low[at], high[at]]));
            for (at, n) in tiles::<W>(from..dim.min(from + span)) {
                let bits = load::<W>(&parts[at * Q::BITS / 8..], n, Q::BITS);
                let tile = word.restore(&bits);
                E::store(&tile, &mut dst[at * E::SIZE..][..n * E::SIZE]);
            }
        }
    }
}

#[inline(always)]
fn encode_channels<E: Element, const BITS: usize, const W: usize>(
    scheme: Scheme,
    form: &Form,
    src: &[u8],
    out: &mut [u8],
) -> bool {
    let top = ((1 << BITS) - 1) as u8;
    let (tokens, heads, dim) = (form.tokens as usize, form.heads as usize, form.dim as usize);
    let group = scheme.group(tokens).unwrap_or(1);
    let (row, numbers) = (heads * dim, packed(dim, BITS));
    let scales = tokens.div_ceil(group) * row;
    let (scale_low, out) = out.split_at_mut(scales);
    let (scale_high, out) = out.split_at_mut(scales);
    let (least_low, out) = out.split_at_mut(scales);
    let (least_high, out) = out.split_at_mut(scales);
    let mut values = [[0.0; W]; GROUP];
    for (g, first) in (0..tokens).step_by(group).enumerate() {
        let count = group.min(tokens - first);
        for head in 0..heads {
            for (at, n) in tiles::<W>(0..dim) {
                let mut range = [Range::NONE; W];
                for (t, tile) in values[..count].iter_mut().enumerate() {
                    let from = ((first + t) * row + head * dim + at) * E::SIZE;
                    *tile = E::load::<W>(&src[from..][..n * E::SIZE]);
                    for (range, &x) in range.iter_mut().zip(tile.iter()) {
                        range.extend(&[x]);
                    }
                }
                let (mut scale, mut least) = ([0u32; W], [0u32; W]);
                let mut fits = true;
                for i in 0..W {
                    let (low, high) = range[i].values();
                    least[i] = f16_down(low);
                    scale[i] = scale_up((high - from_f16(least[i] as u16)) / f32::from(top), 0);
                    fits &= (low.abs() <= F16_MAX) & (high <= E::MAX);
                    fits &= scale[i] <= LARGEST;
                }
                if !fits {
                    return false;
                }
                let (mut base, mut inverse) = ([0.0; W], [0.0; W]);
                let to = g * row + head * dim + at;
                for i in 0..W {
                    base[i] = from_f16(least[i] as u16);
                    inverse[i] = 1.0 / from_f16(scale[i] as u16);
                }
                let planes = [
                    (&mut *scale_low, &scale, 0),
                    (&mut *scale_high, &scale, 8),
                    (&mut *least_low, &least, 0),
                    (&mut *least_high, &least, 8),
                ];
                for (plane, from, shift) in planes {
                    for (byte, word) in plane[to..][..n].iter_mut().zip(from) {
                        *byte = (word >> shift) as u8;
                    }
                }
                for (t, tile) in values[..count].iter().enumerate() {
                    let mut coded = [0; W];
                    for i in 0..W {
                        let number = (tile[i] - base[i]) * inverse[i] + ROUND;
                        coded[i] = number.to_bits() as u8 & top;
                    }
                    let to = ((first + t) * heads + head) * numbers + at * BITS / 8;
                    store(&coded, n, BITS, &mut out[to..]);
                }
            }
        }
    }
    true
}

#[inline(always)]
fn decode_channels<E: Element, const BITS: usize, const W: usize>(
    scheme: Scheme,
    form: &Form,
    parts: &[u8],
    tokens: Span<usize>,
    dst: &mut [u8],
) {
    let (all, heads, dim) = (form.tokens as usize, form.heads as usize, form.dim as usize);
    let group = scheme.group(all).unwrap_or(1);
    let (row, numbers) = (heads * dim, packed(dim, BITS));
    let scales = all.div_ceil(group) * row;
    let (scale_low, parts) = parts.split_at(scales);
    let (scale_high, parts) = parts.split_at(scales);
    let (least_low, parts) = parts.split_at(scales);
    let (least_high, parts) = parts.split_at(scales);
    let mut start = tokens.start;
    while start < tokens.end {
        let g = start / group;
        let end = tokens.end.min((g + 1) * group);
        for head in 0..heads {
            for (at, n) in tiles::<W>(0..dim) {
                let from = g * row + head * dim + at;
                let scale = halves::<W>(&scale_low[from..][..n], &scale_high[from..][..n]);
                let base = halves::<W>(&least_low[from..][..n], &least_high[from..][..n]);
                for t in start..end {
                    let from = (t * heads + head) * numbers + at * BITS / 8;
                    let coded = load::<W>(&parts[from..], n, BITS);
                    let mut tile = [0.0; W];
                    for i in 0..W {
                        tile[i] = f32::from(coded[i]) * scale[i] + base[i];
                    }
                    let to = ((t - tokens.start) * row + head * dim + at) * E::SIZE;
                    E::store(&tile, &mut dst[to..][..n * E::SIZE]);
                }
            }
        }
        start = end;
    }
}

/// Halves, from their low and their high bytes.
#[inline(always)]
fn halves<const W: usize>(low: &[u8], high: &[u8]) -> [f32; W] {
    let (low, high) = (load::<W>(low, low.len(), 8), load::<W>(high, high.len(), 8));
    let mut values = [0.0; W];
    for i in 0..W {
        values[i] = from_f16(u16::from_le_bytes([low[i], high[i]]));
    }
    values
}
