//! AVX-512 and AVX2.

use std::arch::x86_64::*;
use std::mem::transmute;
use std::ops::Range as Span;

use super::lanes::{Lanes, Pair, UNIT, WIDTH};
use super::{Scheme, kernel};
use crate::form::Form;
use crate::simd::Level;

/// AVX-512, with bytes and words; there is one only where a processor has it.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

/// AVX2, with conversions of halves; there is one only where a processor has it.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

/// The two entries of an instruction set, compiled for it.
macro_rules! entries {
    ($lanes:ident, $is:ident, $features:literal) => {
        impl $lanes {
            /// If it is this level's.
            pub(super) fn at(level: Level) -> Option<Self> {
                level.$is().then_some($lanes(()))
            }

            /// [`Scheme::encode`] with these.
            pub(super) fn encode(
                self,
                scheme: Scheme,
                form: &Form,
                src: &[u8],
                out: &mut [u8],
            ) -> bool {
                #[target_feature(enable = $features)]
                fn run(
                    lanes: $lanes,
                    scheme: Scheme,
                    form: &Form,
                    src: &[u8],
                    out: &mut [u8],
                ) -> bool {
                    kernel::encode(lanes, scheme, form, src, out)
                }
                // SAFETY: a level exists only where its instruction set was detected.
                unsafe { run(self, scheme, form, src, out) }
            }

            /// [`Scheme::decode`] with these.
            pub(super) fn decode(
                self,
                scheme: Scheme,
                form: &Form,
                parts: &[u8],
                tokens: Span<usize>,
                dst: &mut [u8],
            ) {
                #[target_feature(enable = $features)]
                fn run(
                    lanes: $lanes,
                    scheme: Scheme,
                    form: &Form,
                    parts: &[u8],
                    tokens: Span<usize>,
                    dst: &mut [u8],
                ) {
                    kernel::decode(lanes, scheme, form, parts, tokens, dst);
                }
                // SAFETY: as above.
                unsafe { run(self, scheme, form, parts, tokens, dst) }
            }
        }
    };
}

entries!(
    Avx512,
    is_avx512,
    "avx2,bmi2,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi"
);
entries!(Avx2, is_avx2, "avx2,bmi2,f16c");

/// Bytes.
const AHEAD: usize = 2048;

/// Functions that are an expression of intrinsics without memory.
macro_rules! lanes {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $out:ty { $($body:tt)* })*) => {
        $(
            #[inline(always)]
            fn $name(self $(, $arg: $type)*) -> $out {
                // SAFETY: `self` exists only where the processor has the instructions; they touch
                // no memory but arrays of the size that they move.
                unsafe { $($body)* }
            }
        )*
    };
}

/// The places of every fourth byte, of two vectors.
const LOW_BYTES: [u8; 64] = {
    let mut all = [0; 64];
    let mut i = 0;
    while i < 32 {
        all[i] = 4 * i as u8;
        i += 1;
    }
    all
};

/// The places of every second word, from the second on, of two vectors.
const UPPER_WORDS: [u16; 32] = {
    let mut all = [0; 32];
    let mut i = 0;
    while i < 32 {
        all[i] = 2 * i as u16 + 1;
        i += 1;
    }
    all
};

impl Lanes for Avx512 {
    type F = __m512;
    type I = __m512i;

    lanes! {
        fn fetch(from: *const u8) -> () { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast()) }
        fn floats(from: &[f32; WIDTH]) -> __m512 { _mm512_loadu_ps(from.as_ptr()) }
        fn to_floats(x: __m512) -> [f32; WIDTH] { transmute::<__m512, [f32; WIDTH]>(x) }
        fn to_ints(x: __m512i) -> [u32; WIDTH] { transmute::<__m512i, [u32; WIDTH]>(x) }
        fn splat(x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn splat_bits(x: u32) -> __m512i { _mm512_set1_epi32(x as i32) }
        fn add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        fn bits(x: __m512) -> __m512i { _mm512_castps_si512(x) }
        fn number(x: __m512i) -> __m512 { _mm512_castsi512_ps(x) }
        fn float(x: __m512i) -> __m512 { _mm512_cvtepi32_ps(x) }
        fn plus(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        fn minus(a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi32(a, b) }
        fn and(a: __m512i, b: __m512i) -> __m512i { _mm512_and_si512(a, b) }
        fn or(a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
        fn left(x: __m512i, by: u32) -> __m512i { _mm512_sllv_epi32(x, _mm512_set1_epi32(by as i32)) }
        fn right(x: __m512i, by: u32) -> __m512i { _mm512_srlv_epi32(x, _mm512_set1_epi32(by as i32)) }
        fn min_signed(a: __m512i, b: __m512i) -> __m512i { _mm512_min_epi32(a, b) }
        fn max_signed(a: __m512i, b: __m512i) -> __m512i { _mm512_max_epi32(a, b) }
        fn min_unsigned(a: __m512i, b: __m512i) -> __m512i { _mm512_min_epu32(a, b) }
        fn max_unsigned(a: __m512i, b: __m512i) -> __m512i { _mm512_max_epu32(a, b) }
        fn if_below(a: __m512i, b: __m512i, then: __m512i, other: __m512i) -> __m512i {
            _mm512_mask_blend_epi32(_mm512_cmplt_epi32_mask(a, b), other, then)
        }
        fn few_bytes(from: &[u8; WIDTH]) -> __m512i {
            _mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast()))
        }
        fn to_few_bytes(x: __m512i) -> [u8; WIDTH] {
            transmute::<__m128i, [u8; WIDTH]>(_mm512_cvtepi32_epi8(x))
        }
        fn to_bytes(x: Pair<__m512i>) -> [u8; UNIT] {
            let places = _mm512_loadu_si512(LOW_BYTES.as_ptr().cast());
            let all = _mm512_permutex2var_epi8(x[0], places, x[1]);
            transmute::<__m256i, [u8; UNIT]>(_mm512_castsi512_si256(all))
        }
        fn to_uppers(x: Pair<__m512i>) -> [u8; 2 * UNIT] {
            let places = _mm512_loadu_si512(UPPER_WORDS.as_ptr().cast());
            transmute::<__m512i, [u8; 2 * UNIT]>(_mm512_permutex2var_epi16(x[0], places, x[1]))
        }
        fn uppers(from: &[u8; 2 * UNIT]) -> Pair<__m512i> {
            let [a, b] = transmute::<[u8; 2 * UNIT], [__m256i; 2]>(*from);
            let (a, b) = (_mm512_cvtepu16_epi32(a), _mm512_cvtepu16_epi32(b));
            [_mm512_slli_epi32::<16>(a), _mm512_slli_epi32::<16>(b)]
        }
        fn words(from: &[u8; 4 * UNIT]) -> Pair<__m512i> {
            transmute::<[u8; 4 * UNIT], Pair<__m512i>>(*from)
        }
        fn to_words(x: Pair<__m512i>) -> [u8; 4 * UNIT] {
            transmute::<Pair<__m512i>, [u8; 4 * UNIT]>(x)
        }
        fn halves(from: &[u8; 2 * UNIT]) -> Pair<__m512> {
            let [a, b] = transmute::<[u8; 2 * UNIT], [__m256i; 2]>(*from);
            [_mm512_cvtph_ps(a), _mm512_cvtph_ps(b)]
        }
        fn to_halves(x: Pair<__m512>) -> [u8; 2 * UNIT] {
            transmute::<[__m256i; 2], [u8; 2 * UNIT]>([
                _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[0]),
                _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[1]),
            ])
        }
    }

    #[inline(always)]
    fn bytes(self, from: &[u8; UNIT]) -> Pair<__m512i> {
        let (a, b) = split(from);
        [self.few_bytes(a), self.few_bytes(b)]
    }
}

/// The two halves of an array.
#[inline(always)]
fn split<const ALL: usize, const HALF: usize>(all: &[u8; ALL]) -> (&[u8; HALF], &[u8; HALF]) {
    (
        all.first_chunk().expect("its half"),
        all.last_chunk().expect("its half"),
    )
}

impl Lanes for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];

    lanes! {
        fn fetch(from: *const u8) -> () { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast()) }
        fn floats(from: &[f32; WIDTH]) -> [__m256; 2] {
            [_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))]
        }
        fn to_floats(x: [__m256; 2]) -> [f32; WIDTH] { transmute::<[__m256; 2], [f32; WIDTH]>(x) }
        fn to_ints(x: [__m256i; 2]) -> [u32; WIDTH] { transmute::<[__m256i; 2], [u32; WIDTH]>(x) }
        fn splat(x: f32) -> [__m256; 2] { [_mm256_set1_ps(x); 2] }
        fn splat_bits(x: u32) -> [__m256i; 2] { [_mm256_set1_epi32(x as i32); 2] }
        fn add(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])]
        }
        fn sub(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])]
        }
        fn mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])]
        }
        fn div(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])]
        }
        fn bits(x: [__m256; 2]) -> [__m256i; 2] { [_mm256_castps_si256(x[0]), _mm256_castps_si256(x[1])] }
        fn number(x: [__m256i; 2]) -> [__m256; 2] { [_mm256_castsi256_ps(x[0]), _mm256_castsi256_ps(x[1])] }
        fn float(x: [__m256i; 2]) -> [__m256; 2] { [_mm256_cvtepi32_ps(x[0]), _mm256_cvtepi32_ps(x[1])] }
        fn plus(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
            [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])]
        }
        fn minus(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
            [_mm256_sub_epi32(a[0], b[0]), _mm256_sub_epi32(a[1], b[1])]
        }
        fn and(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
            [_mm256_and_si256(a[0], b[0]), _mm256_and_si256(a[1], b[1])]
        }
        fn or(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
            [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])]
        }
        fn left(x: [__m256i; 2], by: u32) -> [__m256i; 2] {
            let by = _mm256_set1_epi32(by as i32);
            [_mm256_sllv_epi32(x[0], by), _mm256_sllv_epi32(x[1], by)]
        }
        fn right(x: [__m256i; 2], by: u32) -> [__m256i; 2] {
            let by = _mm256_set1_epi32(by as i32);
            [_mm256_srlv_epi32(x[0], by), _mm256_srlv_epi32(x[1], by)]
        }
        fn min_signed(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
            [_mm256_min_epi32(a[0], b[0]), _mm256_min_epi32(a[1], b[1])]
        }
        fn max_signed(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
            [_mm256_max_epi32(a[0], b[0]), _mm256_max_epi32(a[1], b[1])]
        }
        fn min_unsigned(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
            [_mm256_min_epu32(a[0], b[0]), _mm256_min_epu32(a[1], b[1])]
        }
        fn max_unsigned(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
            [_mm256_max_epu32(a[0], b[0]), _mm256_max_epu32(a[1], b[1])]
        }
        fn if_below(a: [__m256i; 2], b: [__m256i; 2], then: [__m256i; 2], other: [__m256i; 2]) -> [__m256i; 2] {
            [
                _mm256_blendv_epi8(other[0], then[0], _mm256_cmpgt_epi32(b[0], a[0])),
                _mm256_blendv_epi8(other[1], then[1], _mm256_cmpgt_epi32(b[1], a[1])),
            ]
        }
        fn few_bytes(from: &[u8; WIDTH]) -> [__m256i; 2] {
            let all = _mm_loadu_si128(from.as_ptr().cast());
            [_mm256_cvtepu8_epi32(all), _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(all))]
        }
        fn to_few_bytes(x: [__m256i; 2]) -> [u8; WIDTH] {
            let words = in_order(_mm256_packus_epi32(x[0], x[1]));
            let (low, high) = (_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            transmute::<__m128i, [u8; WIDTH]>(_mm_packus_epi16(low, high))
        }
        fn to_bytes(x: Pair<[__m256i; 2]>) -> [u8; UNIT] {
            let [[a, b], [c, d]] = x;
            let bytes = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
            // Four bytes each of the vectors 0 to 3, first their lower halves.
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            transmute::<__m256i, [u8; UNIT]>(_mm256_permutevar8x32_epi32(bytes, order))
        }
        fn to_uppers(x: Pair<[__m256i; 2]>) -> [u8; 2 * UNIT] {
            let [[a, b], [c, d]] = x;
            let (a, b) = (_mm256_srli_epi32::<16>(a), _mm256_srli_epi32::<16>(b));
            let (c, d) = (_mm256_srli_epi32::<16>(c), _mm256_srli_epi32::<16>(d));
            let words = [in_order(_mm256_packus_epi32(a, b)), in_order(_mm256_packus_epi32(c, d))];
            transmute::<[__m256i; 2], [u8; 2 * UNIT]>(words)
        }
        fn halves(from: &[u8; 2 * UNIT]) -> Pair<[__m256; 2]> {
            let [a, b, c, d] = transmute::<[u8; 2 * UNIT], [__m128i; 4]>(*from);
            [[_mm256_cvtph_ps(a), _mm256_cvtph_ps(b)], [_mm256_cvtph_ps(c), _mm256_cvtph_ps(d)]]
        }
        fn to_halves(x: Pair<[__m256; 2]>) -> [u8; 2 * UNIT] {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
            let [[a, b], [c, d]] = x;
            transmute::<[__m128i; 4], [u8; 2 * UNIT]>([
                _mm256_cvtps_ph::<NEAREST>(a),
                _mm256_cvtps_ph::<NEAREST>(b),
                _mm256_cvtps_ph::<NEAREST>(c),
                _mm256_cvtps_ph::<NEAREST>(d),
            ])
        }
        fn uppers(from: &[u8; 2 * UNIT]) -> Pair<[__m256i; 2]> {
            let [a, b, c, d] = transmute::<[u8; 2 * UNIT], [__m128i; 4]>(*from);
            [[upper(a), upper(b)], [upper(c), upper(d)]]
        }
        fn words(from: &[u8; 4 * UNIT]) -> Pair<[__m256i; 2]> {
            transmute::<[u8; 4 * UNIT], Pair<[__m256i; 2]>>(*from)
        }
        fn to_words(x: Pair<[__m256i; 2]>) -> [u8; 4 * UNIT] {
            transmute::<Pair<[__m256i; 2]>, [u8; 4 * UNIT]>(x)
        }
    }

    #[inline(always)]
    fn bytes(self, from: &[u8; UNIT]) -> Pair<[__m256i; 2]> {
        let (a, b) = split(from);
        [self.few_bytes(a), self.few_bytes(b)]
    }
}

/// What packing made of two vectors, whose lower halves come before their upper ones.
#[inline]
#[target_feature(enable = "avx2")]
fn in_order(packed: __m256i) -> __m256i {
    _mm256_permute4x64_epi64::<0b11_01_10_00>(packed)
}

/// Words as the upper halves of integers.
#[inline]
#[target_feature(enable = "avx2")]
fn upper(words: __m128i) -> __m256i {
    _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(words))
}
