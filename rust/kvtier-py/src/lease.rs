//! Leases: blocks that stay where they are while Python looks at them.

use std::ffi::c_int;
use std::mem::ManuallyDrop;

use kvtier_core::fork::Generation;
use kvtier_core::lease::Leased;
use kvtier_core::load::Miss;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::dlpack;
use kvtier_core::sync::Mutex;

/// A leased block. In a fork of the process that leased it nothing is let go of: its memory is not
/// there, and the locks around it may be held for ever.
pub struct Held {
    leased: ManuallyDrop<Leased>,
    home: Generation,
}

impl Held {
    fn new(leased: Leased) -> Self {
        Held {
            leased: ManuallyDrop::new(leased),
            home: Generation::now(),
        }
    }

    /// The block.
    pub fn leased(&self) -> &Leased {
        &self.leased
    }
}

impl Clone for Held {
    fn clone(&self) -> Self {
        Held {
            leased: self.leased.clone(),
            home: self.home,
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.home.is_stale() {
            // SAFETY: dropped here and nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.leased) };
        }
    }
}

/// One leased block: a read-only buffer, and a DLPack producer. The block stays until the last of
/// these, and of the memoryviews and tensors made from them, is gone.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct BlockView {
    held: Held,
}

#[pymethods]
impl BlockView {
    /// Payload bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.held.leased().len()
    }

    /// The tier that the block lies in.
    #[getter]
    fn tier(&self) -> &'static str {
        self.held.leased().tier()
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let leased = slf.get().held.leased();
        let data = leased.ptr().cast_mut();
        // SAFETY: Python's contract for `view`; the pin lives as long as this object.
        unsafe { dlpack::fill(slf.as_any(), view, flags, data, leased.len(), true) }
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<Py<PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        let bad = |what: &str| {
            Err(pyo3::exceptions::PyBufferError::new_err(format!(
                "{what}: a leased block is CPU memory, lent without a copy"
            )))
        };
        if stream.is_some() {
            return bad("stream was given");
        }
        if dl_device.is_some_and(|device| device != (1, 0)) {
            return bad("another device was asked for");
        }
        if copy == Some(true) {
            return bad("copy=True was given");
        }
        dlpack::export(py, &self.held, max_version.is_some_and(|v| v.0 >= 1))
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (1, 0)
    }
}

/// The blocks of one call.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct Lease {
    blocks: Mutex<Vec<Result<Held, Miss>>>,
    reasons: Vec<Option<&'static str>>,
}

impl Lease {
    /// Over the result of a call.
    pub fn new(blocks: Vec<Result<Leased, Miss>>) -> Self {
        let reasons = blocks
            .iter()
            .map(|b| b.as_ref().err().map(|m| m.name()))
            .collect();
        let blocks = blocks.into_iter().map(|b| b.map(Held::new)).collect();
        Lease {
            blocks: Mutex::new(blocks),
            reasons,
        }
    }
}

#[pymethods]
impl Lease {
    /// One view a key, `None` for a miss; empty once released.
    fn blocks(&self) -> Vec<Option<BlockView>> {
        self.blocks
            .lock()
            .iter()
            .map(|block| {
                let held = block.as_ref().ok()?.clone();
                Some(BlockView { held })
            })
            .collect()
    }

    /// Why each key is a miss; `None` for a hit.
    #[getter]
    fn reasons(&self) -> Vec<Option<&'static str>> {
        self.reasons.clone()
    }

    /// Lets go of the blocks; views that were handed out keep theirs.
    fn release(&self) {
        self.blocks.lock().clear();
    }
}
