//! Quality of a continuation from its logits (METHOD §5): the target's own greedy continuation, teacher-forced.

use kvmig_gate::Quality;
use rayon::prelude::*;

/// Logits that can't be compared.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum QualityError {
    /// An arm has logits of another number of tokens.
    #[error("the {arm} arm has {found} logits, expected {rows} rows of at least {vocab}")]
    Shape {
        /// The arm.
        arm: &'static str,
        /// Logits it has.
        found: usize,
        /// Tokens of the continuation.
        rows: usize,
        /// Vocabulary that is compared.
        vocab: usize,
    },
    /// A logit is NaN or infinite.
    #[error("the {arm} arm has a NaN or an infinity among the logits of token {row}")]
    NotFinite {
        /// The arm.
        arm: &'static str,
        /// Row of the continuation.
        row: usize,
    },
    /// A continuation without tokens.
    #[error("no token to compare: the continuation is empty")]
    Empty,
}

/// Logits of one arm: `[n, vocab]`, row i predicting token i of the continuation.
#[derive(Clone, Copy, Debug)]
pub struct Logits<'a> {
    /// The numbers.
    pub values: &'a [f32],
    /// Columns. Siblings may fill up their vocabularies differently: only the columns that both have are compared.
    pub vocab: usize,
}

impl<'a> Logits<'a> {
    /// The first `columns` logits of one token.
    fn row(self, row: usize, columns: usize) -> &'a [f32] {
        &self.values[row * self.vocab..][..columns]
    }
}

/// What one token contributes.
struct Term {
    agrees: bool,
    kl: f64,
    gap: f64,
}

/// Agreement, KL(target ‖ arm) and NLL gap over `continuation`, averaged over its tokens, in nats.
///
/// Both sides are normalised over the columns they share. The cosines of the result are left open.
///
/// # Errors
/// [`QualityError`] when the shapes differ, the continuation is empty, or a logit is not finite.
pub fn compare(
    target: Logits<'_>,
    (name, arm): (&'static str, Logits<'_>),
    continuation: &[u32],
) -> Result<Quality, QualityError> {
    let (rows, vocab) = (continuation.len(), target.vocab.min(arm.vocab));
    for (name, logits) in [("target", target), (name, arm)] {
        if logits.values.len() != rows * logits.vocab {
            return Err(QualityError::Shape { arm: name, found: logits.values.len(), rows, vocab: logits.vocab });
        }
    }
    if rows == 0 {
        return Err(QualityError::Empty);
    }
    let terms: Vec<Term> = (0..rows)
        .into_par_iter()
        .map(|row| {
            let (p, q) = (distribution(target.row(row, vocab)), distribution(arm.row(row, vocab)));
            let p = p.ok_or(QualityError::NotFinite { arm: "target", row })?;
            let q = q.ok_or(QualityError::NotFinite { arm: name, row })?;
            let kl = p.log_probs.iter().zip(&q.log_probs).map(|(p, q)| p.exp() * (p - q)).sum();
            let token = continuation[row] as usize;
            // A token outside the shared columns has no probability in the arm; what the target makes of it can't be told.
            let gap = if token < vocab { p.log_probs[token] - q.log_probs[token] } else { f64::INFINITY };
            let term = Term { agrees: p.best == q.best, kl, gap };
            if gap.is_finite() { Ok(term) } else { Err(QualityError::NotFinite { arm: name, row }) }
        })
        .collect::<Result<_, _>>()?;
    let mean = |value: fn(&Term) -> f64| terms.iter().map(value).sum::<f64>() / rows as f64;
    Ok(Quality {
        agreement: mean(|t| f64::from(u8::from(t.agrees))),
        // Rounding can leave a divergence of equal distributions below zero.
        kl_nats: mean(|t| t.kl).max(0.0),
        nll_gap_nats: mean(|t| t.gap),
        cosine_mean: None,
        cosine_worst_layer: None,
        n: rows,
    })
}

struct Distribution {
    log_probs: Vec<f64>,
    best: usize,
}

/// Log-softmax in f64 and the most probable column; `None` unless all logits are finite.
fn distribution(logits: &[f32]) -> Option<Distribution> {
    if logits.is_empty() || logits.iter().any(|x| !x.is_finite()) {
        return None;
    }
    let best = most_likely(logits);
    let max = f64::from(logits[best]);
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    let norm = max + sum.ln();
    Some(Distribution { log_probs: logits.iter().map(|&x| f64::from(x) - norm).collect(), best })
}

/// The column with the highest logit, of equals the first: greedy decoding's choice. 0 for no columns.
pub fn most_likely(logits: &[f32]) -> usize {
    (1..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

/// Share of the context's worth that an arm keeps, `(NLL without − NLL arm) / (NLL without − NLL native)`, from the two
/// arms' NLL gaps against the native arm; 1 is native, 0 no prefix at all. `None` where the prefix is worth nothing.
pub fn worth_kept(arm_gap: f64, no_prefix_gap: f64) -> Option<f64> {
    (no_prefix_gap > 0.0).then(|| (no_prefix_gap - arm_gap) / no_prefix_gap)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(values: &[f32], vocab: usize) -> Logits<'_> {
        Logits { values, vocab }
    }

    /// Two tokens with probabilities (3/4, 1/4) against (1/2, 1/2): KL and gap by hand.
    #[test]
    fn by_hand() {
        let target = [3.0f32.ln(), 0.0, 0.0, 3.0f32.ln()];
        let arm = [0.0, 0.0, 0.0, 0.0];
        let quality = compare(logits(&target, 2), ("mapped", logits(&arm, 2)), &[0, 1]).unwrap();
        let kl = 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln();
        assert!((quality.kl_nats - kl).abs() < 1e-7);
        assert!((quality.nll_gap_nats - 1.5f64.ln()).abs() < 1e-7);
        // The arm's tie goes to the first column: it agrees on the first token only.
        assert_eq!((quality.agreement, quality.n), (0.5, 2));
    }

    #[test]
    fn an_arm_equal_to_the_target_loses_nothing() {
        let values = [0.3, -1.0, 12.0, 0.1, 0.2, 0.3];
        let quality = compare(logits(&values, 3), ("mapped", logits(&values, 3)), &[2, 0]).unwrap();
        assert_eq!((quality.agreement, quality.kl_nats, quality.nll_gap_nats), (1.0, 0.0, 0.0));
    }

    /// A sibling whose vocabulary is filled up with unused columns is compared on the shared ones, normalised there.
    #[test]
    fn padding_columns_do_not_count() {
        let target = [1.0, 2.0];
        let arm = [1.0, 2.0, 50.0];
        let quality = compare(logits(&target, 2), ("source", logits(&arm, 3)), &[1]).unwrap();
        assert_eq!((quality.agreement, quality.kl_nats), (1.0, 0.0));
    }

    #[test]
    fn nan_and_shape_are_errors() {
        let (good, bad) = ([1.0, 2.0], [1.0, f32::NAN]);
        let nan = compare(logits(&good, 2), ("mapped", logits(&bad, 2)), &[1]);
        assert_eq!(nan.unwrap_err(), QualityError::NotFinite { arm: "mapped", row: 0 });
        let shape = compare(logits(&good, 2), ("mapped", logits(&good, 2)), &[1, 0]);
        assert!(matches!(shape, Err(QualityError::Shape { arm: "target", rows: 2, .. })));
    }

    #[test]
    fn worth() {
        assert_eq!(worth_kept(0.25, 1.0), Some(0.75));
        assert_eq!(worth_kept(0.1, -0.2), None);
    }
}
