//! One process per path: a lock that ends with the process, whatever way it ends.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::error::{Error, ErrorKind};

/// Name of the lock file in a directory.
pub const LOCK_FILE: &str = "kvtier.lock";

/// The lock of a path; dropping it gives the path free.
#[derive(Debug)]
pub struct Lock {
    file: File,
    owner: u32,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // A child forked meanwhile shares the lock, and closing our descriptor would leave it to
        // that child; and a child must not end its parent's.
        if self.owner == std::process::id() {
            let _ = lock_op(&self.file, libc::F_OFD_SETLK, libc::F_UNLCK); // closing is next anyway
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

    /// Locks a block device itself, through a descriptor of its own.
    pub fn device(path: &Path) -> Result<Self, Error> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|e| Error::io(format!("cannot open {} for writing", path.display()), e))?;
        Self::take(&file, path, || None)?;
        Ok(Lock::of(file))
    }

    fn of(file: File) -> Self {
        let owner = std::process::id();
        Lock { file, owner }
    }

    fn take(file: &File, path: &Path, holder: impl Fn() -> Option<u32>) -> Result<(), Error> {
        match lock_op(file, libc::F_OFD_SETLK, libc::F_WRLCK) {
            Ok(_) => Ok(()),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                let pid = holder();
                let who = pid.map_or("another process".into(), |pid| format!("process {pid}"));
                Err(Error::new(
                    ErrorKind::Locked { pid },
                    format!(
                        "{} is in use by {who}: close the store there, or give another path",
                        path.display()
                    ),
                ))
            }
            Err(e) => Err(Error::io(format!("cannot lock {}", path.display()), e)),
        }
    }
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
