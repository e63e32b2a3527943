//! The write budget: how much may be written to NVMe, for the sake of its endurance.

use std::time::Instant;

use crate::sync::{Mutex, MutexGuard};

/// How many bytes a day may be written, spent as they come.
pub(crate) struct Budget {
    per_second: f64,
    burst: f64,
    state: Mutex<(f64, Instant)>,
}

impl Budget {
    /// `per_day` bytes a day, of which an hour's share can be saved up.
    pub(crate) fn new(per_day: u64, now: Instant) -> Self {
        let per_second = per_day as f64 / 86_400.0;
        let burst = per_second * 3600.0;
        Budget {
            per_second,
            burst,
            state: Mutex::new((burst, now)),
        }
    }

    fn refill(&self, now: Instant) -> MutexGuard<'_, (f64, Instant)> {
        let mut state = self.state.lock();
        let passed = now.saturating_duration_since(state.1).as_secs_f64();
        *state = (
            (state.0 + passed * self.per_second).min(self.burst),
            state.1.max(now),
        );
        state
    }

    /// Could `bytes` be spent now?
    pub(crate) fn allows(&self, bytes: usize, now: Instant) -> bool {
        self.refill(now).0 >= bytes as f64
    }

    /// Spends `bytes`, if there are so many.
    pub(crate) fn spend(&self, bytes: usize, now: Instant) -> bool {
        let mut state = self.refill(now);
        let enough = state.0 >= bytes as f64;
        if enough {
            state.0 -= bytes as f64;
        }
        enough
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_budget_is_spent_and_refills_with_time() {
        let start = Instant::now();
        let budget = Budget::new(86_400 * 1000, start);
        assert!(budget.spend(3_600_000, start));
        assert!(!budget.spend(1, start));
        let later = start + Duration::from_secs(10);
        assert!(budget.allows(10_000, later) && !budget.allows(10_001, later));
        assert!(!budget.allows(10_001, start) && !budget.allows(10_001, later));
    }
}
