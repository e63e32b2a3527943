//! What a word of 16 bits says about the numbers that it belongs to.

use super::LARGEST;
use super::lanes::{Lanes, WIDTH};
use crate::float::{E4m3, E5m2, Fp8, ROUND, scale_up};

/// Numbers to bits and back, given a word.
pub(super) trait Word {
    /// The word for numbers from `low` to `high`, between which zero lies; above 16 bits where
    /// they are too large.
    fn fit(low: f32, high: f32) -> u32;
    /// What some words say.
    fn read<L: Lanes>(lanes: L, words: L::I) -> Words;
    /// Numbers, over the scale, to bits.
    fn quantise<L: Lanes>(lanes: L, word: &One<L>, x: L::F) -> L::I;
    /// Bits to numbers.
    fn restore<L: Lanes>(lanes: L, word: &One<L>, n: L::I) -> L::F;
}

/// What sixteen words say.
pub(super) struct Words {
    pub(super) scale: [f32; WIDTH],
    zero: [f32; WIDTH],
    shift: [u32; WIDTH],
}

/// What one of them says, in all lanes.
pub(super) struct One<L: Lanes> {
    scale: L::F,
    zero: L::F,
    shift: L::I,
}

impl Words {
    #[inline(always)]
    pub(super) fn one<L: Lanes>(&self, lanes: L, i: usize) -> One<L> {
        One {
            scale: lanes.splat(self.scale[i]),
            zero: lanes.splat(self.zero[i]),
            shift: lanes.splat_bits(self.shift[i]),
        }
    }
}

/// Numbers 0 to `N`, of which one, or a place between two, means zero: x ≈ scale · (n − zero).
///
/// The scale is a half of 5 bits of mantissa, rounded up; the sign bit and the 5 bits below hold
/// where zero is, in steps of (N + 1) / 64. What is stored is n less the zero's whole part, modulo
/// N + 1, so that equal bits mean about equal numbers whatever the word: that compresses.
pub(super) struct Affine<const N: u8>;

impl<const N: u8> Affine<N> {
    const STEP: f32 = (N as f32 + 1.0) / 64.0;
}

impl<const N: u8> Word for Affine<N> {
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
    fn read<L: Lanes>(lanes: L, words: L::I) -> Words {
        let low = lanes.and(words, lanes.splat_bits(31));
        let code = lanes.or(low, lanes.left(lanes.right(words, 15), 5));
        let zero = lanes.mul(lanes.float(code), lanes.splat(Self::STEP));
        let shift = if N == 255 {
            lanes.left(code, 2)
        } else {
            lanes.right(code, 2)
        };
        let scale = half(lanes, lanes.and(words, lanes.splat_bits(0x7fe0)));
        Words {
            scale: lanes.to_floats(scale),
            zero: lanes.to_floats(zero),
            shift: lanes.to_ints(shift),
        }
    }

    #[inline(always)]
    fn quantise<L: Lanes>(lanes: L, word: &One<L>, x: L::F) -> L::I {
        let number = lanes.add(lanes.add(x, word.zero), lanes.splat(ROUND));
        let moved = lanes.minus(lanes.bits(number), word.shift);
        lanes.and(moved, lanes.splat_bits(u32::from(N)))
    }

    #[inline(always)]
    fn restore<L: Lanes>(lanes: L, word: &One<L>, n: L::I) -> L::F {
        let number = lanes.and(lanes.plus(n, word.shift), lanes.splat_bits(u32::from(N)));
        lanes.mul(word.scale, lanes.sub(lanes.float(number), word.zero))
    }
}

/// A small float of x / scale; the word is the scale, a half.
pub(super) struct Scaled<F>(std::marker::PhantomData<F>);

impl<F: Small> Word for Scaled<F> {
    #[inline(always)]
    fn fit(low: f32, high: f32) -> u32 {
        let scale = scale_up(high.max(-low) / F::MAX, 0);
        if scale <= LARGEST { scale } else { u32::MAX }
    }

    #[inline(always)]
    fn read<L: Lanes>(lanes: L, words: L::I) -> Words {
        Words {
            scale: lanes.to_floats(half(lanes, words)),
            zero: [0.0; WIDTH],
            shift: [0; WIDTH],
        }
    }

    #[inline(always)]
    fn quantise<L: Lanes>(lanes: L, _: &One<L>, x: L::F) -> L::I {
        F::narrow(lanes, x)
    }

    #[inline(always)]
    fn restore<L: Lanes>(lanes: L, word: &One<L>, n: L::I) -> L::F {
        lanes.mul(F::widen(lanes, n), word.scale)
    }
}

/// A format of 8 bits, in vectors: the same as [`Fp8`] one by one.
pub(super) trait Small: Fp8 {
    fn narrow<L: Lanes>(lanes: L, x: L::F) -> L::I;
    fn widen<L: Lanes>(lanes: L, n: L::I) -> L::F;
}

const SIGN: u32 = 1 << 31;

/// See [`crate::float`], where the same is done one by one.
#[inline(always)]
fn widen<L: Lanes, const M: u32, const BIAS: u32>(lanes: L, magnitude: L::I) -> L::F {
    let least = lanes.splat_bits((128 - BIAS) << 23);
    let up = lanes.left(magnitude, 23 - M);
    let normal = lanes.plus(up, lanes.splat_bits((127 - BIAS) << 23));
    let above = lanes.number(lanes.plus(up, least));
    let small = lanes.bits(lanes.sub(above, lanes.number(least)));
    lanes.number(lanes.if_below(magnitude, lanes.splat_bits(1 << M), small, normal))
}

/// Halves that are finite, as numbers.
#[inline(always)]
pub(super) fn half<L: Lanes>(lanes: L, halves: L::I) -> L::F {
    let magnitude = lanes.and(halves, lanes.splat_bits(0x7fff));
    let value = lanes.bits(widen::<L, 10, 15>(lanes, magnitude));
    let sign = lanes.left(lanes.and(halves, lanes.splat_bits(0x8000)), 16);
    lanes.number(lanes.or(value, sign))
}

#[inline(always)]
fn narrow<L: Lanes, const M: u32, const BIAS: u32>(lanes: L, x: L::F, most: f32, nan: u32) -> L::I {
    let drop = 23 - M;
    let all = lanes.and(lanes.bits(x), lanes.splat_bits(!SIGN));
    let magnitude = lanes.min_unsigned(all, lanes.splat_bits(most.to_bits()));
    let even = lanes.and(lanes.right(magnitude, drop), lanes.splat_bits(1));
    let half = lanes.splat_bits((1 << (drop - 1)) - 1);
    let rounded = lanes.right(lanes.plus(lanes.plus(magnitude, half), even), drop);
    let normal = lanes.minus(rounded, lanes.splat_bits((127 - BIAS) << M));
    let place = lanes.splat_bits((127 + 1 - BIAS + 23 - M) << 23);
    let sum = lanes.add(lanes.number(magnitude), lanes.number(place));
    let small = lanes.minus(lanes.bits(sum), place);
    let magnitude = lanes.if_below(
        magnitude,
        lanes.splat_bits((128 - BIAS) << 23),
        small,
        normal,
    );
    let infinity = lanes.splat_bits(f32::INFINITY.to_bits());
    let magnitude = lanes.if_below(infinity, all, lanes.splat_bits(nan), magnitude);
    let sign = lanes.and(lanes.right(lanes.bits(x), 24), lanes.splat_bits(0x80));
    lanes.or(magnitude, sign)
}

impl Small for E4m3 {
    #[inline(always)]
    fn narrow<L: Lanes>(lanes: L, x: L::F) -> L::I {
        narrow::<L, 3, 7>(lanes, x, Self::MAX, 0x7f)
    }

    #[inline(always)]
    fn widen<L: Lanes>(lanes: L, n: L::I) -> L::F {
        let magnitude = lanes.and(n, lanes.splat_bits(0x7f));
        let value = lanes.bits(widen::<L, 3, 7>(lanes, magnitude));
        let nan = lanes.splat_bits(f32::NAN.to_bits());
        let value = lanes.if_below(magnitude, lanes.splat_bits(0x7f), value, nan);
        let sign = lanes.left(lanes.and(n, lanes.splat_bits(0x80)), 24);
        lanes.number(lanes.or(value, sign))
    }
}

impl Small for E5m2 {
    #[inline(always)]
    fn narrow<L: Lanes>(lanes: L, x: L::F) -> L::I {
        narrow::<L, 2, 15>(lanes, x, Self::MAX, 0x7e)
    }

    #[inline(always)]
    fn widen<L: Lanes>(lanes: L, n: L::I) -> L::F {
        let magnitude = lanes.and(n, lanes.splat_bits(0x7f));
        let value = lanes.bits(widen::<L, 2, 15>(lanes, magnitude));
        let below = lanes.left(lanes.and(magnitude, lanes.splat_bits(3)), 21);
        let special = lanes.or(lanes.splat_bits(f32::INFINITY.to_bits()), below);
        let value = lanes.if_below(magnitude, lanes.splat_bits(0x7c), value, special);
        let sign = lanes.left(lanes.and(n, lanes.splat_bits(0x80)), 24);
        lanes.number(lanes.or(value, sign))
    }
}
