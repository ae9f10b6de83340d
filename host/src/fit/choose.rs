//! How many source layers: the k sweep, out of sample (METHOD §3).
//!
//! Each candidate is fitted from the moments and maps the selection documents' source caches; the target's own queries then
//! look at its native cache and at the mapped one. In-sample R² rises with k for ever and is not asked.

use std::ops::ControlFlow;

use rayon::prelude::*;

use super::{
    FitError, Progress, Stage,
    content::{Content, Rotation, Slots},
    design::{Design, RidgeMaps, Side},
    moments::{MomentShape, Moments},
    plan::Prompt,
    product::{View, multiply},
    ridge::{AffineMap, Lambda},
    tap::{All, Hidden},
};
use crate::{
    cache::KvCache,
    engine::{Model, PrefillOptions},
    measure::cosine::{self, Cosines, Queries},
    pair::SweepPoint,
};

/// A selection document, run through both models.
pub(super) struct Trial {
    /// Source rows of the slots that are mapped.
    content: Content,
    /// Source keys as they lie in the cache, for the arms that leave the rotation alone.
    rotated: Vec<f32>,
    /// The target's hidden state there, where the fit has one.
    hidden: Vec<f32>,
    slots: Slots,
    native: KvCache,
    queries: Queries,
}

impl Trial {
    /// Runs both models; the first `head` and last `tail` slots stay native, as do the first `native_layers` layers.
    pub(super) fn run(
        prompt: &Prompt,
        (head, tail, native_layers): (usize, usize, usize),
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
        let mut hidden = Hidden::behind(native_layers, config.hidden);
        let mut observers = All(vec![&mut queries, &mut hidden]);
        let native = target.prefill(tokens, PrefillOptions { observer: Some(&mut observers), ..options() })?.cache;
        let content = Content::read(from.planes(), from.positions(), slots);
        let layout = source.layout();
        let rotation = Rotation::new(&layout.rope, &from.positions()[slots.start..slots.end]);
        let mut rotated = content.keys.clone();
        for (i, row) in rotated.chunks_exact_mut(layout.layers * layout.width()).enumerate() {
            row.chunks_exact_mut(layout.head_dim).for_each(|head| rotation.apply(i, head));
        }
        Ok(Trial { content, rotated, hidden: hidden.rows(slots), slots, native, queries })
    }

    /// Attention-output cosines with the middle mapped.
    pub(super) fn cosines(&self, maps: &RidgeMaps, shape: &MomentShape) -> Cosines {
        self.cosines_with(maps, shape, Rotations::Handled, None)
    }

    /// The same where the rotation may be left as it is, and the rows may be another document's.
    pub(super) fn cosines_with(
        &self,
        maps: &RidgeMaps,
        shape: &MomentShape,
        rotations: Rotations,
        other: Option<&Trial>,
    ) -> Cosines {
        let rows = other.unwrap_or(self);
        let mut planes = self.native.planes().clone();
        let layout = planes.layout().clone();
        let rotation = Rotation::new(&layout.rope, &self.native.positions()[self.slots.start..self.slots.end]);
        let d = layout.head_dim;
        for (mapped, [mut keys, values]) in rows.predict(maps, shape, rotations).enumerate() {
            for (row, slot) in (self.slots.start..self.slots.end).enumerate() {
                for head in 0..layout.kv_heads {
                    let (at, offset) = (row * layout.width() + head * d, planes.offset(head, slot));
                    if rotations == Rotations::Handled {
                        rotation.apply(row, &mut keys[at..at + d]);
                    }
                    let kv = planes.layer_mut(maps.design.native_layers + mapped);
                    kv.k.write(offset, &keys[at..at + d]);
                    kv.v.write(offset, &values[at..at + d]);
                }
            }
        }
        cosine::compare(&self.queries, self.native.planes(), &planes)
    }

    /// Each mapped layer's keys, without their rotation, and values, `[rows, n_kv_t · d_t]`.
    fn predict<'t>(
        &'t self,
        maps: &'t RidgeMaps,
        shape: &'t MomentShape,
        rotations: Rotations,
    ) -> impl Iterator<Item = [Vec<f32>; 2]> + 't {
        const SIDES: [Side; 2] = [Side::Keys, Side::Values];
        let features = move |side, sources: &[usize]| self.features(&maps.design, side, sources, shape, rotations);
        let sources = maps.design.layers.first().map(Vec::as_slice).unwrap_or_default();
        let projected = SIDES.map(|side| maps.projection(side).map(|map| apply(map, &features(side, sources))));
        maps.layers.iter().map(move |map| {
            let of = |at: usize, affine: &AffineMap| match &projected[at] {
                Some(projected) => apply(affine, projected),
                None => apply(affine, &features(SIDES[at], &map.sources)),
            };
            [of(0, &map.keys), of(1, &map.values)]
        })
    }

    /// The rows of a target layer's features, `[rows, features]`.
    fn features(
        &self,
        design: &Design,
        side: Side,
        sources: &[usize],
        shape: &MomentShape,
        rotations: Rotations,
    ) -> Vec<f32> {
        let keys = match rotations {
            Rotations::Handled => &self.content.keys,
            Rotations::Ignored => &self.rotated,
        };
        let (width, columns) = (shape.source_width, shape.source_columns());
        let blocks = design.blocks(side, sources, shape);
        let mut features = Vec::new();
        for row in 0..self.slots.end - self.slots.start {
            for &block in &blocks {
                let (from, at, width) = match block.checked_sub(shape.source_layers) {
                    None => (keys, row * columns + block * width, width),
                    Some(layer) if layer < shape.source_layers => {
                        (&self.content.values, row * columns + layer * width, width)
                    }
                    Some(_) => (&self.hidden, row * shape.hidden, shape.hidden),
                };
                features.extend_from_slice(&from[at..at + width]);
            }
        }
        features
    }
}

fn apply(map: &AffineMap, features: &[f32]) -> Vec<f32> {
    let (inputs, outputs) = (map.weight.rows(), map.weight.cols());
    let weight: Vec<f32> = map.weight.as_slice().iter().map(|&w| w as f32).collect();
    let count = features.len() / inputs;
    let mut y: Vec<f32> = map.bias.iter().map(|&b| b as f32).collect::<Vec<_>>().repeat(count);
    let (x, w) = (View::rows(features, count, inputs, inputs), View::rows(&weight, inputs, outputs, outputs));
    multiply(&mut y, outputs, 1.0, 1.0, x, w);
    y
}

/// What is made of the rotation of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rotations {
    /// Stripped before the map, applied behind it.
    Handled,
    /// Left as it is.
    Ignored,
}

/// One design and penalty to be tried.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    /// Source layers of a target layer.
    pub(super) k: usize,
    pub(super) design: Design,
    pub(super) lambda: Lambda,
}

/// Fits and tries each candidate, given from the cheapest on; gives the index of the chosen one, and what was found.
pub(super) fn choose(
    moments: &Moments,
    candidates: &[Candidate],
    trials: &[Trial],
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<(usize, Vec<SweepPoint>), FitError> {
    let mut per_document: Vec<Vec<f64>> = Vec::new();
    let mut sweep = Vec::new();
    for (done, Candidate { k, design, lambda }) in candidates.iter().enumerate() {
        if watch(Progress { stage: Stage::Sweep, done, total: candidates.len() }).is_break() {
            return Err(FitError::Stopped { stage: Stage::Sweep.name() });
        }
        let maps = RidgeMaps::fit(moments, design, *lambda)?;
        let shape = moments.shape();
        let cosines: Vec<Cosines> = trials.par_iter().map(|trial| trial.cosines(&maps, &shape)).collect();
        let mean = |value: fn(&Cosines) -> f64| cosines.iter().map(value).sum::<f64>() / cosines.len() as f64;
        let (cosine_mean, cosine_worst_layer) = (mean(Cosines::mean), mean(Cosines::worst_layer));
        sweep.push(SweepPoint {
            k: *k,
            lambda: lambda.value,
            rank: design.rank,
            mflops: maps.flops() / 1e6,
            cosine_mean,
            cosine_worst_layer,
            documents: cosines.len(),
        });
        per_document.push(cosines.iter().map(Cosines::mean).collect());
    }
    Ok((cheapest_as_good(candidates, &per_document), sweep))
}

/// Of candidates that cost the same the best; of these the cheapest that is [`smallest_as_good`].
fn cheapest_as_good(candidates: &[Candidate], per_document: &[Vec<f64>]) -> usize {
    let mut best: Vec<usize> = Vec::new();
    for index in 0..candidates.len() {
        let cost = |index: usize| (candidates[index].k, candidates[index].design.rank);
        let total = |index: usize| per_document[index].iter().sum::<f64>();
        match best.iter_mut().find(|other| cost(**other) == cost(index)) {
            None => best.push(index),
            Some(other) if total(index) > total(*other) => *other = index,
            Some(_) => {}
        }
    }
    let of_best: Vec<Vec<f64>> = best.iter().map(|&index| per_document[index].clone()).collect();
    best.get(smallest_as_good(&of_best)).copied().unwrap_or(0)
}

/// The first candidate that falls short of the best by no more than one standard error of their difference over documents: a
/// cheaper mapper is worth more than a difference that may not be one.
pub(super) fn smallest_as_good(per_document: &[Vec<f64>]) -> usize {
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

    #[test]
    fn a_difference_within_its_error_goes_to_the_smaller() {
        let (low, close, best) = (vec![0.5, 0.6, 0.7], vec![0.81, 0.88, 0.95], vec![0.8, 0.9, 0.95]);
        assert_eq!(smallest_as_good(&[low.clone(), close, best.clone()]), 1);
        assert_eq!(smallest_as_good(&[low.clone(), best.clone(), low]), 1);
        assert_eq!(smallest_as_good(&[best]), 0);
    }
}
