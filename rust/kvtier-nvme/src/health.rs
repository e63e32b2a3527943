//! Whether a device is any good: one that only fails is set aside for a while.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock::Clock;
use crate::sync::Mutex;

/// Failures in a row after which a device is set aside, and for how long it is then.
const FAILURES: u32 = 3;
const PAUSE: Duration = Duration::from_secs(10);

#[derive(Default)]
struct State {
    failures: u32,
    /// Set once it was set aside, until something succeeds.
    until: Option<Instant>,
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
        let until = self.state.lock().until;
        until.is_some_and(|until| {
            let left = until.saturating_duration_since(self.clock.now());
            // More than that is left only if the clock was set back.
            !left.is_zero() && left <= PAUSE
        })
    }

    /// Something succeeded.
    pub fn succeeded(&self) {
        *self.state.lock() = State::default();
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
}
