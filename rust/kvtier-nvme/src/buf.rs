//! The memory of a transfer, owned by the operation that uses it.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use kvtier_codec::image::PAGE;

/// Page-aligned memory that stays mapped until the operation that holds it has completed.
///
/// The operation owns its buffer: whoever started it may go away, be cancelled or time out.
pub struct IoBuf {
    ptr: *mut u8,
    len: usize,
    _keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the memory is only reached through the operation that owns the buffer, and `_keep` is Send.
unsafe impl Send for IoBuf {}

impl IoBuf {
    /// Wraps `len` bytes at `ptr`, which stay mapped as long as `keep` lives.
    ///
    /// # Safety
    /// `ptr` must be valid for reads and writes of `len` bytes while `keep` lives. Until the
    /// operation completes, nobody writes them, and nobody reads them if the operation is a read.
    ///
    /// # Panics
    /// If pointer or length is not a multiple of 4096: O_DIRECT would refuse it much later.
    pub unsafe fn new(ptr: *mut u8, len: usize, keep: Arc<dyn Any + Send + Sync>) -> Self {
        assert!(
            (ptr as usize).is_multiple_of(PAGE) && len.is_multiple_of(PAGE) && !ptr.is_null(),
            "an I/O buffer must be aligned to {PAGE} bytes: {ptr:p}, {len} bytes"
        );
        IoBuf {
            ptr,
            len,
            _keep: keep,
        }
    }

    /// The first byte.
    pub fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Bytes in the buffer.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Is the buffer empty?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoBuf({:p}, {})", self.ptr, self.len)
    }
}

/// Page-aligned memory of this crate's own: metadata, and the examples' and tests' blocks.
pub struct Pages {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory; shared references only read it.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// `pages` zeroed pages, at least one.
    pub fn new(pages: usize) -> Self {
        let len = pages.max(1) * PAGE;
        let layout = Self::layout(len);
        // SAFETY: the layout has a non-zero size.
        let ptr = unsafe { alloc_zeroed(layout) };
        match NonNull::new(ptr) {
            Some(ptr) => Pages { ptr, len },
            None => handle_alloc_error(layout),
        }
    }

    fn layout(len: usize) -> Layout {
        match Layout::from_size_align(len, PAGE) {
            Ok(layout) => layout,
            Err(_) => panic!("{len} bytes are more than memory can hold"),
        }
    }

    /// The memory as the buffer of one operation.
    ///
    /// # Safety
    /// Until the operation completes nobody writes the memory, nor reads it if the operation is a read.
    pub unsafe fn io(self: &Arc<Self>) -> IoBuf {
        // SAFETY: the memory lives as long as the clone; the rest is the caller's contract.
        unsafe { IoBuf::new(self.ptr.as_ptr(), self.len, self.clone()) }
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes, and no `&mut` lives beside `&self`.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `len` initialised bytes, reached only through this `&mut self`.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.ptr.as_ptr(), Self::layout(self.len)) }
    }
}
