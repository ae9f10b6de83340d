//! Panels: a chunk's source layers side by side, without their rotation. Each layer that is read is gathered once, however
//! many target layers read it.

use alloc::{format, vec::Vec};

use crate::{Buffer, CacheShape, GatherParams, Job, Kv, ModelPair, Refusal, Selection, View, gpu, range, whole};

/// A panel of keys and one of values: scratch buffers with a plane `[tokens, n_kv_s * d_s]` float32 for each source layer
/// that is used, in ascending order. A plane begins where a binding may.
pub struct Panels {
    /// Keys, their rotation stripped.
    pub keys: Buffer,
    /// Values.
    pub values: Buffer,
    plane_elements: u32,
}

impl Panels {
    /// Bytes of one of the two panels, for a chunk of `tokens` tokens: what a plan counts twice.
    pub fn bytes(pair: &ModelPair, selection: &Selection, tokens: u32) -> u64 {
        selection.used().len() as u64 * plane_bytes(pair, tokens)
    }

    /// Allocates both panels and requests `gather@1` for every layer used.
    ///
    /// # Errors
    /// The host's fault, as a refusal.
    pub fn gather(pair: &ModelPair, selection: &Selection, job: &Job) -> Result<Panels, Refusal> {
        let bytes = Panels::bytes(pair, selection, job.tokens);
        let (keys, values) = (gpu::scratch(bytes)?, gpu::scratch(bytes)?);
        for (plane, &layer) in selection.used().iter().enumerate() {
            let Kv { k, v } = &job.source[layer as usize];
            gather(pair, job, k, pair.source.rope_dims, &keys, plane)?;
            gather(pair, job, v, 0, &values, plane)?;
        }
        // A panel fits a binding, so that its elements can be counted in 32 bits.
        Ok(Panels { keys, values, plane_elements: (plane_bytes(pair, job.tokens) / 4) as u32 })
    }

    /// First element of the plane of each of these source layers, all of which are used.
    pub fn offsets(&self, selection: &Selection, layers: &[u32]) -> Vec<u32> {
        layers.iter().map(|&layer| selection.plane(layer) * self.plane_elements).collect()
    }
}

/// The longest chunk, halved from `most` tokens, whose panels of `bytes(tokens)` bytes fit into one binding of this device.
///
/// # Errors
/// [`Refusal::Limit`] when the panel of one token doesn't.
pub fn longest_chunk(most: u32, bytes: impl Fn(u32) -> u64) -> Result<u32, Refusal> {
    let limit = gpu::limits().max_binding_bytes;
    let mut tokens = most;
    while tokens > 0 {
        if bytes(tokens) <= limit {
            return Ok(tokens);
        }
        tokens /= 2;
    }
    let one = bytes(1);
    let why =
        format!("one token's panel takes {one} bytes, a binding of this device at most {limit}: select fewer layers");
    Err(Refusal::Limit(why))
}

fn plane_bytes(pair: &ModelPair, tokens: u32) -> u64 {
    let bytes = u64::from(tokens) * u64::from(row(pair)) * 4;
    bytes.next_multiple_of(gpu::limits().offset_align.into())
}

/// Elements of a plane's row.
fn row(pair: &ModelPair) -> u32 {
    pair.source.kv_heads * pair.source.head_dim
}

/// Copies one source layer's keys or values, without their rotation, into a plane of a panel.
fn gather(
    pair: &ModelPair,
    job: &Job,
    view: &View,
    rope_dims: u32,
    panel: &Buffer,
    plane: usize,
) -> Result<(), Refusal> {
    let CacheShape { kv_heads, head_dim, .. } = pair.source;
    let params = GatherParams {
        tokens: job.tokens,
        kv_heads,
        head_dim,
        rope_dims,
        head_stride: view.head_stride,
        row_stride: view.row_stride,
        panel_row_stride: row(pair),
    };
    let size = u64::from(job.tokens) * u64::from(row(pair)) * 4;
    let bindings = [
        whole(0, &view.buffer),
        whole(1, &job.source_rope),
        range(2, panel, plane as u64 * plane_bytes(pair, job.tokens), size),
    ];
    Ok(gpu::kernel("gather@1", &params.to_bytes(), &bindings)?)
}
