//! A preallocated file, or a block device, opened past the page cache where that is possible.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Once;

use kvtier_codec::image::PAGE;

use super::Device;
use crate::buf::Pages;
use crate::error::Error;
use crate::units::Bytes;

/// Name of the data file in a directory.
pub const DATA_FILE: &str = "kvtier.dat";

/// A file or block device.
#[derive(Debug)]
pub struct FileDevice {
    file: File,
    len: u64,
    direct: bool,
}

impl FileDevice {
    /// Opens what is there.
    pub fn open(path: &Path, writable: bool) -> Result<Self, Error> {
        let mut options = OpenOptions::new();
        options.read(true).write(writable);
        Self::with(path, &options)
    }

    /// Makes (or makes anew) a file of `bytes` bytes whose space is allocated.
    pub fn create(path: &Path, bytes: u64) -> Result<Self, Error> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        options.mode(0o600); // it holds what users said
        options.custom_flags(libc::O_NOFOLLOW); // it is emptied
        let file = options
            .open(path)
            .map_err(|e| Error::io(format!("cannot open {}", path.display()), e))?;
        allocate(&file, bytes).map_err(|e| {
            Error::io(
                format!(
                    "cannot allocate {} for {}: give a smaller size, or make room",
                    Bytes(bytes),
                    path.display()
                ),
                e,
            )
        })?;
        Self::open(path, true)
    }

    /// Opens with O_DIRECT; without it only where the file system refuses it.
    fn with(path: &Path, options: &OpenOptions) -> Result<Self, Error> {
        let fail = |e| Error::io(format!("cannot open {}", path.display()), e);
        let direct = options.clone().custom_flags(libc::O_DIRECT).open(path);
        let direct = direct.and_then(|file| match file.read_at(&mut Pages::new(1), 0) {
            Ok(_) => Ok(file),
            Err(e) => Err(e),
        });
        let (mut file, direct) = match direct {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                static SAID: Once = Once::new();
                SAID.call_once(|| {
                    tracing::warn!(
                        "the file system of {} refuses O_DIRECT with {PAGE}-byte alignment: \
                         reads and writes go through the page cache, which is slower and takes memory",
                        path.display()
                    );
                });
                (options.open(path).map_err(fail)?, false)
            }
            other => (other.map_err(fail)?, true),
        };
        let len = file.seek(SeekFrom::End(0)).map_err(fail)?;
        Ok(FileDevice { file, len, direct })
    }

    /// The alignment in bytes that O_DIRECT asks for here, or `None`; and why.
    pub fn direct(&self) -> (Option<u32>, String) {
        if !self.direct {
            let why = "refused: reads and writes go through the page cache";
            return (None, why.into());
        }
        // SAFETY: all zeros is a valid value of this plain structure.
        let mut found: libc::statx = unsafe { std::mem::zeroed() };
        // SAFETY: a valid descriptor, an empty path that names it, and a structure to fill.
        let asked = unsafe {
            libc::statx(
                self.file.as_raw_fd(),
                c"".as_ptr(),
                libc::AT_EMPTY_PATH,
                libc::STATX_DIOALIGN,
                &mut found,
            )
        };
        if asked == 0 && found.stx_mask & libc::STATX_DIOALIGN != 0 {
            let align = found.stx_dio_offset_align.max(found.stx_dio_mem_align);
            return (Some(align), "as the file system says".into());
        }
        (
            Some(PAGE as u32),
            "it works; the file system does not say how it aligns".into(),
        )
    }
}

impl Device for FileDevice {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        self.file.write_at(buf, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn raw_fd(&self) -> Option<RawFd> {
        Some(self.file.as_raw_fd())
    }
}

/// Is `path` a block device?
pub fn is_block_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|m| m.file_type().is_block_device())
}

/// What is free on the file's file system.
fn free_bytes(file: &File) -> io::Result<u64> {
    // SAFETY: numbers only, for which all zeros is a value.
    let mut space: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: a valid descriptor, and a structure that outlives the call.
    if unsafe { libc::fstatvfs(file.as_raw_fd(), &mut space) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(space.f_bfree * space.f_frsize)
}

/// Allocates the file's space, by writing zeros where the file system cannot just set it aside.
fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    let too_large = |_| io::Error::from_raw_os_error(libc::EFBIG);
    let len = libc::off_t::try_from(bytes).map_err(too_large)?;
    if bytes.saturating_sub(file.metadata()?.blocks() * 512) > free_bytes(file)? {
        // Else what there is would be taken until the rest is missed, and others would fail meanwhile.
        return Err(io::Error::from_raw_os_error(libc::ENOSPC));
    }
    loop {
        // SAFETY: a valid descriptor and plain numbers.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::EOPNOTSUPP | libc::ENOSYS) => break,
            _ => return Err(error),
        }
    }
    let zeros = Pages::new(256);
    let mut at = 0;
    while at < bytes {
        let n = (bytes - at).min(zeros.len() as u64) as usize;
        file.write_all_at(&zeros[..n], at)?;
        at += n as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_drive_has_is_refused_before_any_of_it_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let file = File::create(dir.path().join("store")).unwrap();
        let more = free_bytes(&file).unwrap() * 2 + (1 << 30);
        let error = allocate(&file, more).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        assert_eq!(file.metadata().unwrap().len(), 0);
        assert_eq!(file.metadata().unwrap().blocks(), 0);
    }
}
