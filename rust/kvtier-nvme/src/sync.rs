//! Locks that also work in a fork of the process: each is a word of its own, without a global
//! queue of waiting threads, of which a fork would inherit those that it does not have.
//!
//! A panic poisons nothing: what a lock guards is whole before anything that can panic is called.

//!
//! Built with `--cfg shuttle`, locks, atomics, threads and channels are those of shuttle, which runs
//! the same code in orders of its own choice (`scripts/races.sh`). There is no time in it: a wait ends
//! when somebody notifies, or at once if its deadline is over.

use std::ops::{Deref, DerefMut};
use std::time::Instant;

use atomic::{AtomicUsize, Ordering};
use base::{PoisonError, TryLockError};

#[cfg(not(shuttle))]
use std::sync as base;

#[cfg(shuttle)]
use shuttle::sync as base;

#[cfg(not(shuttle))]
pub use crossbeam_channel as channel;
#[cfg(not(shuttle))]
pub use std::{sync::atomic, thread, thread_local};

#[cfg(shuttle)]
pub mod channel;
#[cfg(shuttle)]
pub use shuttle::{sync::atomic, thread, thread_local};

/// A mutex without poisoning.
#[derive(Debug, Default)]
pub struct Mutex<T>(base::Mutex<T>);

/// Holds a [`Mutex`]'s lock. Empty only within a wait.
pub struct MutexGuard<'a, T>(Option<base::MutexGuard<'a, T>>);

/// Whether a wait ended because its time was up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOut(bool);

/// Where threads wait for what a [`Mutex`] guards to change.
///
/// Whoever notifies has held that mutex since the change, or while he made it. So he knows of every
/// thread that waits for it, and need not ask the kernel where there is none.
#[derive(Debug, Default)]
pub struct Condvar {
    inner: base::Condvar,
    waiting: AtomicUsize,
}

impl<T> Mutex<T> {
    /// A mutex around `value`.
    pub const fn new(value: T) -> Self {
        Mutex(base::Mutex::new(value))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// The lock, if it is free now.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(MutexGuard(Some(guard))),
            Err(TryLockError::Poisoned(poisoned)) => Some(MutexGuard(Some(poisoned.into_inner()))),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// What it guards.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &self.0 {
            Some(guard) => guard,
            None => unreachable!("a guard is used while it waits"),
        }
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match &mut self.0 {
            Some(guard) => guard,
            None => unreachable!("a guard is used while it waits"),
        }
    }
}

impl TimedOut {
    /// Was the time up?
    pub fn timed_out(self) -> bool {
        self.0
    }
}

impl Condvar {
    /// A condition nobody waits for yet.
    pub const fn new() -> Self {
        Condvar {
            inner: base::Condvar::new(),
            waiting: AtomicUsize::new(0),
        }
    }

    /// Lets go of the lock until somebody notifies.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        if let Some(held) = guard.0.take() {
            self.waiting.fetch_add(1, Ordering::Relaxed);
            let held = self.inner.wait(held);
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            guard.0 = Some(held.unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Lets go of the lock until somebody notifies, or `deadline`.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, deadline: Instant) -> TimedOut {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return TimedOut(true);
        }
        let Some(held) = guard.0.take() else {
            return TimedOut(true);
        };
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let waited = self.inner.wait_timeout(held, left);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        let (held, result) = waited.unwrap_or_else(PoisonError::into_inner);
        guard.0 = Some(held);
        TimedOut(result.timed_out())
    }

    /// Wakes one that waits.
    pub fn notify_one(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.inner.notify_one();
        }
    }

    /// Wakes all that wait.
    pub fn notify_all(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.inner.notify_all();
        }
    }
}
