//! The tier against a bare io_uring loop on an identically prepared file of the same disk.
//!
//! `cargo run --release -p kvtier-nvme --example nvme_bench -- DIR [ROUNDS] [threads]`

use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use io_uring::{IoUring, opcode, types};
use kvtier_codec::image::{Root, Shape};
use kvtier_nvme::{EngineKind, IoBuf, NvmeTier, Options, Read, Slot, Write};

/// Bytes moved per measurement, and in flight.
const TOTAL: usize = 1 << 30;
const FLIGHT: usize = 8 << 20;

/// Memory on huge pages, for as long as the process runs.
#[derive(Clone, Copy)]
struct Arena(usize);

impl Arena {
    fn new(len: usize) -> Arena {
        let (read_write, private) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping, touched within its bounds.
        unsafe {
            let ptr = libc::mmap(std::ptr::null_mut(), len, read_write, private, -1, 0);
            assert!(ptr != libc::MAP_FAILED);
            libc::madvise(ptr, len, libc::MADV_HUGEPAGE);
            std::ptr::write_bytes(ptr.cast::<u8>(), 0x5a, len);
            Arena(ptr as usize)
        }
    }

    fn part(self, offset: usize, len: usize) -> IoBuf {
        // SAFETY: the mapping stays for ever, and the bench uses each part for one operation at a time.
        unsafe { IoBuf::new((self.0 + offset) as *mut u8, len, Arc::new(())) }
    }
}

/// Moves `TOTAL` bytes between the arena and the file in blocks, as fast as a ring can.
fn bare(path: &Path, arena: Arena, block: usize, write: bool) -> f64 {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .expect("the bare file");
    let mut ring: IoUring = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .build(256)
        .expect("a ring");
    ring.submitter()
        .register_files(&[file.as_raw_fd()])
        .expect("register");
    let depth = (FLIGHT / block).clamp(1, 128);
    let blocks = TOTAL / block;
    let begin = Instant::now();
    let mut free: VecDeque<usize> = (0..depth).collect();
    let (mut sent, mut done) = (0, 0);
    while done < blocks {
        while sent < blocks
            && let Some(place) = free.pop_front()
        {
            let ptr = (arena.0 + place * block) as *mut u8;
            let (fd, len, at) = (types::Fixed(0), block as u32, (sent * block) as u64);
            let entry = if write {
                opcode::Write::new(fd, ptr, len).offset(at).build()
            } else {
                opcode::Read::new(fd, ptr, len).offset(at).build()
            };
            // SAFETY: the arena outlives the ring.
            unsafe {
                ring.submission()
                    .push(&entry.user_data(place as u64))
                    .expect("an entry")
            };
            sent += 1;
        }
        ring.submit_and_wait(1).expect("enter");
        for entry in ring.completion() {
            assert_eq!(entry.result(), block as i32);
            free.push_back(entry.user_data() as usize);
            done += 1;
        }
    }
    if write {
        file.sync_data().expect("sync");
    }
    TOTAL as f64 / begin.elapsed().as_secs_f64() / 1e9
}

/// The same through the tier: reserve, write, journal, flush; then read back; then remove.
fn tier(tier: &NvmeTier, arena: Arena, block: usize) -> (f64, f64) {
    let shape = Shape::new(block, 1).expect("a shape");
    let flight = 2 * FLIGHT / block.min(FLIGHT);
    let (back, free) = channel();
    (0..flight).for_each(|place| back.send(place).expect("open"));
    let blocks = TOTAL / block;
    let begin = Instant::now();
    let slots: Vec<Slot> = (0..blocks)
        .map(|i| {
            let place = free.recv().expect("open");
            let slot = tier.reserve(shape.pages()).expect("room");
            let mut id = [0; 32];
            id[..8].copy_from_slice(&i.to_le_bytes());
            let back = back.clone();
            tier.write(Write {
                slot,
                id,
                parent: None,
                namespace: 0,
                shape,
                codec: 0,
                plain: shape,
                importance: 0.0,
                root: Root([0; 16]),
                buf: arena.part(place * block, block),
                done: Box::new(move |result| {
                    result.expect("write");
                    let _ = back.send(place);
                }),
            });
            slot
        })
        .collect();
    tier.flush(None).expect("flush");
    let wrote = begin.elapsed().as_secs_f64();
    let (back, free) = channel();
    (0..flight).for_each(|place| back.send(place).expect("open"));
    let begin = Instant::now();
    for &slot in &slots {
        let place: usize = free.recv().expect("open");
        let back = back.clone();
        tier.read(Read {
            slot,
            offset: 0,
            len: block as u32,
            buf: arena.part(place * block, block),
            hold: tier.hold(slot),
            urgent: false,
            attended: None,
            done: Box::new(move |result| {
                result.expect("read");
                let _ = back.send(place);
            }),
        });
    }
    (0..flight).for_each(|_| assert!(free.recv().is_ok()));
    let read = begin.elapsed().as_secs_f64();
    slots.iter().for_each(|&slot| tier.remove(slot, &[0; 32]));
    tier.flush(None).expect("flush");
    (TOTAL as f64 / wrote / 1e9, TOTAL as f64 / read / 1e9)
}

/// Median microseconds of single 64 KiB reads: a bare `pread`, and through the tier.
fn latency(store: &NvmeTier, bare_file: &Path, arena: Arena) -> (f64, f64) {
    const BLOCK: usize = 64 << 10;
    const READS: usize = 2000;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(bare_file);
    let file = file.expect("the bare file");
    let place = |i: usize| (i * 7919) % (TOTAL / BLOCK);
    let slots: Vec<Slot> = (0..TOTAL / BLOCK)
        .map(|_| store.reserve((BLOCK / 4096) as u32).expect("room"))
        .collect();
    let (mut bare, mut tier) = (Vec::new(), Vec::new());
    for i in 0..READS {
        let begin = Instant::now();
        let at = (place(i) * BLOCK) as i64;
        // SAFETY: the arena is large enough, and nothing else uses it now.
        let n = unsafe { libc::pread(file.as_raw_fd(), arena.0 as *mut _, BLOCK, at) };
        assert_eq!(n, BLOCK as isize);
        bare.push(begin.elapsed().as_secs_f64() * 1e6);
        let (back, done) = channel();
        let begin = Instant::now();
        let slot = slots[place(i)];
        store.read(Read {
            slot,
            offset: 0,
            len: BLOCK as u32,
            buf: arena.part(0, BLOCK),
            hold: store.hold(slot),
            urgent: true,
            attended: None,
            done: Box::new(move |result| back.send(result.is_ok()).unwrap_or(())),
        });
        assert_eq!(done.recv(), Ok(true));
        tier.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    slots.into_iter().for_each(|slot| store.abandon(slot));
    (median(bare), median(tier))
}

fn cpu_seconds() -> f64 {
    // SAFETY: all zeros is a valid value, and the structure outlives the call.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let dir = PathBuf::from(
        args.get(1)
            .expect("give a directory on the disk to measure"),
    );
    let rounds: usize = args
        .get(2)
        .map_or(5, |r| r.parse().expect("a number of rounds"));
    let arena = Arena::new(64 << 20);
    let mut options = Options::new(vec![dir.join("tier")], (TOTAL + TOTAL / 8) as u64);
    if args.iter().any(|a| a == "threads") {
        options.engine = EngineKind::Threads;
    }
    let (store, _) = NvmeTier::open(options).expect("the tier");
    let bare_file = dir.join("bare.dat");
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(&bare_file);
    // SAFETY: a valid descriptor and plain numbers.
    let made = unsafe { libc::fallocate(file.expect("a file").as_raw_fd(), 0, 0, TOTAL as i64) };
    assert_eq!(made, 0, "fallocate");
    bare(&bare_file, arena, 1 << 20, true); // the first lap over fresh space is slower
    tier(&store, arena, 1 << 20);
    let registration = args
        .iter()
        .any(|a| a == "register")
        .then(|| store.register(arena.part(0, 64 << 20)));
    println!(
        "engine {}; GB/s, medians of {rounds} interleaved rounds",
        store.engine_name()
    );
    println!("block   write: bare  tier ratio   read: bare  tier ratio   CPU s/GiB (tier)");
    for block in [64 << 10, 256 << 10, 1 << 20, 4 << 20] {
        let mut all: [Vec<f64>; 5] = Default::default();
        for _ in 0..rounds {
            all[0].push(bare(&bare_file, arena, block, true));
            all[2].push(bare(&bare_file, arena, block, false));
            let before = cpu_seconds();
            let (write, read) = tier(&store, arena, block);
            all[4].push((cpu_seconds() - before) / 2.0);
            all[1].push(write);
            all[3].push(read);
        }
        let ratio = |a: usize, b: usize| {
            median(
                all[a]
                    .iter()
                    .zip(&all[b])
                    .map(|(a, b)| a / b)
                    .collect::<Vec<f64>>(),
            )
        };
        let (write_ratio, read_ratio) = (ratio(1, 0), ratio(3, 2));
        let [bare_write, tier_write, bare_read, tier_read, cpu] = all.clone().map(median);
        println!(
            "{:>5}K {bare_write:>12.2} {tier_write:>5.2} {write_ratio:>5.2} \
             {bare_read:>12.2} {tier_read:>5.2} {read_ratio:>5.2} {cpu:>10.3}",
            block >> 10
        );
    }
    let (bare, tier) = latency(&store, &bare_file, arena);
    println!(
        "single 64K reads, p50: pread {bare:.0} us, tier {tier:.0} us, ratio {:.2}",
        tier / bare
    );
    println!("{:?}", store.stats());
    drop(registration);
    store.close(None).expect("close");
}
