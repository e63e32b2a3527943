use super::*;
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

const CANARY: u8 = 0xA5;
const MARGIN: usize = 128;

/// Bytes without a period that a kernel could hide a mistake in.
fn bytes(len: usize) -> Vec<u8> {
    let step = |state: &mut u64| {
        *state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        Some((*state >> 56) as u8)
    };
    std::iter::repeat_n((), len)
        .scan(1, |state, ()| step(state))
        .collect()
}

/// Runs `copy` to a destination `offset` bytes after a line boundary and checks that it wrote
/// `src`, and nothing beside it.
fn checked<T>(src: &[u8], offset: usize, copy: impl FnOnce(*mut u8, *const u8, usize) -> T) -> T {
    let mut dst = vec![CANARY; src.len() + 2 * MARGIN + LINE];
    let at = MARGIN + dst[MARGIN..].as_ptr().align_offset(LINE) + offset % LINE;
    let result = copy(dst[at..].as_mut_ptr(), src.as_ptr(), src.len());
    assert!(
        dst[at..at + src.len()] == *src,
        "copy of {} to {offset}",
        src.len()
    );
    dst.drain(at..at + src.len());
    assert!(
        dst.iter().all(|&byte| byte == CANARY),
        "beside {} at {offset}",
        src.len()
    );
    result
}

/// Compares everything that takes `src` with the portable hash and a plain copy.
fn check(src: &[u8], offset: usize) {
    let hash = portable::xxh3_64(src);
    assert_eq!(hash64(src), hash, "hash of {}", src.len());
    // SAFETY: `checked` passes valid, distinct buffers, here and below.
    checked(src, offset, |dst, src, len| unsafe { copy(dst, src, len) });
    // SAFETY: as above.
    let copied = checked(src, offset, |dst, src, len| unsafe {
        copy_hash64(dst, src, len)
    });
    assert_eq!(copied, hash, "copy and hash of {}", src.len());
    for kernel in kernels() {
        // SAFETY: as above.
        checked(src, offset, |dst, src, len| unsafe {
            kernel.copy_long(dst, src, len)
        });
        if src.len() <= MIDSIZE_MAX {
            continue;
        }
        assert_eq!(
            kernel.hash_long(src),
            hash,
            "{}: hash of {}",
            kernel.name,
            src.len()
        );
        for stream in [false, true] {
            let copied = checked(src, offset, |dst, src, len| {
                // SAFETY: as above.
                unsafe { kernel.copy_hash_long(dst, src, len, stream) }
            });
            assert_eq!(
                copied,
                hash,
                "{}: {} to {offset}, {stream}",
                kernel.name,
                src.len()
            );
        }
    }
}

#[test]
fn known_values() {
    assert_eq!(hash64(b""), 0x2D06_8005_38D3_94C2);
    assert_eq!(hash128(b""), 0x99AA_06D3_0147_98D8_6001_C324_468D_497F);
}

#[test]
fn names_the_fastest_kernel() {
    assert_eq!(
        kernel(),
        kernels().first().map_or("scalar", |kernel| kernel.name)
    );
}

#[test]
fn every_short_length() {
    let data = bytes(4096);
    for len in 0..=data.len() {
        check(&data[..len], 0);
        check(&data[data.len() - len..], len);
    }
}

#[test]
fn every_misalignment() {
    let data = bytes(3 * BLOCK + LINE);
    for offset in 0..LINE {
        for len in [241, BLOCK, BLOCK + 1, 2 * BLOCK + 100, 3 * BLOCK] {
            check(&data[..len], offset);
            check(&data[offset..][..len], 0);
            check(&data[offset..][..len], LINE - offset);
        }
    }
}

#[test]
fn lengths_about_the_streaming_threshold() {
    let data = bytes(STREAM_FROM + BLOCK + 1);
    for len in [
        STREAM_FROM - 1,
        STREAM_FROM,
        STREAM_FROM + 1,
        STREAM_FROM + BLOCK,
    ] {
        for offset in [0, 1, 16, 63] {
            check(&data[1..][..len], offset);
        }
    }
}

/// What `kernel` says of copies, while somebody changes the source from byte `from` on, is the hash of what
/// arrived.
fn check_torn(len: usize, from: usize, rounds: usize) {
    let src: Vec<AtomicU8> = bytes(len).into_iter().map(AtomicU8::new).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for byte in &src[from..] {
                    byte.store(
                        byte.load(Ordering::Relaxed).wrapping_add(1),
                        Ordering::Relaxed,
                    );
                }
            }
        });
        let mut dst = vec![0; len + LINE];
        let mut torn = 0;
        for round in 0..rounds {
            let dst = &mut dst[round % LINE..][..len];
            for kernel in kernels() {
                let (to, from) = (dst.as_mut_ptr(), src.as_ptr().cast());
                // SAFETY: valid, distinct buffers; the kernels' loads from the source are atomic
                // enough, being outside of the compiler's view.
                let hash = unsafe { kernel.copy_hash_long(to, from, len, round % 3 == 0) };
                torn += usize::from(hash != portable::xxh3_64(dst));
            }
        }
        done.store(true, Ordering::Relaxed);
        assert_eq!(torn, 0);
    });
}

#[test]
fn hashes_what_it_wrote_while_the_source_changes() {
    check_torn(20 * BLOCK + 777, 0, 2000);
    // The end, which is hashed twice, changes all the time.
    for len in [MIDSIZE_MAX + 1, BLOCK + STRIPE - 1, BLOCK + STRIPE] {
        check_torn(len, len - STRIPE, 100_000);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_length_and_offset(
        len in 0..300_000_usize,
        start in 0..LINE,
        offset in 0..LINE,
        seed in any::<u8>(),
    ) {
        let mut data = bytes(start + len);
        data.iter_mut().for_each(|byte| *byte ^= seed);
        check(&data[start..], offset);
    }
}
