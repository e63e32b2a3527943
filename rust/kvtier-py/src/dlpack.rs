//! DLPack, both ways: blocks as capsules, and other libraries' tensors as bytes.

use std::ffi::{CStr, c_int, c_void};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyTuple};

use crate::errors::raise;
use crate::lease::Held;

const CPU: i32 = 1;
const CUDA_HOST: i32 = 3;
const READ_ONLY: u64 = 1;
const NAME: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

#[repr(C)]
struct ManagedVersioned {
    version: (u32, u32),
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: Tensor,
}

/// What an exported capsule keeps alive.
struct Export<M> {
    managed: M,
    _held: Held,
    shape: [i64; 1],
}

unsafe extern "C" fn free<M: Context>(managed: *mut M) {
    // SAFETY: the consumer calls the deleter once, with the pointer that it got from us.
    drop(unsafe { Box::from_raw((*managed).context().cast::<Export<M>>()) });
}

/// The two layouts of a managed tensor.
trait Context: Sized {
    const NAME: &'static CStr;
    fn context(&self) -> *mut c_void;
    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)>;
    fn new(tensor: Tensor) -> Self;
    fn attach(&mut self, context: *mut c_void, shape: *mut i64);
}

impl Context for Managed {
    const NAME: &'static CStr = NAME;
    fn context(&self) -> *mut c_void {
        self.context
    }
    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }
    fn new(tensor: Tensor) -> Self {
        Managed {
            tensor,
            context: std::ptr::null_mut(),
            deleter: Some(free::<Managed>),
        }
    }
    fn attach(&mut self, context: *mut c_void, shape: *mut i64) {
        self.context = context;
        self.tensor.shape = shape;
    }
}

impl Context for ManagedVersioned {
    const NAME: &'static CStr = VERSIONED;
    fn context(&self) -> *mut c_void {
        self.context
    }
    fn deleter(&self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }
    fn new(tensor: Tensor) -> Self {
        ManagedVersioned {
            version: (1, 0),
            context: std::ptr::null_mut(),
            deleter: Some(free::<ManagedVersioned>),
            flags: READ_ONLY,
            tensor,
        }
    }
    fn attach(&mut self, context: *mut c_void, shape: *mut i64) {
        self.context = context;
        self.tensor.shape = shape;
    }
}

/// Frees what a capsule holds if nobody consumed it (a consumer renames the capsule).
unsafe extern "C" fn destroy<M: Context>(capsule: *mut ffi::PyObject) {
    // SAFETY: called by Python, attached, with our capsule; the name says whether it was consumed.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()).cast::<M>();
            if let Some(deleter) = (*managed).deleter() {
                deleter(managed);
            }
        }
    }
}

fn capsule<M: Context>(py: Python<'_>, held: &Held) -> PyResult<Py<PyAny>> {
    let tensor = Tensor {
        data: held.leased().ptr().cast_mut().cast(),
        device: Device { kind: CPU, id: 0 },
        ndim: 1,
        dtype: DataType {
            code: 1, // unsigned
            bits: 8,
            lanes: 1,
        },
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let export = Box::into_raw(Box::new(Export {
        managed: M::new(tensor),
        _held: held.clone(),
        shape: [held.leased().len() as i64],
    }));
    // SAFETY: `export` is ours; its address stays until the deleter frees it. The capsule owns it
    // from here on.
    unsafe {
        let shape = (&raw mut (*export).shape).cast();
        (*export).managed.attach(export.cast(), shape);
        let managed = &raw mut (*export).managed;
        let capsule = ffi::PyCapsule_New(managed.cast(), M::NAME.as_ptr(), Some(destroy::<M>));
        match Bound::from_owned_ptr_or_err(py, capsule) {
            Ok(capsule) => Ok(capsule.unbind()),
            Err(error) => {
                free(managed);
                Err(error)
            }
        }
    }
}

/// A capsule over a leased block, `uint8[len]` on the CPU. A versioned one says that it is
/// read-only; the old form cannot.
pub fn export(py: Python<'_>, held: &Held, versioned: bool) -> PyResult<Py<PyAny>> {
    if versioned {
        capsule::<ManagedVersioned>(py, held)
    } else {
        capsule::<Managed>(py, held)
    }
}

/// The name that NumPy and torch give a dtype; `None` for one that neither has.
fn dtype_name(dtype: DataType) -> Option<String> {
    let plain = match dtype.code {
        0 => "int",
        1 => "uint",
        2 => "float",
        4 => "bfloat",
        5 => "complex",
        6 => return Some("bool".into()),
        8 => return Some("float8_e4m3".into()),
        10 => return Some("float8_e4m3fn".into()),
        11 => return Some("float8_e4m3fnuz".into()),
        12 => return Some("float8_e5m2".into()),
        13 => return Some("float8_e5m2fnuz".into()),
        _ => return None,
    };
    Some(format!("{plain}{}", dtype.bits))
}

/// The bytes of another library's CPU tensor, as a buffer.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct DlpackView {
    data: *mut u8,
    len: usize,
    read_only: bool,
    dtype: String,
    shape: Vec<i64>,
    /// Unconsumed: its destructor gives the tensor back.
    _capsule: Py<PyAny>,
}

// SAFETY: the memory is the producer's, valid while the capsule lives.
unsafe impl Send for DlpackView {}
// SAFETY: as above.
unsafe impl Sync for DlpackView {}

/// The tensor of a capsule, and whether it is read-only.
fn open<'a>(capsule: &'a Bound<'_, PyCapsule>) -> Result<(&'a Tensor, bool), String> {
    let gone = |_| "a DLPack capsule that was consumed before, or is none, was given".to_owned();
    if !capsule.is_valid_checked(Some(VERSIONED)) {
        let managed = capsule.pointer_checked(Some(NAME)).map_err(gone)?;
        // SAFETY: a capsule of this name holds this struct.
        return Ok((unsafe { &managed.cast::<Managed>().as_ref().tensor }, false));
    }
    let managed = capsule.pointer_checked(Some(VERSIONED)).map_err(gone)?;
    // SAFETY: a capsule of this name holds this struct, whose major version is checked before
    // anything behind it is read.
    let managed = unsafe { managed.cast::<ManagedVersioned>().as_ref() };
    if managed.version.0 != 1 {
        return Err(format!(
            "DLPack version {} was given; version 1 is understood",
            managed.version.0
        ));
    }
    Ok((&managed.tensor, managed.flags & READ_ONLY != 0))
}

#[pymethods]
impl DlpackView {
    /// Takes a capsule from `__dlpack__`.
    #[new]
    fn new(py: Python<'_>, capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        let bad = |what: String| Err(raise(py, "InvalidBlockError", what));
        let Ok(capsule) = capsule.cast::<PyCapsule>() else {
            return bad(format!("__dlpack__ gave {capsule} where a capsule is due"));
        };
        let (tensor, read_only) = match open(capsule) {
            Ok(opened) => opened,
            Err(why) => return bad(why),
        };
        if tensor.device.kind != CPU && tensor.device.kind != CUDA_HOST {
            return bad(format!(
                "a tensor on DLPack device type {} was given; this version takes CPU tensors. Copy it to the CPU first",
                tensor.device.kind
            ));
        }
        let ndim = tensor.ndim as usize;
        let dims = |ptr: *mut i64| {
            if ptr.is_null() || ndim == 0 {
                &[][..]
            } else {
                // SAFETY: DLPack gives `ndim` entries.
                unsafe { std::slice::from_raw_parts(ptr, ndim) }
            }
        };
        let (shape, strides) = (dims(tensor.shape), dims(tensor.strides));
        let mut expected = 1;
        for (axis, &n) in shape.iter().enumerate().rev() {
            if !strides.is_empty() && n > 1 && strides[axis] != expected {
                return bad(format!(
                    "a tensor of shape {shape:?} with strides {strides:?} was given; it must be contiguous. Call .contiguous() first"
                ));
            }
            expected *= n;
        }
        let dtype = tensor.dtype;
        let name = dtype_name(dtype).filter(|_| dtype.lanes == 1 && dtype.bits % 8 == 0);
        let Some(name) = name else {
            return bad(format!(
                "a tensor of DLPack dtype code {}, {} bits and {} lanes was given; whole bytes of a dtype that NumPy or torch has are taken. View it as uint8 first",
                dtype.code, dtype.bits, dtype.lanes
            ));
        };
        Ok(DlpackView {
            data: tensor
                .data
                .cast::<u8>()
                .wrapping_add(tensor.byte_offset as usize),
            len: expected as usize * usize::from(dtype.bits / 8),
            read_only,
            dtype: name,
            shape: shape.to_vec(),
            _capsule: capsule.clone().into_any().unbind(),
        })
    }

    /// What an element is, as NumPy and torch name it.
    #[getter]
    fn dtype(&self) -> &str {
        &self.dtype
    }

    /// Elements along each axis.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Whether the memory must not be written to.
    #[getter]
    fn readonly(&self) -> bool {
        self.read_only
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        // SAFETY: Python's contract for `view`; the memory lives as long as the capsule.
        unsafe {
            fill(
                slf.as_any(),
                view,
                flags,
                this.data,
                this.len,
                this.read_only,
            )
        }
    }
}

/// Fills a `Py_buffer` over `len` bytes that live as long as `owner`.
///
/// # Safety
/// `view` must be Python's, and the memory valid while `owner` lives.
pub unsafe fn fill(
    owner: &Bound<'_, PyAny>,
    view: *mut ffi::Py_buffer,
    flags: c_int,
    data: *mut u8,
    len: usize,
    read_only: bool,
) -> PyResult<()> {
    // SAFETY: the caller's contract.
    let rc = unsafe {
        ffi::PyBuffer_FillInfo(
            view,
            owner.as_ptr(),
            data.cast(),
            len as isize,
            c_int::from(read_only),
            flags,
        )
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(PyErr::fetch(owner.py()))
    }
}
