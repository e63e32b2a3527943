//! What the machine itself can do: the bounds that `kvtier bench` sets beside the store's figures.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvtier_codec::checksum::copy;
use kvtier_nvme::bare::{Bare, Run};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::buffers::View;
use crate::errors::raise;

/// Copies all of `src` to `dst`, buffers of the same length, block by block on this thread: with libc's
/// `memcpy`, or the fastest copy past the cache that the store has. Returns the seconds that took.
#[pyfunction]
#[pyo3(signature = (dst, src, block, streaming=false))]
pub fn bound_memcpy(
    py: Python<'_>,
    dst: &Bound<'_, PyAny>,
    src: &Bound<'_, PyAny>,
    block: usize,
    streaming: bool,
) -> PyResult<f64> {
    let (dst, src) = (View::raw(dst, true)?, View::raw(src, false)?);
    let (to, from, len) = (dst.ptr() as usize, src.ptr() as usize, dst.len());
    if len != src.len() || block == 0 || (to < from + len && from < to + len) {
        return Err(PyValueError::new_err(format!(
            "buffers of {len} and {} bytes, block {block}: one size, no overlap, and a block of at least 1 are needed",
            src.len()
        )));
    }
    Ok(py.detach(|| {
        let begun = Instant::now();
        for at in (0..len).step_by(block) {
            let n = block.min(len - at);
            // SAFETY: both ranges lie in the buffers, which the views keep and which do not
            // overlap.
            unsafe {
                if streaming {
                    copy((to + at) as *mut u8, (from + at) as *const u8, n);
                } else {
                    libc::memcpy((to + at) as *mut _, (from + at) as *const _, n);
                }
            }
        }
        begun.elapsed().as_secs_f64()
    }))
}

/// A file for the bare io_uring loop: `O_DIRECT`, one ring, registered huge pages, no checks.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct BareDisk {
    bare: Bare,
    prepare_s: f64,
}

fn storage(py: Python<'_>, error: &std::io::Error) -> PyErr {
    raise(
        py,
        "StorageError",
        format!(
            "the bare io_uring loop failed: {error}. Give a directory on a local drive, and allow io_uring"
        ),
    )
}

#[pymethods]
impl BareDisk {
    /// Makes a file of `size` bytes and writes all of it once.
    #[new]
    fn new(py: Python<'_>, path: PathBuf, size: u64) -> PyResult<Self> {
        let (bare, timing) = py
            .detach(|| Bare::create(&path, size))
            .map_err(|e| storage(py, &e))?;
        Ok(BareDisk {
            bare,
            prepare_s: timing.elapsed.as_secs_f64(),
        })
    }

    /// Seconds of the first lap, over fresh space.
    #[getter]
    fn prepare_s(&self) -> f64 {
        self.prepare_s
    }

    /// Moves `count` blocks with `depth` in flight, from `start` on and round at the end, to or from
    /// `memory` bytes, round and round as well (0: as many as are in flight). Returns seconds, CPU seconds, and whether the memory was registered.
    #[pyo3(signature = (write, block, depth, start, count, sync, memory=0))]
    #[expect(clippy::too_many_arguments, reason = "a request has so many parts")]
    fn run(
        &self,
        py: Python<'_>,
        write: bool,
        block: usize,
        depth: usize,
        start: u64,
        count: usize,
        sync: bool,
        memory: usize,
    ) -> PyResult<(f64, f64, bool)> {
        let run = Run {
            write,
            block,
            depth,
            start,
            count,
            sync,
            memory,
        };
        let timing = py
            .detach(|| self.bare.run(run, |_| ()))
            .map_err(|e| storage(py, &e))?;
        Ok((
            timing.elapsed.as_secs_f64(),
            timing.cpu.as_secs_f64(),
            timing.registered,
        ))
    }

    /// Reads `count` blocks one after another, each to a place of its own. Returns the seconds of each.
    fn latencies(
        &self,
        py: Python<'_>,
        block: usize,
        start: u64,
        count: usize,
    ) -> PyResult<Vec<f64>> {
        let run = Run {
            write: false,
            block,
            depth: 1,
            start,
            count,
            sync: false,
            memory: count * block,
        };
        let mut all: Vec<Duration> = Vec::with_capacity(count);
        py.detach(|| self.bare.run(run, |latency| all.push(latency)))
            .map_err(|e| storage(py, &e))?;
        Ok(all.iter().map(Duration::as_secs_f64).collect())
    }
}
