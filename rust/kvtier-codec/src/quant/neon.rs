//! NEON.

use std::arch::aarch64::*;
use std::mem::transmute;

use super::lanes::{Lanes, Pair, Portable, UNIT, WIDTH};
use crate::simd::Level;

/// NEON, which is part of the architecture; there is one only where a processor has it.
#[derive(Clone, Copy)]
pub(super) struct Neon(());

impl Neon {
    /// If it is this level's.
    pub(super) fn at(level: Level) -> Option<Self> {
        level.is_neon().then_some(Neon(()))
    }
}

type Floats = [float32x4_t; 4];
type Ints = [uint32x4_t; 4];

/// The same of each of four vectors.
macro_rules! four {
    ($f:ident; $a:expr) => {
        [$f($a[0]), $f($a[1]), $f($a[2]), $f($a[3])]
    };
    ($f:ident; $a:expr, $b:expr) => {
        [
            $f($a[0], $b[0]),
            $f($a[1], $b[1]),
            $f($a[2], $b[2]),
            $f($a[3], $b[3]),
        ]
    };
}

/// Functions of intrinsics.
macro_rules! lanes {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $out:ty { $($body:tt)* })*) => {
        $(
            #[inline(always)]
            fn $name(self $(, $arg: $type)*) -> $out {
                #[allow(unused_unsafe, reason = "newer releases of Rust declare them safe")]
                // SAFETY: `self` exists only where the processor has the instructions; they touch
                // no memory but arrays of the size that they move.
                unsafe { $($body)* }
            }
        )*
    };
}

impl Lanes for Neon {
    type F = Floats;
    type I = Ints;

    /// What such processors fetch by themselves.
    #[inline(always)]
    fn fetch(self, _: *const u8) {}

    lanes! {
        fn floats(from: &[f32; WIDTH]) -> Floats { transmute::<[f32; WIDTH], Floats>(*from) }
        fn to_floats(x: Floats) -> [f32; WIDTH] { transmute::<Floats, [f32; WIDTH]>(x) }
        fn to_ints(x: Ints) -> [u32; WIDTH] { transmute::<Ints, [u32; WIDTH]>(x) }
        fn splat(x: f32) -> Floats { [vdupq_n_f32(x); 4] }
        fn splat_bits(x: u32) -> Ints { [vdupq_n_u32(x); 4] }
        fn add(a: Floats, b: Floats) -> Floats { four!(vaddq_f32; a, b) }
        fn sub(a: Floats, b: Floats) -> Floats { four!(vsubq_f32; a, b) }
        fn mul(a: Floats, b: Floats) -> Floats { four!(vmulq_f32; a, b) }
        fn div(a: Floats, b: Floats) -> Floats { four!(vdivq_f32; a, b) }
        fn bits(x: Floats) -> Ints { four!(vreinterpretq_u32_f32; x) }
        fn number(x: Ints) -> Floats { four!(vreinterpretq_f32_u32; x) }
        fn float(x: Ints) -> Floats { four!(vcvtq_f32_u32; x) }
        fn plus(a: Ints, b: Ints) -> Ints { four!(vaddq_u32; a, b) }
        fn minus(a: Ints, b: Ints) -> Ints { four!(vsubq_u32; a, b) }
        fn and(a: Ints, b: Ints) -> Ints { four!(vandq_u32; a, b) }
        fn or(a: Ints, b: Ints) -> Ints { four!(vorrq_u32; a, b) }
        fn left(x: Ints, by: u32) -> Ints {
            let by = [vdupq_n_s32(by as i32); 4];
            four!(vshlq_u32; x, by)
        }
        fn right(x: Ints, by: u32) -> Ints {
            let by = [vdupq_n_s32(-(by as i32)); 4];
            four!(vshlq_u32; x, by)
        }
        fn min_signed(a: Ints, b: Ints) -> Ints {
            let (a, b) = (four!(vreinterpretq_s32_u32; a), four!(vreinterpretq_s32_u32; b));
            let least = four!(vminq_s32; a, b);
            four!(vreinterpretq_u32_s32; least)
        }
        fn max_signed(a: Ints, b: Ints) -> Ints {
            let (a, b) = (four!(vreinterpretq_s32_u32; a), four!(vreinterpretq_s32_u32; b));
            let most = four!(vmaxq_s32; a, b);
            four!(vreinterpretq_u32_s32; most)
        }
        fn min_unsigned(a: Ints, b: Ints) -> Ints { four!(vminq_u32; a, b) }
        fn max_unsigned(a: Ints, b: Ints) -> Ints { four!(vmaxq_u32; a, b) }
        fn if_below(a: Ints, b: Ints, then: Ints, other: Ints) -> Ints {
            let below = four!(vcltq_u32; a, b);
            [
                vbslq_u32(below[0], then[0], other[0]),
                vbslq_u32(below[1], then[1], other[1]),
                vbslq_u32(below[2], then[2], other[2]),
                vbslq_u32(below[3], then[3], other[3]),
            ]
        }
        fn few_bytes(from: &[u8; WIDTH]) -> Ints {
            let all = transmute::<[u8; WIDTH], uint8x16_t>(*from);
            let (low, high) = (vmovl_u8(vget_low_u8(all)), vmovl_high_u8(all));
            [
                vmovl_u16(vget_low_u16(low)),
                vmovl_high_u16(low),
                vmovl_u16(vget_low_u16(high)),
                vmovl_high_u16(high),
            ]
        }
        fn to_few_bytes(x: Ints) -> [u8; WIDTH] {
            let low = vmovn_high_u32(vmovn_u32(x[0]), x[1]);
            let high = vmovn_high_u32(vmovn_u32(x[2]), x[3]);
            transmute::<uint8x16_t, [u8; WIDTH]>(vmovn_high_u16(vmovn_u16(low), high))
        }
        fn uppers(from: &[u8; 2 * UNIT]) -> Pair<Ints> {
            let [a, b, c, d] = transmute::<[u8; 2 * UNIT], [uint16x8_t; 4]>(*from);
            [
                [
                    vshll_n_u16::<16>(vget_low_u16(a)),
                    vshll_high_n_u16::<16>(a),
                    vshll_n_u16::<16>(vget_low_u16(b)),
                    vshll_high_n_u16::<16>(b),
                ],
                [
                    vshll_n_u16::<16>(vget_low_u16(c)),
                    vshll_high_n_u16::<16>(c),
                    vshll_n_u16::<16>(vget_low_u16(d)),
                    vshll_high_n_u16::<16>(d),
                ],
            ]
        }
        fn to_uppers(x: Pair<Ints>) -> [u8; 2 * UNIT] {
            let [a, b] = x;
            transmute::<[uint16x8_t; 4], [u8; 2 * UNIT]>([
                vshrn_high_n_u32::<16>(vshrn_n_u32::<16>(a[0]), a[1]),
                vshrn_high_n_u32::<16>(vshrn_n_u32::<16>(a[2]), a[3]),
                vshrn_high_n_u32::<16>(vshrn_n_u32::<16>(b[0]), b[1]),
                vshrn_high_n_u32::<16>(vshrn_n_u32::<16>(b[2]), b[3]),
            ])
        }
        fn words(from: &[u8; 4 * UNIT]) -> Pair<Ints> {
            transmute::<[u8; 4 * UNIT], Pair<Ints>>(*from)
        }
        fn to_words(x: Pair<Ints>) -> [u8; 4 * UNIT] {
            transmute::<Pair<Ints>, [u8; 4 * UNIT]>(x)
        }
    }

    #[inline(always)]
    fn to_bytes(self, x: Pair<Ints>) -> [u8; UNIT] {
        let mut all = [0; UNIT];
        all[..WIDTH].copy_from_slice(&self.to_few_bytes(x[0]));
        all[WIDTH..].copy_from_slice(&self.to_few_bytes(x[1]));
        all
    }

    #[inline(always)]
    fn bytes(self, from: &[u8; UNIT]) -> Pair<Ints> {
        let low = from.first_chunk().expect("half a unit");
        let high = from.last_chunk().expect("half a unit");
        [self.few_bytes(low), self.few_bytes(high)]
    }

    #[inline(always)]
    fn halves(self, from: &[u8; 2 * UNIT]) -> Pair<Floats> {
        let [low, high] = Portable.halves(from);
        [self.floats(&low), self.floats(&high)]
    }

    #[inline(always)]
    fn to_halves(self, x: Pair<Floats>) -> [u8; 2 * UNIT] {
        Portable.to_halves([self.to_floats(x[0]), self.to_floats(x[1])])
    }
}
