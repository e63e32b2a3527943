//! The kernels for x86-64.

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

#[inline]
pub(super) fn prefetch(src: *const u8) {
    #[allow(unused_unsafe, reason = "newer releases of Rust declare it safe")]
    // SAFETY: a prefetch of any address is harmless.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(src.cast())
    }
}

pub(super) mod avx512 {
    use super::super::Kernel;
    use super::super::xxh3::*;
    use super::prefetch;
    use std::arch::asm;
    use std::arch::x86_64::*;

    type Stripe = __m512i;

    kernel!("avx512", "avx512f");

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_once(src: *const u8) -> Stripe {
        let data;
        // SAFETY: the caller vouches for 64 readable bytes.
        unsafe {
            asm!("vmovdqu64 {}, [{}]", out(zmm_reg) data, in(reg) src,
                options(readonly, nostack, preserves_flags));
        }
        data
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(src: *const u8) -> Stripe {
        // SAFETY: the caller vouches for 64 readable bytes.
        unsafe { _mm512_loadu_si512(src.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store(dst: *mut u8, data: Stripe) {
        // SAFETY: the caller vouches for 64 writable bytes.
        unsafe { _mm512_storeu_si512(dst.cast(), data) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn stream(dst: *mut u8, data: Stripe) {
        // SAFETY: the caller vouches for 64 writable bytes on a line boundary.
        unsafe { _mm512_stream_si512(dst.cast(), data) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn accumulate(sum: Stripe, data: Stripe, key: Stripe) -> Stripe {
        let keyed = _mm512_xor_si512(data, key);
        let product = _mm512_mul_epu32(keyed, _mm512_srli_epi64::<32>(keyed));
        let swapped = _mm512_shuffle_epi32::<0b01_00_11_10>(data);
        _mm512_add_epi64(sum, _mm512_add_epi64(product, swapped))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn scramble(sum: Stripe, key: Stripe) -> Stripe {
        let prime = _mm512_set1_epi64(i64::from(PRIME32_1));
        let mixed = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64::<47>(sum)), key);
        let low = _mm512_mul_epu32(mixed, prime);
        let high = _mm512_mul_epu32(_mm512_srli_epi64::<32>(mixed), prime);
        _mm512_add_epi64(low, _mm512_slli_epi64::<32>(high))
    }
}

pub(super) mod avx2 {
    use super::super::Kernel;
    use super::super::xxh3::*;
    use super::prefetch;
    use std::arch::asm;
    use std::arch::x86_64::*;

    type Stripe = [__m256i; 2];

    kernel!("avx2", "avx2");

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_once(src: *const u8) -> Stripe {
        let (low, high);
        // SAFETY: the caller vouches for 64 readable bytes.
        unsafe {
            asm!("vmovdqu {}, [{src}]", "vmovdqu {}, [{src} + 32]",
                out(ymm_reg) low, out(ymm_reg) high, src = in(reg) src,
                options(readonly, nostack, preserves_flags));
        }
        [low, high]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(src: *const u8) -> Stripe {
        // SAFETY: the caller vouches for 64 readable bytes.
        unsafe {
            [
                _mm256_loadu_si256(src.cast()),
                _mm256_loadu_si256(src.add(32).cast()),
            ]
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn store(dst: *mut u8, data: Stripe) {
        // SAFETY: the caller vouches for 64 writable bytes.
        unsafe {
            _mm256_storeu_si256(dst.cast(), data[0]);
            _mm256_storeu_si256(dst.add(32).cast(), data[1]);
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn stream(dst: *mut u8, data: Stripe) {
        // SAFETY: the caller vouches for 64 writable bytes on a line boundary.
        unsafe {
            _mm256_stream_si256(dst.cast(), data[0]);
            _mm256_stream_si256(dst.add(32).cast(), data[1]);
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn accumulate(sum: Stripe, data: Stripe, key: Stripe) -> Stripe {
        std::array::from_fn(|i| {
            let keyed = _mm256_xor_si256(data[i], key[i]);
            let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
            let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(data[i]);
            _mm256_add_epi64(sum[i], _mm256_add_epi64(product, swapped))
        })
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn scramble(sum: Stripe, key: Stripe) -> Stripe {
        let prime = _mm256_set1_epi64x(i64::from(PRIME32_1));
        std::array::from_fn(|i| {
            let mixed = _mm256_xor_si256(
                _mm256_xor_si256(sum[i], _mm256_srli_epi64::<47>(sum[i])),
                key[i],
            );
            let low = _mm256_mul_epu32(mixed, prime);
            let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime);
            _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high))
        })
    }
}
