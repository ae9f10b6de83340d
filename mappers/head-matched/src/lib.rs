//! The head-matched mapper: each KV head of a target layer is a linear map of *one* KV head of the layer's selected source
//! layers, for keys (without their rotation) and for values. Head h of n_t reads head ⌊h · n_s / n_t⌋ of n_s, which has
//! n_s times fewer weights than a full-head map of as many layers.
//!
//! The source layers are gathered once per chunk ([`Panels`]); the products of all heads of a layer's keys or values are
//! one `heads@1`, which reads its head's columns from there.

use kvmig_mapper::{
    Buffer, HeadsParams, Job, Kv, Mapper, Metadata, ModelPair, Panels, Refusal, Selection, View, WeightSpec, WorkPlan,
    bias, gpu, kernel, longest_chunk, parse_settings, weight,
};
use serde::Deserialize;

/// Tokens per chunk where the device's bindings are long enough: large enough that the weights are read seldom, small
/// enough that the panels stay in a cache.
const CHUNK_TOKENS: u32 = 256;

/// The settings that a fit writes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    /// For each target layer that is mapped the source layers it reads, in the order of its weights' rows.
    layers: Vec<Vec<u32>>,
}

struct HeadMatched;

kvmig_mapper::export!(HeadMatched);

impl Mapper for HeadMatched {
    fn describe() -> Metadata {
        Metadata {
            name: env!("CARGO_PKG_NAME").into(),
            version: env!("CARGO_PKG_VERSION").into(),
            kinds: vec!["head-matched".into()],
            shaders: vec![],
        }
    }

    fn plan(pair: &ModelPair, settings: &str) -> Result<WorkPlan, Refusal> {
        let selection = select(pair, settings)?;
        let chunk_tokens = longest_chunk(CHUNK_TOKENS, |tokens| Panels::bytes(pair, &selection, tokens))?;
        let mut weights = Vec::new();
        for (l, selected) in selection.layers().iter().enumerate() {
            for part in ["k", "v"] {
                weights.extend(specs(pair, &selection.name(l, part), selected.len() as u32));
            }
        }
        Ok(WorkPlan {
            kind: "head-matched".into(),
            weights,
            chunk_tokens,
            scratch_bytes: 2 * Panels::bytes(pair, &selection, chunk_tokens),
            max_dispatches: 2 * (selection.used().len() + selection.layers().len()) as u32,
        })
    }

    fn run(pair: &ModelPair, settings: &str, job: Job) -> Result<(), Refusal> {
        let selection = select(pair, settings)?;
        let panels = Panels::gather(pair, &selection, &job)?;
        for (l, selected) in selection.layers().iter().enumerate() {
            let offsets = panels.offsets(&selection, selected);
            let Kv { k, v } = &job.target[l];
            heads(pair, &job, &selection.name(l, "k"), &panels.keys, &offsets, pair.target.rope_dims, k)?;
            heads(pair, &job, &selection.name(l, "v"), &panels.values, &offsets, 0, v)?;
        }
        Ok(())
    }
}

fn select(pair: &ModelPair, settings: &str) -> Result<Selection, Refusal> {
    Selection::new(pair, parse_settings::<Settings>(settings)?.layers)
}

/// Weights and bias of one target layer's keys or values: `[n_t, blocks * d_s, d_t]` and `[n_t * d_t]`.
fn specs(pair: &ModelPair, name: &str, blocks: u32) -> [WeightSpec; 2] {
    let (heads, dim) = (pair.target.kv_heads, pair.target.head_dim);
    let shape = [heads, blocks * pair.source.head_dim, dim];
    [weight(format!("{name}.weight"), &shape), bias(format!("{name}.bias"), heads * dim)]
}

/// Computes one target layer's keys or values from its blocks (planes of the panel).
fn heads(
    pair: &ModelPair,
    job: &Job,
    weights: &str,
    panel: &Buffer,
    offsets: &[u32],
    rope_dims: u32,
    view: &View,
) -> Result<(), Refusal> {
    let params = HeadsParams {
        tokens: job.tokens,
        block_width: pair.source.head_dim,
        panel_row_stride: pair.source.kv_heads * pair.source.head_dim,
        panel_heads: pair.source.kv_heads,
        head_step: pair.source.head_dim,
        heads: pair.target.kv_heads,
        head_dim: pair.target.head_dim,
        rope_dims,
        relu: false,
        out_offset: 0,
        head_stride: view.head_stride,
        row_stride: view.row_stride,
        offsets: offsets.to_vec(),
    };
    let weight = gpu::weights(&format!("{weights}.weight"))?;
    let bias = gpu::weights(&format!("{weights}.bias"))?;
    Ok(kernel("heads@1", &params.to_bytes(), [panel, &weight, &bias, &job.target_rope, &view.buffer])?)
}
