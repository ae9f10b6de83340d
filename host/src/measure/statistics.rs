//! Means over documents and their bootstrap intervals (METHOD §5): tokens of one document are not independent, so documents
//! are what is drawn again.

use serde::{Deserialize, Serialize};

use super::random::Random;

// A reader of a pair folder makes its intervals again and refuses others (`pair/summary.rs`): whoever changes one of these two
// counts `pair::FORMAT` up, or every pair that was written before reads as one with false figures.

/// Bootstrap resamples. At 2,000 the end points of a 95 % interval wander by about a fortieth of its width.
const RESAMPLES: usize = 2_000;

/// Seed of every interval, so that a report can be made again.
const SEED: u64 = 0x6b76_6d69_6721;

/// A mean over `n` documents with its 95 % percentile-bootstrap interval; in files `[mean, low, high, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "(f64, f64, f64, usize)", into = "(f64, f64, f64, usize)")]
pub struct Interval {
    /// The mean.
    pub mean: f64,
    /// 2.5 % point of the resampled means.
    pub low: f64,
    /// 97.5 % point.
    pub high: f64,
    /// Documents.
    pub n: usize,
}

impl From<(f64, f64, f64, usize)> for Interval {
    fn from((mean, low, high, n): (f64, f64, f64, usize)) -> Interval {
        Interval { mean, low, high, n }
    }
}

impl From<Interval> for (f64, f64, f64, usize) {
    fn from(Interval { mean, low, high, n }: Interval) -> (f64, f64, f64, usize) {
        (mean, low, high, n)
    }
}

impl Interval {
    /// Mean and interval of one figure per document; `None` without documents.
    pub fn of(values: &[f64]) -> Option<Interval> {
        let mean = mean(values)?;
        let (low, high) =
            percentiles(values.len(), |draw| draw.iter().map(|&i| values[i]).sum::<f64>() / draw.len() as f64);
        Some(Interval { mean, low, high, n: values.len() })
    }

    /// The ratio of two means over the same documents; `None` where the denominator's own interval includes 0 (METHOD §5),
    /// or there are no documents.
    ///
    /// # Panics
    /// If the two slices differ in length.
    pub fn of_ratio(numerator: &[f64], denominator: &[f64]) -> Option<Interval> {
        assert_eq!(numerator.len(), denominator.len(), "a ratio of means is over one set of documents");
        let below = Interval::of(denominator)?;
        if below.low <= 0.0 && below.high >= 0.0 {
            return None;
        }
        let (low, high) = percentiles(numerator.len(), |draw| {
            draw.iter().map(|&i| numerator[i]).sum::<f64>() / draw.iter().map(|&i| denominator[i]).sum::<f64>()
        });
        Some(Interval { mean: mean(numerator)? / below.mean, low, high, n: numerator.len() })
    }
}

/// The mean; `None` without values.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The middle value, or the mean of the middle two; `None` without values.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (below, above) = (sorted.get(sorted.len().checked_sub(1)? / 2)?, sorted.get(sorted.len() / 2)?);
    Some((below + above) / 2.0)
}

/// The 2.5 % and 97.5 % points of `statistic` over resampled sets of document indices.
fn percentiles(n: usize, statistic: impl Fn(&[usize]) -> f64) -> (f64, f64) {
    let mut random = Random::new(SEED);
    let mut draw = vec![0; n];
    let mut results: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            draw.fill_with(|| random.below(n));
            statistic(&draw)
        })
        .collect();
    results.sort_by(f64::total_cmp);
    (results[RESAMPLES / 40], results[RESAMPLES - 1 - RESAMPLES / 40])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_of_a_constant_is_the_constant() {
        let interval = Interval::of(&[2.5; 9]).unwrap();
        assert_eq!((interval.mean, interval.low, interval.high, interval.n), (2.5, 2.5, 2.5, 9));
    }

    #[test]
    fn the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn no_documents_no_figure() {
        assert_eq!(median(&[]), None);
        assert_eq!(Interval::of(&[]), None);
    }

    /// For normal values the percentile interval is about the mean ± 1.96 standard errors.
    #[test]
    fn about_two_standard_errors_wide() {
        let mut random = Random::new(3);
        let values: Vec<f64> = (0..400).map(|_| random.normal()).collect();
        let interval = Interval::of(&values).unwrap();
        let half = (interval.high - interval.low) / 2.0;
        assert!((0.085..0.112).contains(&half), "half width {half}, expected about 1.96/20");
        assert!(interval.low < interval.mean && interval.mean < interval.high);
    }

    #[test]
    fn a_ratio_without_a_denominator_is_left_out() {
        let uncertain = [1.0, -1.0, 0.5, -0.7, 0.2];
        assert_eq!(Interval::of_ratio(&[1.0; 5], &uncertain), None);
        let ratio = Interval::of_ratio(&[1.0, 2.0, 3.0], &[2.0, 4.0, 6.0]).unwrap();
        assert!(
            (ratio.mean - 0.5).abs() < 1e-15 && (ratio.low - 0.5).abs() < 1e-15 && (ratio.high - 0.5).abs() < 1e-15
        );
    }
}
