//! Counters and latency histograms, cheap enough to be always on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A counter.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// The sum so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

const STEPS: usize = 4;
const BUCKETS: usize = 40 * STEPS;

/// Latencies in buckets a quarter of a power of two wide.
#[derive(Debug)]
pub struct Histogram {
    buckets: Box<[Counter]>,
    total_ns: Counter,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram {
            buckets: (0..BUCKETS).map(|_| Counter::default()).collect(),
            total_ns: Counter::default(),
        }
    }
}

impl Histogram {
    fn bucket(ns: u64) -> usize {
        let ns = ns.max(STEPS as u64);
        let exponent = ns.ilog2() as usize;
        let step = (ns >> (exponent - 2)) as usize & (STEPS - 1);
        ((exponent - 2) * STEPS + step).min(BUCKETS - 1)
    }

    /// The smallest latency of the bucket after this one.
    fn upper(bucket: usize) -> u64 {
        let (exponent, step) = (bucket / STEPS, bucket % STEPS);
        ((STEPS + step + 1) as u64) << exponent
    }

    /// Adds one latency.
    pub fn record(&self, elapsed: Duration) {
        let ns = elapsed.as_nanos().min(u64::MAX.into()) as u64;
        self.buckets[Self::bucket(ns)].add(1);
        self.total_ns.add(ns);
    }

    /// Adds the time since `start`.
    pub fn since(&self, start: Instant) {
        self.record(start.elapsed());
    }

    /// Count, mean and quantiles.
    pub fn summary(&self) -> Summary {
        let counts: Vec<u64> = self.buckets.iter().map(Counter::get).collect();
        let count: u64 = counts.iter().sum();
        let quantile = |q: f64| {
            let rank = (q * count as f64).ceil() as u64;
            let mut seen = 0;
            let at = counts.iter().position(|&n| {
                seen += n;
                seen >= rank && rank > 0
            });
            at.map_or(0.0, |bucket| Self::upper(bucket) as f64 * 1e-9)
        };
        Summary {
            count,
            mean_s: self.total_ns.get() as f64 * 1e-9 / count.max(1) as f64,
            p50_s: quantile(0.5),
            p99_s: quantile(0.99),
        }
    }
}

/// What a histogram says, in seconds; quantiles are upper bounds of their bucket (within 25 %).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// Latencies recorded.
    pub count: u64,
    /// Their mean.
    pub mean_s: f64,
    /// Half are below this.
    pub p50_s: f64,
    /// 99 % are below this.
    pub p99_s: f64,
}

/// Counters of one tier.
#[derive(Debug, Default)]
pub struct TierStats {
    /// Blocks read from here by a caller.
    pub hits: Counter,
    /// Bytes read from here by a caller.
    pub hit_bytes: Counter,
    /// Blocks that arrived: put, promoted or demoted to here.
    pub inserts: Counter,
    /// Blocks that left for the tier below.
    pub demotions: Counter,
    /// Blocks that left because a tier below has them already.
    pub drops: Counter,
    /// Blocks that left the store from here.
    pub evictions: Counter,
    /// Blocks whose bytes were not what was put.
    pub corrupt: Counter,
    /// Reads or writes that the device failed.
    pub errors: Counter,
    /// Time of one caller's read of one block.
    pub get: Histogram,
}

/// Counters of the store.
#[derive(Debug, Default)]
pub struct StoreStats {
    /// Blocks stored.
    pub puts: Counter,
    /// Their bytes.
    pub put_bytes: Counter,
    /// Blocks that were there already.
    pub present: Counter,
    /// Blocks refused because their parent was not in the store.
    pub orphans: Counter,
    /// Reads that found nothing.
    pub misses: Counter,
    /// Loads from NVMe into memory.
    pub loads: Counter,
    /// Readers that joined a load under way.
    pub joined: Counter,
    /// Blocks dropped because the write budget was spent.
    pub over_budget: Counter,
    /// Blocks moved within a tier to make a hole.
    pub moved: Counter,
    /// Time of one put of one block.
    pub put: Histogram,
    /// Time from a load's start to its block's being readable.
    pub load: Histogram,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_bound_the_truth_from_above_within_a_quarter() {
        let histogram = Histogram::default();
        for us in 1..=1000 {
            histogram.record(Duration::from_micros(us));
        }
        let s = histogram.summary();
        assert_eq!(s.count, 1000);
        assert!((s.mean_s - 500.5e-6).abs() < 1e-9);
        assert!(s.p50_s >= 500e-6 && s.p50_s <= 500e-6 * 1.26, "{s:?}");
        assert!(s.p99_s >= 990e-6 && s.p99_s <= 990e-6 * 1.26, "{s:?}");
        histogram.record(Duration::from_secs(1 << 40));
        histogram.record(Duration::ZERO);
        assert_eq!(histogram.summary().count, 1002);
    }

    #[test]
    fn nothing_recorded_is_zero() {
        assert_eq!(Histogram::default().summary(), Summary::default());
    }
}
