//! What a fit can say of its own work, from what it has at hand anyway. Nothing is chosen by it.

use rayon::prelude::*;

use super::{
    linalg::{Cholesky, LinalgError, Matrix},
    moments::{Covariances, Moments},
    product::{View, multiply},
    select::Scores,
};
use crate::pair::{ForwardCurve, HeatMap};

/// Source layers that a forward curve adds at most: what comes after adds little, and each costs as much as all before.
pub const FORWARD_STEPS: usize = 8;

/// The scores by which source layers are chosen.
pub fn heat_map(scores: &Scores) -> HeatMap {
    HeatMap { keys: scores.keys.clone(), values: scores.values.clone() }
}

/// Adds to a target layer's features the source layer that raises the mean of keys' and values' R² most, step by step, up to
/// [`FORWARD_STEPS`] of them. Least squares without a penalty, in sample.
///
/// Block Gram–Schmidt on the covariances: what the layers so far explain of each candidate is taken off it once, so that a step
/// factorises one block a candidate.
///
/// # Errors
/// [`LinalgError::NotFinite`] if the moments are not finite.
pub fn forward(moments: &Moments, target_layer: usize) -> Result<ForwardCurve, LinalgError> {
    let mut sides = [moments.keys(), moments.values()].map(|side| Residuals::new(side, target_layer));
    let layers = moments.shape().source_layers;
    let mut curve = ForwardCurve { layer: target_layer, sources: vec![], keys: vec![], values: vec![] };
    let mut joint = [0.0; 2];
    for _ in 0..FORWARD_STEPS.min(layers) {
        let left: Vec<usize> = (0..layers).filter(|layer| !curve.sources.contains(layer)).collect();
        let gains = |side: &Residuals<'_>| -> Result<Vec<f64>, LinalgError> {
            left.par_iter().map(|&layer| side.gain(layer)).collect()
        };
        let (keys, values) = (gains(&sides[0])?, gains(&sides[1])?);
        // Of equals the earlier one.
        let best = (0..left.len()).rev().max_by(|&a, &b| (keys[a] + values[a]).total_cmp(&(keys[b] + values[b])));
        let Some(best) = best else { break };
        joint = [joint[0] + keys[best], joint[1] + values[best]];
        curve.sources.push(left[best]);
        curve.keys.push(joint[0]);
        curve.values.push(joint[1]);
        for side in &mut sides {
            side.add(left[best], &left)?;
        }
    }
    Ok(curve)
}

/// One side's candidates, less what the layers that were added explain of them.
struct Residuals<'a> {
    side: Covariances<'a>,
    /// Variance of the target layer, summed over coordinates.
    total: f64,
    candidates: Vec<Candidate>,
    added: Vec<usize>,
}

struct Candidate {
    /// Covariance, `[w, w]`.
    own: Matrix,
    /// Covariance with the target layer, `[w, t]`.
    cross: Matrix,
    /// `L⁻¹` times its covariance with each layer that was added, `[w, w]` each, in their order.
    explained: Vec<Matrix>,
}

impl<'a> Residuals<'a> {
    fn new(side: Covariances<'a>, target_layer: usize) -> Residuals<'a> {
        let candidate = |layer| Candidate {
            own: side.source(&[layer]),
            cross: side.cross(&[layer], target_layer),
            explained: Vec::new(),
        };
        let candidates = (0..side.shape().source_layers).map(candidate).collect();
        let total = side.target_variance(target_layer).iter().sum();
        Residuals { side, total, candidates, added: Vec::new() }
    }

    /// What `layer` would add to R².
    fn gain(&self, layer: usize) -> Result<f64, LinalgError> {
        let Candidate { own, cross, .. } = &self.candidates[layer];
        let Some(factor) = factor(own)? else { return Ok(0.0) };
        let mut half = cross.clone();
        factor.forward(&mut half);
        let explained = half.as_slice().iter().map(|x| x * x).sum::<f64>();
        // Rounding may leave a little more than there is.
        Ok(if self.total > 0.0 { (explained / self.total).min(1.0) } else { 0.0 })
    }

    /// Takes what `layer` explains off the other layers of `left`.
    fn add(&mut self, layer: usize, left: &[usize]) -> Result<(), LinalgError> {
        let Some(factor) = factor(&self.candidates[layer].own)? else { return Ok(()) };
        let mut half = self.candidates[layer].cross.clone();
        factor.forward(&mut half);
        let before = self.candidates[layer].explained.clone();
        let (side, width) = (self.side, self.candidates[layer].own.rows());
        self.candidates.par_iter_mut().enumerate().filter(|(at, _)| *at != layer && left.contains(at)).for_each(
            |(at, other)| {
                let both = side.source(&[layer, at]);
                let rows = (0..width).flat_map(|row| both.row(row)[width..].to_vec()).collect();
                let mut between = Matrix::from_vec(width, width, rows);
                for (ours, theirs) in before.iter().zip(&other.explained) {
                    subtract(&mut between, ours, theirs);
                }
                factor.forward(&mut between);
                subtract(&mut other.own, &between, &between);
                subtract(&mut other.cross, &between, &half);
                other.explained.push(between);
            },
        );
        self.added.push(layer);
        Ok(())
    }
}

/// The factor of what is left of a layer; none where nothing is.
fn factor(own: &Matrix) -> Result<Option<Cholesky>, LinalgError> {
    match Cholesky::new(own) {
        Ok(factor) => Ok(Some(factor)),
        Err(LinalgError::NotPositiveDefinite { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// `from −= leftᵀ · right`.
fn subtract(from: &mut Matrix, left: &Matrix, right: &Matrix) {
    let view = |matrix: &'_ Matrix| (matrix.rows(), matrix.cols());
    let ((rows, a), (_, b)) = (view(left), view(right));
    let left = View::rows(left.as_slice(), rows, a, a).transposed();
    multiply(from.as_mut_slice(), b, 1.0, -1.0, left, View::rows(right.as_slice(), rows, b, b));
}

/// Effective degrees of freedom of a ridge, `tr(C (C + D)⁻¹)`: as many features as a fit without penalty would have had to
/// be as flexible (Hastie, Tibshirani & Friedman, The Elements of Statistical Learning, (3.50)). `penalty` is D's diagonal.
///
/// # Errors
/// [`LinalgError`] if C + D has no Cholesky factor.
pub fn effective_features(c: &Matrix, penalty: &[f64]) -> Result<f64, LinalgError> {
    let n = c.rows();
    let mut system = c.clone();
    penalty.iter().enumerate().for_each(|(i, penalty)| system.row_mut(i)[i] += penalty);
    let factor = Cholesky::new(&system)?;
    drop(system);
    // tr(C A⁻¹) = n − tr(D A⁻¹), and (A⁻¹)ᵢᵢ = |L⁻¹ eᵢ|².
    let mut inverse = Matrix::zeros(n, n);
    inverse.add_diagonal(1.0);
    factor.forward(&mut inverse);
    let mut squares = vec![0.0; n];
    for row in 0..n {
        squares.iter_mut().zip(inverse.row(row)).for_each(|(sum, x)| *sum += x * x);
    }
    let taken: f64 = squares.iter().zip(penalty).map(|(square, penalty)| square * (penalty + factor.jitter())).sum();
    Ok(n as f64 - taken)
}

/// How much more of the keys' errors lies where the target's queries look than elsewhere: their share along each right singular
/// vector of the queries, weighted by its σ², over the mean of all directions. 1 where errors are spread evenly, more where
/// they do harm; none where there is no error, or no query.
///
/// `queries`: `[_, d]`, content space, of all query heads of the KV head; `errors`: `[_, d]` of its held-out tokens.
pub fn key_concentration(queries: &[f32], errors: &[f32], d: usize) -> Option<f64> {
    // Σ σ²ⱼ (e·vⱼ)² is |Q e|²: the decomposition itself is not needed.
    let gram = gram(queries, d);
    let of_errors = self::gram(errors, d);
    let seen: f64 = gram.as_slice().iter().zip(of_errors.as_slice()).map(|(q, e)| q * e).sum();
    let (look, error) = (gram.trace(), of_errors.trace());
    (look > 0.0 && error > 0.0).then(|| seen / look / (error / d as f64))
}

/// `rowsᵀ · rows` in f64, `[d, d]`.
fn gram(rows: &[f32], d: usize) -> Matrix {
    let wide: Vec<f64> = rows.iter().map(|&x| f64::from(x)).collect();
    let (view, mut gram) = (View::rows(&wide, wide.len() / d.max(1), d, d), Matrix::zeros(d, d));
    multiply(gram.as_mut_slice(), d, 0.0, 1.0, view.transposed(), view);
    gram
}

/// How much larger the values' errors are where the target attends: their squares weighted by squared attention, over their
/// plain mean. None where there is no error, or no attention.
///
/// `errors`: `[tokens, d]`; `attention`: the share of attention that each token gets.
pub fn value_concentration(errors: &[f32], attention: &[f32], d: usize) -> Option<f64> {
    let squares = errors.chunks_exact(d).map(|row| row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>());
    let (mut weighted, mut weights, mut plain) = (0.0, 0.0, 0.0);
    for (square, &share) in squares.zip(attention) {
        let weight = f64::from(share).powi(2);
        weighted += weight * square;
        weights += weight;
        plain += square;
    }
    (weights > 0.0 && plain > 0.0).then(|| weighted / weights / (plain / attention.len() as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fit::{
            moments::{MomentShape, Rows},
            ridge::{self, Lambda, LambdaConvention},
        },
        measure::random::Random,
    };

    const SHAPE: MomentShape =
        MomentShape { source_layers: 5, source_width: 3, target_layers: 1, target_width: 4, hidden: 0 };

    /// Target = 2 · layer 3 + layer 1 + a tenth of noise; layer 4 is layer 3 again, layer 0 and 2 are noise.
    fn planted() -> Moments {
        let mut random = Random::new(5);
        let (mut x, mut y) = (Vec::new(), Vec::new());
        for _ in 0..3_000 {
            let mut row: Vec<f32> = (0..15).map(|_| random.normal() as f32).collect();
            row.copy_within(9..12, 12);
            y.extend((0..4).map(|j| 2.0 * row[9 + j % 3] + row[3 + j % 3] + 0.1 * random.normal() as f32));
            x.extend(row);
        }
        let mut moments = Moments::new(SHAPE);
        let rows = Rows { source: &x, target: &y };
        moments.add(rows, rows);
        moments
    }

    #[test]
    fn the_curve_finds_what_was_planted_in_its_order() {
        let moments = planted();
        let curve = forward(&moments, 0).unwrap();
        assert_eq!(curve.sources.len(), 5);
        assert_eq!(curve.sources[..2], [3, 1], "{curve:?}");
        assert!((curve.keys[0] - 0.8).abs() < 0.02 && (curve.keys[1] - 0.998).abs() < 1e-3, "{curve:?}");
        assert_eq!(curve.keys, curve.values, "both sides were given the same rows");
        assert!(curve.keys.windows(2).all(|pair| pair[1] >= pair[0]), "{curve:?}");
        // A copy of what is there already adds nothing, and comes last.
        assert_eq!(curve.sources[4], 4);
        assert!(curve.keys[4] - curve.keys[3] < 1e-6, "{curve:?}");
    }

    /// The joint R² of the first n layers is that of fitting them at once.
    #[test]
    fn the_curve_is_that_of_joint_fits() {
        let moments = planted();
        let curve = forward(&moments, 0).unwrap();
        for n in 1..=4 {
            let mut layers = curve.sources[..n].to_vec();
            layers.sort_unstable();
            let lambda = Lambda { value: 0.0, convention: LambdaConvention::PerToken };
            let map = ridge::fit(&moments, &[layers], lambda).unwrap().remove(0);
            assert!((map.keys.r2 - curve.keys[n - 1]).abs() < 1e-6, "{n}: {} against {curve:?}", map.keys.r2);
        }
    }

    #[test]
    fn effective_features_fall_from_all_to_none() {
        let mut c = Matrix::zeros(3, 3);
        for (i, variance) in [4.0, 1.0, 0.25].into_iter().enumerate() {
            c.row_mut(i)[i] = variance;
        }
        let of = |penalty: f64| effective_features(&c, &[penalty; 3]).unwrap();
        assert!((of(0.0) - 3.0).abs() < 1e-12);
        // 4/5 + 1/2 + 0.25/1.25
        assert!((of(1.0) - 1.5).abs() < 1e-12);
        assert!(of(1e9) < 1e-6);
        // Against tr(C A⁻¹) solved the long way, with correlations and unequal penalties.
        let covariance = planted().keys().source(&[0, 3]);
        let penalty = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6];
        let mut system = covariance.clone();
        penalty.iter().enumerate().for_each(|(i, p)| system.row_mut(i)[i] += p);
        let mut solved = covariance.clone();
        Cholesky::new(&system).unwrap().solve(&mut solved);
        assert!((effective_features(&covariance, &penalty).unwrap() - solved.trace()).abs() < 1e-10);
    }

    #[test]
    fn errors_count_where_queries_look() {
        let mut random = Random::new(9);
        let d = 4;
        let mut noise = |n: usize| -> Vec<f32> { (0..n).map(|_| random.normal() as f32).collect() };
        // Queries along the first axis alone, with σ² = 9.
        let queries: Vec<f32> = (0..500).flat_map(|_| [3.0, 0.0, 0.0, 0.0]).collect();
        let even = noise(4_000 * d);
        let concentration = key_concentration(&queries, &even, d).unwrap();
        assert!((concentration - 1.0).abs() < 0.1, "{concentration}");
        let along: Vec<f32> = (0..100).flat_map(|i| [i as f32, 0.0, 0.0, 0.0]).collect();
        assert!(
            (key_concentration(&queries, &along, d).unwrap() - 4.0).abs() < 1e-9,
            "all of it in one of 4 directions"
        );
        let beside: Vec<f32> = (0..100).flat_map(|i| [0.0, i as f32, 0.0, 1.0]).collect();
        assert_eq!(key_concentration(&queries, &beside, d), Some(0.0));
        // Queries that look everywhere alike see every error alike.
        let everywhere: Vec<f32> = (0..d * d).map(|i| if i % (d + 1) == 0 { 1.0 } else { 0.0 }).collect();
        assert!((key_concentration(&everywhere, &along, d).unwrap() - 1.0).abs() < 1e-12);
        assert_eq!(key_concentration(&queries, &vec![0.0; 40], d), None);
    }

    #[test]
    fn errors_count_where_attention_falls() {
        let errors = [3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let at = |attention: [f32; 4]| value_concentration(&errors, &attention, 2);
        assert_eq!(at([0.25; 4]), Some(1.0));
        assert_eq!(at([1.0, 0.0, 0.0, 0.0]), Some(4.0));
        assert_eq!(at([0.0, 0.5, 0.5, 0.0]), Some(0.0));
        assert_eq!(at([0.0; 4]), None);
        assert_eq!(value_concentration(&[0.0; 8], &[0.25; 4], 2), None);
    }
}
