//! What each target layer reads.

use kvmig_mapper::{ModelPair, Refusal};
use serde::Deserialize;

/// The settings that a fit writes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settings {
    /// Per mapped target layer the source layers it reads, in the order of its weights' blocks.
    layers: Vec<Vec<u32>>,
    /// Keys and values are both features of keys and of values.
    #[serde(default)]
    joint: bool,
    /// The target's hidden state is a feature as well.
    #[serde(default)]
    hidden: bool,
    /// Features are projected to so many first, which every target layer then reads; 0 for no projection.
    #[serde(default)]
    rank: u32,
}

/// Settings that fit the pair.
pub(crate) struct Features {
    /// Per mapped target layer, its source layers; none is empty, none repeats a layer.
    pub(crate) selected: Vec<Vec<u32>>,
    /// Every source layer that some target layer reads, ascending.
    pub(crate) used: Vec<u32>,
    /// Keys and values share one panel.
    pub(crate) joint: bool,
    /// Width of the hidden state, 0 where it is not read.
    pub(crate) hidden: u32,
    /// Columns of the projection, 0 where there is none.
    pub(crate) rank: u32,
}

impl Settings {
    pub(crate) fn resolve(self, pair: &ModelPair) -> Result<Features, Refusal> {
        let invalid = |why| Err(Refusal::Invalid(why));
        let (found, expected) = (self.layers.len(), pair.target.layers - pair.native_layers);
        if found as u64 != u64::from(expected) {
            return invalid(format!(
                "settings.layers: found {found} entries, expected one per target layer that is mapped ({expected})"
            ));
        }
        let mut used = vec![false; pair.source.layers as usize];
        for (l, selected) in self.layers.iter().enumerate() {
            if selected.is_empty() {
                return invalid(format!("settings.layers[{l}]: found no source layer, expected at least one"));
            }
            for (i, &layer) in selected.iter().enumerate() {
                if layer >= pair.source.layers {
                    let most = pair.source.layers;
                    return invalid(format!(
                        "settings.layers[{l}]: found source layer {layer}, expected less than {most}"
                    ));
                }
                if selected[..i].contains(&layer) {
                    return invalid(format!(
                        "settings.layers[{l}]: found source layer {layer} twice, expected each once"
                    ));
                }
                used[layer as usize] = true;
            }
        }
        if self.hidden && pair.hidden == 0 {
            return invalid("settings.hidden: found true, expected a pair with native layers of the target".into());
        }
        if self.rank > 0 && self.layers.iter().any(|selected| *selected != self.layers[0]) {
            return invalid("settings.rank: found a projection, expected every target layer to read the same ones".into());
        }
        let used = (0..pair.source.layers).filter(|&layer| used[layer as usize]).collect();
        let hidden = if self.hidden { pair.hidden } else { 0 };
        Ok(Features { selected: self.layers, used, joint: self.joint, hidden, rank: self.rank })
    }
}

impl Features {
    /// Where among the used layers a source layer is.
    pub(crate) fn plane(&self, layer: u32) -> u32 {
        self.used.partition_point(|&used| used < layer) as u32
    }
}
