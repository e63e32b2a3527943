//! A rate limiter, for what-if runs over a slower link.

use std::time::{Duration, Instant};

use crate::sync::Mutex;

/// A pause up to this long is the copy itself, or a late wake-up, and is made up for.
const SLACK: Duration = Duration::from_millis(2);

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

    /// When `bytes` that are asked for now are through, behind those that were asked for before.
    fn ends(&self, bytes: usize, now: Instant) -> Instant {
        let mut free_at = self.free_at.lock();
        let start = match *free_at {
            Some(at) if now.saturating_duration_since(at) <= SLACK => at,
            _ => now,
        };
        let end = start + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second);
        *free_at = Some(end);
        end
    }

    /// Blocks until `bytes` are through.
    pub fn pass(&self, bytes: usize) {
        self.pass_since(bytes, Instant::now());
    }

    /// Blocks until `bytes` are through that were asked for at `since`. A call that reads many
    /// blocks passes them together: of two such calls side by side the first one would else take
    /// as long as both.
    pub fn pass_since(&self, bytes: usize, since: Instant) {
        let end = self.ends(bytes, since);
        crate::sync::thread::sleep(end.saturating_duration_since(Instant::now()));
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
        // A caller that comes back late gets the rate all the same, but an idle time is no credit.
        let late = now + Duration::from_millis(3);
        assert_eq!(pacer.ends(1_000_000, late), late);
        let later = now + Duration::from_secs(1);
        assert_eq!(
            pacer.ends(1_000_000, later),
            later + Duration::from_millis(1)
        );
    }
}
