//! What a fit tells people of its own work: the parts of `diagnostics.json`, from what the fit has at hand, and from what the
//! pair makes of the selection documents.

use std::ops::ControlFlow;

use rayon::prelude::*;

use super::{
    FitError, Progress, Stage,
    choose::Candidate,
    content::{Content, Rotation, Slots},
    design::Side,
    diagnostics::{effective_features, forward, heat_map, key_concentration, value_concentration},
    ends::Tools,
    fitted::Fitted,
    linalg::LinalgError,
    moments::Moments,
    plan::Prompt,
    select::Scores,
    step,
};
use crate::{
    cache::KvCache,
    engine::PrefillOptions,
    measure::cosine::{self, Cosines, Queries},
    migrate::{self, Setup},
    pair::{Diagnostics, Draft, Pair, PerSide},
};

/// More features than these are not factorised for their degrees of freedom alone: it would take as long as the fit.
const MOST_FEATURES: usize = 4_096;

/// What moments and weights tell.
pub(super) fn diagnose(
    moments: &Moments,
    scores: &Scores,
    chosen: &Candidate,
    fitted: &Fitted,
) -> Result<Diagnostics, LinalgError> {
    let shape = moments.shape();
    let mapped = chosen.design.native_layers..shape.target_layers;
    let forward = mapped.into_par_iter().map(|layer| forward(moments, layer)).collect::<Result<Vec<_>, _>>()?;
    let features = chosen.design.features(&shape);
    Ok(Diagnostics {
        r2: Some(heat_map(scores)),
        forward,
        effective_features: freedom(moments, chosen)?,
        rows_per_feature: Some(moments.rows() as f64 / features as f64),
        weight_bytes: Some(fitted.tensors.iter().map(|tensor| tensor.bytes()).sum()),
        ..Diagnostics::default()
    })
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

/// Adds what the pair itself makes of some documents, through its module as on any request: each layer's cosine, and where its
/// errors lie. Of no documents, nothing is added.
pub(super) fn observe(
    tools: Tools<'_>,
    draft: &Draft,
    prompts: &[Prompt],
    diagnostics: &mut Diagnostics,
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<(), FitError> {
    if prompts.is_empty() {
        return Ok(());
    }
    let seen: Vec<Seen> = tools.trials(draft, |setup| {
        let one = |(done, prompt)| {
            step(watch, Stage::Diagnose, done, prompts.len())?;
            Seen::run(setup, draft.pair(), prompt)
        };
        prompts.iter().enumerate().map(one).collect()
    })?;
    let cosine = |layer: usize| seen.iter().map(|seen| seen.cosines.layers[layer]).sum::<f64>() / seen.len() as f64;
    diagnostics.cosine = (0..tools.target.layout().layers).map(cosine).collect();
    // None where a layer has no error on any of them.
    let side = |side: usize| {
        let layer = |layer: usize| mean(seen.iter().filter_map(|seen| seen.concentration[layer][side]));
        (0..seen[0].concentration.len()).map(layer).collect::<Option<Vec<f64>>>()
    };
    diagnostics.concentration = side(0).zip(side(1)).map(|(keys, values)| PerSide { keys, values });
    Ok(())
}

/// One document.
struct Seen {
    /// Of every layer.
    cosines: Cosines,
    /// How much more of a mapped layer's errors lies where the target looks than elsewhere, of keys and of values; mean over KV
    /// heads, none where there is no error.
    concentration: Vec<[Option<f64>; 2]>,
}

impl Seen {
    /// Runs both models and the map; the queries are those of the native tail.
    fn run(setup: &Setup<'_>, pair: &Pair, prompt: &Prompt) -> Result<Seen, FitError> {
        let (tokens, config) = (&prompt.tokens, setup.target.config());
        let options = || PrefillOptions { room: 0, ..PrefillOptions::default() };
        let cache = setup.source.prefill(tokens, options())?.cache;
        let slots = Slots::all(pair.head(), tokens.len() - pair.tail());
        let mut queries = Queries::from_position(slots.end as u32, config.layers, config.heads, config.head_dim);
        let observed = PrefillOptions { observer: Some(&mut queries), ..options() };
        let native = setup.target.prefill(tokens, observed)?.cache;
        let planes = setup.target.reserve(tokens.len());
        let (session, receipt) = migrate::trial(setup, tokens, Some(&prompt.domain), &cache, planes)?;
        // Quality is the evidence's business.
        setup.gate.unaudited(receipt)?;
        let cosines = cosine::compare(&queries, native.planes(), session.planes());
        let errors = Errors {
            queries: &queries,
            native: &native,
            slots,
            own: Content::read(native.planes(), native.positions(), slots),
            mapped: Content::read(session.planes(), session.positions(), slots),
        };
        let layers = (pair.native_layers()..config.layers).into_par_iter();
        Ok(Seen { cosines, concentration: layers.map(|layer| errors.concentration(layer)).collect() })
    }
}

/// What was mapped, beside what the target computes there, and how the target looks at it.
struct Errors<'a> {
    queries: &'a Queries,
    native: &'a KvCache,
    slots: Slots,
    own: Content,
    mapped: Content,
}

impl Errors<'_> {
    /// Of one layer.
    fn concentration(&self, layer: usize) -> [Option<f64>; 2] {
        let heads: Vec<[Option<f64>; 2]> =
            (0..self.native.layout().kv_heads).map(|kv_head| self.of_head(layer, kv_head)).collect();
        [0, 1].map(|side| mean(heads.iter().filter_map(|head| head[side])))
    }

    fn of_head(&self, layer: usize, kv_head: usize) -> [Option<f64>; 2] {
        let Errors { queries, native, slots, own, mapped } = self;
        let layout = native.layout();
        let (d, group) = (layout.head_dim, queries.heads() / layout.kv_heads);
        let errors = |own: &[f32], mapped: &[f32]| -> Vec<f32> {
            let (columns, from) = (layout.layers * layout.width(), layer * layout.width() + kv_head * d);
            let rows = mapped.chunks_exact(columns).zip(own.chunks_exact(columns));
            rows.flat_map(|(a, b)| a[from..from + d].iter().zip(&b[from..from + d]).map(|(a, b)| a - b)).collect()
        };
        let stripped = Rotation::new(&layout.rope, queries.positions());
        let (mut looking, mut attention) = (Vec::new(), vec![0.0; slots.end - slots.start]);
        for head in kv_head * group..(kv_head + 1) * group {
            let mut rows = queries.of_head(layer, head);
            rows.chunks_exact_mut(d).enumerate().for_each(|(row, query)| stripped.strip(row, query));
            looking.extend(rows);
            let received = queries.attention(layer, head, native.planes(), slots.start..slots.end);
            attention.iter_mut().zip(received).for_each(|(sum, share)| *sum += share);
        }
        let keys = key_concentration(&looking, &errors(&own.keys, &mapped.keys), d);
        [keys, value_concentration(&errors(&own.values, &mapped.values), &attention, d)]
    }
}

/// None of nothing.
fn mean(numbers: impl Iterator<Item = f64>) -> Option<f64> {
    let numbers: Vec<f64> = numbers.collect();
    (!numbers.is_empty()).then(|| numbers.iter().sum::<f64>() / numbers.len() as f64)
}
