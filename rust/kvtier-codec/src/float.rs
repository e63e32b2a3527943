//! Small floats. Each function is branch-free integer and single-precision arithmetic, so that
//! loops over it become vector code; results do not depend on the instruction set.

/// 1.5 · 2²³: adding it to a number below 2²² rounds that to an integer, half to even, and leaves
/// the integer in the low bits.
pub const ROUND: f32 = 12_582_912.0;

/// The largest finite half.
pub const F16_MAX: f32 = 65_504.0;

const SIGN: u32 = 1 << 31;

/// The value of a small float without a sign, of `M` bits of mantissa and this exponent bias:
/// exact, subnormals included; there is no infinity.
#[inline(always)]
fn widen<const M: u32, const BIAS: u32>(magnitude: u32) -> f32 {
    let normal = (magnitude << (23 - M)) + ((127 - BIAS) << 23);
    let least = (128 - BIAS) << 23; // 2^(1 - bias), above which subnormals count
    let small = f32::from_bits((magnitude << (23 - M)) + least) - f32::from_bits(least);
    if magnitude >> M == 0 {
        small
    } else {
        f32::from_bits(normal)
    }
}

/// The nearest small float to a magnitude that is not above its largest, half to even.
#[inline(always)]
fn narrow<const M: u32, const BIAS: u32>(magnitude: u32) -> u32 {
    let drop = 23 - M;
    let even = (magnitude >> drop) & 1;
    let normal =
        ((magnitude + (1 << (drop - 1)) - 1 + even) >> drop).wrapping_sub((127 - BIAS) << M);
    // A number whose last place is the spacing of the subnormals: the sum is rounded to it.
    let place = (127 + 1 - BIAS + 23 - M) << 23;
    let small = (f32::from_bits(magnitude) + f32::from_bits(place))
        .to_bits()
        .wrapping_sub(place);
    if magnitude < (128 - BIAS) << 23 {
        small
    } else {
        normal
    }
}

/// A half that is finite.
#[inline(always)]
pub fn from_f16(half: u16) -> f32 {
    let value = widen::<10, 15>(u32::from(half) & 0x7fff);
    f32::from_bits(value.to_bits() | (u32::from(half) & 0x8000) << 16)
}

/// The nearest half to a number, half to even; saturates.
#[inline(always)]
pub fn to_f16(x: f32) -> u16 {
    let magnitude = (x.to_bits() & !SIGN).min(F16_MAX.to_bits());
    (narrow::<10, 15>(magnitude) | (x.to_bits() & SIGN) >> 16) as u16
}

/// The least half that is not below a positive `x`, is above zero, and whose last `drop` bits are
/// zero. Above 65,504: some number above 0x7bff.
#[inline(always)]
pub fn scale_up(x: f32, drop: u32) -> u32 {
    let bits = x.to_bits();
    let shift = 13 + drop;
    let normal = (((bits + (1 << shift) - 1) >> shift) << drop).wrapping_sub(112 << 10);
    // Units of the subnormals that have `drop` bits of zeros; at most 1024 of them.
    let units = f32::from_bits(bits.min(113 << 23)) * ((1 << (24 - drop)) as f32);
    let near = units + ROUND;
    let count = near.to_bits().wrapping_sub(ROUND.to_bits()) + u32::from(near - ROUND < units);
    if bits < 113 << 23 {
        count.max(1) << drop
    } else {
        normal
    }
}

/// The greatest half that is not above `x`, if |x| is at most 65,504.
#[inline(always)]
pub fn f16_down(x: f32) -> u32 {
    let bits = x.to_bits() & !SIGN;
    let up = x < 0.0;
    let normal = ((bits + if up { 0x1fff } else { 0 }) >> 13).wrapping_sub(112 << 10);
    let units = f32::from_bits(bits.min(113 << 23)) * 16_777_216.0;
    let near = units + ROUND;
    let (rounded, count) = (near - ROUND, near.to_bits().wrapping_sub(ROUND.to_bits()));
    let small = if up {
        count + u32::from(rounded < units)
    } else {
        count.wrapping_sub(u32::from(rounded > units))
    };
    let magnitude = if bits < 113 << 23 { small } else { normal };
    magnitude | if up { 0x8000 } else { 0 }
}

/// The nearest bfloat16 to a finite number, half to even.
#[inline(always)]
pub fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// The value of a bfloat16.
#[inline(always)]
pub fn from_bf16(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// One of the two 8-bit formats.
pub trait Fp8 {
    /// The largest finite value.
    const MAX: f32;
    /// The nearest to a number, half to even. Saturates, infinity too; NaN stays NaN.
    fn encode(x: f32) -> u8;
    /// Its value.
    fn decode(byte: u8) -> f32;
}

/// `float8_e4m3fn`.
#[derive(Clone, Copy)]
pub struct E4m3;
/// `float8_e5m2`.
#[derive(Clone, Copy)]
pub struct E5m2;

/// See [`Fp8::encode`].
#[inline(always)]
fn encode<const M: u32, const BIAS: u32>(x: f32, most: f32, nan: u32) -> u8 {
    let all = x.to_bits() & !SIGN;
    let magnitude = narrow::<M, BIAS>(all.min(most.to_bits()));
    let magnitude = if all > f32::INFINITY.to_bits() {
        nan
    } else {
        magnitude
    };
    (magnitude | (x.to_bits() & SIGN) >> 24) as u8
}

impl Fp8 for E4m3 {
    const MAX: f32 = 448.0;

    #[inline(always)]
    fn encode(x: f32) -> u8 {
        encode::<3, 7>(x, Self::MAX, 0x7f)
    }

    #[inline(always)]
    fn decode(byte: u8) -> f32 {
        let magnitude = u32::from(byte) & 0x7f;
        let value = widen::<3, 7>(magnitude).to_bits();
        let value = if magnitude == 0x7f {
            f32::NAN.to_bits()
        } else {
            value
        };
        f32::from_bits(value | (u32::from(byte) & 0x80) << 24)
    }
}

impl Fp8 for E5m2 {
    const MAX: f32 = 57_344.0;

    #[inline(always)]
    fn encode(x: f32) -> u8 {
        encode::<2, 15>(x, Self::MAX, 0x7e)
    }

    #[inline(always)]
    fn decode(byte: u8) -> f32 {
        let magnitude = u32::from(byte) & 0x7f;
        let value = widen::<2, 15>(magnitude).to_bits();
        // The exponent of all ones, as in single precision: infinity and NaN.
        let special = f32::INFINITY.to_bits() | (magnitude & 3) << 21;
        let value = if magnitude >= 0x7c { special } else { value };
        f32::from_bits(value | (u32::from(byte) & 0x80) << 24)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a half, by the definition.
    fn half(bits: u16) -> f64 {
        let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
        let value = if exponent == 0 {
            mantissa * 2f64.powi(-24)
        } else {
            (1024.0 + mantissa) * 2f64.powi(exponent - 25)
        };
        if bits >> 15 == 1 { -value } else { value }
    }

    #[test]
    fn halves_are_exact_both_ways() {
        for bits in (0..=0xffff).filter(|b| b & 0x7c00 != 0x7c00) {
            assert_eq!(f64::from(from_f16(bits)), half(bits));
            assert_eq!(to_f16(from_f16(bits)), bits);
        }
    }

    #[test]
    fn directed_rounding_gives_the_nearest_on_that_side() {
        let finite: Vec<u16> = (0..0x7c00).collect();
        let mut x = 1e-9f32;
        while x < 60_000.0 {
            let up = scale_up(x, 0) as u16;
            assert!(
                half(up) >= f64::from(x) && (up <= 1 || half(up - 1) < f64::from(x)),
                "{x}"
            );
            let coarse = scale_up(x, 5) as u16;
            assert!(coarse & 31 == 0 && half(coarse) >= f64::from(x), "{x}");
            assert!(coarse == 32 || half(coarse - 32) < f64::from(x), "{x}");
            let down = f16_down(x) as u16;
            assert!(
                half(down) <= f64::from(x) && half(down + 1) > f64::from(x),
                "{x}"
            );
            let below = f16_down(-x) as u16;
            assert!(half(below) <= f64::from(-x), "{x}");
            assert!(below == 0x8000 || half(below - 1) > f64::from(-x), "{x}");
            x *= 1.001;
        }
        for &bits in &finite {
            let x = half(bits) as f32;
            assert_eq!(scale_up(x, 0), u32::from(bits.max(1)));
            assert_eq!(f16_down(x), u32::from(bits));
        }
        assert!(scale_up(65_505.0, 0) > 0x7bff && scale_up(f32::INFINITY, 0) > 0x7bff);
        assert!(scale_up(65_505.0, 5) > 0x7bff && scale_up(f32::MAX, 5) > 0x7bff);
    }

    #[test]
    fn eight_bits_come_back_as_they_were() {
        for byte in 0..=255u8 {
            let e4 = E4m3::decode(byte);
            assert!(e4.is_nan() == (byte & 0x7f == 0x7f));
            assert_eq!(E4m3::encode(e4), byte);
            let e5 = E5m2::decode(byte);
            if byte & 0x7f < 0x7c {
                assert_eq!(E5m2::encode(e5), byte);
            }
            assert_eq!(e5.is_infinite(), byte & 0x7f == 0x7c);
            assert_eq!(e5.is_nan(), byte & 0x7f > 0x7c);
        }
        assert_eq!(E4m3::encode(f32::INFINITY), 0x7e);
        assert_eq!(E5m2::encode(f32::NEG_INFINITY), 0xfb);
        assert_eq!((E4m3::encode(448.1), E5m2::encode(1e9)), (0x7e, 0x7b));
    }
}
