//! Tiles: a few elements of a dtype as single-precision numbers, loaded and stored at once.

use crate::float::{F16_MAX, from_bf16, from_f16, to_bf16, to_f16};

/// A dtype that lossy codecs take.
pub(crate) trait Element {
    /// Bytes of an element.
    const SIZE: usize;
    /// The largest finite one.
    const MAX: f32;
    /// The values of `W` elements.
    fn widen<const W: usize>(src: &[u8]) -> [f32; W];
    /// The elements nearest to `W` values.
    fn narrow<const W: usize>(tile: &[f32; W], dst: &mut [u8]);

    /// As [`Element::widen`] of fewer elements, zeros behind them.
    #[inline(always)]
    fn load<const W: usize>(src: &[u8]) -> [f32; W] {
        if src.len() == W * Self::SIZE {
            return Self::widen(src);
        }
        let mut whole = [[0; 4]; W];
        let whole = &mut whole.as_flattened_mut()[..W * Self::SIZE];
        whole[..src.len()].copy_from_slice(src);
        Self::widen(whole)
    }

    /// As [`Element::narrow`] of as many elements as `dst` has.
    #[inline(always)]
    fn store<const W: usize>(tile: &[f32; W], dst: &mut [u8]) {
        if dst.len() == W * Self::SIZE {
            return Self::narrow(tile, dst);
        }
        let mut whole = [[0; 4]; W];
        let whole = &mut whole.as_flattened_mut()[..W * Self::SIZE];
        Self::narrow(tile, whole);
        dst.copy_from_slice(&whole[..dst.len()]);
    }
}

macro_rules! element {
    ($(#[$doc:meta])* $name:ident: $bits:ty, $max:expr, $widen:path, $narrow:path) => {
        $(#[$doc])*
        pub(crate) struct $name;

        impl Element for $name {
            const SIZE: usize = size_of::<$bits>();
            const MAX: f32 = $max;

            #[inline(always)]
            fn widen<const W: usize>(src: &[u8]) -> [f32; W] {
                let mut tile = [0.0; W];
                for (x, &bytes) in tile.iter_mut().zip(src.as_chunks::<{ Self::SIZE }>().0) {
                    *x = $widen(<$bits>::from_le_bytes(bytes));
                }
                tile
            }

            #[inline(always)]
            fn narrow<const W: usize>(tile: &[f32; W], dst: &mut [u8]) {
                for (&x, bytes) in tile.iter().zip(dst.as_chunks_mut::<{ Self::SIZE }>().0) {
                    *bytes = $narrow(x).to_le_bytes();
                }
            }
        }
    };
}

element!(Bf16: u16, f32::MAX, from_bf16, to_bf16);
element!(
    /// Infinities become large numbers: whoever cares looks at the range, which they exceed.
    Fp16: u16, F16_MAX, from_f16, to_f16
);
element!(Fp32: u32, f32::MAX, f32::from_bits, f32::to_bits);

/// The bits of a number as an integer of the same order; it is its own inverse.
#[inline(always)]
pub(crate) fn ordered(bits: i32) -> i32 {
    bits ^ (((bits >> 31) as u32) >> 1) as i32
}

/// The least and the greatest of some numbers, as [`ordered`] integers, in which even a NaN has a
/// place: beyond the infinities.
#[derive(Clone, Copy)]
pub(crate) struct Range {
    pub low: i32,
    pub high: i32,
}

impl Range {
    /// Of zero alone.
    pub const ZERO: Range = Range { low: 0, high: 0 };
    /// Of nothing.
    pub const NONE: Range = Range {
        low: i32::MAX,
        high: i32::MIN,
    };

    /// Takes in more numbers.
    #[inline(always)]
    pub fn extend<const W: usize>(&mut self, tile: &[f32; W]) {
        let (mut low, mut high) = (self.low, self.high);
        for x in tile {
            let key = ordered(x.to_bits() as i32);
            low = low.min(key);
            high = high.max(key);
        }
        (self.low, self.high) = (low, high);
    }

    /// The two numbers.
    #[inline(always)]
    pub fn values(self) -> (f32, f32) {
        let value = |key: i32| f32::from_bits(ordered(key) as u32);
        (value(self.low), value(self.high))
    }
}
