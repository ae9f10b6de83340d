//! The MLP mapper: for each KV head of a target layer, and for keys (without their rotation) and values apart, a network of
//! two hidden layers, `Ŷ = W₃ relu(W₂ relu(W₁ x + b₁) + b₂) + b₃`. All heads read the same features: every KV head of the
//! layer's selected source layers, side by side.
//!
//! The source layers are gathered once per chunk ([`Panels`]). Each layer of the networks is one `heads@1` over a group of
//! heads; its activations go into one of two scratch buffers, which all networks of a chunk use in turn, because a step
//! may not read a buffer that it writes.

mod network;

use kvmig_mapper::{
    Buffer, HeadsParams, Job, Kv, Mapper, Metadata, ModelPair, Panels, Refusal, Selection, View, WorkPlan, gpu, kernel,
    longest_chunk, parse_settings,
};
use network::{Group, Network, Part};
use serde::Deserialize;

/// Tokens per chunk where the device's bindings are long enough: large enough that the weights are read seldom, small
/// enough that the panels stay in a cache.
const CHUNK_TOKENS: u32 = 256;

/// Bytes of activations of a chunk at most, both buffers together: tokens are cut until they fit.
const ACTIVATION_BYTES: u64 = 64 << 20;

/// The settings that a fit writes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    /// For each target layer that is mapped the source layers it reads, in the order of its weights' rows.
    layers: Vec<Vec<u32>>,
    /// Neurons of each of the two hidden layers.
    width: u32,
}

struct Mlp;

kvmig_mapper::export!(Mlp);

impl Mapper for Mlp {
    fn describe() -> Metadata {
        Metadata {
            name: env!("CARGO_PKG_NAME").into(),
            version: env!("CARGO_PKG_VERSION").into(),
            kinds: vec!["mlp".into()],
            shaders: vec![],
        }
    }

    fn plan(pair: &ModelPair, settings: &str) -> Result<WorkPlan, Refusal> {
        let (selection, networks) = resolve(pair, settings)?;
        let chunk_tokens = chunk_tokens(pair, &selection, &networks)?;
        let mut weights = Vec::new();
        for (l, network) in networks.iter().enumerate() {
            for part in ["k", "v"] {
                weights.extend(network.weights(&selection.name(l, part)));
            }
        }
        let groups: usize = networks.iter().map(|network| network.groups().count()).sum();
        Ok(WorkPlan {
            kind: "mlp".into(),
            weights,
            chunk_tokens,
            scratch_bytes: 2
                * (Panels::bytes(pair, &selection, chunk_tokens) + activation_bytes(&networks, chunk_tokens)),
            max_dispatches: 2 * (selection.used().len() + Part::ALL.len() * groups) as u32,
        })
    }

    fn run(pair: &ModelPair, settings: &str, job: Job) -> Result<(), Refusal> {
        let (selection, networks) = resolve(pair, settings)?;
        let panels = Panels::gather(pair, &selection, &job)?;
        let bytes = activation_bytes(&networks, job.tokens);
        let chunk = Chunk { pair, job: &job, activations: [gpu::scratch(bytes)?, gpu::scratch(bytes)?] };
        for (l, network) in networks.iter().enumerate() {
            let offsets = panels.offsets(&selection, &selection.layers()[l]);
            let Kv { k, v } = &job.target[l];
            let keys =
                Side { name: selection.name(l, "k"), panel: &panels.keys, rope_dims: pair.target.rope_dims, view: k };
            let values = Side { name: selection.name(l, "v"), panel: &panels.values, rope_dims: 0, view: v };
            for group in network.groups() {
                chunk.run(network, &group, &offsets, &keys)?;
                chunk.run(network, &group, &offsets, &values)?;
            }
        }
        Ok(())
    }
}

/// The source layers and the networks of each target layer.
fn resolve(pair: &ModelPair, settings: &str) -> Result<(Selection, Vec<Network>), Refusal> {
    let Settings { layers, width } = parse_settings(settings)?;
    let selection = Selection::new(pair, layers)?;
    let networks = selection.layers().iter().map(|selected| Network::new(pair, selected.len(), width));
    let networks = networks.collect::<Result<_, _>>()?;
    Ok((selection, networks))
}

/// Bytes of one of the two activation buffers: `[heads, tokens, width]` float32 of the largest group.
fn activation_bytes(networks: &[Network], tokens: u32) -> u64 {
    networks.iter().map(|network| 4 * u64::from(tokens) * network.group_columns()).max().unwrap_or(0)
}

/// The longest chunk, halved, whose panels fit this device's bindings and whose activations fit them and the bound.
fn chunk_tokens(pair: &ModelPair, selection: &Selection, networks: &[Network]) -> Result<u32, Refusal> {
    let most = gpu::limits().max_binding_bytes.min(ACTIVATION_BYTES / 2);
    let mut tokens = longest_chunk(CHUNK_TOKENS, |tokens| Panels::bytes(pair, selection, tokens))?;
    while tokens > 0 {
        if activation_bytes(networks, tokens) <= most {
            return Ok(tokens);
        }
        tokens /= 2;
    }
    let one = activation_bytes(networks, 1);
    Err(Refusal::Limit(format!(
        "one token's activations take {one} bytes, at most {most} can be had: fit a smaller width"
    )))
}

/// Keys or values of a target layer.
struct Side<'a> {
    /// What its weights' names begin with.
    name: String,
    /// What its networks read.
    panel: &'a Buffer,
    /// How many dimensions of what they give are rotated.
    rope_dims: u32,
    /// Where it goes.
    view: &'a View,
}

/// What a chunk's networks run with.
struct Chunk<'a> {
    pair: &'a ModelPair,
    job: &'a Job,
    activations: [Buffer; 2],
}

impl Chunk<'_> {
    /// Runs the networks of a group of heads: panel → first buffer → second buffer → the heads of the target view.
    fn run(&self, network: &Network, group: &Group, offsets: &[u32], side: &Side<'_>) -> Result<(), Refusal> {
        let Side { name, panel, rope_dims, view } = side;
        let (tokens, width) = (self.job.tokens, network.width());
        let features = self.pair.source.kv_heads * self.pair.source.head_dim;
        let [first, second] = &self.activations;
        let input = HeadsParams {
            tokens,
            block_width: features,
            panel_row_stride: features,
            panel_heads: 1,
            head_step: 0,
            heads: group.heads,
            head_dim: width,
            rope_dims: 0,
            relu: true,
            out_offset: 0,
            head_stride: tokens * width,
            row_stride: width,
            offsets: offsets.to_vec(),
        };
        // From one buffer of activations, head by head.
        let middle = HeadsParams {
            block_width: width,
            panel_row_stride: width,
            panel_heads: group.heads,
            head_step: tokens * width,
            offsets: vec![0],
            ..input.clone()
        };
        let output = HeadsParams {
            head_dim: self.pair.target.head_dim,
            rope_dims: *rope_dims,
            relu: false,
            out_offset: group.first * view.head_stride,
            head_stride: view.head_stride,
            row_stride: view.row_stride,
            ..middle.clone()
        };
        let steps = [
            (Part::In, input, *panel, first),
            (Part::Mid, middle, first, second),
            (Part::Out, output, second, &view.buffer),
        ];
        for (part, params, from, into) in steps {
            let weight = gpu::weights(&part.weight(name, group))?;
            let bias = gpu::weights(&part.bias(name, group))?;
            kernel("heads@1", &params.to_bytes(), [from, &weight, &bias, &self.job.target_rope, into])?;
        }
        Ok(())
    }
}
