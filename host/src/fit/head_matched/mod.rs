//! The head-local ridge of CacheBridge, arXiv:2609.00891 (METHOD §4): target head h reads source head a(h) = ⌊h · n_kv_s / n_kv_t⌋
//! of each selected layer, and rows count as much as the target's attention makes of them.
//!
//! Built from the spilled rows in two passes: the weighted means, then panels of a bounded number of rows, gathered, centred
//! and weighted, whose products are summed. The whole of X is never there. Scratch per thread is `ROWS` · (p + d_t)
//! numbers; the sums of as many target layers as `SUMS` allows are built in one pass over the rows.

mod sums;

use std::ops::ControlFlow;

use super::{
    FitError, Progress, Stage,
    linalg::LinalgError,
    ridge::{self, AffineMap, Lambda},
    rows::{Of, Part, RowFile, RowsError},
};
use crate::{
    cache::Elem,
    pair::{RidgeSettings, Tensor, WeightingRecord, rounded},
};
use sums::Sums;

/// Rows of a panel.
const ROWS: usize = 512;

/// Bytes of sums at once; more target layers take another pass over the rows.
const SUMS: usize = 512 << 20;

/// How much a row counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weighting {
    /// By the target's attention, as far as the effective number of rows stays above a floor.
    #[default]
    Attention,
    /// All rows alike: the ablation.
    Uniform,
}

/// Map of one head's keys or values, and what it was fitted with.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadMap {
    /// `[k · d_s, d_t]`; R² is in-sample and weighted.
    pub map: AffineMap,
    /// The weights were `1 + α (r − 1)`.
    pub alpha: f64,
    /// Kish's effective number of rows, `(Σ w)² / Σ w²`.
    pub effective_rows: f64,
    /// Weighted variance of the target, summed over coordinates: how much this head counts in a layer's R².
    variance: f64,
}

/// Maps of one target layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerMaps {
    /// The target layer.
    pub layer: usize,
    /// Source layers it reads, in the order of its weights' rows.
    pub sources: Vec<usize>,
    /// The keys' maps, a head each.
    pub keys: Vec<HeadMap>,
    /// The values'.
    pub values: Vec<HeadMap>,
}

impl LayerMaps {
    /// Keys' or values' maps.
    pub fn part(&self, part: Part) -> &[HeadMap] {
        match part {
            Part::Keys => &self.keys,
            Part::Values => &self.values,
        }
    }

    /// In-sample R², weighted, over all heads and coordinates.
    pub fn r2(&self, part: Part) -> f64 {
        let variance: f64 = self.part(part).iter().map(|head| head.variance).sum();
        let explained: f64 = self.part(part).iter().map(|head| head.map.r2 * head.variance).sum();
        if variance > 0.0 { explained / variance } else { 0.0 }
    }
}

/// A fitted head-matched mapper.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadMatched {
    /// Target layers, ascending.
    pub layers: Vec<LayerMaps>,
    weighting: Weighting,
}

impl HeadMatched {
    /// The module's settings.
    pub fn settings(&self) -> String {
        RidgeSettings::plain(self.layers.iter().map(|layer| layer.sources.clone()).collect()).to_json()
    }

    /// Per target layer and part `layers.{l}.{p}.weight` `[n_kv_t, k · d_s, d_t]` and `layers.{l}.{p}.bias` `[n_kv_t · d_t]`. Matrices
    /// are of type `elem`, biases f32 and adjusted to the rounded matrices.
    pub fn tensors(&self, elem: Elem) -> Vec<Tensor> {
        let part = |layer: &LayerMaps, part: Part| {
            let heads = layer.part(part);
            let (mut weight, mut bias) = (Vec::new(), Vec::new());
            for HeadMap { map, .. } in heads {
                let head = rounded(map.weight.as_slice().iter().copied(), elem);
                bias.extend(map.bias_for(&head));
                weight.extend(head);
            }
            let (inputs, outputs) =
                heads.first().map_or((0, 0), |head| (head.map.weight.rows(), head.map.weight.cols()));
            let name = |tensor: &str| format!("layers.{}.{}.{tensor}", layer.layer, part.letter());
            let shape = vec![heads.len(), inputs, outputs];
            [
                Tensor { name: name("weight"), elem, shape, numbers: weight },
                Tensor { name: name("bias"), elem: Elem::F32, shape: vec![bias.len()], numbers: bias },
            ]
        };
        self.layers.iter().flat_map(|layer| Part::BOTH.into_iter().flat_map(move |p| part(layer, p))).collect()
    }

    /// Mean in-sample R² over target layers, weighted.
    pub fn r2(&self, part: Part) -> f64 {
        self.layers.iter().map(|layer| layer.r2(part)).sum::<f64>() / self.layers.len() as f64
    }

    /// Largest jitter that a factorisation needed; 0 in the ordinary case.
    pub fn jitter(&self) -> f64 {
        self.heads().map(|head| head.map.jitter).fold(0.0, f64::max)
    }

    /// How the rows were weighted; `None` where all counted alike.
    pub fn weighting(&self) -> Option<WeightingRecord> {
        let least = |value: fn(&HeadMap) -> f64| self.heads().map(value).fold(f64::INFINITY, f64::min);
        (self.weighting == Weighting::Attention).then(|| WeightingRecord {
            alpha_mean: self.heads().map(|head| head.alpha).sum::<f64>() / self.heads().count() as f64,
            alpha_least: least(|head| head.alpha),
            effective_rows_least: least(|head| head.effective_rows),
        })
    }

    /// The maps of all heads, keys and values.
    pub fn heads(&self) -> impl Iterator<Item = &HeadMap> {
        self.layers.iter().flat_map(|layer| layer.keys.iter().chain(&layer.values))
    }
}

/// Fits the last `selection.len()` layers of the target (the ones before are native), each from its source layers.
///
/// # Errors
/// [`FitError::Rows`], [`FitError::Linalg`]; [`FitError::Stopped`] where `watch` breaks.
///
/// # Panics
/// If `selection` is of more layers than the target has, or names one that the source has not.
pub fn fit(
    rows: &RowFile,
    selection: &[Vec<usize>],
    lambda: Lambda,
    weighting: Weighting,
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<HeadMatched, FitError> {
    let shape = rows.shape();
    let first = shape.target.layers.checked_sub(selection.len()).expect("no more layers than the target has");
    let bytes = |sources: &Vec<usize>| {
        let p = sources.len() * shape.source.head_dim;
        2 * shape.target.kv_heads * 8 * p * (p + shape.target.head_dim)
    };
    let mut groups: Vec<Vec<(usize, &[usize])>> = Vec::new();
    let mut held = usize::MAX;
    for (i, sources) in selection.iter().enumerate() {
        if held.saturating_add(bytes(sources)) > SUMS {
            groups.push(Vec::new());
            held = 0;
        }
        held += bytes(sources);
        groups.last_mut().expect("the first layer begins one").push((first + i, sources));
    }
    let total = 2 * groups.len() * rows.chunks();
    let mut layers = Vec::new();
    for (g, group) in groups.iter().enumerate() {
        let mut step = |pass: usize, chunk: usize| {
            let done = (2 * g + pass) * rows.chunks() + chunk;
            let stopped = watch(Progress { stage: Stage::Solve, done, total }).is_break();
            if stopped { Err(FitError::Stopped { stage: Stage::Solve.name() }) } else { Ok(()) }
        };
        layers.extend(fit_group(rows, group, lambda, weighting, &mut step)?);
    }
    let _ = watch(Progress { stage: Stage::Solve, done: total, total });
    Ok(HeadMatched { layers, weighting })
}

fn fit_group(
    rows: &RowFile,
    group: &[(usize, &[usize])],
    lambda: Lambda,
    weighting: Weighting,
    step: &mut dyn FnMut(usize, usize) -> Result<(), FitError>,
) -> Result<Vec<LayerMaps>, FitError> {
    let mut sums = Sums::new(rows, group, weighting)?;
    for pass in [sums::Pass::Means, sums::Pass::Products] {
        for chunk in 0..rows.chunks() {
            step(pass as usize, chunk)?;
            sums.add(rows, chunk, pass)?;
        }
    }
    Ok(sums.solve(lambda)?)
}
