//! Which source layers each target layer reads: the part of the settings that mappers of several kinds share.

use alloc::{format, string::String, vec, vec::Vec};

use crate::{CacheShape, ModelPair, Refusal};

/// Source layers for each target layer, checked against the pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    layers: Vec<Vec<u32>>,
    used: Vec<u32>,
    native: u32,
}

impl Selection {
    /// Checks what a pair's settings call `layers`: for each target layer that is mapped the source layers it reads, in the
    /// order of its weights' blocks.
    ///
    /// # Errors
    /// [`Refusal::Invalid`] for another number of target layers, for none or a repeated one among a target layer's source
    /// layers, and for one that the source doesn't have; [`Refusal::Unsupported`] for a pair of empty or unrotated caches, and
    /// for a target of which no layer is mapped.
    pub fn new(pair: &ModelPair, layers: Vec<Vec<u32>>) -> Result<Selection, Refusal> {
        for (which, shape) in [("source", &pair.source), ("target", &pair.target)] {
            check_shape(which, shape)?;
        }
        let invalid = |why| Err(Refusal::Invalid(why));
        let native = pair.native_layers;
        let (found, expected) = (layers.len(), pair.target.layers.saturating_sub(native));
        if expected == 0 {
            let why =
                format!("target: found {native} native layers, expected less than its {} layers", pair.target.layers);
            return Err(Refusal::Unsupported(why));
        }
        if found as u64 != u64::from(expected) {
            return invalid(format!(
                "settings.layers: found {found} entries, expected one per target layer that is mapped ({expected})"
            ));
        }
        let most = pair.source.layers;
        let mut used = vec![false; most as usize];
        for (l, selected) in layers.iter().enumerate() {
            let field = format!("settings.layers[{l}]");
            if selected.is_empty() {
                return invalid(format!("{field}: found no source layer, expected at least one"));
            }
            for (i, &layer) in selected.iter().enumerate() {
                if layer >= most {
                    return invalid(format!("{field}: found source layer {layer}, expected less than {most}"));
                }
                if selected[..i].contains(&layer) {
                    return invalid(format!("{field}: found source layer {layer} twice, expected each once"));
                }
                used[layer as usize] = true;
            }
        }
        let used = (0..most).filter(|&layer| used[layer as usize]).collect();
        Ok(Selection { layers, used, native })
    }

    /// For each target layer that is mapped its source layers: at least one, each once.
    pub fn layers(&self) -> &[Vec<u32>] {
        &self.layers
    }

    /// Where among the layers used a source layer is.
    pub fn plane(&self, layer: u32) -> u32 {
        self.used.partition_point(|&used| used < layer) as u32
    }

    /// What the weights' names of the mapped layer `index` begin with, for `part` `k` or `v`: `layers.{l}.{part}`, with l as the
    /// target counts its layers.
    pub fn name(&self, index: usize, part: &str) -> String {
        format!("layers.{}.{part}", self.native as usize + index)
    }

    /// Every source layer that some target layer reads, ascending.
    pub fn used(&self) -> &[u32] {
        &self.used
    }
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
