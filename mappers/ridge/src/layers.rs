//! What each target layer reads.

use kvmig_mapper::{ModelPair, Refusal, Selection};
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
    /// The source layers.
    pub(crate) selection: Selection,
    /// Keys and values share one panel.
    pub(crate) joint: bool,
    /// Width of the hidden state, 0 where it is not read.
    pub(crate) hidden: u32,
    /// Columns of the projection, 0 where there is none.
    pub(crate) rank: u32,
}

impl Settings {
    pub(crate) fn resolve(self, pair: &ModelPair) -> Result<Features, Refusal> {
        let invalid = |why: &str| Err(Refusal::Invalid(why.into()));
        let selection = Selection::new(pair, self.layers)?;
        if self.hidden && pair.hidden == 0 {
            return invalid("settings.hidden: found true, expected a pair with native layers of the target");
        }
        let layers = selection.layers();
        if self.rank > 0 && layers.iter().any(|selected| *selected != layers[0]) {
            return invalid("settings.rank: found a projection, expected every target layer to read the same ones");
        }
        let hidden = if self.hidden { pair.hidden } else { 0 };
        Ok(Features { selection, joint: self.joint, hidden, rank: self.rank })
    }
}
