//! How far the background is with backing the store's memory.

use std::sync::Arc;
use std::time::Instant;

use kvtier_core::sync::{Condvar, Mutex};
use pyo3::prelude::*;

use crate::arguments::Seconds;

/// How far prefaulting is, for any thread to wait on.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct Progress {
    state: Arc<ProgressState>,
}

type At = Option<(usize, usize)>;

/// Shared with the threads that do it.
#[derive(Default)]
pub struct ProgressState {
    /// Bytes done and in all; `None` until prefaulting begins.
    at: Mutex<At>,
    changed: Condvar,
}

impl ProgressState {
    /// Notes that `done` of `total` bytes are backed.
    pub fn set(&self, done: usize, total: usize) {
        let mut at = self.at.lock();
        let before = at.map_or(0, |(done, _)| done);
        *at = Some((done.max(before), total));
        self.changed.notify_all();
    }

    /// Waits until it is no longer `seen`, or until `deadline`; says whether that was in time.
    fn wait(&self, seen: At, deadline: Instant) -> (At, bool) {
        let mut at = self.at.lock();
        while *at == seen {
            if self.changed.wait_until(&mut at, deadline).timed_out() {
                return (*at, *at != seen);
            }
        }
        (*at, true)
    }
}

impl Progress {
    /// What the background reports to.
    pub fn state(&self) -> Arc<ProgressState> {
        self.state.clone()
    }
}

#[pymethods]
impl Progress {
    #[new]
    fn new() -> Self {
        Progress {
            state: Arc::default(),
        }
    }

    /// Waits until all is done (true) or `timeout` seconds passed; calls `report(done, total)` on
    /// the way.
    #[pyo3(signature = (report, timeout))]
    fn wait(
        &self,
        py: Python<'_>,
        report: Option<Bound<'_, PyAny>>,
        timeout: Seconds,
    ) -> PyResult<bool> {
        let until = timeout.until(py)?;
        let mut seen = None;
        loop {
            let state = &self.state;
            let (at, in_time) = py.detach(|| state.wait(seen, until));
            if at != seen
                && let (Some(report), Some(at)) = (&report, at)
            {
                report.call1(at)?;
            }
            seen = at;
            match at {
                Some((done, total)) if done >= total => return Ok(true),
                _ if !in_time => return Ok(false),
                _ => py.check_signals()?,
            }
        }
    }
}
