//! One process per path: a lock that ends with the process, whatever way it ends.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::error::{Error, ErrorKind};

/// Name of the lock file in a directory.
pub const LOCK_FILE: &str = "kvtier.lock";

/// The lock of a path; dropping it gives the path free.
#[derive(Debug)]
pub struct Lock {
    /// What is locked: the lock file and, once it is there, the data file; or the block device.
    files: Vec<File>,
    owner: u32,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // A child forked meanwhile shares the lock, and closing our descriptor would leave it to
        // that child; and a child must not end its parent's.
        if self.owner == std::process::id() {
            for file in &self.files {
                let _ = lock_op(file, libc::F_OFD_SETLK, libc::F_UNLCK); // closing is next anyway
            }
        }
    }
}

impl Lock {
    /// Locks a directory through its lock file, which then names this process.
    pub fn directory(dir: &Path) -> Result<Self, Error> {
        let path = dir.join(LOCK_FILE);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .custom_flags(libc::O_NOFOLLOW) // its content is replaced
            .open(&path)
            .map_err(|e| Error::io(format!("cannot open {} for writing", path.display()), e))?;
        Self::take(&file, dir, || holder(dir))?;
        let note = file
            .set_len(0)
            .and_then(|()| write!(file, "{}", std::process::id()));
        // The lock stands without the note; only the message of others gets poorer.
        if let Err(e) = note {
            tracing::warn!("cannot write this process's id to {}: {e}", path.display());
        }
        Ok(Lock::of(file))
    }

    /// Locks the data file too: somebody might remove the lock file while it is held.
    pub fn extend(&mut self, data: &Path) -> Result<(), Error> {
        self.files.append(&mut Self::file(data)?.files);
        Ok(())
    }

    /// Locks a file that is there, or a character device.
    pub fn file(path: &Path) -> Result<Self, Error> {
        let file = open(path, 0)?;
        Self::take(&file, path, || None)?;
        Ok(Lock::of(file))
    }

    /// Locks a block device itself, through a descriptor of its own.
    ///
    /// The kernel refuses one that is mounted or otherwise in exclusive use, under whatever name.
    pub fn device(path: &Path) -> Result<Self, Error> {
        let file = open(path, libc::O_EXCL)?;
        Self::take(&file, path, || None)?;
        Ok(Lock::of(file))
    }

    fn of(file: File) -> Self {
        Lock {
            files: vec![file],
            owner: std::process::id(),
        }
    }

    fn take(file: &File, path: &Path, holder: impl Fn() -> Option<u32>) -> Result<(), Error> {
        match lock_op(file, libc::F_OFD_SETLK, libc::F_WRLCK) {
            Ok(_) => Ok(()),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                Err(in_use(path, holder()))
            }
            Err(e) => Err(Error::io(format!("cannot lock {}", path.display()), e)),
        }
    }
}

fn in_use(path: &Path, pid: Option<u32>) -> Error {
    let who = pid.map_or("another process".into(), |pid| format!("process {pid}"));
    Error::new(
        ErrorKind::Locked { pid },
        format!(
            "{} is in use by {who}: close the store there, or give another path",
            path.display()
        ),
    )
}

fn open(path: &Path, flags: i32) -> Result<File, Error> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(flags)
        .open(path)
        .map_err(|e| match e.raw_os_error() {
            Some(libc::EBUSY) => in_use(path, None),
            _ => Error::io(format!("cannot open {} for writing", path.display()), e),
        })
}

/// The process that holds the lock of a directory, if one does and it is known.
pub fn holder(dir: &Path) -> Option<u32> {
    let mut file = File::open(dir.join(LOCK_FILE)).ok()?;
    if lock_op(&file, libc::F_OFD_GETLK, libc::F_WRLCK).ok()? == libc::F_UNLCK as i16 {
        return None;
    }
    let mut pid = String::new();
    file.rewind().ok()?;
    file.read_to_string(&mut pid).ok()?;
    pid.trim().parse().ok()
}

/// Sets a lock over the whole file, or asks for one; returns the type that came back.
fn lock_op(file: &File, op: libc::c_int, kind: libc::c_int) -> io::Result<i16> {
    let mut lock = libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: a valid descriptor, and a lock structure that outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), op, &mut lock) } {
        0 => Ok(lock.l_type),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_holder_is_refused_and_told_who_holds_it() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(holder(dir.path()), None);
        let lock = Lock::directory(dir.path()).unwrap();
        let me = Some(std::process::id());
        assert_eq!(holder(dir.path()), me);
        let refused = Lock::directory(dir.path()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Locked { pid: me });
        drop(lock);
        assert_eq!(holder(dir.path()), None);
        Lock::directory(dir.path()).unwrap();
    }
}
