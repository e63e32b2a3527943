//! One eviction policy by itself: to be checked against plain models, or asked what it would do.

use kvtier_core::policy::{self, Handle, Meta};
use pyo3::prelude::*;

use crate::errors::from_core;
use kvtier_core::sync::Mutex;

/// An eviction policy over numbered blocks, the very code that the store and the replayer use.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct Policy {
    inner: Mutex<Box<dyn policy::Policy>>,
}

#[pymethods]
impl Policy {
    #[new]
    fn new(py: Python<'_>, name: &str, pages: u64) -> PyResult<Self> {
        let inner = policy::by_name(name, pages).map_err(|e| from_core(py, &e))?;
        Ok(Policy {
            inner: Mutex::new(inner),
        })
    }

    /// Would this block be let in?
    #[pyo3(signature = (block, fingerprint, parent=None, pages=1, importance=0.0))]
    fn admit(
        &self,
        block: Handle,
        fingerprint: u64,
        parent: Option<Handle>,
        pages: u32,
        importance: f32,
    ) -> bool {
        let meta = Meta {
            parent,
            fingerprint,
            pages,
            importance,
        };
        self.inner.lock().admit(block, &meta)
    }

    /// A block was used that was not let in.
    #[pyo3(signature = (fingerprint, parent=None, pages=1, importance=0.0))]
    fn refuse(&self, fingerprint: u64, parent: Option<Handle>, pages: u32, importance: f32) {
        let meta = Meta {
            parent,
            fingerprint,
            pages,
            importance,
        };
        self.inner.lock().on_refuse(&meta);
    }

    /// A block arrived.
    #[pyo3(signature = (block, fingerprint, parent=None, pages=1, importance=0.0))]
    fn insert(
        &self,
        block: Handle,
        fingerprint: u64,
        parent: Option<Handle>,
        pages: u32,
        importance: f32,
    ) {
        let meta = Meta {
            parent,
            fingerprint,
            pages,
            importance,
        };
        self.inner.lock().on_insert(block, &meta);
    }

    /// A block was used.
    fn hit(&self, block: Handle) {
        self.inner.lock().on_hit(block);
    }

    /// A block left.
    fn remove(&self, block: Handle) {
        self.inner.lock().on_remove(block);
    }

    /// A block that was named stays.
    fn defer(&self, block: Handle) {
        self.inner.lock().defer(block);
    }

    /// The caller's score of a block changed.
    fn set_importance(&self, block: Handle, score: f32) {
        self.inner.lock().set_importance(block, score);
    }

    /// The next `n` blocks to leave that are not in `pinned`.
    fn victims(&self, n: usize, pinned: std::collections::HashSet<Handle>) -> Vec<Handle> {
        let mut out = Vec::new();
        self.inner
            .lock()
            .victims(n, &mut |block| !pinned.contains(&block), &mut out);
        out
    }

    fn __len__(&self) -> usize {
        self.inner.lock().len()
    }

    /// Bytes kept in memory.
    #[getter]
    fn memory_bytes(&self) -> usize {
        self.inner.lock().memory_bytes()
    }
}
