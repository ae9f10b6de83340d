//! The full-head ridge mapper: per target layer, `Ŷ = X W + b` for keys (without their rotation) and for values, where X is
//! all KV heads of the layer's selected source layers, side by side.
//!
//! Each selected source layer is gathered once per chunk into a plane `[C, n_kv_s * d_s]` of a panel of keys and of one of
//! values; the products read their blocks from there.

mod layers;

use kvmig_mapper::{
    AffineParams, Buffer, CacheShape, Dtype, GatherParams, Job, Kv, Mapper, Metadata, ModelPair, Refusal, View,
    WeightSpec, WorkPlan, gpu, kernel, parse_settings, weight,
};
use layers::{Layers, Settings};

/// Tokens per chunk where the device's bindings are long enough: large enough that the weights are read seldom, small
/// enough that the panels stay in a cache.
const CHUNK_TOKENS: u32 = 256;

struct Ridge;

kvmig_mapper::export!(Ridge);

impl Mapper for Ridge {
    fn describe() -> Metadata {
        Metadata {
            name: env!("CARGO_PKG_NAME").into(),
            version: env!("CARGO_PKG_VERSION").into(),
            kinds: vec!["ridge".into()],
            shaders: vec![],
        }
    }

    fn plan(pair: &ModelPair, settings: &str) -> Result<WorkPlan, Refusal> {
        let layers = resolve(pair, settings)?;
        let chunk_tokens = chunk_tokens(pair, &layers)?;
        let weights =
            layers.selected.iter().enumerate().flat_map(|(l, selected)| layer_weights(pair, l, selected.len()));
        Ok(WorkPlan {
            kind: "ridge".into(),
            weights: weights.collect(),
            chunk_tokens,
            scratch_bytes: 2 * panel_bytes(pair, &layers, chunk_tokens),
            max_dispatches: 2 * (layers.used.len() + layers.selected.len()) as u32,
        })
    }

    fn run(pair: &ModelPair, settings: &str, job: Job) -> Result<(), Refusal> {
        let layers = resolve(pair, settings)?;
        let bytes = panel_bytes(pair, &layers, job.tokens);
        let (keys, values) = (gpu::scratch(bytes)?, gpu::scratch(bytes)?);
        for (plane, &layer) in layers.used.iter().enumerate() {
            let Kv { k, v } = &job.source[layer as usize];
            gather(pair, &job, k, pair.source.rope_dims, &keys, plane)?;
            gather(pair, &job, v, 0, &values, plane)?;
        }
        for (l, selected) in layers.selected.iter().enumerate() {
            let blocks: Vec<u32> = selected.iter().map(|&layer| layers.plane(layer)).collect();
            let Kv { k, v } = &job.target[l];
            affine(pair, &job, &format!("layers.{l}.k"), &keys, &blocks, pair.target.rope_dims, k)?;
            affine(pair, &job, &format!("layers.{l}.v"), &values, &blocks, 0, v)?;
        }
        Ok(())
    }
}

fn resolve(pair: &ModelPair, settings: &str) -> Result<Layers, Refusal> {
    for (which, shape) in [("source", &pair.source), ("target", &pair.target)] {
        check_shape(which, shape)?;
    }
    parse_settings::<Settings>(settings)?.resolve(pair)
}

fn check_shape(which: &str, shape: &CacheShape) -> Result<(), Refusal> {
    let CacheShape { layers, kv_heads, head_dim, rope_dims, .. } = *shape;
    if layers == 0 || kv_heads == 0 || head_dim == 0 {
        let why =
            format!("{which}: found {layers} layers of {kv_heads} KV heads of width {head_dim}, expected no zero");
        return Err(Refusal::Unsupported(why));
    }
    if rope_dims == 0 || rope_dims > head_dim || rope_dims % 2 != 0 {
        let why =
            format!("{which}: found rope-dims {rope_dims}, expected an even number from 2 to head-dim ({head_dim})");
        return Err(Refusal::Unsupported(why));
    }
    Ok(())
}

/// The longest chunk, halved from [`CHUNK_TOKENS`], whose panels fit into one binding each.
fn chunk_tokens(pair: &ModelPair, layers: &Layers) -> Result<u32, Refusal> {
    let most = gpu::limits().max_binding_bytes;
    let mut tokens = CHUNK_TOKENS;
    while panel_bytes(pair, layers, tokens) > most {
        tokens /= 2;
        if tokens == 0 {
            let one = panel_bytes(pair, layers, 1);
            let why = format!(
                "one token's panel takes {one} bytes, a binding of this device at most {most}: select fewer layers"
            );
            return Err(Refusal::Limit(why));
        }
    }
    Ok(tokens)
}

/// Bytes of one panel: a plane for each layer used.
fn panel_bytes(pair: &ModelPair, layers: &Layers, tokens: u32) -> u64 {
    layers.used.len() as u64 * plane_bytes(pair, tokens)
}

/// Bytes from one plane `[tokens, n_kv_s * d_s]` f32 of a panel to the next: each begins where a binding may.
fn plane_bytes(pair: &ModelPair, tokens: u32) -> u64 {
    let bytes = u64::from(tokens) * u64::from(width(&pair.source)) * 4;
    bytes.next_multiple_of(gpu::limits().offset_align.into())
}

fn width(shape: &CacheShape) -> u32 {
    shape.kv_heads * shape.head_dim
}

/// Weights and biases of one target layer: `[blocks * n_kv_s * d_s, n_kv_t * d_t]` and `[n_kv_t * d_t]`.
fn layer_weights(pair: &ModelPair, layer: usize, blocks: usize) -> [WeightSpec; 4] {
    let (rows, columns) = (blocks as u32 * width(&pair.source), width(&pair.target));
    let bias = |name| WeightSpec { elem: Some(Dtype::Float32), ..weight(name, &[columns]) };
    [
        weight(format!("layers.{layer}.k.weight"), &[rows, columns]),
        bias(format!("layers.{layer}.k.bias")),
        weight(format!("layers.{layer}.v.weight"), &[rows, columns]),
        bias(format!("layers.{layer}.v.bias")),
    ]
}

/// Copies one source layer's keys or values, without their rotation, into a plane of the panel.
fn gather(
    pair: &ModelPair,
    job: &Job,
    view: &View,
    rope_dims: u32,
    panel: &Buffer,
    plane: usize,
) -> Result<(), Refusal> {
    let CacheShape { kv_heads, head_dim, .. } = pair.source;
    let row = width(&pair.source);
    let params = GatherParams {
        tokens: job.tokens,
        kv_heads,
        head_dim,
        rope_dims,
        head_stride: view.head_stride,
        row_stride: view.row_stride,
        panel_row_stride: row,
    };
    let size = u64::from(job.tokens) * u64::from(row) * 4;
    let bindings = [
        kvmig_mapper::whole(0, &view.buffer),
        kvmig_mapper::whole(1, &job.source_rope),
        kvmig_mapper::range(2, panel, plane as u64 * plane_bytes(pair, job.tokens), size),
    ];
    Ok(gpu::kernel("gather@1", &params.to_bytes(), &bindings)?)
}

/// Computes one target layer's keys or values from its blocks (planes of the panel).
fn affine(
    pair: &ModelPair,
    job: &Job,
    weights: &str,
    panel: &Buffer,
    blocks: &[u32],
    rope_dims: u32,
    view: &View,
) -> Result<(), Refusal> {
    let row = width(&pair.source);
    // A panel fits a binding, so that its elements can be counted in 32 bits.
    let plane_elements = (plane_bytes(pair, job.tokens) / 4) as u32;
    let params = AffineParams {
        tokens: job.tokens,
        block_width: row,
        panel_row_stride: row,
        kv_heads: pair.target.kv_heads,
        head_dim: pair.target.head_dim,
        rope_dims,
        head_stride: view.head_stride,
        row_stride: view.row_stride,
        offsets: blocks.iter().map(|plane| plane * plane_elements).collect(),
    };
    let weight = gpu::weights(&format!("{weights}.weight"))?;
    let bias = gpu::weights(&format!("{weights}.bias"))?;
    Ok(kernel("affine@1", &params.to_bytes(), [panel, &weight, &bias, &job.target_rope, &view.buffer])?)
}
