//! What the tier writes to: a flat range of bytes with a barrier.

pub mod file;
pub mod lock;
#[cfg(any(test, feature = "sim"))]
pub mod sim;

use std::io;
use std::os::fd::RawFd;

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

/// Reads all of `buf` from `offset` on.
pub fn read_exact(device: &dyn Device, buf: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < buf.len() {
        match device.read_at(&mut buf[done..], offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Writes all of `buf` at `offset`.
pub fn write_all(device: &dyn Device, buf: &[u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < buf.len() {
        match device.write_at(&buf[done..], offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
