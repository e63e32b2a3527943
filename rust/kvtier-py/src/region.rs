//! Memory of the caller that reads go straight into.

use std::any::Any;
use std::sync::Arc;

use kvtier_core::store;
use pyo3::prelude::*;

use crate::buffers::View;
use crate::errors::raise;
use kvtier_core::sync::Mutex;

/// The caller's memory, lent to operations. Rust threads may drop it: then it is given back by the
/// next call that comes from Python.
struct Lent(Option<View>);

static RETURNED: Mutex<Vec<View>> = Mutex::new(Vec::new());

impl Drop for Lent {
    fn drop(&mut self) {
        RETURNED.lock().extend(self.0.take());
    }
}

/// Gives back memory that was lent and is no longer used. Called with the interpreter attached.
pub fn give_back() {
    // In a fork the lock may be held by a thread that is not there: then nothing is given back.
    let views = RETURNED
        .try_lock()
        .map(|mut returned| std::mem::take(&mut *returned));
    drop(views);
}

/// Memory of the caller that NVMe reads go straight into.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct Region {
    region: Option<Arc<store::Region>>,
    len: usize,
}

impl Drop for Region {
    fn drop(&mut self) {
        self.region = None;
        give_back();
    }
}

impl Region {
    /// Lends `buffer` to what `register` makes of it.
    pub fn new(
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        register: impl FnOnce(usize, usize, Arc<dyn Any + Send + Sync>) -> PyResult<Arc<store::Region>>,
    ) -> PyResult<Self> {
        let view = View::raw(buffer, true).map_err(|error| {
            let what = format!(
                "a region is writable contiguous memory, and what was given is not: {error}"
            );
            raise(py, "InvalidBlockError", what)
        })?;
        let (start, len) = (view.ptr() as usize, view.len());
        let region = register(start, len, Arc::new(Lent(Some(view))));
        give_back(); // if it was refused
        Ok(Region {
            region: Some(region?),
            len,
        })
    }
}

#[pymethods]
impl Region {
    /// Bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.len
    }

    /// Operations that still use the memory. After a call that gave `deadline`, its buffer is the
    /// store's until this is 0.
    fn in_flight(&self) -> usize {
        self.region.as_ref().map_or(0, |region| region.in_flight())
    }
}
