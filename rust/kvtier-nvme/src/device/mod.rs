//! What the tier writes to: a flat range of bytes with a barrier.

pub mod file;
pub mod lock;
#[cfg(any(test, feature = "sim"))]
pub mod sim;

use std::io;
use std::os::fd::RawFd;

use kvtier_codec::image::PAGE;

/// A block device, or a file that stands for one. Offsets and lengths are multiples of 4096.
pub trait Device: Send + Sync {
    /// Reads into `buf` from `offset` on; may read less than asked.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes `buf` at `offset`; may write less than asked.
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize>;
    /// Returns when all writes that completed before the call survive a loss of power.
    fn sync(&self) -> io::Result<()>;
    /// Bytes on the device; fixed while it is open.
    fn len(&self) -> u64;
    /// Has the device no bytes at all?
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The descriptor io_uring may use, if there is one.
    fn raw_fd(&self) -> Option<RawFd> {
        None
    }
}

/// Transient errors in a row before a transfer fails.
pub const RETRIES: u32 = 64;

/// How far a transfer of several requests has come.
#[derive(Debug)]
pub struct Progress {
    len: usize,
    moved: usize,
    retries: u32,
}

impl Progress {
    /// A transfer of `len` bytes, a multiple of 4096.
    pub fn new(len: usize) -> Self {
        Progress {
            len,
            moved: 0,
            retries: 0,
        }
    }

    /// Bytes that have been moved, a multiple of 4096.
    pub fn moved(&self) -> usize {
        self.moved
    }

    /// Takes the device's answer to the request for the rest: bytes moved, or an error. `None` asks
    /// for another request; `eof` is the error where nothing more can be moved.
    pub fn advance(
        &mut self,
        answer: io::Result<usize>,
        eof: io::ErrorKind,
    ) -> Option<io::Result<()>> {
        let rest = self.len - self.moved;
        let passing = match answer {
            Ok(n) if n == rest => return Some(Ok(())),
            Ok(n) if n > rest => {
                return Some(Err(io::Error::other(format!("{n} bytes moved of {rest}"))));
            }
            Ok(0) => return Some(Err(eof.into())),
            // What follows must stay aligned, so a part of a page is moved again.
            Ok(n) if n >= PAGE => {
                self.moved += n - n % PAGE;
                self.retries = 0;
                return None;
            }
            Ok(n) => io::Error::other(format!("short transfer: {n} bytes")),
            Err(e) => match e.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => e,
                _ => return Some(Err(e)),
            },
        };
        self.retries += 1;
        (self.retries > RETRIES).then_some(Err(passing))
    }
}

/// Reads all of `buf`, whole pages, from `offset` on.
pub fn read_exact(device: &dyn Device, buf: &mut [u8], offset: u64) -> io::Result<()> {
    let mut progress = Progress::new(buf.len());
    loop {
        let moved = progress.moved();
        let answer = device.read_at(&mut buf[moved..], offset + moved as u64);
        if let Some(result) = progress.advance(answer, io::ErrorKind::UnexpectedEof) {
            return result;
        }
    }
}

/// Writes all of `buf`, whole pages, at `offset`.
pub fn write_all(device: &dyn Device, buf: &[u8], offset: u64) -> io::Result<()> {
    let mut progress = Progress::new(buf.len());
    loop {
        let moved = progress.moved();
        let answer = device.write_at(&buf[moved..], offset + moved as u64);
        if let Some(result) = progress.advance(answer, io::ErrorKind::WriteZero) {
            return result;
        }
    }
}
