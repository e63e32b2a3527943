//! Work in the background: jobs, asynchronous operations, and the eventfd that announces them.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use kvtier_core::error::{Error, Kind, Result};
use kvtier_core::fork::Generation;
use kvtier_core::jobs;
use kvtier_core::lease::Leased;
use kvtier_core::load::Miss;
use kvtier_core::put::Put;
use kvtier_core::read::Got;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

use crate::arguments::Seconds;
use crate::buffers::View;
use crate::core::{got_code, put_code};
use crate::errors::{check_home, from_core};
use crate::lease::Lease;
use kvtier_core::sync::Mutex;

/// Where finished operations of one event loop are announced.
pub struct Mailbox {
    fd: OwnedFd,
    tokens: Mutex<Vec<u64>>,
}

impl Mailbox {
    /// Announces an operation; never blocks, never touches Python.
    pub fn post(&self, token: u64) {
        self.tokens.lock().push(token);
        let one = 1u64.to_ne_bytes();
        // SAFETY: the descriptor is ours and open; a full counter only means that it is readable.
        unsafe { libc::write(self.fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }
}

/// A queue of finished operations with a descriptor that is readable while there are any.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct Completions(pub Arc<Mailbox>);

#[pymethods]
impl Completions {
    #[new]
    fn new() -> PyResult<Self> {
        // SAFETY: a plain system call; the descriptor is owned from here on.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(PyOSError::new_err(
                std::io::Error::last_os_error().to_string(),
            ));
        }
        Ok(Completions(Arc::new(Mailbox {
            // SAFETY: just opened, owned by nobody else.
            fd: unsafe { OwnedFd::from_raw_fd(fd) },
            tokens: Mutex::default(),
        })))
    }

    /// The descriptor to watch.
    fn fileno(&self) -> i32 {
        self.0.fd.as_raw_fd()
    }

    /// The tokens of the operations that finished since the last call.
    fn drain(&self) -> Vec<u64> {
        let mut count = [0u8; 8];
        // SAFETY: the descriptor is ours; `count` has the 8 bytes that an eventfd gives.
        unsafe { libc::read(self.0.fd.as_raw_fd(), count.as_mut_ptr().cast(), 8) };
        std::mem::take(&mut self.0.tokens.lock())
    }
}

/// What an operation gives.
pub enum Outcome {
    /// Of puts.
    Puts(Result<Vec<Put>>),
    /// Of reads.
    Gots(Result<Vec<Got>>),
    /// Of leases.
    Leases(Result<Vec<std::result::Result<Leased, Miss>>>),
    /// Of verbs that only finish.
    Unit(Result<()>),
    /// Of pins.
    Flags(Result<Vec<bool>>),
}

/// The result of an operation under way, and the caller's memory that it uses.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct Operation {
    slot: Arc<Mutex<Option<Outcome>>>,
    views: Mutex<Vec<View>>,
}

/// Stores an operation's outcome and announces it, whatever happens to whoever started it.
pub struct Finisher<T> {
    slot: Arc<Mutex<Option<Outcome>>>,
    mailbox: Arc<Mailbox>,
    token: u64,
    outcome: fn(Result<T>) -> Outcome,
}

impl<T> Finisher<T> {
    /// Ends the operation.
    pub fn finish(self, result: Result<T>) {
        *self.slot.lock() = Some((self.outcome)(result));
    }
}

impl<T> Drop for Finisher<T> {
    fn drop(&mut self) {
        let mut slot = self.slot.lock();
        if slot.is_none() {
            // The work was dropped before it ran: whoever waits must hear of it.
            let error = Error::new(
                Kind::Closed,
                "the store was closed before the operation ran",
            );
            *slot = Some((self.outcome)(Err(error)));
        }
        drop(slot);
        self.mailbox.post(self.token);
    }
}

impl Operation {
    /// An operation that keeps `views` until its outcome is taken, and what ends it and posts `token`.
    pub fn start<T>(
        views: Vec<View>,
        mailbox: &Completions,
        token: u64,
        outcome: fn(Result<T>) -> Outcome,
    ) -> (Self, Finisher<T>) {
        let slot = Arc::new(Mutex::new(None));
        let finisher = Finisher {
            slot: slot.clone(),
            mailbox: mailbox.0.clone(),
            token,
            outcome,
        };
        let operation = Operation {
            slot,
            views: Mutex::new(views),
        };
        (operation, finisher)
    }

    /// The outcome, once. Lets go of the caller's memory, with no lock held: a buffer's owner may
    /// run Python code then.
    fn take(&self) -> Option<Outcome> {
        let outcome = self.slot.lock().take();
        let views = std::mem::take(&mut *self.views.lock());
        drop(views);
        outcome
    }
}

#[pymethods]
impl Operation {
    /// Once announced: nobody wants the result. Lets go of it, and of the caller's memory.
    fn discard(&self) {
        drop(self.take());
    }

    /// The result, once announced. Lets go of the caller's memory.
    fn result(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let raise = |error: Error| from_core(py, &error);
        match self.take() {
            None => Ok(py.None()),
            Some(Outcome::Puts(puts)) => {
                let codes: Vec<u8> = puts.map_err(raise)?.into_iter().map(put_code).collect();
                Ok(codes.into_pyobject(py)?.into_any().unbind())
            }
            Some(Outcome::Gots(gots)) => {
                let codes: Vec<u8> = gots.map_err(raise)?.into_iter().map(got_code).collect();
                Ok(codes.into_pyobject(py)?.into_any().unbind())
            }
            Some(Outcome::Leases(leases)) => {
                let lease = Lease::new(leases.map_err(raise)?);
                Ok(Py::new(py, lease)?.into_any())
            }
            Some(Outcome::Flags(flags)) => {
                let flags = flags.map_err(raise)?;
                Ok(flags.into_pyobject(py)?.into_any().unbind())
            }
            Some(Outcome::Unit(unit)) => unit.map_err(raise).map(|()| py.None()),
        }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // Dropped while the work still uses the caller's memory (interpreter exit), or in a fork,
        // where the thread that held the lock does not exist: lending the memory for ever is
        // harmless, taking it back now is not. A finished operation's result may have been taken:
        // then `views` is empty.
        let finished = self.slot.try_lock().is_some_and(|slot| slot.is_some());
        if !finished && let Some(mut views) = self.views.try_lock() {
            std::mem::forget(std::mem::take(&mut *views));
        }
    }
}

/// A prefetch under way.
#[pyclass(frozen, module = "kvtier._kvtier")]
pub struct Job {
    job: Arc<jobs::Job>,
    home: Generation,
}

impl Job {
    /// Of this process.
    pub fn new(job: Arc<jobs::Job>) -> Self {
        Job {
            job,
            home: Generation::now(),
        }
    }

    fn run<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&jobs::Job) -> T + Send,
    ) -> PyResult<T> {
        check_home(py, self.home)?;
        let job = &self.job;
        Ok(py.detach(move || work(job)))
    }
}

#[pymethods]
impl Job {
    /// Waits; true: done, false: `timeout` seconds passed.
    fn wait(&self, py: Python<'_>, timeout: Seconds) -> PyResult<bool> {
        let until = timeout.until(py)?;
        self.run(py, |job| job.wait(until))
    }

    /// Is it done?
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        self.run(py, jobs::Job::is_done)
    }

    /// Gives up what has not been asked for yet.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, jobs::Job::cancel)
    }

    /// One code a key, once done.
    fn results(&self, py: Python<'_>) -> PyResult<Option<Vec<u8>>> {
        let results = self.run(py, jobs::Job::results)?;
        Ok(results.map(|gots| gots.into_iter().map(got_code).collect()))
    }

    /// Posts `token` when done.
    fn notify(&self, py: Python<'_>, completions: &Completions, token: u64) -> PyResult<()> {
        let mailbox = completions.0.clone();
        self.run(py, move |job| {
            job.on_done(Box::new(move || mailbox.post(token)))
        })
    }
}
