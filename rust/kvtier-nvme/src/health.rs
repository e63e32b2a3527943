//! Whether a device is any good: one that only fails is set aside for a while, one that does not answer
//! until it does.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock::Clock;
use crate::sync::Mutex;

/// Failures in a row after which a device is set aside, and for how long it is then.
const FAILURES: u32 = 3;
const PAUSE: Duration = Duration::from_secs(10);

/// How long a device may take to answer before it counts as stalled, and is bypassed until it does.
pub const STALL: Duration = Duration::from_secs(5);

#[derive(Default)]
struct State {
    failures: u32,
    /// Set once it was set aside, until something succeeds.
    until: Option<Instant>,
    /// What it was asked for and has not answered.
    open: usize,
    /// Since when it has answered nothing, if anything is open.
    since: Option<Instant>,
    stalled: bool,
}

/// What has become of the last things that a device was asked for.
pub struct Health {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

impl Health {
    /// Of a device that was asked for nothing yet; pauses are told by this clock.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Health {
            clock,
            state: Mutex::default(),
        }
    }

    /// Nothing more is to be asked of it now. Once the pause is over it is tried again.
    pub fn is_aside(&self) -> bool {
        let (stalled, until) = {
            let state = self.state.lock();
            (state.stalled, state.until)
        };
        stalled
            || until.is_some_and(|until| {
                let left = until.saturating_duration_since(self.clock.now());
                // More than that is left only if the clock was set back.
                !left.is_zero() && left <= PAUSE
            })
    }

    /// It was asked for something that may never be [`Health::answered`].
    pub fn asked(&self) {
        let mut state = self.state.lock();
        state.open += 1;
        state.since.get_or_insert_with(|| self.clock.now());
    }

    /// It did what it was asked for, or said that it cannot.
    pub fn answered(&self) {
        let mut state = self.state.lock();
        state.open -= 1;
        state.since = (state.open > 0).then(|| self.clock.now());
        state.stalled = false;
    }

    /// Looks whether it answers. True: it has not for too long, and did so far.
    pub fn has_stalled(&self) -> bool {
        let mut state = self.state.lock();
        let waited = state
            .since
            .map(|since| self.clock.now().saturating_duration_since(since));
        let late = waited.is_some_and(|waited| waited > STALL);
        late && !std::mem::replace(&mut state.stalled, late)
    }

    /// It has stalled, and not answered since.
    pub fn is_stalled(&self) -> bool {
        self.state.lock().stalled
    }

    /// Something succeeded.
    pub fn succeeded(&self) {
        let mut state = self.state.lock();
        (state.failures, state.until) = (0, None);
    }

    /// Something failed. True: from now on it is set aside, and was not before.
    pub fn failed(&self) -> bool {
        let mut state = self.state.lock();
        state.failures += 1;
        if state.failures < FAILURES {
            return false;
        }
        let before = state.until.replace(self.clock.now() + PAUSE);
        before.is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    struct Moved(Instant, AtomicU64);

    impl Clock for Moved {
        fn now(&self) -> Instant {
            self.0 + Duration::from_secs(self.1.load(Ordering::SeqCst))
        }
    }

    #[test]
    fn only_failures_in_a_row_set_it_aside_and_it_is_said_once() {
        let clock = Arc::new(Moved(Instant::now(), AtomicU64::new(0)));
        let health = Health::new(clock.clone());
        for _ in 0..4 {
            assert!(!health.failed() && !health.failed());
            health.succeeded();
        }
        assert!(!health.failed() && !health.failed() && !health.is_aside());
        assert!(health.failed() && health.is_aside());
        clock.1.store(10, Ordering::SeqCst);
        assert!(!health.is_aside(), "it is tried again");
        assert!(!health.failed() && health.is_aside(), "one failure will do");
        clock.1.store(20, Ordering::SeqCst);
        health.succeeded();
        assert!(!health.failed() && !health.is_aside());
    }

    #[test]
    fn what_is_not_answered_in_time_sets_it_aside_until_it_is() {
        let clock = Arc::new(Moved(Instant::now(), AtomicU64::new(0)));
        let health = Health::new(clock.clone());
        let pass = |seconds| clock.1.fetch_add(seconds, Ordering::SeqCst);
        pass(60);
        assert!(!health.has_stalled(), "it was asked for nothing");
        (0..3).for_each(|_| health.asked());
        pass(5);
        assert!(!health.has_stalled());
        health.answered(); // slowly
        pass(5);
        assert!(!health.has_stalled() && !health.is_aside());
        pass(1);
        assert!(health.has_stalled() && health.is_aside() && health.is_stalled());
        assert!(!health.has_stalled(), "it is said once");
        assert!(!health.failed() && health.is_stalled());
        health.answered();
        assert!(!health.is_aside() && !health.has_stalled());
        pass(6);
        assert!(health.has_stalled(), "the last one is open still");
        health.answered();
        assert!(!health.is_aside());
        pass(60);
        assert!(!health.has_stalled());
    }
}
