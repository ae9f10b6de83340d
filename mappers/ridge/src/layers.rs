//! Which source layers each target layer reads.

use kvmig_mapper::{ModelPair, Refusal};
use serde::Deserialize;

/// The settings that a fit writes: per target layer the source layers it reads, in the order of its weights' blocks.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settings {
    layers: Vec<Vec<u32>>,
}

/// Settings that fit the pair.
pub(crate) struct Layers {
    /// Per target layer, its source layers; none is empty, none repeats a layer.
    pub(crate) selected: Vec<Vec<u32>>,
    /// Every source layer that some target layer reads, ascending.
    pub(crate) used: Vec<u32>,
}

impl Settings {
    pub(crate) fn resolve(self, pair: &ModelPair) -> Result<Layers, Refusal> {
        let (found, expected) = (self.layers.len(), pair.target.layers);
        if found as u64 != u64::from(expected) {
            let why = format!("settings.layers: found {found} entries, expected one per target layer ({expected})");
            return Err(Refusal::Invalid(why));
        }
        let mut used = vec![false; pair.source.layers as usize];
        for (l, selected) in self.layers.iter().enumerate() {
            if selected.is_empty() {
                return Err(Refusal::Invalid(format!(
                    "settings.layers[{l}]: found no source layer, expected at least one"
                )));
            }
            for (i, &layer) in selected.iter().enumerate() {
                if layer >= pair.source.layers {
                    let most = pair.source.layers;
                    let why = format!("settings.layers[{l}]: found source layer {layer}, expected less than {most}");
                    return Err(Refusal::Invalid(why));
                }
                if selected[..i].contains(&layer) {
                    let why = format!("settings.layers[{l}]: found source layer {layer} twice, expected each once");
                    return Err(Refusal::Invalid(why));
                }
                used[layer as usize] = true;
            }
        }
        let used = (0..pair.source.layers).filter(|&layer| used[layer as usize]).collect();
        Ok(Layers { selected: self.layers, used })
    }
}

impl Layers {
    /// The panel plane that holds a source layer.
    pub(crate) fn plane(&self, layer: u32) -> u32 {
        self.used.partition_point(|&used| used < layer) as u32
    }
}
