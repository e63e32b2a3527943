//! The bare loop that benches compare the tier with: one ring, a fixed file, registered memory on
//! huge pages, so many requests in flight, and nothing else. No checks, no metadata, no threads.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};
use kvtier_codec::image::PAGE;

/// The size of a huge page.
const HUGE: usize = 2 << 20;
/// Requests in flight at most.
const MAX_DEPTH: usize = 256;
/// Bytes of one request while the file is prepared, and how many are in flight.
const PREPARE: (usize, usize) = (1 << 20, 8);

/// A file that was written once from end to end, and nothing more.
pub struct Bare {
    file: File,
    len: u64,
}

/// What one run of the loop took.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Wall-clock time of the loop, without the ring's setup.
    pub elapsed: Duration,
    /// CPU time of the loop's thread.
    pub cpu: Duration,
    /// The memory was registered with the ring.
    pub registered: bool,
}

/// One run of the loop.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Write, or read.
    pub write: bool,
    /// Bytes of a request, a multiple of 4096.
    pub block: usize,
    /// Requests in flight.
    pub depth: usize,
    /// Where in the file the first one goes; the loop wraps at the file's end.
    pub start: u64,
    /// How many there are.
    pub count: usize,
    /// Ends with an `fdatasync`, which counts.
    pub sync: bool,
    /// Bytes of memory that the requests go round in, at least those in flight: few may all lie in the
    /// processor's cache.
    pub memory: usize,
}

impl Bare {
    /// Makes a file of `len` bytes, and writes all of it once: fresh space is slower. Also gives
    /// what that took.
    pub fn create(path: &Path, len: u64) -> io::Result<(Self, Timing)> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .custom_flags(libc::O_DIRECT)
            .open(path)?;
        let (block, depth) = PREPARE;
        let len = len - len % block as u64;
        // SAFETY: a valid descriptor and plain numbers.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len as libc::off_t) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let bare = Bare { file, len };
        let lap = Run {
            write: true,
            block,
            depth,
            start: 0,
            count: (len / block as u64) as usize,
            sync: true,
            memory: 0,
        };
        let timing = bare.run(lap, |_| ())?;
        Ok((bare, timing))
    }

    /// Runs the loop; `each` is told how long each request took, in the order of completion.
    pub fn run(&self, run: Run, mut each: impl FnMut(Duration)) -> io::Result<Timing> {
        let Run { block, depth, .. } = run;
        let blocks = self.len / block.max(1) as u64;
        if block == 0 || !block.is_multiple_of(PAGE) || blocks == 0 || u32::try_from(block).is_err()
        {
            return Err(io::Error::other(format!(
                "requests of {block} bytes do not fit a file of {} in whole pages",
                self.len
            )));
        }
        let depth = depth.clamp(1, MAX_DEPTH);
        let places = depth.max(run.memory / block);
        let memory = Huge::new(block * places)?;
        let mut ring: IoUring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(MAX_DEPTH as u32)
            .or_else(|_| IoUring::new(MAX_DEPTH as u32))?;
        ring.submitter().register_files(&[self.file.as_raw_fd()])?;
        let whole = libc::iovec {
            iov_base: memory.at(0).cast(),
            iov_len: block * places,
        };
        // SAFETY: the memory outlives the ring, which is dropped first.
        let registered = unsafe { ring.submitter().register_buffers(&[whole]) }.is_ok();
        let first = run.start / block as u64;
        let mut free: VecDeque<usize> = (0..places).collect();
        let mut sent_at = vec![Instant::now(); places];
        let (mut sent, mut done) = (0, 0);
        let (begun, cpu) = (Instant::now(), thread_cpu());
        while done < run.count {
            while sent < run.count.min(done + depth)
                && let Some(place) = free.pop_front()
            {
                let at = (first + sent as u64) % blocks * block as u64;
                let (fd, ptr, len) = (types::Fixed(0), memory.at(place * block), block as u32);
                let entry = match (run.write, registered) {
                    (true, true) => opcode::WriteFixed::new(fd, ptr, len, 0).offset(at).build(),
                    (true, false) => opcode::Write::new(fd, ptr, len).offset(at).build(),
                    (false, true) => opcode::ReadFixed::new(fd, ptr, len, 0).offset(at).build(),
                    (false, false) => opcode::Read::new(fd, ptr, len).offset(at).build(),
                };
                sent_at[place] = Instant::now();
                // SAFETY: memory and file outlive the request: all of them complete below, or the
                // memory is leaked.
                let pushed = unsafe { ring.submission().push(&entry.user_data(place as u64)) };
                if pushed.is_err() {
                    memory.leak();
                    return Err(io::Error::other("the ring has no free entry"));
                }
                sent += 1;
            }
            match ring.submit_and_wait(1) {
                Err(e) if e.raw_os_error() != Some(libc::EINTR) => {
                    memory.leak();
                    return Err(e);
                }
                _ => {}
            }
            while let Some(entry) = ring.completion().next() {
                if entry.result() != block as i32 {
                    memory.leak();
                    return Err(match entry.result() {
                        n if n < 0 => io::Error::from_raw_os_error(-n),
                        n => io::Error::other(format!("{n} bytes moved of {block}")),
                    });
                }
                let place = entry.user_data() as usize;
                each(sent_at[place].elapsed());
                free.push_back(place);
                done += 1;
            }
        }
        if run.write && run.sync {
            self.file.sync_data()?;
        }
        Ok(Timing {
            elapsed: begun.elapsed(),
            cpu: thread_cpu().saturating_sub(cpu),
            registered,
        })
    }
}

/// CPU time of the calling thread.
fn thread_cpu() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the structure outlives the call, which cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Private memory on huge pages, filled with bytes that do not compress to nothing.
struct Huge {
    map: *mut u8,
    mapped: usize,
    shift: usize,
}

impl Huge {
    fn new(len: usize) -> io::Result<Self> {
        let mapped = len.next_multiple_of(HUGE) + HUGE;
        let (access, kind) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping wherever the kernel likes.
        let map = unsafe { libc::mmap(std::ptr::null_mut(), mapped, access, kind, -1, 0) };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping just made; without huge pages it works too.
        unsafe { libc::madvise(map, mapped, libc::MADV_HUGEPAGE) };
        let map = map.cast::<u8>();
        let huge = Huge {
            map,
            mapped,
            shift: map.align_offset(HUGE),
        };
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        for at in (0..len).step_by(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // SAFETY: inside the mapping, aligned, and ours alone.
            unsafe { huge.at(at).cast::<u64>().write(state) };
        }
        Ok(huge)
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.map.wrapping_add(self.shift + offset)
    }

    /// Leaves the mapping in place: requests may still use it.
    fn leak(self) {
        std::mem::forget(self);
    }
}

impl Drop for Huge {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; nothing refers to it any more.
        unsafe { libc::munmap(self.map.cast(), self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_moves_every_block_once_and_refuses_what_does_not_fit() {
        let dir = tempfile::tempdir().unwrap();
        let (bare, first) = Bare::create(&dir.path().join("bare"), 4 << 20).unwrap();
        assert!(first.elapsed > Duration::ZERO);
        let mut run = Run {
            write: false,
            block: 64 << 10,
            depth: 8,
            start: 3 << 20,
            count: 32,
            sync: false,
            memory: 1 << 20,
        };
        for write in [false, true] {
            run.write = write;
            let mut seen = 0;
            let timing = bare.run(run, |latency| seen += usize::from(latency > Duration::ZERO));
            assert!(timing.unwrap().elapsed > Duration::ZERO);
            assert_eq!(seen, 32);
        }
        run.block = 1000;
        assert!(bare.run(run, |_| ()).is_err());
    }
}
