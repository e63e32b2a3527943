//! What can go wrong, in words that say what was given, what is allowed and what to do.

use std::fmt;
use std::io;

/// What kind of thing went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The device or the file system refused or failed a request.
    Io,
    /// Another process (or this one) has the path open.
    Locked {
        /// The holder, where it is known.
        pid: Option<u32>,
    },
    /// A newer version of kvtier wrote this path. It was left as it is.
    NewerFormat,
    /// What is on the path is not a kvtier store, or is one beyond recovery.
    Damaged,
    /// The file system has no room for the file.
    Full,
    /// The deadline passed first.
    Deadline,
    /// An option has a value that is not allowed.
    Config,
    /// The tier is closed.
    Closed,
}

/// An error of the NVMe tier.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<io::Error>,
}

impl Error {
    /// An error of `kind` that says `message`.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error {
            kind,
            message: message.into(),
            source: None,
        }
    }

    /// A failed request: [`ErrorKind::Full`] where the file system has no room, else [`ErrorKind::Io`].
    pub fn io(message: impl Into<String>, source: io::Error) -> Self {
        let kind = match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => ErrorKind::Full,
            _ => ErrorKind::Io,
        };
        Error {
            kind,
            message: message.into(),
            source: Some(source),
        }
    }

    /// What kind of thing went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Is it the device that is missing or broken, so that others can stand in for it? What an
    /// operator has to put right (permissions, sizes, a path in use, a foreign file) is not that.
    pub(crate) fn is_device_failure(&self) -> bool {
        let errno = self.source.as_ref().and_then(io::Error::raw_os_error);
        self.kind == ErrorKind::Deadline
            || matches!(
                errno,
                Some(
                    libc::EIO
                        | libc::ENXIO
                        | libc::ENODEV
                        | libc::ENOENT
                        | libc::ENOTDIR
                        | libc::EROFS
                        | libc::ENOMEDIUM
                        | libc::EREMOTEIO
                        | libc::EBADMSG
                        | libc::EUCLEAN
                        | libc::ESHUTDOWN
                        | libc::ENOTCONN
                        | libc::ESTALE
                        | libc::ETIMEDOUT
                )
            )
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| e as _)
    }
}
