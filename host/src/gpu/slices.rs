//! How much work one dispatch may take, so that none runs for seconds.

use std::time::Duration;

/// Work below this says more about the driver's overhead than about its speed.
const SIGNIFICANT: u64 = 50_000_000;

/// The speed an adapter has shown, in multiplications and additions per second.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate(f64);

impl Rate {
    /// A first guess, low enough for the slowest of its kind: a third of the slowest software adapter measured
    /// (docs/MEASUREMENTS.md), an integrated GPU of ten years ago.
    pub(super) fn guess(hardware: bool) -> Rate {
        Rate(if hardware { 5e10 } else { 5e8 })
    }

    /// Takes a measurement in: a slower one at once, a faster one by half, since only the first can end in a watchdog.
    pub(super) fn measured(&mut self, flops: u64, took: Duration) {
        if flops >= SIGNIFICANT && !took.is_zero() {
            let shown = flops as f64 / took.as_secs_f64();
            self.0 = shown.min(0.5 * (self.0 + shown));
        }
    }

    /// Seconds that `flops` are expected to take.
    pub(super) fn seconds(self, flops: u64) -> f64 {
        flops as f64 / self.0
    }

    /// Work that stays within `limit`.
    pub(super) fn work(self, limit: Duration) -> u64 {
        // A float beyond u64 saturates.
        (self.0 * limit.as_secs_f64()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_adapter_gets_smaller_slices_at_once() {
        let limit = Duration::from_millis(200);
        let mut rate = Rate::guess(true);
        rate.measured(1_000_000_000, Duration::from_secs(1));
        assert_eq!(rate.work(limit), 200_000_000);
        rate.measured(3_000_000_000, Duration::from_secs(1));
        assert_eq!(rate.work(limit), 400_000_000, "half of the way up");
    }

    #[test]
    fn too_little_work_says_nothing() {
        let mut rate = Rate::guess(false);
        let before = rate.seconds(1_000_000);
        rate.measured(10, Duration::from_secs(10));
        assert!((rate.seconds(1_000_000) - before).abs() < 1e-12);
    }
}
