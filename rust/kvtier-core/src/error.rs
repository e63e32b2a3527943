//! What can go wrong, in the words of the Python exceptions it becomes.

use std::fmt;

/// The kind of an [`Error`]; each is one exception class in Python.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A setting that cannot work.
    Config,
    /// Bytes, a size, a range or a key that does not fit the layout.
    InvalidBlock,
    /// The store was closed, or this process is a fork of the one that opened it.
    Closed,
    /// Another process holds the directory.
    Locked,
    /// No room, and none can be made now.
    Full,
    /// The deadline passed first.
    Deadline,
    /// The operating system or a device refused.
    Storage,
    /// Stored bytes are not what was put, where no miss can say so.
    Corrupt,
    /// This build or machine cannot do it.
    Unsupported,
}

/// An error: what was given, what is allowed, what to do.
#[derive(Clone, Debug)]
pub struct Error {
    kind: Kind,
    message: String,
}

/// The result of everything here that can fail.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of this kind.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Error {
            kind,
            message: message.into(),
        }
    }

    /// Its kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The last error of the operating system, with what was tried.
    pub fn os(what: impl fmt::Display) -> Self {
        let error = std::io::Error::last_os_error();
        Error::new(Kind::Storage, format!("{what}: {error}"))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<kvtier_nvme::Error> for Error {
    fn from(error: kvtier_nvme::Error) -> Self {
        use kvtier_nvme::ErrorKind;
        let kind = match error.kind() {
            ErrorKind::Locked { .. } => Kind::Locked,
            ErrorKind::NewerFormat => Kind::Unsupported,
            ErrorKind::Damaged => Kind::Corrupt,
            ErrorKind::Deadline => Kind::Deadline,
            ErrorKind::Config => Kind::Config,
            ErrorKind::Closed => Kind::Closed,
            _ => Kind::Storage,
        };
        Error::new(kind, error.to_string())
    }
}
