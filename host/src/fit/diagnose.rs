//! What a fit tells people of its own work: the parts of `diagnostics.json`, from what the fit has at hand.

use rayon::prelude::*;

use super::{
    choose::{Candidate, Trial, mean},
    design::{RidgeMaps, Side},
    diagnostics::{effective_features, forward, heat_map},
    fitted::Fitted,
    linalg::LinalgError,
    moments::Moments,
    select::Scores,
};
use crate::{
    measure::cosine::Cosines,
    pair::{Diagnostics, PerSide},
};

/// More features than these are not factorised for their degrees of freedom alone: it would take as long as the fit.
const MOST_FEATURES: usize = 4_096;

/// Diagnostics of a fit; `maps` and `trials` where there are any.
pub(super) fn diagnose(
    moments: &Moments,
    scores: &Scores,
    chosen: &Candidate,
    fitted: &Fitted,
    maps: Option<&RidgeMaps>,
    trials: &[Trial],
) -> Result<Diagnostics, LinalgError> {
    let shape = moments.shape();
    let mapped = chosen.design.native_layers..shape.target_layers;
    let forward = mapped.into_par_iter().map(|layer| forward(moments, layer)).collect::<Result<Vec<_>, _>>()?;
    let features = chosen.design.features(&shape);
    let cosines = |maps: &RidgeMaps| {
        let of_each: Vec<Cosines> = trials.par_iter().map(|trial| trial.cosines(maps, &shape)).collect();
        let mean = |layer: usize| of_each.iter().map(|c| c.layers[layer]).sum::<f64>() / of_each.len() as f64;
        (0..shape.target_layers).map(mean).collect()
    };
    Ok(Diagnostics {
        r2: Some(heat_map(scores)),
        forward,
        cosine: maps.filter(|_| !trials.is_empty()).map_or_else(Vec::new, cosines),
        concentration: maps.and_then(|maps| concentration(maps, trials, moments)),
        effective_features: freedom(moments, chosen)?,
        rows_per_feature: Some(moments.rows() as f64 / features as f64),
        weight_bytes: Some(fitted.tensors.iter().map(|tensor| tensor.bytes()).sum()),
    })
}

/// Of each mapped layer, over the documents; none where a layer has no error on any of them.
fn concentration(maps: &RidgeMaps, trials: &[Trial], moments: &Moments) -> Option<PerSide> {
    let shape = moments.shape();
    let of_each: Vec<_> = trials.par_iter().map(|trial| trial.concentration(maps, &shape)).collect();
    let side = |side: usize| {
        let layer = |layer: usize| mean(of_each.iter().filter_map(|trial| trial[layer][side]));
        (0..maps.layers.len()).map(layer).collect::<Option<Vec<f64>>>()
    };
    Some(PerSide { keys: side(0)?, values: side(1)? })
}

/// Effective degrees of freedom of each mapped layer's keys and values, all heads reading all features.
fn freedom(moments: &Moments, Candidate { design, lambda, .. }: &Candidate) -> Result<Option<PerSide>, LinalgError> {
    let shape = moments.shape();
    if design.rank.is_some() || design.heads.is_some() || design.features(&shape) > MOST_FEATURES {
        return Ok(None);
    }
    let side = |side: Side| {
        let layers = design.layers.par_iter().map(|sources| {
            let covariance = moments.joint().source(&design.blocks(side, sources, &shape));
            let penalty = lambda.diagonal(&covariance, moments.rows() as f64);
            effective_features(&covariance, &penalty)
        });
        layers.collect::<Result<Vec<f64>, _>>()
    };
    Ok(Some(PerSide { keys: side(Side::Keys)?, values: side(Side::Values)? }))
}
