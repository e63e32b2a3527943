//! The core's errors as the exceptions of `kvtier.errors`.

use kvtier_core::error::{Error, Kind};
use kvtier_core::fork::Generation;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// The exception class of that name.
fn class<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyType>> {
    let module = MODULE.get_or_try_init(py, || py.import("kvtier.errors").map(Bound::unbind))?;
    Ok(module.bind(py).getattr(name)?.cast_into::<PyType>()?)
}

/// An exception of `kvtier.errors`.
pub fn raise(py: Python<'_>, name: &str, message: String) -> PyErr {
    match class(py, name) {
        Ok(class) => PyErr::from_type(class, message),
        Err(_) => PyRuntimeError::new_err(message),
    }
}

/// The exception that this error is.
pub fn from_core(py: Python<'_>, error: &Error) -> PyErr {
    let name = match error.kind() {
        Kind::Config => "ConfigError",
        Kind::InvalidBlock => "InvalidBlockError",
        Kind::Closed => "ClosedError",
        Kind::Locked => "LockedError",
        Kind::Full => "FullError",
        Kind::Deadline => "DeadlineError",
        Kind::Storage => "StorageError",
        Kind::Corrupt => "CorruptError",
        Kind::Unsupported => "UnsupportedError",
    };
    raise(py, name, error.to_string())
}

/// Refuses what would wait for threads of another process.
pub fn check_home(py: Python<'_>, home: Generation) -> PyResult<()> {
    if !home.is_stale() {
        return Ok(());
    }
    let what = "this process is a fork of the one that opened the store, and a fork has none of its threads. Open a store in each process, after the fork";
    Err(raise(py, "ClosedError", what.into()))
}
