//! The life of one load, from the wait for a slot to its landing, whoever waits for it and whoever
//! finishes it. It knows nothing of what is loaded: `P` is the slot that is filled, and only one ever
//! gets it.

use std::time::Instant;

use crate::sync::{Condvar, Mutex};

type Callback<E> = Box<dyn FnOnce(Result<(), E>) + Send>;

enum Phase<P, E> {
    /// Whoever started it waits for a slot.
    Reserving,
    /// The slot is being read into.
    Reading,
    /// The image is in the slot; nobody has looked at it yet.
    Arrived(P),
    /// Somebody verifies it.
    Finishing,
    Landed(Result<(), E>),
}

struct State<P, E> {
    phase: Phase<P, E>,
    /// Waiters that will finish the flight themselves.
    watchers: usize,
    callbacks: Vec<Callback<E>>,
}

/// How far a flight has come.
pub struct Course<P, E> {
    state: Mutex<State<P, E>>,
    changed: Condvar,
}

/// A waiter's part in a flight.
pub enum Wait<P, E> {
    /// The image is there, and is the waiter's to verify and publish.
    Finish(P),
    /// It ended.
    Landed(Result<(), E>),
    /// The deadline came first.
    TimedOut,
}

impl<P, E: Copy> Course<P, E> {
    /// A flight that waits for its slot, with so many watchers.
    pub fn new(watchers: usize) -> Self {
        Course {
            state: Mutex::new(State {
                phase: Phase::Reserving,
                watchers,
                callbacks: Vec::new(),
            }),
            changed: Condvar::new(),
        }
    }

    /// Says that the caller is going to [`Course::wait`].
    pub fn watch(&self) {
        self.state.lock().watchers += 1;
    }

    /// Takes [`Course::watch`] back. True: the image is there and nobody waits any more, so the
    /// caller sees to it that somebody finishes the flight.
    #[must_use]
    pub fn unwatch(&self) -> bool {
        let mut state = self.state.lock();
        state.watchers -= 1;
        state.watchers == 0 && matches!(state.phase, Phase::Arrived(_))
    }

    /// Calls `callback` when the flight lands, on the thread that lands it; at once if it has.
    pub fn on_landing(&self, callback: Callback<E>) {
        let mut state = self.state.lock();
        if let Phase::Landed(landing) = state.phase {
            drop(state);
            callback(landing);
        } else {
            state.callbacks.push(callback);
        }
    }

    /// Is its slot still waited for?
    pub fn is_reserving(&self) -> bool {
        matches!(self.state.lock().phase, Phase::Reserving)
    }

    /// The slot is there, and is read into from now on.
    pub fn depart(&self) {
        self.state.lock().phase = Phase::Reading;
    }

    /// The image is in the slot. True: nobody waits for it, so the caller sees to it that somebody
    /// finishes the flight.
    #[must_use]
    pub fn arrive(&self, slot: P) -> bool {
        let mut state = self.state.lock();
        state.phase = Phase::Arrived(slot);
        let watched = state.watchers > 0;
        drop(state);
        if watched {
            self.changed.notify_all();
        }
        !watched
    }

    /// The slot, for the one who finishes the flight; `None` if another one does, or has.
    pub fn claim(&self) -> Option<P> {
        Self::claim_in(&mut self.state.lock())
    }

    fn claim_in(state: &mut State<P, E>) -> Option<P> {
        match std::mem::replace(&mut state.phase, Phase::Finishing) {
            Phase::Arrived(slot) => Some(slot),
            other => {
                state.phase = other;
                None
            }
        }
    }

    /// Waits, between [`Course::watch`] and [`Course::unwatch`], until there is something to do or
    /// `deadline`.
    pub fn wait(&self, deadline: Instant) -> Wait<P, E> {
        let mut state = self.state.lock();
        loop {
            if let Some(slot) = Self::claim_in(&mut state) {
                return Wait::Finish(slot);
            }
            if let Phase::Landed(landing) = state.phase {
                return Wait::Landed(landing);
            }
            if self.changed.wait_until(&mut state, deadline).timed_out()
                && !matches!(state.phase, Phase::Arrived(_) | Phase::Landed(_))
            {
                return Wait::TimedOut;
            }
        }
    }

    /// Ends the flight.
    pub fn land(&self, landing: Result<(), E>) {
        let mut state = self.state.lock();
        state.phase = Phase::Landed(landing);
        let callbacks = std::mem::take(&mut state.callbacks);
        drop(state);
        self.changed.notify_all();
        for callback in callbacks {
            callback(landing);
        }
    }
}
