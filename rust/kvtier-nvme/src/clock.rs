//! Time, as the tier sees it: a trait, so that a test can make it jump.

use std::time::Instant;

/// Tells the time for pacing and for how long a failing path is bypassed.
pub trait Clock: Send + Sync {
    /// The time now.
    fn now(&self) -> Instant;
}

/// The system's monotonic clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }
}
