//! Memory that Python objects lend: NumPy arrays, anything with the buffer protocol, and through
//! `kvtier.buffers` torch tensors, extension dtypes and DLPack.

use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;

use kvtier_core::read::Out;
use numpy::npyffi::{NPY_ARRAY_WRITEABLE, NPY_TYPES};
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::errors::raise;
use crate::space::Space;

static EXPORT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Borrowed C-contiguous memory. It must be dropped with the interpreter attached.
pub struct View {
    ptr: *mut u8,
    len: usize,
    lender: Lender,
}

enum Lender {
    /// An array of plain numbers. It has a buffer too, but NumPy takes as long to describe one as a copy
    /// of a kilobyte does.
    Array(#[expect(dead_code, reason = "it keeps the memory")] Py<PyUntypedArray>),
    Buffer(Box<ffi::Py_buffer>),
}

// SAFETY: the memory stays valid and in place until it is released; who may read or write
// it meanwhile is the Python caller's promise, as with every buffer.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    /// Borrows the memory of `object`, checked against the space's dtype and shape.
    pub fn new(object: &Bound<'_, PyAny>, space: &Space, writable: bool) -> PyResult<Self> {
        if let Ok(array) = object.cast()
            && let Some(view) = Self::of_array(array, space, writable)?
        {
            return Ok(view);
        }
        match Self::raw(object, writable) {
            Ok(view) => {
                view.check(object.py(), space)?;
                Ok(view)
            }
            // Not a plain buffer: let Python explain, or find another way in.
            Err(_) => Self::raw(&export(object, space, writable)?, writable),
        }
    }

    /// As [`View::new`], of an array. `None`: what it lends is to be asked of its buffer.
    fn of_array(
        array: &Bound<'_, PyUntypedArray>,
        space: &Space,
        writable: bool,
    ) -> PyResult<Option<Self>> {
        let dtype = array.dtype();
        // SAFETY: an array, alive while the reference is.
        let fields = unsafe { &*array.as_array_ptr() };
        let lends =
            array.is_c_contiguous() && (!writable || fields.flags & NPY_ARRAY_WRITEABLE != 0);
        let Some(format) = plain(&dtype).filter(|_| lends) else {
            return Ok(None);
        };
        let shape = array.shape();
        let axes: Vec<isize> = match shape {
            [_] => Vec::new(), // it says nothing
            _ => shape.iter().map(|&n| n as isize).collect(),
        };
        check(array.py(), space, format, dtype.itemsize(), &axes)?;
        Ok(Some(View {
            ptr: fields.data.cast(),
            len: array.len() * dtype.itemsize(),
            lender: Lender::Array(array.clone().unbind()),
        }))
    }

    /// As [`View::new`] for memory without a layout.
    pub fn raw(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
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
        let view: Box<ffi::Py_buffer> = unsafe { Box::from_raw(Box::into_raw(view).cast()) };
        Ok(View {
            ptr: view.buf.cast(),
            len: view.len as usize,
            lender: Lender::Buffer(view),
        })
    }

    /// The first byte.
    pub fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
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

    /// Is a buffer what the space takes?
    fn check(&self, py: Python<'_>, space: &Space) -> PyResult<()> {
        let Lender::Buffer(view) = &self.lender else {
            return Ok(());
        };
        let format = if view.format.is_null() {
            "B"
        } else {
            // SAFETY: a non-null format is a C string that lives as long as the view.
            unsafe { CStr::from_ptr(view.format) }
                .to_str()
                .unwrap_or("?")
        };
        let shape = match view.shape.is_null() {
            true => &[],
            // SAFETY: `shape` has `ndim` entries while the view lives.
            false => unsafe { std::slice::from_raw_parts(view.shape, view.ndim as usize) },
        };
        check(py, space, format, view.itemsize as usize, shape)
    }
}

/// The format of plain numbers in this machine's order of bytes.
fn plain(dtype: &Bound<'_, PyArrayDescr>) -> Option<&'static str> {
    /// By NumPy's numbers of its own types.
    const FORMATS: [&str; 13] = [
        "?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "f", "d",
    ];
    const HALF: c_int = NPY_TYPES::NPY_HALF as c_int;
    let format = match dtype.num() {
        HALF => "e",
        number => FORMATS.get(usize::try_from(number).ok()?)?,
    };
    (matches!(dtype.byteorder(), b'=' | b'|') && !dtype.has_fields()).then_some(format)
}

/// Is memory of this form what the space takes?
fn check(
    py: Python<'_>,
    space: &Space,
    format: &str,
    itemsize: usize,
    shape: &[isize],
) -> PyResult<()> {
    if !space.accepts_format(format, itemsize) {
        return Err(raise(
            py,
            "InvalidBlockError",
            format!(
                "a buffer of format {format:?} ({itemsize} bytes an element) was given; this layout takes {}. Convert it, or view it as uint8 if its bits are right already",
                match space.dtype() {
                    Some(dtype) => format!("{dtype} or plain bytes (uint8)"),
                    None => "numbers of any kind, but no objects and pointers".into(),
                }
            ),
        ));
    }
    if shape.len() > 1 && !space.accepts_shape(shape, itemsize) {
        return Err(raise(
            py,
            "InvalidBlockError",
            format!(
                "a buffer of shape {shape:?} was given; this layout's blocks are {}. Transpose it, or pass flat bytes in that order",
                space.describe_shape()
            ),
        ));
    }
    Ok(())
}

impl Drop for View {
    fn drop(&mut self) {
        if let Lender::Buffer(view) = &mut self.lender {
            // SAFETY: filled by `PyObject_GetBuffer`, released once; views are dropped attached.
            unsafe { ffi::PyBuffer_Release(&mut **view) };
        }
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
