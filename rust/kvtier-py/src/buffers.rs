//! Memory that Python objects lend: anything with the buffer protocol, and through
//! `kvtier.buffers` torch tensors, extension dtypes and DLPack.

use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;

use kvtier_core::read::Out;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::errors::raise;
use crate::space::Space;

static EXPORT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// A borrowed C-contiguous buffer. It must be dropped with the interpreter attached.
pub struct View(Box<ffi::Py_buffer>);

// SAFETY: the buffer's memory stays valid and in place until it is released; who may read or write
// it meanwhile is the Python caller's promise, as with every buffer.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    /// Borrows the memory of `object`, checked against the space's dtype and shape.
    pub fn new(object: &Bound<'_, PyAny>, space: &Space, writable: bool) -> PyResult<Self> {
        match Self::acquire(object, writable) {
            Ok(view) => {
                view.check(object.py(), space)?;
                Ok(view)
            }
            // Not a plain buffer: let Python explain, or find another way in.
            Err(_) => Self::acquire(&export(object, space, writable)?, writable),
        }
    }

    /// As [`View::new`] for memory without a layout.
    pub fn raw(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        Self::acquire(object, writable)
    }

    fn acquire(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        let flags: c_int = ffi::PyBUF_C_CONTIGUOUS
            | ffi::PyBUF_FORMAT
            | if writable { ffi::PyBUF_WRITABLE } else { 0 };
        let mut view = Box::new(MaybeUninit::<ffi::Py_buffer>::zeroed());
        // SAFETY: attached; `view` is fresh, and released in `drop` only if it was filled.
        let rc = unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), view.as_mut_ptr(), flags) };
        if rc != 0 {
            return Err(PyErr::take(object.py())
                .unwrap_or_else(|| PyBufferError::new_err("the object lends no buffer")));
        }
        // SAFETY: a `Py_buffer` is valid when zeroed, and was filled above.
        Ok(View(unsafe { Box::from_raw(Box::into_raw(view).cast()) }))
    }

    /// The first byte.
    pub fn ptr(&self) -> *mut u8 {
        self.0.buf.cast()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.0.len as usize
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        if self.len() == 0 {
            return &[];
        }
        // SAFETY: contiguous memory of `len` bytes while the view lives. That nobody writes to it
        // meanwhile is the caller's promise; the core reads each byte once, so a broken promise
        // gives a block of mixed content, never one that fails its own checksum.
        unsafe { std::slice::from_raw_parts(self.ptr(), self.len()) }
    }

    /// Where a read puts its bytes.
    pub fn out(&self) -> Out {
        Out {
            ptr: self.ptr(),
            len: self.len(),
        }
    }

    fn check(&self, py: Python<'_>, space: &Space) -> PyResult<()> {
        let view = &*self.0;
        let format = if view.format.is_null() {
            "B"
        } else {
            // SAFETY: a non-null format is a C string that lives as long as the view.
            unsafe { CStr::from_ptr(view.format) }
                .to_str()
                .unwrap_or("?")
        };
        if !space.accepts_format(format, view.itemsize as usize) {
            return Err(raise(
                py,
                "InvalidBlockError",
                format!(
                    "a buffer of format {format:?} ({} bytes an element) was given; this layout takes {}. Convert it, or view it as uint8 if its bits are right already",
                    view.itemsize,
                    match space.dtype() {
                        Some(dtype) => format!("{dtype} or plain bytes (uint8)"),
                        None => "numbers of any kind, but no objects and pointers".into(),
                    }
                ),
            ));
        }
        if view.ndim > 1 && !view.shape.is_null() {
            // SAFETY: `shape` has `ndim` entries while the view lives.
            let shape = unsafe { std::slice::from_raw_parts(view.shape, view.ndim as usize) };
            if !space.accepts_shape(shape, view.itemsize as usize) {
                return Err(raise(
                    py,
                    "InvalidBlockError",
                    format!(
                        "a buffer of shape {shape:?} was given; this layout's blocks are {}. Transpose it, or pass flat bytes in that order",
                        space.describe_shape()
                    ),
                ));
            }
        }
        Ok(())
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: filled by `PyObject_GetBuffer`, released once; views are dropped attached.
        unsafe { ffi::PyBuffer_Release(&mut *self.0) };
    }
}

/// Has `kvtier.buffers.export` turn an object that lends no plain buffer into one that does.
fn export<'py>(
    object: &Bound<'py, PyAny>,
    space: &Space,
    writable: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let function = EXPORT.get_or_try_init(py, || {
        py.import("kvtier.buffers")?
            .getattr("export")
            .map(Bound::unbind)
    })?;
    function.bind(py).call1((
        object,
        space.dtype(),
        space.python_shape(),
        space.token_axis(),
        writable,
    ))
}
