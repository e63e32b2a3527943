//! The kernel for AArch64, little endian.

use super::Kernel;
use super::xxh3::*;
use std::arch::aarch64::*;
use std::arch::asm;
use std::array;

type Stripe = [uint64x2_t; 4];

kernel!("neon", "neon");

#[inline]
#[target_feature(enable = "neon")]
unsafe fn load_once(src: *const u8) -> Stripe {
    let (a, b, c, d);
    // SAFETY: the caller vouches for 64 readable bytes.
    unsafe {
        asm!("ldp {:q}, {:q}, [{src}]", "ldp {:q}, {:q}, [{src}, #32]",
            out(vreg) a, out(vreg) b, out(vreg) c, out(vreg) d, src = in(reg) src,
            options(readonly, nostack, preserves_flags));
    }
    [a, b, c, d]
}

#[inline]
#[target_feature(enable = "neon")]
unsafe fn load(src: *const u8) -> Stripe {
    // SAFETY: the caller vouches for 64 readable bytes.
    array::from_fn(|i| unsafe { vreinterpretq_u64_u8(vld1q_u8(src.add(16 * i))) })
}

#[inline]
#[target_feature(enable = "neon")]
unsafe fn store(dst: *mut u8, data: Stripe) {
    for (i, part) in data.into_iter().enumerate() {
        // SAFETY: the caller vouches for 64 writable bytes.
        unsafe { vst1q_u8(dst.add(16 * i), vreinterpretq_u8_u64(part)) }
    }
}

#[inline]
#[target_feature(enable = "neon")]
unsafe fn stream(dst: *mut u8, [a, b, c, d]: Stripe) {
    // SAFETY: the caller vouches for 64 writable bytes.
    unsafe {
        asm!("stnp {:q}, {:q}, [{dst}]", "stnp {:q}, {:q}, [{dst}, #32]",
            in(vreg) a, in(vreg) b, in(vreg) c, in(vreg) d, dst = in(reg) dst,
            options(nostack, preserves_flags));
    }
}

#[inline]
pub(super) fn prefetch(src: *const u8) {
    // SAFETY: a prefetch of any address is harmless.
    unsafe {
        asm!("prfm pldl1keep, [{}]", in(reg) src, options(readonly, nostack, preserves_flags));
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn accumulate(sum: Stripe, data: Stripe, key: Stripe) -> Stripe {
    array::from_fn(|i| {
        let keyed = veorq_u64(data[i], key[i]);
        let swapped = vextq_u64::<1>(data[i], data[i]);
        let sum = vaddq_u64(sum[i], swapped);
        vmlal_u32(sum, vmovn_u64(keyed), vshrn_n_u64::<32>(keyed))
    })
}

#[inline]
#[target_feature(enable = "neon")]
fn scramble(sum: Stripe, key: Stripe) -> Stripe {
    let prime = vdup_n_u32(PRIME32_1);
    array::from_fn(|i| {
        let mixed = veorq_u64(veorq_u64(sum[i], vshrq_n_u64::<47>(sum[i])), key[i]);
        let low = vmull_u32(vmovn_u64(mixed), prime);
        let high = vmull_u32(vshrn_n_u64::<32>(mixed), prime);
        vaddq_u64(low, vshlq_n_u64::<32>(high))
    })
}
