//! What all kernels share of XXH3's treatment of long inputs: constants, start, end and the loop.

use xxhash_rust::const_xxh3::const_custom_default_secret;

/// The longest input that XXH3 treats otherwise than this module.
pub(super) const MIDSIZE_MAX: usize = 240;
/// What one step accumulates.
pub(super) const STRIPE: usize = 64;
/// What lies between two scrambles.
pub(super) const BLOCK: usize = 1024;

pub(super) const SECRET: [u8; 192] = const_custom_default_secret(0);
pub(super) const SCRAMBLE_KEY: usize = SECRET.len() - STRIPE;
const LAST_KEY: usize = SCRAMBLE_KEY - 7;
const MERGE_KEY: usize = 11;

pub(super) const PRIME32_1: u32 = 0x9E37_79B1;
const PRIME32_2: u32 = 0x85EB_CA77;
const PRIME32_3: u32 = 0xC2B2_AE3D;
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;
const AVALANCHE: u64 = 0x1656_6791_9E37_79F9;

/// The eight accumulators, laid out as one vector register.
#[repr(C, align(64))]
pub(super) struct Acc([u64; 8]);

impl Acc {
    pub(super) const START: Self = Self([
        PRIME32_3 as u64,
        PRIME64_1,
        PRIME64_2,
        PRIME64_3,
        PRIME64_4,
        PRIME32_2 as u64,
        PRIME64_5,
        PRIME32_1 as u64,
    ]);

    /// Accumulates the last stripe, which may overlap the one before, and merges.
    pub(super) fn finish(mut self, last: &[u8; STRIPE], len: usize) -> u64 {
        for lane in 0..8 {
            let data = word(last, 8 * lane);
            let keyed = data ^ word(&SECRET, LAST_KEY + 8 * lane);
            self.0[lane ^ 1] = self.0[lane ^ 1].wrapping_add(data);
            self.0[lane] =
                self.0[lane].wrapping_add((keyed & 0xFFFF_FFFF).wrapping_mul(keyed >> 32));
        }
        let mut hash = (len as u64).wrapping_mul(PRIME64_1);
        for pair in 0..4 {
            let low = self.0[2 * pair] ^ word(&SECRET, MERGE_KEY + 16 * pair);
            let high = self.0[2 * pair + 1] ^ word(&SECRET, MERGE_KEY + 16 * pair + 8);
            let product = u128::from(low) * u128::from(high);
            hash = hash.wrapping_add(product as u64 ^ (product >> 64) as u64);
        }
        hash = (hash ^ (hash >> 37)).wrapping_mul(AVALANCHE);
        hash ^ (hash >> 32)
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// How far ahead of the loads the source is prefetched: measured, flat from 2 to 8 KiB.
pub(super) const AHEAD: usize = 4096;

/// What a pass does with a stripe besides hashing it.
pub(super) const LEAVE: u8 = 0;
pub(super) const STORE: u8 = 1;
pub(super) const STREAM: u8 = 2;

/// Defines `KERNEL` over the functions of the surrounding module on `Stripe`, 64 bytes in
/// registers: `load_once` (a load that the compiler neither repeats nor splits), `load`, `store`,
/// `stream`, `prefetch`, `accumulate` and `scramble`.
macro_rules! kernel {
    ($name:literal, $feature:literal) => {
        kernel!($name, $feature, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    };
    ($name:literal, $feature:literal, $($key:literal)*) => {
        pub(in crate::checksum) static KERNEL: Kernel = Kernel {
            name: $name,
            hash: pass::<LEAVE>,
            copy_hash: pass::<STORE>,
            stream_hash: pass::<STREAM>,
            stream: stream_lines,
        };

        #[target_feature(enable = $feature)]
        unsafe fn pass<const SINK: u8>(
            acc: &mut Acc,
            dst: *mut u8,
            src: *const u8,
            stripes: usize,
        ) {
            const IN_BLOCK: usize = BLOCK / STRIPE;
            let secret = SECRET.as_ptr();
            let lanes: *mut u8 = std::ptr::from_mut(acc).cast();
            // SAFETY: the caller vouches for `stripes` stripes at `src`, and at `dst` unless SINK
            // is LEAVE; keys lie within the secret; the accumulators are one stripe.
            unsafe {
                let mut sum = load(lanes);
                let step = |sum, stripe: usize, key| {
                    let at = stripe * STRIPE;
                    prefetch(src.wrapping_add(at + AHEAD));
                    let data = load_once(src.add(at));
                    match SINK {
                        STORE => store(dst.add(at), data),
                        STREAM => stream(dst.add(at), data),
                        _ => {}
                    }
                    accumulate(sum, data, load(secret.add(8 * key)))
                };
                let blocks = stripes / IN_BLOCK;
                for block in 0..blocks {
                    // Spelled out, for the keys to be constants that stay in registers.
                    $(sum = step(sum, block * IN_BLOCK + $key, $key);)*
                    sum = scramble(sum, load(secret.add(SCRAMBLE_KEY)));
                }
                for key in 0..stripes % IN_BLOCK {
                    sum = step(sum, blocks * IN_BLOCK + key, key);
                }
                store(lanes, sum);
            }
        }

        #[target_feature(enable = $feature)]
        unsafe fn stream_lines(dst: *mut u8, src: *const u8, lines: usize) {
            for line in 0..lines {
                let at = line * STRIPE;
                // SAFETY: the caller vouches for `lines` lines at `src` and, aligned, at `dst`.
                unsafe {
                    prefetch(src.wrapping_add(at + AHEAD));
                    stream(dst.add(at), load(src.add(at)));
                }
            }
        }
    };
}
