//! What can be promised of a mapped cache before it exists.
//!
//! METHOD §6 at its simplest: the point prediction is a constant, the mean over the held-out documents, so the residuals of
//! split conformal prediction (Angelopoulos & Bates, arXiv:2107.07511) order as the losses themselves do, and the one-sided
//! bound is the ⌈(n+1)(1−α/m)⌉-th smallest loss of n documents. With m candidates to choose from each gets α/m, so that the
//! promise holds for the one that is chosen. It holds over requests that are exchangeable with the documents.
//!
//! Which documents count is settled by what is known of them beforehand, never by their outcomes:
//! - the request's domain where it names one (a domain without documents has too little evidence), all otherwise;
//! - of those, the request's length bucket, documents of half to twice its tokens, where it holds enough of them; all of the
//!   domain otherwise, as long as the request is at most `max_extrapolation` times longer than the longest or shorter than
//!   the shortest. That is extrapolation, and the reason says so: at other lengths exchangeability is an assumption.

use serde::Serialize;

use crate::{DocumentOutcome, Policy, Reason, evidence::Checked, reason::Promise};

/// What the gate expects of a migration, before it happens. Values in the metric's unit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// The metric's name.
    pub metric: &'static str,
    /// Expected value.
    pub value: f64,
    /// The realised value falls short of this in at most a share `alpha` of requests.
    pub bound: f64,
    /// What the policy asks of the bound.
    pub floor: f64,
    /// Share of requests that may fall short of the bound.
    pub alpha: f64,
    /// Held-out documents it rests on.
    pub n: usize,
}

/// A prediction with the documents it rests on.
#[derive(Debug)]
pub(crate) struct Predicted<'e> {
    pub(crate) prediction: Prediction,
    pub(crate) promise: Promise,
    pub(crate) documents: Vec<&'e DocumentOutcome>,
}

/// Predicts for a request of `tokens` tokens, with `candidates` mappers to choose from.
pub(crate) fn predict<'e>(
    policy: &Policy,
    evidence: Checked<'e>,
    domain: Option<&str>,
    tokens: usize,
    candidates: usize,
) -> Result<Predicted<'e>, Reason> {
    let settings = policy.settings();
    let alpha = settings.alpha / candidates.max(1) as f64;
    let needed = settings.min_evidence.max(fewest(alpha));
    let documents = select(evidence, domain, tokens, needed, settings.max_extrapolation)?;
    let too_little = |found| Reason::TooLittleEvidence { domain: domain.map(str::to_owned), found, needed };

    let metric = settings.metric;
    let mut losses: Vec<f64> = documents.iter().map(|document| metric.loss(metric.value(&document.mapped))).collect();
    let n = losses.len();
    let mean = losses.iter().sum::<f64>() / n as f64;
    let bound = upper_bound(&mut losses, alpha).ok_or_else(|| too_little(n))?;
    let (value, bound, floor) = (metric.loss(mean), metric.loss(bound), policy.floor());
    let prediction = Prediction { metric: metric.name(), value, bound, floor, alpha: settings.alpha, n };
    let promise = Promise { metric, bound, floor, alpha: settings.alpha, n, evidence_tokens: span(&documents), tokens };
    Ok(Predicted { prediction, promise, documents })
}

fn select<'e>(
    evidence: Checked<'e>,
    domain: Option<&str>,
    tokens: usize,
    needed: usize,
    max_extrapolation: f64,
) -> Result<Vec<&'e DocumentOutcome>, Reason> {
    let in_domain = |document: &&DocumentOutcome| domain.is_none_or(|domain| document.domain == domain);
    let all: Vec<_> = evidence.documents().iter().filter(in_domain).collect();
    if all.len() < needed {
        return Err(Reason::TooLittleEvidence { domain: domain.map(str::to_owned), found: all.len(), needed });
    }
    let within = |factor: f64, low: usize, high: usize| {
        tokens as f64 * factor >= low as f64 && tokens as f64 <= high as f64 * factor
    };
    let bucket: Vec<_> = all.iter().copied().filter(|d| within(2.0, d.tokens, d.tokens)).collect();
    if bucket.len() >= needed {
        return Ok(bucket);
    }
    let (shortest, longest) = span(&all);
    if within(max_extrapolation, shortest, longest) {
        Ok(all)
    } else {
        Err(Reason::LengthOutsideEvidence { tokens, evidence: (shortest, longest), max: max_extrapolation })
    }
}

/// Shortest and longest document, in tokens.
fn span(documents: &[&DocumentOutcome]) -> (usize, usize) {
    let tokens = || documents.iter().map(|document| document.tokens);
    (tokens().min().unwrap_or(0), tokens().max().unwrap_or(0))
}

/// Decimal levels such as 0.1 are not binary numbers: a product that misses an integer by less than this is that integer.
const ROUNDING: f64 = 1e-9;

/// ⌈1/α⌉ − 1, the fewest losses that have an α bound.
fn fewest(alpha: f64) -> usize {
    ((1.0 / alpha - ROUNDING).ceil() as usize).saturating_sub(1)
}

/// The ⌈(n+1)(1−α)⌉-th smallest of n losses: a further, exchangeable one is at most this with probability ≥ 1 − α. `None`
/// when there are too few.
fn upper_bound(losses: &mut [f64], alpha: f64) -> Option<f64> {
    let n = losses.len();
    // ⌈(n+1)(1−α)⌉ = n + 1 − ⌊(n+1)α⌋; as an index from zero, one less.
    let index = n.checked_sub(((n + 1) as f64 * alpha + ROUNDING).floor() as usize)?;
    if index >= n {
        return None;
    }
    losses.sort_by(f64::total_cmp);
    Some(losses[index])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{fewest, upper_bound};

    #[test]
    fn the_rank_is_the_textbook_one() {
        let bound = |n: usize, alpha| upper_bound(&mut (1..=n).map(|i| i as f64).collect::<Vec<_>>(), alpha);
        // ⌈31 · 0.9⌉ = 28, ⌈30 · 0.9⌉ = 27, ⌈10 · 0.9⌉ = 9, and nine documents are the fewest for 0.1.
        assert_eq!(bound(30, 0.1), Some(28.0));
        assert_eq!(bound(29, 0.1), Some(27.0));
        assert_eq!(bound(9, 0.1), Some(9.0));
        assert_eq!(bound(8, 0.1), None);
        assert_eq!(bound(0, 0.1), None);
        assert_eq!(fewest(0.1), 9);
        // Three candidates share 0.1: ⌈30 · (1 − 0.1/3)⌉ = 29.
        assert_eq!(fewest(0.1 / 3.0), 29);
        assert_eq!(bound(29, 0.1 / 3.0), Some(29.0));
    }

    proptest! {
        /// Among n + 1 exchangeable losses each is equally likely to be the one that comes last, so counting over which one
        /// is left out gives the coverage exactly: at least 1 − α, and with distinct losses less than 1 − α + 1/(n+1).
        #[test]
        fn coverage_is_exact(n in 9usize..80, alpha in 0.02f64..0.5, seed in any::<u64>()) {
            prop_assume!(n >= fewest(alpha));
            // Distinct losses in an arbitrary order: an odd multiplier permutes residues of a power of two.
            let all: Vec<f64> =
                (0..=n as u64).map(|i| (i.wrapping_mul(seed | 1) % (1 << 20)) as f64 + i as f64 / 1e3).collect();
            let covered = (0..=n).filter(|&out| {
                let mut rest: Vec<f64> = all.iter().enumerate().filter(|(i, _)| *i != out).map(|(_, x)| *x).collect();
                all[out] <= upper_bound(&mut rest, alpha).unwrap()
            }).count();
            let share = covered as f64 / (n + 1) as f64;
            prop_assert!(share >= 1.0 - alpha - 1e-9, "covered {covered} of {}", n + 1);
            prop_assert!(share < 1.0 - alpha + 1.0 / (n + 1) as f64 + 1e-6);
        }

        #[test]
        fn too_few_is_no_bound(alpha in 0.02f64..0.5) {
            let fewest = fewest(alpha);
            prop_assert!(upper_bound(&mut vec![0.0; fewest], alpha).is_some());
            prop_assert!(upper_bound(&mut vec![0.0; fewest - 1], alpha).is_none());
        }
    }
}
