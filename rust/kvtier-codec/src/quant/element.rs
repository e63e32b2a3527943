//! The dtypes that lossy codecs take, a unit of elements at once.

use super::kernel::{fixed, fixed_mut};
use super::lanes::{Lanes, Pair, UNIT};
use crate::float::{F16_MAX, from_f16};

/// A dtype that lossy codecs take.
///
/// A number's *raw* bits are its own, with zeros behind them to 32: sign and magnitude.
pub(super) trait Element {
    /// Bytes of an element.
    const SIZE: usize;
    /// The largest finite one.
    const MAX: f32;
    /// The number of some raw bits; of what is not finite, one above the largest, or NaN.
    fn value(raw: u32) -> f32;
    /// The raw bits of a unit.
    fn raw<L: Lanes>(lanes: L, src: &[u8]) -> Pair<L::I>;
    /// The values of a unit, where they are finite.
    fn values<L: Lanes>(lanes: L, src: &[u8]) -> Pair<L::F>;
    /// Writes the elements nearest to some values.
    fn put<L: Lanes>(lanes: L, x: Pair<L::F>, dst: &mut [u8]);
}

pub(super) struct Bf16;
pub(super) struct Fp16;
pub(super) struct Fp32;

impl Element for Bf16 {
    const SIZE: usize = 2;
    const MAX: f32 = f32::MAX;

    #[inline(always)]
    fn value(raw: u32) -> f32 {
        f32::from_bits(raw)
    }

    #[inline(always)]
    fn raw<L: Lanes>(lanes: L, src: &[u8]) -> Pair<L::I> {
        lanes.uppers(fixed(src))
    }

    #[inline(always)]
    fn values<L: Lanes>(lanes: L, src: &[u8]) -> Pair<L::F> {
        let raw = Self::raw(lanes, src);
        [lanes.number(raw[0]), lanes.number(raw[1])]
    }

    /// As [`crate::float::to_bf16`], one by one.
    #[inline(always)]
    fn put<L: Lanes>(lanes: L, x: Pair<L::F>, dst: &mut [u8]) {
        let rounded = [round(lanes, x[0]), round(lanes, x[1])];
        *fixed_mut::<{ 2 * UNIT }>(dst) = lanes.to_uppers(rounded);
    }
}

/// Bits whose upper halves are the nearest bfloat16, half to even.
#[inline(always)]
fn round<L: Lanes>(lanes: L, x: L::F) -> L::I {
    let bits = lanes.bits(x);
    let even = lanes.and(lanes.right(bits, 16), lanes.splat_bits(1));
    lanes.plus(bits, lanes.plus(even, lanes.splat_bits(0x7fff)))
}

impl Element for Fp16 {
    const SIZE: usize = 2;
    const MAX: f32 = F16_MAX;

    #[inline(always)]
    fn value(raw: u32) -> f32 {
        from_f16((raw >> 16) as u16)
    }

    #[inline(always)]
    fn raw<L: Lanes>(lanes: L, src: &[u8]) -> Pair<L::I> {
        lanes.uppers(fixed(src))
    }

    #[inline(always)]
    fn values<L: Lanes>(lanes: L, src: &[u8]) -> Pair<L::F> {
        lanes.halves(fixed(src))
    }

    /// As [`crate::float::to_f16`], one by one.
    #[inline(always)]
    fn put<L: Lanes>(lanes: L, x: Pair<L::F>, dst: &mut [u8]) {
        let near = [saturate(lanes, x[0]), saturate(lanes, x[1])];
        *fixed_mut::<{ 2 * UNIT }>(dst) = lanes.to_halves(near);
    }
}

/// Numbers that halves can hold.
#[inline(always)]
fn saturate<L: Lanes>(lanes: L, x: L::F) -> L::F {
    let bits = lanes.bits(x);
    let magnitude = lanes.and(bits, lanes.splat_bits(i32::MAX as u32));
    let magnitude = lanes.min_unsigned(magnitude, lanes.splat_bits(F16_MAX.to_bits()));
    let sign = lanes.and(bits, lanes.splat_bits(1 << 31));
    lanes.number(lanes.or(magnitude, sign))
}

impl Element for Fp32 {
    const SIZE: usize = 4;
    const MAX: f32 = f32::MAX;

    #[inline(always)]
    fn value(raw: u32) -> f32 {
        f32::from_bits(raw)
    }

    #[inline(always)]
    fn raw<L: Lanes>(lanes: L, src: &[u8]) -> Pair<L::I> {
        lanes.words(fixed(src))
    }

    #[inline(always)]
    fn values<L: Lanes>(lanes: L, src: &[u8]) -> Pair<L::F> {
        let raw = Self::raw(lanes, src);
        [lanes.number(raw[0]), lanes.number(raw[1])]
    }

    #[inline(always)]
    fn put<L: Lanes>(lanes: L, x: Pair<L::F>, dst: &mut [u8]) {
        *fixed_mut::<{ 4 * UNIT }>(dst) = lanes.to_words([lanes.bits(x[0]), lanes.bits(x[1])]);
    }
}
