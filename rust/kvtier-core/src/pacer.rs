//! A rate limiter, for what-if runs over a slower link.

use std::time::{Duration, Instant};

use crate::sync::Mutex;

/// Lets bytes pass at a fixed rate.
#[derive(Debug)]
pub struct Pacer {
    bytes_per_second: f64,
    free_at: Mutex<Option<Instant>>,
}

impl Pacer {
    /// At most `gbs` times 1e9 bytes a second.
    pub fn new(gbs: f64) -> Self {
        Pacer {
            bytes_per_second: gbs * 1e9,
            free_at: Mutex::new(None),
        }
    }

    /// When `bytes` that start now are through, behind those that started before.
    fn ends(&self, bytes: usize, now: Instant) -> Instant {
        let mut free_at = self.free_at.lock();
        let start = free_at.map_or(now, |at| at.max(now));
        let end = start + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second);
        *free_at = Some(end);
        end
    }

    /// Blocks until `bytes` are through.
    pub fn pass(&self, bytes: usize) {
        let now = Instant::now();
        std::thread::sleep(self.ends(bytes, now).saturating_duration_since(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_queue_behind_one_another() {
        let pacer = Pacer::new(1.0);
        let now = Instant::now();
        assert_eq!(pacer.ends(1_000_000, now), now + Duration::from_millis(1));
        assert_eq!(pacer.ends(1_000_000, now), now + Duration::from_millis(2));
        let later = now + Duration::from_secs(1);
        assert_eq!(
            pacer.ends(1_000_000, later),
            later + Duration::from_millis(1)
        );
    }
}
