//! As much of `crossbeam_channel` as the crates use, of shuttle's locks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::{Condvar, Mutex};

struct Shared<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

struct State<T> {
    items: VecDeque<T>,
    senders: usize,
    receivers: usize,
}

/// See `crossbeam_channel`.
pub struct Sender<T>(Arc<Shared<T>>);

/// See `crossbeam_channel`.
pub struct Receiver<T>(Arc<Shared<T>>);

/// Nobody receives any more.
#[derive(Debug)]
pub struct SendError<T>(pub T);

/// Nobody sends any more.
#[derive(Debug)]
pub struct RecvError;

/// Why nothing came.
#[derive(Debug)]
pub enum RecvTimeoutError {
    /// Not by the deadline.
    Timeout,
    /// Nobody sends any more.
    Disconnected,
}

/// See `crossbeam_channel`.
pub fn unbounded<T>() -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Shared {
        state: Mutex::new(State {
            items: VecDeque::new(),
            senders: 1,
            receivers: 1,
        }),
        changed: Condvar::new(),
    });
    (Sender(shared.clone()), Receiver(shared))
}

/// As [`unbounded`]: nobody sends more than fits.
pub fn bounded<T>(_: usize) -> (Sender<T>, Receiver<T>) {
    unbounded()
}

impl<T> Sender<T> {
    /// See `crossbeam_channel`.
    pub fn send(&self, item: T) -> Result<(), SendError<T>> {
        let mut state = self.0.state.lock();
        if state.receivers == 0 {
            return Err(SendError(item));
        }
        state.items.push_back(item);
        self.0.changed.notify_all();
        Ok(())
    }
}

impl<T> Receiver<T> {
    /// See `crossbeam_channel`.
    pub fn recv(&self) -> Result<T, RecvError> {
        let mut state = self.0.state.lock();
        loop {
            match state.items.pop_front() {
                Some(item) => return Ok(item),
                None if state.senders == 0 => return Err(RecvError),
                None => self.0.changed.wait(&mut state),
            }
        }
    }

    /// See `crossbeam_channel`.
    pub fn recv_deadline(&self, deadline: Instant) -> Result<T, RecvTimeoutError> {
        let mut state = self.0.state.lock();
        loop {
            match state.items.pop_front() {
                Some(item) => return Ok(item),
                None if state.senders == 0 => return Err(RecvTimeoutError::Disconnected),
                None if self.0.changed.wait_until(&mut state, deadline).timed_out() => {
                    return Err(RecvTimeoutError::Timeout);
                }
                None => {}
            }
        }
    }

    /// See `crossbeam_channel`.
    pub fn iter(&self) -> impl Iterator<Item = T> + '_ {
        std::iter::from_fn(|| self.recv().ok())
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.0.state.lock().senders += 1;
        Sender(self.0.clone())
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        self.0.state.lock().receivers += 1;
        Receiver(self.0.clone())
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.state.lock().senders -= 1;
        self.0.changed.notify_all();
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.0.state.lock().receivers -= 1;
    }
}
