//! The full-head ridge of Heo, arXiv:2608.03893 (METHOD §4): `Ŷ = X W + b`, X = all KV heads of the selected source layers.

use std::{collections::BTreeMap, str::FromStr};

use serde::{Deserialize, Serialize};

use super::{
    linalg::{Cholesky, LinalgError, Matrix},
    moments::{Covariances, Moments},
};
use crate::{
    cache::Elem,
    pair::{Tensor, rounded},
};

/// What the λ of a ridge multiplies: the s of `W = (C + λsI)⁻¹ B`, C and B being covariances per token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LambdaConvention {
    /// s = 1: as published.
    PerToken,
    /// s = the mean diagonal of C, so that one λ suits models of any scale.
    #[default]
    PerTokenRelative,
    /// s = 1 / N: λ on the raw sums.
    Sum,
    /// s = each coordinate's own variance: as if every feature had been scaled to 1. Where the selected layers differ in
    /// scale (values grow a thousandfold with depth in some models), no one s suits them all.
    Standardised,
}

impl LambdaConvention {
    /// Every convention with the name it has in manifests and on the command line.
    pub const ALL: [(&'static str, LambdaConvention); 4] = [
        ("per-token", LambdaConvention::PerToken),
        ("per-token-relative", LambdaConvention::PerTokenRelative),
        ("sum", LambdaConvention::Sum),
        ("standardised", LambdaConvention::Standardised),
    ];
}

/// A convention that does not exist.
#[derive(Debug, thiserror::Error)]
#[error("lambda convention `{0}`: expected per-token, per-token-relative, sum or standardised")]
pub struct ParseConventionError(String);

impl FromStr for LambdaConvention {
    type Err = ParseConventionError;

    fn from_str(s: &str) -> Result<LambdaConvention, ParseConventionError> {
        let found = LambdaConvention::ALL.iter().find(|(name, _)| *name == s);
        found.map(|(_, convention)| *convention).ok_or_else(|| ParseConventionError(s.to_owned()))
    }
}

/// The strength of the ridge.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lambda {
    /// λ ≥ 0.
    pub value: f64,
    /// What it multiplies.
    pub convention: LambdaConvention,
}

impl Default for Lambda {
    /// 0.01 of the mean variance.
    fn default() -> Lambda {
        Lambda { value: 0.01, convention: LambdaConvention::default() }
    }
}

impl Lambda {
    /// What is added to each element of the diagonal of the covariance `c` over `rows` rows.
    pub fn diagonal(&self, c: &Matrix, rows: f64) -> Vec<f64> {
        let n = c.rows();
        match self.convention {
            LambdaConvention::PerToken => vec![self.value; n],
            LambdaConvention::PerTokenRelative => vec![self.value * c.trace() / n.max(1) as f64; n],
            LambdaConvention::Sum => vec![self.value / rows; n],
            LambdaConvention::Standardised => (0..n).map(|i| self.value * c.row(i)[i]).collect(),
        }
    }
}

/// The affine map of keys or values of one target layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AffineMap {
    /// `[k · n_kv_s · d_s, n_kv_t · d_t]`.
    pub weight: Matrix,
    /// `[n_kv_t · d_t]`.
    pub bias: Vec<f64>,
    /// Mean of the source rows it reads, `[k · n_kv_s · d_s]`: what a rounded weight needs to find its bias again.
    pub source_mean: Vec<f64>,
    /// Mean of the target rows.
    pub target_mean: Vec<f64>,
    /// In-sample R² over all coordinates. A diagnostic: never used to choose k (METHOD §3).
    pub r2: f64,
    /// Jitter that the factorisation needed, 0 in the ordinary case.
    pub jitter: f64,
}

impl AffineMap {
    /// `{name}.weight` of type `elem`, and `{name}.bias` in f32, adjusted to the rounded weight.
    pub(super) fn tensors(&self, name: &str, elem: Elem) -> [Tensor; 2] {
        let weight = rounded(self.weight.as_slice().iter().copied(), elem);
        let bias = self.bias_for(&weight);
        let shape = vec![self.weight.rows(), self.weight.cols()];
        [
            Tensor { name: format!("{name}.weight"), elem, shape, numbers: weight },
            Tensor { name: format!("{name}.bias"), elem: Elem::F32, shape: vec![bias.len()], numbers: bias },
        ]
    }

    /// The bias that keeps the means mapped onto each other when the weight is replaced by `weight` (a rounded one).
    pub fn bias_for(&self, weight: &[f32]) -> Vec<f32> {
        let mut bias = self.target_mean.clone();
        for (row, &mean) in weight.chunks_exact(bias.len()).zip(&self.source_mean) {
            bias.iter_mut().zip(row).for_each(|(b, &w)| *b -= mean * f64::from(w));
        }
        bias.iter().map(|&b| b as f32).collect()
    }
}

/// Solves `(C + λsI) W = B` for several right-hand sides of one system; also gives the jitter it needed.
///
/// # Errors
/// [`LinalgError`] if C + λsI has no Cholesky factor.
pub fn solve(c: &Matrix, rhs: &mut [Matrix], lambda: Lambda, rows: f64) -> Result<f64, LinalgError> {
    let factor = factorise(c.clone(), &lambda.diagonal(c, rows))?;
    rhs.iter_mut().for_each(|b| factor.solve(b));
    Ok(factor.jitter())
}

/// The factor of C with `diagonal` added to it.
fn factorise(mut c: Matrix, diagonal: &[f64]) -> Result<Cholesky, LinalgError> {
    for (i, penalty) in diagonal.iter().enumerate() {
        c.row_mut(i)[i] += penalty;
    }
    Cholesky::new(&c)
}

/// Keys' and values' maps of one target layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerMap {
    /// Source layers it reads, in the order of its weight's rows.
    pub sources: Vec<usize>,
    /// Keys, content space to content space.
    pub keys: AffineMap,
    /// Values.
    pub values: AffineMap,
}

impl LayerMap {
    /// The tensors of target layer `layer`: `layers.{l}.k.weight` `[features, n_kv_t · d_t]` and `layers.{l}.k.bias`
    /// `[n_kv_t · d_t]`, and the same with `v`. Matrices are of type `elem`, biases f32 and adjusted to the rounded matrices.
    pub fn tensors(&self, layer: usize, elem: Elem) -> Vec<Tensor> {
        let side = |(side, map): (&str, &AffineMap)| map.tensors(&format!("layers.{layer}.{side}"), elem);
        [("k", &self.keys), ("v", &self.values)].into_iter().flat_map(side).collect()
    }
}

/// Fits every target layer from the source layers chosen for it (`selection[target_layer]`).
///
/// # Errors
/// [`LinalgError`] if a regularised covariance has no Cholesky factor.
pub fn fit(moments: &Moments, selection: &[Vec<usize>], lambda: Lambda) -> Result<Vec<LayerMap>, LinalgError> {
    let wanted: Vec<Wanted> = selection.iter().cloned().enumerate().map(|(layer, sources)| (sources, layer)).collect();
    let keys = fit_each(moments.keys(), &wanted, lambda)?;
    let values = fit_each(moments.values(), &wanted, lambda)?;
    let layers = selection.iter().zip(keys.into_iter().zip(values));
    Ok(layers.map(|(sources, (keys, values))| LayerMap { sources: sources.clone(), keys, values }).collect())
}

/// The blocks that one output block is predicted from, and that output block, as [`Covariances`] count them.
pub(super) type Wanted = (Vec<usize>, usize);

/// One map for each that is wanted.
pub(super) fn fit_each(
    side: Covariances<'_>,
    wanted: &[Wanted],
    lambda: Lambda,
) -> Result<Vec<AffineMap>, LinalgError> {
    // Outputs that are predicted from the same features share one factorisation: with k = all there is only one.
    let mut groups: BTreeMap<&[usize], Vec<usize>> = BTreeMap::new();
    for (index, (sources, _)) in wanted.iter().enumerate() {
        groups.entry(sources).or_default().push(index);
    }
    let mut maps: Vec<Option<AffineMap>> = vec![None; wanted.len()];
    for (sources, indices) in groups {
        let covariance = side.source(sources);
        let mut diagonal = lambda.diagonal(&covariance, side.rows());
        let factor = factorise(covariance, &diagonal)?;
        diagonal.iter_mut().for_each(|penalty| *penalty += factor.jitter());
        let source_mean = side.source_mean(sources);
        for index in indices {
            let cross = side.cross(sources, wanted[index].1);
            let mut weight = cross.clone();
            factor.solve(&mut weight);
            maps[index] = Some(affine(side, wanted[index].1, &cross, weight, &source_mean, &diagonal, factor.jitter()));
        }
    }
    Ok(maps.into_iter().flatten().collect())
}

fn affine(
    side: Covariances<'_>,
    target: usize,
    cross: &Matrix,
    weight: Matrix,
    source_mean: &[f64],
    diagonal: &[f64],
    jitter: f64,
) -> AffineMap {
    let target_mean = side.target_mean(target);
    let mut bias = target_mean.clone();
    for (i, &mean) in source_mean.iter().enumerate() {
        bias.iter_mut().zip(weight.row(i)).for_each(|(b, w)| *b -= mean * w);
    }
    // With (C + D) W = B: SSE/N = Σ var(y) − 2 tr(WᵀB) + tr(WᵀCW) = Σ var(y) − tr(WᵀB) − tr(WᵀDW).
    let row = |(i, penalty): (usize, &f64)| -> f64 {
        weight.row(i).iter().zip(cross.row(i)).map(|(w, b)| w * b + penalty * w * w).sum()
    };
    let explained: f64 = diagonal.iter().enumerate().map(row).sum();
    let total: f64 = side.target_variance(target).iter().sum();
    let r2 = if total > 0.0 { explained / total } else { 0.0 };
    AffineMap { weight, bias, source_mean: source_mean.to_vec(), target_mean, r2, jitter }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fit::moments::{MomentShape, Rows},
        measure::random::Random,
    };

    const SHAPE: MomentShape =
        MomentShape { source_layers: 3, source_width: 5, target_layers: 2, target_width: 4, hidden: 0 };

    /// Keys: y = x W + b without noise from layers 0 and 2; values: unrelated noise.
    fn planted(count: usize) -> (Moments, Vec<f64>, Vec<f32>, Vec<f32>) {
        let mut random = Random::new(11);
        let w: Vec<f64> = (0..15 * 8).map(|i| if (5..10).contains(&(i / 8)) { 0.0 } else { random.normal() }).collect();
        let x: Vec<f32> = (0..count * 15).map(|i| 10.0 * (i % 3) as f32 + random.normal() as f32).collect();
        let mut y = Vec::new();
        for row in x.chunks_exact(15) {
            y.extend((0..8).map(|j| {
                (j as f64 + row.iter().enumerate().map(|(i, &x)| f64::from(x) * w[i * 8 + j]).sum::<f64>()) as f32
            }));
        }
        let noise: Vec<f32> = (0..count * 8).map(|_| random.normal() as f32).collect();
        let mut moments = Moments::new(SHAPE);
        moments.add(Rows { source: &x, target: &y }, Rows { source: &x, target: &noise });
        (moments, w, x, y)
    }

    #[test]
    fn recovers_a_planted_map() {
        let (moments, w, ..) = planted(600);
        let lambda = Lambda { value: 0.0, convention: LambdaConvention::PerToken };
        let maps = fit(&moments, &[vec![0, 2], vec![0, 1, 2]], lambda).unwrap();
        for (layer, map) in maps.iter().enumerate() {
            assert!((map.keys.r2 - 1.0).abs() < 1e-6, "R² {}", map.keys.r2);
            assert!(map.values.r2 < 0.1, "noise explained: {}", map.values.r2);
            for (i, source) in map.sources.iter().flat_map(|s| s * 5..(s + 1) * 5).enumerate() {
                for j in 0..4 {
                    let error = map.keys.weight.row(i)[j] - w[source * 8 + layer * 4 + j];
                    assert!(error.abs() < 1e-4, "weight {i},{j} of layer {layer} is off by {error:e}");
                }
            }
            for j in 0..4 {
                let error = map.keys.bias[j] - (layer * 4 + j) as f64;
                assert!(error.abs() < 2e-3, "bias {j} of layer {layer} is off by {error:e}");
            }
        }
    }

    #[test]
    fn conventions_differ_by_their_scale_only() {
        let (moments, ..) = planted(200);
        let c = moments.keys().source(&[0, 2]);
        let scale = c.trace() / 10.0;
        let fit = |value, convention| {
            fit(&moments, &[vec![0, 2], vec![0, 2]], Lambda { value, convention }).unwrap().remove(1).keys.weight
        };
        let close = |a: &Matrix, b: &Matrix| {
            let worst = a.as_slice().iter().zip(b.as_slice()).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
            assert!(worst < 1e-12, "weights differ by {worst:e}");
        };
        let relative = fit(0.3, LambdaConvention::PerTokenRelative);
        close(&relative, &fit(0.3 * scale, LambdaConvention::PerToken));
        close(&relative, &fit(0.3 * scale * 200.0, LambdaConvention::Sum));
    }

    /// With standardised λ, a feature's unit is of no consequence; with one λ for all it is.
    #[test]
    fn standardised_predictions_do_not_depend_on_units() {
        let mut random = Random::new(3);
        let x: Vec<f32> = (0..400 * 15).map(|_| random.normal() as f32).collect();
        let y: Vec<f32> = (0..400 * 8).map(|i| x[i / 8 * 15 + i % 8] + random.normal() as f32).collect();
        let scaled: Vec<f32> = x.iter().enumerate().map(|(i, x)| if i % 15 < 5 { x / 1024.0 } else { *x }).collect();
        let r2 = |x: &[f32], convention| {
            let mut moments = Moments::new(SHAPE);
            let rows = Rows { source: x, target: &y };
            moments.add(rows, rows);
            let lambda = Lambda { value: 0.1, convention };
            fit(&moments, &[vec![0, 1], vec![0, 1]], lambda).unwrap()[0].keys.r2
        };
        let difference = |convention| (r2(&x, convention) - r2(&scaled, convention)).abs();
        assert!(difference(LambdaConvention::Standardised) < 1e-6);
        assert!(difference(LambdaConvention::PerTokenRelative) > 0.1);
    }

    /// The closed form of R² against the residuals themselves.
    #[test]
    fn r2_is_that_of_the_predictions() {
        let (moments, _, x, y) = planted(300);
        let map = &fit(&moments, &[vec![1], vec![0]], Lambda { value: 0.5, ..Lambda::default() }).unwrap()[1].keys;
        let (mut residual, mut total) = (0.0, 0.0);
        for (x, y) in x.chunks_exact(15).zip(y.chunks_exact(8)) {
            for j in 0..4 {
                let predicted = map.bias[j] + (0..5).map(|i| f64::from(x[i]) * map.weight.row(i)[j]).sum::<f64>();
                residual += (f64::from(y[4 + j]) - predicted).powi(2);
                total += (f64::from(y[4 + j]) - map.target_mean[j]).powi(2);
            }
        }
        assert!((map.r2 - (1.0 - residual / total)).abs() < 1e-5, "{} against {}", map.r2, 1.0 - residual / total);
    }

    #[test]
    fn a_rounded_weight_keeps_the_means() {
        let (moments, ..) = planted(300);
        let map = fit(&moments, &[vec![0], vec![0, 1]], Lambda::default()).unwrap().remove(1).keys;
        let rounded: Vec<f32> = map.weight.as_slice().iter().map(|&w| half::f16::from_f64(w).to_f32()).collect();
        let bias = map.bias_for(&rounded);
        for j in 0..4 {
            let rows = rounded.chunks_exact(4).zip(&map.source_mean);
            let mapped = f64::from(bias[j]) + rows.map(|(row, mean)| f64::from(row[j]) * mean).sum::<f64>();
            assert!((mapped - map.target_mean[j]).abs() < 1e-5);
        }
    }
}
