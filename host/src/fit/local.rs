//! Head-local maps from the moments alone, all rows alike: what the k of a head-matched mapper is chosen by.
//!
//! Target head h reads source head a(h) = ⌊h · n_kv_s / n_kv_t⌋ of each selected layer (METHOD §4). The maps are written out in
//! full, with zeroes where a head reads nothing, so that they are tried as any other.

use rayon::prelude::*;

use super::{
    design::{Design, RidgeMaps, Side},
    linalg::{LinalgError, Matrix},
    moments::{Covariances, Moments},
    ridge::{self, AffineMap, Lambda},
};

/// KV heads of the two models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Of the source.
    pub source: usize,
    /// Of the target.
    pub target: usize,
}

/// Fits every mapped layer.
pub(super) fn fit(moments: &Moments, design: &Design, heads: Heads, lambda: Lambda) -> Result<RidgeMaps, LinalgError> {
    let shape = moments.shape();
    let side = |side: Side| -> Result<Vec<AffineMap>, LinalgError> {
        let layers = design.layers.par_iter().enumerate();
        let maps = layers.map(|(mapped, sources)| {
            let (blocks, output) = (design.blocks(side, sources, &shape), design.output(side, mapped, &shape));
            layer(moments.joint(), &blocks, output, heads, lambda)
        });
        maps.collect()
    };
    Ok(RidgeMaps::new(design, Vec::new(), side(Side::Keys)?, side(Side::Values)?))
}

fn layer(
    covariances: Covariances<'_>,
    blocks: &[usize],
    output: usize,
    heads: Heads,
    lambda: Lambda,
) -> Result<AffineMap, LinalgError> {
    let shape = covariances.shape();
    let (own, out) = (shape.source_width / heads.source, shape.target_width / heads.target);
    let (source, cross) = (covariances.source(blocks), covariances.cross(blocks, output));
    let mut weight = Matrix::zeros(cross.rows(), cross.cols());
    let (mut explained, mut jitter) = (0.0, 0.0f64);
    for head in 0..heads.target {
        let from = head * heads.source / heads.target * own;
        let rows: Vec<usize> =
            (0..blocks.len()).flat_map(|b| (0..own).map(move |i| b * shape.source_width + from + i)).collect();
        let columns = head * out..(head + 1) * out;
        let pick = |matrix: &Matrix, columns: &mut dyn Iterator<Item = usize>| {
            let columns: Vec<usize> = columns.collect();
            let picked = rows.iter().flat_map(|&row| columns.iter().map(move |&column| matrix.row(row)[column]));
            Matrix::from_vec(rows.len(), columns.len(), picked.collect())
        };
        let system = pick(&source, &mut rows.iter().copied());
        let wanted = pick(&cross, &mut columns.clone());
        let mut solved = [wanted.clone()];
        jitter = jitter.max(ridge::solve(&system, &mut solved, lambda, covariances.rows())?);
        let penalty = lambda.diagonal(&system, covariances.rows());
        for (i, &row) in rows.iter().enumerate() {
            weight.row_mut(row)[columns.clone()].copy_from_slice(solved[0].row(i));
            let terms = solved[0].row(i).iter().zip(wanted.row(i));
            explained += terms.map(|(w, b)| w * b + penalty[i] * w * w).sum::<f64>();
        }
    }
    let (source_mean, target_mean) = (covariances.source_mean(blocks), covariances.target_mean(output));
    let mut bias = target_mean.clone();
    for (i, mean) in source_mean.iter().enumerate() {
        bias.iter_mut().zip(weight.row(i)).for_each(|(b, w)| *b -= mean * w);
    }
    let total: f64 = covariances.target_variance(output).iter().sum();
    let r2 = if total > 0.0 { explained / total } else { 0.0 };
    Ok(AffineMap { weight, bias, source_mean, target_mean, r2, jitter })
}
