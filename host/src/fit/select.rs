//! Which source layers a target layer reads (METHOD §3).

use rayon::prelude::*;

use super::{
    linalg::{Cholesky, LinalgError},
    moments::{Covariances, Moments},
};
use crate::cache::CacheLayout;

/// How well each source layer alone explains each target layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Scores {
    /// R² of the keys (rotation stripped), `[target_layers][source_layers]`.
    pub keys: Vec<Vec<f64>>,
    /// R² of the values, likewise.
    pub values: Vec<Vec<f64>>,
}

impl Scores {
    /// Ordinary least squares with bias for each (source layer, target layer, head), target head h from source head
    /// a(h) = ⌊h · n_kv_s / n_kv_t⌋, R² averaged over heads.
    ///
    /// # Errors
    /// [`LinalgError`] if the moments are not finite.
    pub fn new(moments: &Moments, source: &CacheLayout, target: &CacheLayout) -> Result<Scores, LinalgError> {
        let side = |covariances: Covariances<'_>| -> Result<Vec<Vec<f64>>, LinalgError> {
            let by_source: Vec<Vec<f64>> = (0..source.layers)
                .into_par_iter()
                .map(|layer| explained(covariances, layer, source, target))
                .collect::<Result<_, _>>()?;
            Ok((0..target.layers).map(|t| by_source.iter().map(|row| row[t]).collect()).collect())
        };
        Ok(Scores { keys: side(moments.keys())?, values: side(moments.values())? })
    }

    /// The mean of the two R² of a target layer with a source layer.
    pub fn score(&self, target_layer: usize, source_layer: usize) -> f64 {
        (self.keys[target_layer][source_layer] + self.values[target_layer][source_layer]) / 2.0
    }

    /// The `k` source layers with the highest scores for a target layer, ascending; of equals the earlier one.
    pub fn top(&self, target_layer: usize, k: usize) -> Vec<usize> {
        let mut layers: Vec<usize> = (0..self.keys[target_layer].len()).collect();
        layers.sort_by(|&a, &b| self.score(target_layer, b).total_cmp(&self.score(target_layer, a)).then(a.cmp(&b)));
        layers.truncate(k);
        layers.sort_unstable();
        layers
    }

    /// [`Scores::top`] of every target layer: what the mapper's settings name.
    pub fn top_all(&self, k: usize) -> Vec<Vec<usize>> {
        (0..self.keys.len()).map(|layer| self.top(layer, k)).collect()
    }
}

/// R² of one source layer with every target layer, averaged over heads.
fn explained(
    covariances: Covariances<'_>,
    layer: usize,
    source: &CacheLayout,
    target: &CacheLayout,
) -> Result<Vec<f64>, LinalgError> {
    let factors: Vec<Option<Cholesky>> = (0..source.kv_heads)
        .map(|head| {
            let matrix = covariances.source_columns(layer, head * source.head_dim..(head + 1) * source.head_dim);
            // A head that never varies explains nothing, and has no factor.
            if matrix.trace() == 0.0 { Ok(None) } else { Cholesky::new(&matrix).map(Some) }
        })
        .collect::<Result<_, _>>()?;
    let layers = (0..target.layers).map(|target_layer| {
        let variance = covariances.target_variance(target_layer);
        let heads = (0..target.kv_heads).map(|head| {
            let from = head * source.kv_heads / target.kv_heads;
            let columns = head * target.head_dim..(head + 1) * target.head_dim;
            let total: f64 = variance[columns.clone()].iter().sum();
            let Some(factor) = factors[from].as_ref().filter(|_| total > 0.0) else { return 0.0 };
            let source_columns = from * source.head_dim..(from + 1) * source.head_dim;
            let mut half = covariances.cross_columns((layer, source_columns), (target_layer, columns));
            factor.forward(&mut half);
            half.as_slice().iter().map(|x| x * x).sum::<f64>() / total
        });
        heads.sum::<f64>() / target.kv_heads as f64
    });
    Ok(layers.collect())
}

/// The sweep of METHOD §3, clipped to the source's layers, all of them last.
pub fn sweep(source_layers: usize) -> Vec<usize> {
    let listed = [1, 2, 4, 6, 8, 10, 12, 16, 20, 24];
    let mut sweep: Vec<usize> = listed.into_iter().filter(|&k| k < source_layers).collect();
    sweep.push(source_layers);
    sweep
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cache::{Elem, Pairing, Rope, RopeScaling},
        fit::moments::{MomentShape, Rows},
        measure::random::Random,
    };

    fn layout(layers: usize, kv_heads: usize, head_dim: usize) -> CacheLayout {
        let rope = Rope { theta: 1e4, dims: head_dim, pairing: Pairing::HalfSplit, scaling: RopeScaling::None };
        CacheLayout { layers, kv_heads, head_dim, rope, elem: Elem::F32 }
    }

    /// Target layer 0 is a map of source layer 2 with noise of the same variance, layer 1 of layer 0 without noise; each
    /// target head from the source head that GQA groups it with.
    #[test]
    fn finds_the_planted_layers_through_the_head_map() {
        let (source, target) = (layout(3, 1, 4), layout(2, 2, 3));
        let shape = MomentShape { source_layers: 3, source_width: 4, target_layers: 2, target_width: 6, hidden: 0 };
        let mut random = Random::new(7);
        let count = 4_000;
        let x: Vec<f32> = (0..count * 12).map(|_| random.normal() as f32).collect();
        let mut y = Vec::new();
        for row in x.chunks_exact(12) {
            for j in 0..6 {
                y.push(row[8 + j % 4] + random.normal() as f32);
            }
            y.extend((0..6).map(|j| 3.0 - 2.0 * row[j % 4]));
        }
        let mut moments = Moments::new(shape);
        let part = Rows { source: &x, target: &y };
        moments.add(part, part);
        let scores = Scores::new(&moments, &source, &target).unwrap();
        assert!((scores.score(0, 2) - 0.5).abs() < 0.03, "{scores:?}");
        assert!((scores.score(1, 0) - 1.0).abs() < 1e-5, "{scores:?}");
        assert!(scores.score(1, 1) < 0.01 && scores.score(0, 0) < 0.01, "{scores:?}");
        assert_eq!(scores.top_all(1), [[2], [0]]);
        assert_eq!(scores.top(0, 3), [0, 1, 2]);
    }

    #[test]
    fn the_sweep_ends_with_all_layers() {
        assert_eq!(sweep(24), [1, 2, 4, 6, 8, 10, 12, 16, 20, 24]);
        assert_eq!(sweep(6), [1, 2, 4, 6]);
        assert_eq!(sweep(30), [1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 30]);
    }
}
