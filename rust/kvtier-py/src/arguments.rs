//! Arguments of the verbs that are easily mistaken: keys, lists of them, and times. What is wrong is
//! looked for only once something is.

use std::ops::Deref;
use std::time::{Duration, Instant};

use kvtier_core::config::DEFAULT_TIMEOUT;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyByteArray, PyBytes, PyMemoryView, PyString};

use crate::errors::raise;

const A_KEY: &str = "a key is 16 to 64 bytes, such as chain(token_ids) gives";

/// A key.
pub struct Key(PyBackedBytes);

/// Keys, in a sequence.
pub struct Keys(Vec<PyBackedBytes>);

/// Keys of parents, in a sequence; `None` is no parent.
pub struct Parents(Vec<Option<PyBackedBytes>>);

/// Seconds; `None` is the default.
pub struct Seconds(pub Option<f64>);

impl Deref for Key {
    type Target = PyBackedBytes;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Deref for Keys {
    type Target = Vec<PyBackedBytes>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Deref for Parents {
    type Target = Vec<Option<PyBackedBytes>>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<'py> FromPyObject<'_, 'py> for Key {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match given.extract() {
            Ok(key) => Ok(Key(key)),
            Err(_) => Err(invalid(
                &given,
                format!("{} was given as a key; {A_KEY}", what(&given)),
            )),
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for Keys {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        given
            .extract()
            .map(Keys)
            .map_err(|e| explain(&given, "keys", e))
    }
}

impl<'py> FromPyObject<'_, 'py> for Parents {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        (given.extract().map(Parents)).map_err(|e| explain(&given, "parents", e))
    }
}

impl<'py> FromPyObject<'_, 'py> for Seconds {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        given.extract().map(Seconds).map_err(|_| {
            raise(given.py(), "ConfigError", format!(
                "{} was given as a timeout or deadline; allowed are seconds from 0 on, as a number, or None for the default",
                shown(&given)
            ))
        })
    }
}

impl Seconds {
    /// The moment so many seconds from now; the default timeout if there is none.
    pub fn until(&self, py: Python<'_>) -> PyResult<Instant> {
        let wait = match self.0 {
            None => DEFAULT_TIMEOUT,
            Some(seconds) if seconds >= 0.0 => {
                // A year is as good as for ever, and cannot overflow the clock.
                Duration::from_secs_f64(seconds.min(365.0 * 86_400.0))
            }
            Some(seconds) => {
                return Err(raise(
                    py,
                    "ConfigError",
                    format!(
                        "timeout={seconds} was given; seconds from 0 on are allowed, or None for {} s",
                        DEFAULT_TIMEOUT.as_secs()
                    ),
                ));
            }
        };
        Ok(Instant::now() + wait)
    }
}

fn invalid(given: &Bound<'_, PyAny>, message: String) -> PyErr {
    raise(given.py(), "InvalidBlockError", message)
}

/// Why `given` is no sequence of keys; `error` where it is not known.
fn explain(given: &Bound<'_, PyAny>, name: &str, error: PyErr) -> PyErr {
    let one = given.is_instance_of::<PyBytes>()
        || given.is_instance_of::<PyByteArray>()
        || given.is_instance_of::<PyMemoryView>();
    if one {
        return invalid(
            given,
            format!(
                "{} was given for {name}, which is a list of keys: put it into one, as in [key]",
                what(given)
            ),
        );
    }
    let text = given.is_instance_of::<PyString>();
    let Some(length) = given.len().ok().filter(|_| !text) else {
        return invalid(
            given,
            format!(
                "{} was given for {name}; allowed is a list of keys, and {A_KEY}",
                what(given)
            ),
        );
    };
    let none = name == "parents";
    for i in 0..length {
        let Ok(item) = given.get_item(i) else { break };
        if item.extract::<PyBackedBytes>().is_err() && !(none && item.is_none()) {
            let or = if none {
                "; None for a block without a parent"
            } else {
                ""
            };
            return invalid(
                given,
                format!("{name}[{i}] is {}; {A_KEY}{or}", what(&item)),
            );
        }
    }
    match error.is_instance_of::<PyTypeError>(given.py()) {
        true => invalid(
            given,
            format!(
                "{} was given for {name}; allowed is a list of keys, and {A_KEY}",
                what(given)
            ),
        ),
        false => error,
    }
}

/// `"abc"`, or `a list`: what a reader recognises.
fn what(given: &Bound<'_, PyAny>) -> String {
    let name = given.get_type().name();
    let name = name.map_or_else(|_| "object".into(), |n| n.to_string());
    format!("an object of type {name} ({})", shown(given))
}

fn shown(given: &Bound<'_, PyAny>) -> String {
    let text = given.repr().map_or_else(|_| "?".into(), |r| r.to_string());
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
