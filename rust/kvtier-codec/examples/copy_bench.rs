//! Measures the copies and hashes of `checksum` against libc's `memcpy`.
//!
//! The working set is two arenas of 512 MiB on huge pages, walked block by block in a scattered order,
//! as a store walks its slots. All operations take turns within a lap; medians of the laps are
//! printed, each with its ratio to the `memcpy` of the same lap. The optional argument moves the
//! destinations off their boundary by that many bytes.

use kvtier_codec::checksum;
use std::hint::black_box;
use std::time::Instant;

const ARENA: usize = 512 << 20;
const PAGE: usize = 4096;
const LAPS: usize = 11;

type Operation = (&'static str, fn(*mut u8, *const u8, usize));

const OPERATIONS: [Operation; 4] = [
    ("memcpy", |dst, src, len| {
        // SAFETY: `main` passes ranges within two arenas.
        unsafe { libc::memcpy(dst.cast(), src.cast(), len) };
    }),
    ("copy", |dst, src, len| {
        // SAFETY: `main` passes ranges within two arenas.
        unsafe { checksum::copy(dst, src, len) };
    }),
    ("copy_hash64", |dst, src, len| {
        // SAFETY: `main` passes ranges within two arenas.
        black_box(unsafe { checksum::copy_hash64(dst, src, len) });
    }),
    ("hash64", |_, src, len| {
        // SAFETY: `main` passes ranges within two arenas.
        let data = unsafe { std::slice::from_raw_parts(src, len) };
        black_box(checksum::hash64(data));
    }),
];

fn main() {
    let shift: usize = std::env::args().nth(1).map_or(0, |arg| {
        arg.parse()
            .expect("the argument is the number of bytes that destinations are shifted by")
    });
    assert!(
        shift < PAGE,
        "a shift of less than {PAGE} bytes, not {shift}"
    );
    let (src, dst) = (arena(1), arena(2));

    println!(
        "kernel {}, destinations shifted by {shift}",
        checksum::kernel()
    );
    println!(
        "{:>8} {:>12} {:>6} {:>9}",
        "bytes", "operation", "GB/s", "x memcpy"
    );
    for len in [64 << 10, 256 << 10, 1 << 20, 4 << 20] {
        let blocks = ARENA / len;
        let mut rates = [const { Vec::new() }; OPERATIONS.len()];
        for _ in 0..LAPS {
            for ((_, operation), rates) in OPERATIONS.iter().zip(&mut rates) {
                let start = Instant::now();
                for turn in 0..blocks {
                    // Odd, so that the power of two of blocks is walked through once.
                    let at = turn * 0x9E5 % blocks * len;
                    operation(dst.wrapping_add(at + shift), src.wrapping_add(at), len);
                }
                rates.push((blocks * len) as f64 / start.elapsed().as_secs_f64() / 1e9);
            }
        }
        for ((name, _), own) in OPERATIONS.iter().zip(&rates) {
            let ratio = own.iter().zip(&rates[0]).map(|(own, memcpy)| own / memcpy);
            println!(
                "{len:>8} {name:>12} {:>6.1} {:>9.2}",
                median(own.clone()),
                median(ratio.collect())
            );
        }
    }
}

/// Maps an arena on huge pages, with room for the shift, and touches all of it.
fn arena(fill: u8) -> *mut u8 {
    const HUGE: usize = 2 << 20;
    let len = ARENA + 2 * HUGE;
    // SAFETY: a fresh private mapping, which is kept until the process ends.
    unsafe {
        let base = libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        assert_ne!(
            base,
            libc::MAP_FAILED,
            "{}",
            std::io::Error::last_os_error()
        );
        libc::madvise(base, len, libc::MADV_HUGEPAGE);
        libc::memset(base, i32::from(fill), len);
        base.wrapping_byte_add(base.align_offset(HUGE)).cast()
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
