//! How many source layers: the k sweep, out of sample (METHOD §3).
//!
//! Each candidate is fitted from the moments and maps the selection documents' source caches; the target's own queries then
//! look at its native cache and at the mapped one. In-sample R² rises with k for ever and is not asked.

use std::ops::ControlFlow;

use rayon::prelude::*;

use super::{
    FitError, Progress, Stage,
    content::{Content, Rotation, Slots},
    moments::Moments,
    plan::Prompt,
    product::{View, multiply},
    ridge::{self, AffineMap, Lambda, LayerMap},
    select::Scores,
};
use crate::{
    cache::{CacheLayout, KvCache},
    engine::{Model, PrefillOptions},
    measure::cosine::{self, Cosines, Queries},
    pair::SweepPoint,
};

/// A selection document, run through both models.
pub(super) struct Trial {
    /// Source rows of the slots that are mapped.
    content: Content,
    slots: Slots,
    native: KvCache,
    queries: Queries,
}

impl Trial {
    /// Runs both models; the first `head` and last `tail` slots stay native.
    pub(super) fn run(
        prompt: &Prompt,
        (head, tail): (usize, usize),
        source: &Model,
        target: &Model,
    ) -> Result<Trial, FitError> {
        let tokens = &prompt.tokens;
        let slots = Slots::all(head, tokens.len() - tail);
        let options = || PrefillOptions { room: 0, ..PrefillOptions::default() };
        let from = source.prefill(tokens, options())?.cache;
        let config = target.config();
        let first = slots.end as u32;
        let mut queries = Queries::from_position(first, config.layers, config.heads, config.head_dim);
        let native = target.prefill(tokens, PrefillOptions { observer: Some(&mut queries), ..options() })?.cache;
        Ok(Trial { content: Content::read(from.planes(), from.positions(), slots), slots, native, queries })
    }

    /// Attention-output cosines with the middle mapped.
    fn cosines(&self, maps: &[LayerMap], source: &CacheLayout) -> Cosines {
        let mut planes = self.native.planes().clone();
        let layout = planes.layout().clone();
        let rotation = Rotation::new(&layout.rope, &self.native.positions()[self.slots.start..self.slots.end]);
        let (d, columns) = (layout.head_dim, source.layers * source.width());
        for (layer, map) in maps.iter().enumerate() {
            let mut keys = apply(&map.keys, &self.content.keys, columns, &map.sources, source.width());
            let values = apply(&map.values, &self.content.values, columns, &map.sources, source.width());
            for (row, slot) in (self.slots.start..self.slots.end).enumerate() {
                for head in 0..layout.kv_heads {
                    let (at, offset) = (row * layout.width() + head * d, planes.offset(head, slot));
                    rotation.apply(row, &mut keys[at..at + d]);
                    let kv = planes.layer_mut(layer);
                    kv.k.write(offset, &keys[at..at + d]);
                    kv.v.write(offset, &values[at..at + d]);
                }
            }
        }
        cosine::compare(&self.queries, self.native.planes(), &planes)
    }
}

/// `[rows, n_kv_t · d_t]`: the affine map of the selected layers' columns.
fn apply(map: &AffineMap, rows: &[f32], columns: usize, sources: &[usize], width: usize) -> Vec<f32> {
    let (inputs, outputs) = (map.weight.rows(), map.weight.cols());
    let picked = |row| sources.iter().flat_map(move |&layer| row_slice(row, layer, width));
    let x: Vec<f32> = rows.chunks_exact(columns).flat_map(picked).copied().collect();
    let weight: Vec<f32> = map.weight.as_slice().iter().map(|&w| w as f32).collect();
    let count = rows.len() / columns;
    let mut y: Vec<f32> = map.bias.iter().map(|&b| b as f32).collect::<Vec<_>>().repeat(count);
    multiply(
        &mut y,
        outputs,
        1.0,
        1.0,
        View::rows(&x, count, inputs, inputs),
        View::rows(&weight, inputs, outputs, outputs),
    );
    y
}

fn row_slice(row: &[f32], layer: usize, width: usize) -> &[f32] {
    &row[layer * width..(layer + 1) * width]
}

/// Fits and tries each k; gives the chosen one with its maps, and what was found.
pub(super) fn choose(
    moments: &Moments,
    scores: &Scores,
    candidates: &[usize],
    lambda: Lambda,
    trials: &[Trial],
    source: &CacheLayout,
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<(usize, Vec<SweepPoint>), FitError> {
    let mut per_document: Vec<Vec<f64>> = Vec::new();
    let mut sweep = Vec::new();
    for (done, &k) in candidates.iter().enumerate() {
        if watch(Progress { stage: Stage::Sweep, done, total: candidates.len() }).is_break() {
            return Err(FitError::Stopped { stage: Stage::Sweep.name() });
        }
        let maps = ridge::fit(moments, &scores.top_all(k), lambda)?;
        let cosines: Vec<Cosines> = trials.par_iter().map(|trial| trial.cosines(&maps, source)).collect();
        let mean = |value: fn(&Cosines) -> f64| cosines.iter().map(value).sum::<f64>() / cosines.len() as f64;
        let (cosine_mean, cosine_worst_layer) = (mean(Cosines::mean), mean(Cosines::worst_layer));
        sweep.push(SweepPoint { k, cosine_mean, cosine_worst_layer, documents: cosines.len() });
        per_document.push(cosines.iter().map(Cosines::mean).collect());
    }
    Ok((candidates[smallest_as_good(&per_document)], sweep))
}

/// The first candidate that falls short of the best by no more than one standard error of their difference over documents: a
/// cheaper mapper is worth more than a difference that may not be one.
fn smallest_as_good(per_document: &[Vec<f64>]) -> usize {
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let best = (0..per_document.len()).max_by(|&a, &b| mean(&per_document[a]).total_cmp(&mean(&per_document[b])));
    let Some(best) = best else { return 0 };
    let as_good = |candidate: &Vec<f64>| {
        let short: Vec<f64> = per_document[best].iter().zip(candidate).map(|(best, own)| best - own).collect();
        let (n, average) = (short.len() as f64, mean(&short));
        let variance = short.iter().map(|x| (x - average).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
        average <= (variance / n).sqrt()
    };
    per_document.iter().position(as_good).unwrap_or(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fit::linalg::Matrix;

    #[test]
    fn a_difference_within_its_error_goes_to_the_smaller() {
        let (low, close, best) = (vec![0.5, 0.6, 0.7], vec![0.81, 0.88, 0.95], vec![0.8, 0.9, 0.95]);
        assert_eq!(smallest_as_good(&[low.clone(), close, best.clone()]), 1);
        assert_eq!(smallest_as_good(&[low.clone(), best.clone(), low]), 1);
        assert_eq!(smallest_as_good(&[best]), 0);
    }

    #[test]
    fn the_map_reads_the_selected_layers_columns() {
        let map = AffineMap {
            weight: Matrix::from_vec(4, 1, vec![1.0, 10.0, 100.0, 1000.0]),
            bias: vec![0.5],
            source_mean: vec![0.0; 4],
            target_mean: vec![0.0],
            r2: 0.0,
            jitter: 0.0,
        };
        // Two rows of three layers of two columns.
        let rows: Vec<f32> = (1..=12).map(|x| x as f32).collect();
        assert_eq!(apply(&map, &rows, 6, &[2, 0], 2), [5.0 + 60.0 + 100.0 + 2000.5, 11.0 + 120.0 + 700.0 + 8000.5]);
    }
}
