//! XXH3 checksums, alone and fused with a copy.
//!
//! Inputs of more than 240 bytes run on the widest vector kernel that this processor has;
//! without one, and up to that size, the hashing is the `xxhash-rust` crate's.

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use xxhash_rust::xxh3 as portable;

#[macro_use]
mod xxh3;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests;

use xxh3::{Acc, BLOCK, MIDSIZE_MAX, STRIPE};

/// From this length on a copy goes past the cache, which spares fetching the lines that it
/// overwrites: measured, that wins to cold memory, and about evens out to memory that 32 MiB of
/// cache still hold. Shorter copies are likelier to be read again at once.
const STREAM_FROM: usize = 64 << 10;

/// Has the processor fetch a value that is going to be needed.
pub fn prefetch<T>(what: &T) {
    let from = ptr::from_ref(what).cast::<u8>();
    prefetch_lines(from, size_of::<T>());
}

/// As [`prefetch`], the `len` bytes from a place on, whatever is there.
pub fn prefetch_lines(from: *const u8, len: usize) {
    for at in (0..len).step_by(LINE) {
        #[cfg(target_arch = "x86_64")]
        x86::prefetch(from.wrapping_add(at));
        #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
        neon::prefetch(from.wrapping_add(at));
    }
}

/// The unit in which non-temporal stores reach memory.
const LINE: usize = 64;

/// Hashes whole stripes, from the start of a block on, into the accumulators. A copying pass also
/// writes them to the first pointer, which a hashing one ignores.
type Pass = unsafe fn(&mut Acc, *mut u8, *const u8, stripes: usize);

/// The loops of one instruction set. Each needs that set at run time.
struct Kernel {
    name: &'static str,
    hash: Pass,
    /// Copies with ordinary stores.
    copy_hash: Pass,
    /// Copies with non-temporal stores to a destination on a line boundary.
    stream_hash: Pass,
    /// Copies whole lines with non-temporal stores to a destination on a line boundary.
    stream: unsafe fn(*mut u8, *const u8, lines: usize),
}

/// The kernels that this processor can run, the fastest first.
fn kernels() -> Vec<&'static Kernel> {
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            found.push(&x86::avx512::KERNEL);
        }
        if is_x86_feature_detected!("avx2") {
            found.push(&x86::avx2::KERNEL);
        }
    }
    #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
    if std::arch::is_aarch64_feature_detected!("neon") {
        found.push(&neon::KERNEL);
    }
    found
}

fn fastest() -> Option<&'static Kernel> {
    static FASTEST: OnceLock<Option<&'static Kernel>> = OnceLock::new();
    *FASTEST.get_or_init(|| kernels().first().copied())
}

/// The name of the instruction set in use: `avx512`, `avx2`, `neon` or `scalar`.
pub fn kernel() -> &'static str {
    fastest().map_or("scalar", |kernel| kernel.name)
}

/// XXH3-64 of `data`, seed 0.
pub fn hash64(data: &[u8]) -> u64 {
    match fastest() {
        Some(kernel) if data.len() > MIDSIZE_MAX => kernel.hash_long(data),
        _ => portable::xxh3_64(data),
    }
}

/// XXH3-128 of `data`, seed 0.
pub fn hash128(data: &[u8]) -> u128 {
    portable::xxh3_128(data)
}

/// Copies `len` bytes from `src` to `dst`.
///
/// # Safety
/// `src` must be valid for reads and `dst` for writes of `len` bytes; they must not overlap.
pub unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller's contract, which is also that of `copy_nonoverlapping`.
    unsafe {
        match fastest() {
            Some(kernel) if len >= STREAM_FROM => {
                kernel.copy_long(dst, src, len);
                fence();
            }
            _ => ptr::copy_nonoverlapping(src, dst, len),
        }
    }
}

/// Copies `len` bytes from `src` to `dst` and returns the XXH3-64 (seed 0) of the bytes written.
///
/// The hash is of the bytes that went to `dst`, whatever happens to `src` meanwhile: a byte is
/// hashed from the register that it is stored from, or read back from where that went.
///
/// # Safety
/// As for [`copy`].
pub unsafe fn copy_hash64(dst: *mut u8, src: *const u8, len: usize) -> u64 {
    // SAFETY: the caller's contract.
    let hash = unsafe { copy_hash64_unfenced(dst, src, len) };
    fence();
    hash
}

/// As [`copy_hash64`], but what the thread stores next may reach others before the copy does: call
/// [`fence`] before anybody is told of it. The copy reaches memory beside what is done until then.
///
/// # Safety
/// As for [`copy`].
pub unsafe fn copy_hash64_unfenced(dst: *mut u8, src: *const u8, len: usize) -> u64 {
    // SAFETY: the caller's contract; `dst` holds `len` initialised bytes after the copy.
    unsafe {
        match fastest() {
            Some(kernel) if len > MIDSIZE_MAX => {
                kernel.copy_hash_long(dst, src, len, len >= STREAM_FROM)
            }
            _ => {
                copy(dst, src, len);
                portable::xxh3_64(std::slice::from_raw_parts(dst, len))
            }
        }
    }
}

impl Kernel {
    /// [`hash64`] of more than [`MIDSIZE_MAX`] bytes.
    fn hash_long(&self, data: &[u8]) -> u64 {
        let (src, len) = (data.as_ptr(), data.len());
        let mut acc = Acc::START;
        // SAFETY: a kernel is only ever reached where its instruction set was detected. The whole
        // stripes before the last byte, and the last stripe, lie within `data`.
        unsafe {
            (self.hash)(&mut acc, ptr::null_mut(), src, (len - 1) / STRIPE);
            acc.finish(&*src.add(len - STRIPE).cast(), len)
        }
    }

    /// [`copy`] with non-temporal stores; a [`fence`] must follow.
    ///
    /// # Safety
    /// As for [`copy`].
    unsafe fn copy_long(&self, dst: *mut u8, src: *const u8, len: usize) {
        let head = dst.align_offset(LINE).min(len);
        let lines = (len - head) / LINE;
        let tail = head + lines * LINE;
        // SAFETY: head, lines and tail divide the `len` bytes of the caller's contract; the
        // lines start on a boundary of `dst`.
        unsafe {
            ptr::copy_nonoverlapping(src, dst, head);
            (self.stream)(dst.add(head), src.add(head), lines);
            ptr::copy_nonoverlapping(src.add(tail), dst.add(tail), len - tail);
        }
    }

    /// [`copy_hash64_unfenced`] of more than [`MIDSIZE_MAX`] bytes.
    ///
    /// # Safety
    /// As for [`copy`].
    unsafe fn copy_hash_long(&self, dst: *mut u8, src: *const u8, len: usize, stream: bool) -> u64 {
        #[repr(align(64))]
        struct End([MaybeUninit<u8>; BLOCK + STRIPE]);

        let mut acc = Acc::START;
        // The last stripe may overlap the one before, and both must be of what was read once: it is read back from where
        // the end went, which is in the cache.
        let blocks = (len - STRIPE) / BLOCK;
        let (begin, rest) = (blocks * BLOCK, len - blocks * BLOCK);
        let whole = (rest - 1) / STRIPE * STRIPE;
        let mut end = End([MaybeUninit::uninit(); BLOCK + STRIPE]);
        // SAFETY: blocks and rest divide the `len` bytes of the caller's contract, which is more than a
        // stripe; the rest is from one stripe to a block and a stripe less a byte.
        unsafe {
            let (src_end, dst_end) = (src.add(begin), dst.add(begin));
            let to = if stream {
                end.0.as_mut_ptr().cast()
            } else {
                dst_end
            };
            if stream && blocks > 0 {
                self.stream_blocks(&mut acc, dst, src, blocks);
            } else {
                (self.copy_hash)(&mut acc, dst, src, begin / STRIPE);
            }
            (self.copy_hash)(&mut acc, to, src_end, whole / STRIPE);
            ptr::copy_nonoverlapping(src_end.add(whole), to.add(whole), rest - whole);
            if stream {
                self.copy_long(dst_end, to, rest);
            }
            acc.finish(&*to.add(rest - STRIPE).cast(), len)
        }
    }

    /// Copies and hashes one or more blocks with non-temporal stores.
    ///
    /// # Safety
    /// As for [`copy`], for `blocks * BLOCK` bytes.
    unsafe fn stream_blocks(&self, acc: &mut Acc, dst: *mut u8, src: *const u8, blocks: usize) {
        /// Blocks that pass through the stage at a time: few enough to stay in the L1 cache.
        const STAGED: usize = 2;
        #[repr(align(64))]
        struct Stage([u8; STAGED * BLOCK + LINE]);

        let shift = dst.addr() % LINE;
        if shift == 0 {
            // SAFETY: the caller's contract, and `dst` is on a boundary.
            return unsafe { (self.stream_hash)(acc, dst, src, blocks * BLOCK / STRIPE) };
        }
        // Off a boundary, stripes pass through a stage that lies to its lines as `dst` does to its
        // own: each is still read once from `src`, and whole lines leave.
        let mut stage = Stage([0; STAGED * BLOCK + LINE]);
        let stage = stage.0.as_mut_ptr();
        for done in (0..blocks).step_by(STAGED) {
            let len = STAGED.min(blocks - done) * BLOCK;
            let done = done * BLOCK;
            // SAFETY: the stage holds `shift + len` bytes. What leaves ends at or before
            // `done + len`, and starts at or after `dst`: of the first line, only our part does.
            unsafe {
                (self.copy_hash)(acc, stage.add(shift), src.add(done), len / STRIPE);
                let mut line = 0;
                if done == 0 {
                    ptr::copy_nonoverlapping(stage.add(shift), dst, LINE - shift);
                    line = LINE;
                }
                let out = dst.wrapping_sub(shift).wrapping_add(done + line);
                (self.stream)(out, stage.add(line), (len - line) / LINE);
                // The part of a line at the end waits for its rest.
                ptr::copy_nonoverlapping(stage.add(len), stage, shift);
            }
        }
        // SAFETY: the last `shift` bytes of the blocks, of which there is at least one.
        unsafe { ptr::copy_nonoverlapping(stage, dst.add(blocks * BLOCK - shift), shift) };
    }
}

/// Orders the non-temporal stores before this before whatever the thread stores after it, so that
/// publishing the copy publishes its bytes.
pub fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of the architecture.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    };
}
