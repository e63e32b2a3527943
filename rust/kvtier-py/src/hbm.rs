//! The HBM tier's side of Python: what is to be copied there, and what lies there.

use std::mem::ManuallyDrop;

use kvtier_core::fork::Generation;
use kvtier_core::hbm;
use kvtier_core::sync::Mutex;
use pyo3::prelude::*;

use crate::errors::check_home;

/// Where the thread that copies to the device gets its work.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct Feed {
    feed: hbm::Feed,
    home: Generation,
}

impl Feed {
    /// Of this process.
    pub fn new(feed: hbm::Feed) -> Self {
        Feed {
            feed,
            home: Generation::now(),
        }
    }
}

#[pymethods]
impl Feed {
    /// `(address, bytes)` of each memory tier; mapped while this lives.
    fn host(&self) -> Vec<(usize, usize)> {
        let ranges = self.feed.host().into_iter();
        ranges.map(|(at, len)| (at as usize, len)).collect()
    }

    /// The next copies; with `wait`, blocks until there are some. `None`: no more come.
    fn next(&self, py: Python<'_>, wait: bool) -> PyResult<Option<Batch>> {
        check_home(py, self.home)?;
        let batch = py.detach(|| self.feed.next(wait));
        Ok(batch.map(|batch| Batch(Mutex::new(Some(batch)))))
    }

    /// Something else failed that the device was asked for.
    fn failed(&self, py: Python<'_>) -> PyResult<()> {
        check_home(py, self.home)?;
        py.detach(|| self.feed.failed());
        Ok(())
    }

    /// Does the device answer? Where not, what it was given may never end.
    fn answers(&self, py: Python<'_>) -> bool {
        self.home.is_stale() || py.detach(|| self.feed.answers())
    }

    /// No more come from now on. In a fork it does nothing.
    fn stop(&self, py: Python<'_>) {
        if !self.home.is_stale() {
            py.detach(|| self.feed.stop());
        }
    }
}

/// Copies that end together.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct Batch(Mutex<Option<hbm::Batch>>);

#[pymethods]
impl Batch {
    /// `(place in the pool, address, bytes)` of each copy.
    fn copies(&self) -> Vec<(usize, usize, usize)> {
        let batch = self.0.lock();
        let copies = batch.as_ref().map(hbm::Batch::copies).unwrap_or_default();
        let plain = |c: hbm::Copying| (c.at, c.host as usize, c.len);
        copies.into_iter().map(plain).collect()
    }

    /// Verifies what is copied, while it is copied.
    fn verify(&self, py: Python<'_>) {
        py.detach(|| {
            if let Some(batch) = self.0.lock().as_mut() {
                batch.verify();
            }
        });
    }

    /// They have ended, well or not; nothing touches their memory any more.
    fn finish(&self, py: Python<'_>, ok: bool) {
        py.detach(|| {
            let batch = self.0.lock().take();
            if let Some(batch) = batch {
                batch.finish(ok);
            }
        });
    }
}

/// A block that stays in its place of the pool while this lives.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct Placed {
    placed: ManuallyDrop<hbm::Placed>,
    home: Generation,
}

impl Placed {
    /// Of this process.
    pub fn new(placed: hbm::Placed) -> Self {
        Placed {
            placed: ManuallyDrop::new(placed),
            home: Generation::now(),
        }
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        // In a fork nothing is let go of: the locks around it may be held for ever.
        if !self.home.is_stale() {
            // SAFETY: dropped here and nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.placed) };
        }
    }
}

#[pymethods]
impl Placed {
    /// Its first byte, from the pool's.
    #[getter]
    fn at(&self) -> usize {
        self.placed.at()
    }

    /// Payload bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.placed.len()
    }
}
