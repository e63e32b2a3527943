//! The loops, for any instruction set: whole rows in the order in which they lie in memory.

use std::marker::PhantomData;
use std::ops::Range as Span;

use super::element::{Bf16, Element, Fp16, Fp32};
use super::lanes::{Lanes, Pair, UNIT, WIDTH};
use super::word::{Affine, One, Scaled, Word, half};
use super::{LARGEST, Scheme, packed};
use crate::float::{E4m3, E5m2, F16_MAX, ROUND, f16_down, from_f16, scale_up};
use crate::form::{Dtype, Form};

/// Words that are fitted at once.
const FITTED: usize = 2 * WIDTH;

/// What no word is above.
const MOST: u32 = 0xffff;

/// Channels whose scales are kept at hand while the tokens of a group go by.
const CHUNK: usize = 1024;

/// Units of them.
const UNITS: usize = CHUNK / UNIT;

/// [`Scheme::encode`] on one instruction set.
#[inline(always)]
pub(super) fn encode<L: Lanes>(
    lanes: L,
    scheme: Scheme,
    form: &Form,
    src: &[u8],
    out: &mut [u8],
) -> bool {
    match form.dtype {
        Dtype::Bf16 => encode_as::<L, Bf16>(lanes, scheme, form, src, out),
        Dtype::Fp16 => encode_as::<L, Fp16>(lanes, scheme, form, src, out),
        Dtype::Fp32 => encode_as::<L, Fp32>(lanes, scheme, form, src, out),
        Dtype::Bytes => unreachable!("plain bytes are never made lossy"),
    }
}

/// [`Scheme::decode`] on one instruction set.
#[inline(always)]
pub(super) fn decode<L: Lanes>(
    lanes: L,
    scheme: Scheme,
    form: &Form,
    parts: &[u8],
    tokens: Span<usize>,
    dst: &mut [u8],
) {
    match form.dtype {
        Dtype::Bf16 => decode_as::<L, Bf16>(lanes, scheme, form, parts, tokens, dst),
        Dtype::Fp16 => decode_as::<L, Fp16>(lanes, scheme, form, parts, tokens, dst),
        Dtype::Fp32 => decode_as::<L, Fp32>(lanes, scheme, form, parts, tokens, dst),
        Dtype::Bytes => unreachable!("plain bytes are never made lossy"),
    }
}

#[inline(always)]
fn encode_as<L: Lanes, E: Element>(
    lanes: L,
    scheme: Scheme,
    form: &Form,
    src: &[u8],
    out: &mut [u8],
) -> bool {
    match scheme {
        Scheme::Int8Token => encode_tokens::<L, E, Affine<255>, 8>(lanes, scheme, form, src, out),
        Scheme::Int4Token => encode_tokens::<L, E, Affine<15>, 4>(lanes, scheme, form, src, out),
        Scheme::E4m3 => encode_tokens::<L, E, Scaled<E4m3>, 8>(lanes, scheme, form, src, out),
        Scheme::E5m2 => encode_tokens::<L, E, Scaled<E5m2>, 8>(lanes, scheme, form, src, out),
        Scheme::Int8Channel => encode_channels::<L, E, 8>(lanes, scheme, form, src, out),
        Scheme::Int4Channel => encode_channels::<L, E, 4>(lanes, scheme, form, src, out),
    }
}

#[inline(always)]
fn decode_as<L: Lanes, E: Element>(
    lanes: L,
    scheme: Scheme,
    form: &Form,
    parts: &[u8],
    tokens: Span<usize>,
    dst: &mut [u8],
) {
    match scheme {
        Scheme::Int8Token => {
            decode_tokens::<L, E, Affine<255>, 8>(lanes, scheme, form, parts, tokens, dst)
        }
        Scheme::Int4Token => {
            decode_tokens::<L, E, Affine<15>, 4>(lanes, scheme, form, parts, tokens, dst)
        }
        Scheme::E4m3 => {
            decode_tokens::<L, E, Scaled<E4m3>, 8>(lanes, scheme, form, parts, tokens, dst)
        }
        Scheme::E5m2 => {
            decode_tokens::<L, E, Scaled<E5m2>, 8>(lanes, scheme, form, parts, tokens, dst)
        }
        Scheme::Int8Channel => decode_channels::<L, E, 8>(lanes, scheme, form, parts, tokens, dst),
        Scheme::Int4Channel => decode_channels::<L, E, 4>(lanes, scheme, form, parts, tokens, dst),
    }
}

/// Bytes as an array of this length, which they have.
#[inline(always)]
pub(super) fn fixed<const N: usize>(bytes: &[u8]) -> &[u8; N] {
    bytes.first_chunk().expect("a whole unit")
}

/// As [`fixed`], to write to.
#[inline(always)]
pub(super) fn fixed_mut<const N: usize>(bytes: &mut [u8]) -> &mut [u8; N] {
    bytes.first_chunk_mut().expect("a whole unit")
}

/// The least and the greatest of some numbers, sixteen side by side, from their raw bits.
#[derive(Clone, Copy)]
struct Ranges<L: Lanes> {
    /// As signed integers.
    least: Pair<L::I>,
    most: Pair<L::I>,
    /// As an unsigned one: the lowest number, of those whose sign is set.
    below: Pair<L::I>,
}

impl<L: Lanes> Ranges<L> {
    /// Of nothing.
    #[inline(always)]
    fn none(lanes: L) -> Self {
        Ranges {
            least: [lanes.splat_bits(i32::MAX as u32); 2],
            most: [lanes.splat_bits(i32::MIN as u32); 2],
            below: [lanes.splat_bits(0); 2],
        }
    }

    #[inline(always)]
    fn extend(&mut self, lanes: L, raw: Pair<L::I>) {
        for (i, raw) in raw.into_iter().enumerate() {
            self.least[i] = lanes.min_signed(self.least[i], raw);
            self.most[i] = lanes.max_signed(self.most[i], raw);
            self.below[i] = lanes.max_unsigned(self.below[i], raw);
        }
    }

    /// The two numbers of each place.
    #[inline(always)]
    fn values<E: Element>(&self, lanes: L) -> ([f32; UNIT], [f32; UNIT]) {
        let (mut low, mut high) = ([0.0; UNIT], [0.0; UNIT]);
        for half in 0..2 {
            let least = lanes.to_ints(self.least[half]);
            let most = lanes.to_ints(self.most[half]);
            let below = lanes.to_ints(self.below[half]);
            for i in 0..WIDTH {
                let negative = |raw: u32| raw >> 31 == 1;
                let lowest = if negative(below[i]) {
                    below[i]
                } else {
                    least[i]
                };
                let highest = if negative(most[i]) { least[i] } else { most[i] };
                low[half * WIDTH + i] = E::value(lowest);
                high[half * WIDTH + i] = E::value(highest);
            }
        }
        (low, high)
    }
}

/// A unit that is not whole, with zeros behind it.
#[inline(always)]
fn padded<E: Element>(rest: &[u8]) -> [u8; 4 * UNIT] {
    let mut whole = [0; 4 * UNIT];
    whole[..rest.len()].copy_from_slice(rest);
    whole
}

/// The raw bits of the least and the greatest of some numbers and zero.
#[inline(always)]
fn range_of<L: Lanes, E: Element>(lanes: L, src: &[u8]) -> (u32, u32) {
    let mut above = [lanes.splat_bits(0); 2];
    let mut below = above;
    let units = src.chunks_exact(UNIT * E::SIZE);
    let rest = units.remainder();
    for unit in units {
        let raw = E::raw(lanes, unit);
        above = [
            lanes.max_signed(above[0], raw[0]),
            lanes.max_signed(above[1], raw[1]),
        ];
        below = [
            lanes.max_unsigned(below[0], raw[0]),
            lanes.max_unsigned(below[1], raw[1]),
        ];
    }
    if !rest.is_empty() {
        let raw = E::raw(lanes, &padded::<E>(rest)[..UNIT * E::SIZE]);
        above = [
            lanes.max_signed(above[0], raw[0]),
            lanes.max_signed(above[1], raw[1]),
        ];
        below = [
            lanes.max_unsigned(below[0], raw[0]),
            lanes.max_unsigned(below[1], raw[1]),
        ];
    }
    let above = lanes.to_ints(lanes.max_signed(above[0], above[1]));
    let below = lanes.to_ints(lanes.max_unsigned(below[0], below[1]));
    let most = above.into_iter().fold(0, u32::max);
    let least = below.into_iter().fold(0, u32::max);
    (if least >> 31 == 1 { least } else { 0 }, most)
}

/// Numbers to bits, for one row.
trait Coder<L: Lanes> {
    /// Those of unit `u`.
    fn code(&self, lanes: L, u: usize, x: Pair<L::F>) -> Pair<L::I>;
}

/// Bits to numbers, for one row.
trait Decoder<L: Lanes> {
    /// Those of unit `u`.
    fn value(&self, lanes: L, u: usize, n: Pair<L::I>) -> Pair<L::F>;
}

/// Reads a unit of numbers, or the `count` that are left, zeros behind them.
#[inline(always)]
fn load<L: Lanes, const BITS: usize>(lanes: L, src: &[u8], count: usize) -> Pair<L::I> {
    if BITS == 8 {
        if count == UNIT {
            return lanes.bytes(fixed(src));
        }
        let mut padded = [0; UNIT];
        padded[..count].copy_from_slice(&src[..count]);
        return lanes.bytes(&padded);
    }
    if count == UNIT {
        let both = lanes.few_bytes(fixed(src));
        let low = lanes.splat_bits(15);
        return [lanes.and(both, low), lanes.right(both, 4)];
    }
    let half = count.div_ceil(2);
    let mut padded = [0; UNIT];
    for (j, &byte) in src[..half].iter().enumerate() {
        padded[j] = byte & 15;
        if j + half < count {
            padded[j + half] = byte >> 4;
        }
    }
    lanes.bytes(&padded)
}

/// Writes a unit of numbers, or the first `count` of it.
#[inline(always)]
fn store<L: Lanes, const BITS: usize>(lanes: L, x: Pair<L::I>, count: usize, dst: &mut [u8]) {
    if BITS == 8 {
        if count == UNIT {
            *fixed_mut(dst) = lanes.to_bytes(x);
        } else {
            dst[..count].copy_from_slice(&lanes.to_bytes(x)[..count]);
        }
        return;
    }
    if count == UNIT {
        let both = lanes.or(x[0], lanes.left(x[1], 4));
        *fixed_mut(dst) = lanes.to_few_bytes(both);
        return;
    }
    let (bits, half) = (lanes.to_bytes(x), count.div_ceil(2));
    for j in 0..half {
        let high = if j + half < count { bits[j + half] } else { 0 };
        dst[j] = bits[j] | high << 4;
    }
}

/// Codes a row of elements.
#[inline(always)]
fn encode_row<L: Lanes, E: Element, const BITS: usize>(
    lanes: L,
    src: &[u8],
    out: &mut [u8],
    coder: &impl Coder<L>,
) {
    let (elements, bytes) = (UNIT * E::SIZE, UNIT * BITS / 8);
    let from = src.chunks_exact(elements);
    let rest = from.remainder();
    let whole = src.len() / elements;
    let (out, last) = out.split_at_mut(whole * bytes);
    for (u, (from, to)) in from.zip(out.chunks_exact_mut(bytes)).enumerate() {
        let coded = coder.code(lanes, u, E::values(lanes, from));
        store::<L, BITS>(lanes, coded, UNIT, to);
    }
    if !rest.is_empty() {
        let from = padded::<E>(rest);
        let coded = coder.code(lanes, whole, E::values(lanes, &from[..elements]));
        store::<L, BITS>(lanes, coded, rest.len() / E::SIZE, last);
    }
}

/// Decodes a row of numbers.
#[inline(always)]
fn decode_row<L: Lanes, E: Element, const BITS: usize>(
    lanes: L,
    coded: &[u8],
    dst: &mut [u8],
    decoder: &impl Decoder<L>,
) {
    let (elements, bytes) = (UNIT * E::SIZE, UNIT * BITS / 8);
    let whole = dst.len() / elements;
    let mut to = dst.chunks_exact_mut(elements);
    for (u, (to, from)) in to.by_ref().zip(coded.chunks_exact(bytes)).enumerate() {
        lanes.fetch(to.as_ptr());
        let from = load::<L, BITS>(lanes, from, UNIT);
        E::put(lanes, decoder.value(lanes, u, from), to);
    }
    let rest = to.into_remainder();
    if !rest.is_empty() {
        let mut last = [0; 4 * UNIT];
        let from = load::<L, BITS>(lanes, &coded[whole * bytes..], rest.len() / E::SIZE);
        E::put(
            lanes,
            decoder.value(lanes, whole, from),
            &mut last[..elements],
        );
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// Of numbers that share a word, and the inverse of its scale.
struct ByWord<L: Lanes, Q>(One<L>, L::F, PhantomData<Q>);

impl<L: Lanes, Q: Word> Coder<L> for ByWord<L, Q> {
    #[inline(always)]
    fn code(&self, lanes: L, _: usize, x: Pair<L::F>) -> Pair<L::I> {
        [
            Q::quantise(lanes, &self.0, lanes.mul(x[0], self.1)),
            Q::quantise(lanes, &self.0, lanes.mul(x[1], self.1)),
        ]
    }
}

impl<L: Lanes, Q: Word> Decoder<L> for ByWord<L, Q> {
    #[inline(always)]
    fn value(&self, lanes: L, _: usize, n: Pair<L::I>) -> Pair<L::F> {
        [
            Q::restore(lanes, &self.0, n[0]),
            Q::restore(lanes, &self.0, n[1]),
        ]
    }
}

/// Of numbers in channels, each with a scale, or its inverse, and a least number.
struct ByChannel<L: Lanes, const BITS: usize> {
    scale: [Pair<L::F>; UNITS],
    base: [Pair<L::F>; UNITS],
}

impl<L: Lanes, const BITS: usize> ByChannel<L, BITS> {
    #[inline(always)]
    fn new(lanes: L) -> Self {
        ByChannel {
            scale: [[lanes.splat(0.0); 2]; UNITS],
            base: [[lanes.splat(0.0); 2]; UNITS],
        }
    }
}

impl<L: Lanes, const BITS: usize> Coder<L> for ByChannel<L, BITS> {
    #[inline(always)]
    fn code(&self, lanes: L, u: usize, x: Pair<L::F>) -> Pair<L::I> {
        let (round, top) = (lanes.splat(ROUND), lanes.splat_bits((1 << BITS) - 1));
        let (inverse, base) = (&self.scale[u % UNITS], &self.base[u % UNITS]);
        let mut coded = [top; 2];
        for i in 0..2 {
            let above = lanes.mul(lanes.sub(x[i], base[i]), inverse[i]);
            coded[i] = lanes.and(lanes.bits(lanes.add(above, round)), top);
        }
        coded
    }
}

impl<L: Lanes, const BITS: usize> Decoder<L> for ByChannel<L, BITS> {
    #[inline(always)]
    fn value(&self, lanes: L, u: usize, n: Pair<L::I>) -> Pair<L::F> {
        let (scale, base) = (&self.scale[u % UNITS], &self.base[u % UNITS]);
        [
            lanes.add(lanes.mul(lanes.float(n[0]), scale[0]), base[0]),
            lanes.add(lanes.mul(lanes.float(n[1]), scale[1]), base[1]),
        ]
    }
}

#[inline(always)]
fn encode_tokens<L: Lanes, E: Element, Q: Word, const BITS: usize>(
    lanes: L,
    scheme: Scheme,
    form: &Form,
    src: &[u8],
    out: &mut [u8],
) -> bool {
    let dim = form.dim as usize;
    let (span, numbers) = (scheme.span(dim), packed(dim, BITS));
    let words = form.tokens as usize * form.heads as usize * dim.div_ceil(span);
    let (low, out) = out.split_at_mut(words);
    let (high, out) = out.split_at_mut(words);
    let mut read = pieces(src, dim * E::SIZE, span * E::SIZE);
    let mut again = pieces(src, dim * E::SIZE, span * E::SIZE);
    let mut written = pieces_mut(out, numbers, span * BITS / 8);
    let planes = low.chunks_mut(FITTED).zip(high.chunks_mut(FITTED));
    for (low, high) in planes {
        let (mut least, mut most) = ([0; FITTED], [0; FITTED]);
        for ((least, most), src) in least
            .iter_mut()
            .zip(&mut most)
            .take(low.len())
            .zip(&mut read)
        {
            (*least, *most) = range_of::<L, E>(lanes, src);
        }
        let (mut fitted, mut fits) = ([0u32; FITTED], true);
        for ((word, &least), &most) in fitted.iter_mut().zip(&least).zip(&most) {
            let (least, most) = (E::value(least), E::value(most));
            *word = Q::fit(least, most);
            fits &= (least >= -E::MAX) & (most <= E::MAX) & (*word <= MOST);
        }
        if !fits {
            return false;
        }
        for (i, (low, high)) in low.iter_mut().zip(&mut *high).enumerate() {
            [*low, *high] = (fitted[i] as u16).to_le_bytes();
        }
        for (low, high) in low.chunks(WIDTH).zip(high.chunks(WIDTH)) {
            let said = Q::read(lanes, words_of(lanes, low, high));
            let inverse = lanes.to_floats(lanes.div(lanes.splat(1.0), lanes.floats(&said.scale)));
            for (i, (src, out)) in (&mut again).zip(&mut written).take(low.len()).enumerate() {
                let inverse = lanes.splat(inverse[i]);
                let word = ByWord::<L, Q>(said.one(lanes, i), inverse, PhantomData);
                encode_row::<L, E, BITS>(lanes, src, out, &word);
            }
        }
    }
    true
}

/// The parts of some rows, row after row.
#[inline(always)]
fn pieces(all: &[u8], row: usize, part: usize) -> impl Iterator<Item = &[u8]> {
    all.chunks_exact(row).flat_map(move |row| row.chunks(part))
}

/// As [`pieces`], to write to.
#[inline(always)]
fn pieces_mut(all: &mut [u8], row: usize, part: usize) -> impl Iterator<Item = &mut [u8]> {
    (all.chunks_exact_mut(row)).flat_map(move |row| row.chunks_mut(part))
}

/// Up to sixteen bytes, zeros behind them.
#[inline(always)]
fn few_bytes<L: Lanes>(lanes: L, from: &[u8]) -> L::I {
    if from.len() == WIDTH {
        return lanes.few_bytes(fixed(from));
    }
    let mut padded = [0; WIDTH];
    padded[..from.len()].copy_from_slice(from);
    lanes.few_bytes(&padded)
}

/// Up to sixteen words, from their low and their high bytes.
#[inline(always)]
fn words_of<L: Lanes>(lanes: L, low: &[u8], high: &[u8]) -> L::I {
    let (low, high) = (few_bytes(lanes, low), few_bytes(lanes, high));
    lanes.or(low, lanes.left(high, 8))
}

/// Up to 32 halves, from their low and their high bytes.
#[inline(always)]
fn halves_of<L: Lanes>(lanes: L, low: &[u8], high: &[u8]) -> Pair<L::F> {
    let low = load::<L, 8>(lanes, low, low.len());
    let high = load::<L, 8>(lanes, high, high.len());
    [
        half(lanes, lanes.or(low[0], lanes.left(high[0], 8))),
        half(lanes, lanes.or(low[1], lanes.left(high[1], 8))),
    ]
}

#[inline(always)]
fn decode_tokens<L: Lanes, E: Element, Q: Word, const BITS: usize>(
    lanes: L,
    scheme: Scheme,
    form: &Form,
    parts: &[u8],
    tokens: Span<usize>,
    dst: &mut [u8],
) {
    let (heads, dim) = (form.heads as usize, form.dim as usize);
    let (span, numbers) = (scheme.span(dim), packed(dim, BITS));
    let a_token = heads * dim.div_ceil(span);
    let words = form.tokens as usize * a_token;
    let (low, parts) = parts.split_at(words);
    let (high, parts) = parts.split_at(words);
    let wanted = tokens.start * a_token..tokens.end * a_token;
    let parts = &parts[tokens.start * heads * numbers..tokens.end * heads * numbers];
    let mut coded = pieces(parts, numbers, span * BITS / 8);
    let mut to = pieces_mut(dst, dim * E::SIZE, span * E::SIZE);
    let low = low[wanted.clone()].chunks(WIDTH);
    for (low, high) in low.zip(high[wanted].chunks(WIDTH)) {
        let said = Q::read(lanes, words_of(lanes, low, high));
        for (i, (coded, to)) in (&mut coded).zip(&mut to).take(low.len()).enumerate() {
            let one = said.one(lanes, i);
            let word = ByWord::<L, Q>(one, lanes.splat(0.0), PhantomData);
            decode_row::<L, E, BITS>(lanes, coded, to, &word);
        }
    }
}

/// Rows and their length, of channels that lie side by side: where no head ends in a unit of
/// numbers, a token is one row.
#[inline(always)]
fn rows(form: &Form, bits: usize) -> (usize, usize) {
    let (heads, dim) = (form.heads as usize, form.dim as usize);
    if bits == 8 || dim.is_multiple_of(UNIT) {
        return (1, heads * dim);
    }
    (heads, dim)
}

#[inline(always)]
fn encode_channels<L: Lanes, E: Element, const BITS: usize>(
    lanes: L,
    scheme: Scheme,
    form: &Form,
    src: &[u8],
    out: &mut [u8],
) -> bool {
    let top = (1u32 << BITS) - 1;
    let tokens = form.tokens as usize;
    let (heads, dim) = rows(form, BITS);
    let group = scheme.group(tokens).unwrap_or(1);
    let (row, numbers) = (heads * dim, packed(dim, BITS));
    let scales = tokens.div_ceil(group) * row;
    let (scale_low, out) = out.split_at_mut(scales);
    let (scale_high, out) = out.split_at_mut(scales);
    let (least_low, out) = out.split_at_mut(scales);
    let (least_high, out) = out.split_at_mut(scales);
    let mut channels = ByChannel::<L, BITS>::new(lanes);
    for (g, src) in src.chunks(group * row * E::SIZE).enumerate() {
        for head in 0..heads {
            for at in (0..dim).step_by(CHUNK) {
                let (n, at) = (CHUNK.min(dim - at), head * dim + at);
                let chunk = at * E::SIZE..(at + n) * E::SIZE;
                let token = src.chunks_exact(row * E::SIZE);
                let mut ranges = [Ranges::none(lanes); UNITS];
                for src in token.clone() {
                    let src = &src[chunk.clone()];
                    let units = src.chunks_exact(UNIT * E::SIZE);
                    let rest = units.remainder();
                    for (unit, range) in units.zip(&mut ranges) {
                        range.extend(lanes, E::raw(lanes, unit));
                    }
                    if !rest.is_empty() {
                        let unit = &padded::<E>(rest)[..UNIT * E::SIZE];
                        ranges[n / UNIT].extend(lanes, E::raw(lanes, unit));
                    }
                }
                for (u, range) in ranges[..n.div_ceil(UNIT)].iter().enumerate() {
                    let (low, high) = range.values::<E>(lanes);
                    let (mut scale, mut least) = ([0u32; UNIT], [0u32; UNIT]);
                    let mut fits = true;
                    for i in 0..UNIT {
                        least[i] = f16_down(low[i]);
                        // A sum of zeros that are negative is one too, until zero is added.
                        let above = (high[i] - from_f16(least[i] as u16)) + 0.0;
                        scale[i] = scale_up(above / top as f32, 0);
                        fits &= (low[i].abs() <= F16_MAX) & (high[i] <= E::MAX);
                        fits &= scale[i] <= LARGEST;
                    }
                    if !fits {
                        return false;
                    }
                    let (mut base, mut inverse) = ([0.0; UNIT], [0.0; UNIT]);
                    for i in 0..UNIT {
                        base[i] = from_f16(least[i] as u16);
                        inverse[i] = 1.0 / from_f16(scale[i] as u16);
                    }
                    channels.base[u] = [lanes.floats(low_of(&base)), lanes.floats(high_of(&base))];
                    channels.scale[u] = [
                        lanes.floats(low_of(&inverse)),
                        lanes.floats(high_of(&inverse)),
                    ];
                    let to = g * row + at + u * UNIT;
                    let n = UNIT.min(n - u * UNIT);
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
                }
                let begin = head * numbers + (at - head * dim) * BITS / 8;
                let out = out[g * group * heads * numbers..].chunks_exact_mut(heads * numbers);
                for (src, out) in token.zip(out) {
                    let out = &mut out[begin..][..packed(n, BITS)];
                    encode_row::<L, E, BITS>(lanes, &src[chunk.clone()], out, &channels);
                }
            }
        }
    }
    true
}

#[inline(always)]
fn low_of(unit: &[f32; UNIT]) -> &[f32; WIDTH] {
    unit.first_chunk().expect("half a unit")
}

#[inline(always)]
fn high_of(unit: &[f32; UNIT]) -> &[f32; WIDTH] {
    unit.last_chunk().expect("half a unit")
}

#[inline(always)]
fn decode_channels<L: Lanes, E: Element, const BITS: usize>(
    lanes: L,
    scheme: Scheme,
    form: &Form,
    parts: &[u8],
    tokens: Span<usize>,
    dst: &mut [u8],
) {
    let all = form.tokens as usize;
    let (heads, dim) = rows(form, BITS);
    let group = scheme.group(all).unwrap_or(1);
    let (row, numbers) = (heads * dim, packed(dim, BITS));
    let scales = all.div_ceil(group) * row;
    let (scale_low, parts) = parts.split_at(scales);
    let (scale_high, parts) = parts.split_at(scales);
    let (least_low, parts) = parts.split_at(scales);
    let (least_high, parts) = parts.split_at(scales);
    let mut channels = ByChannel::<L, BITS>::new(lanes);
    let mut start = tokens.start;
    while start < tokens.end {
        let g = start / group;
        let end = tokens.end.min((g + 1) * group);
        for head in 0..heads {
            for at in (0..dim).step_by(CHUNK) {
                let n = CHUNK.min(dim - at);
                let begin = head * numbers + at * BITS / 8;
                let at = head * dim + at;
                for u in 0..n.div_ceil(UNIT) {
                    let from = g * row + at + u * UNIT;
                    let n = UNIT.min(n - u * UNIT);
                    let of = from..from + n;
                    channels.scale[u] =
                        halves_of(lanes, &scale_low[of.clone()], &scale_high[of.clone()]);
                    channels.base[u] = halves_of(lanes, &least_low[of.clone()], &least_high[of]);
                }
                let coded = parts[start * heads * numbers..].chunks_exact(heads * numbers);
                let to =
                    dst[(start - tokens.start) * row * E::SIZE..].chunks_exact_mut(row * E::SIZE);
                for (coded, to) in coded.zip(to).take(end - start) {
                    let coded = &coded[begin..][..packed(n, BITS)];
                    let to = &mut to[at * E::SIZE..][..n * E::SIZE];
                    decode_row::<L, E, BITS>(lanes, coded, to, &channels);
                }
            }
        }
        start = end;
    }
}
