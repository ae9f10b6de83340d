//! What a fit saw of its own work: for people, and nothing decides by it.

use kvmig_gate::parse::from_json;
use serde::{Deserialize, Serialize};

use super::{DIAGNOSTICS, PairError, file};

/// A pair's `diagnostics.json`. Which parts there are depends on the kind of mapper.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Diagnostics {
    /// How well each source layer alone explains each target layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r2: Option<HeatMap>,
    /// What each further source layer adds, per mapped target layer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub forward: Vec<ForwardCurve>,
    /// Attention-output cosine of each target layer, mean over the selection documents. Of a fit that kept none (`--selection 0`)
    /// this is empty, and so is the next.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cosine: Vec<f64>,
    /// Whether the errors lie where the target looks, on the same documents.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concentration: Option<PerSide>,
    /// Effective degrees of freedom of each mapped target layer's ridge, `tr(C (C + D)⁻¹)`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effective_features: Option<PerSide>,
    /// Rows that a weight matrix was fitted on, for each of its features.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows_per_feature: Option<f64>,
    /// Bytes of the weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_bytes: Option<u64>,
}

/// R², `[target layers][source layers]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeatMap {
    /// Of the keys, rotation stripped.
    pub keys: Vec<Vec<f64>>,
    /// Of the values.
    pub values: Vec<Vec<f64>>,
}

/// Source layers in the order in which they add most, and the R² of all up to each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForwardCurve {
    /// The target layer.
    pub layer: usize,
    /// The source layers.
    pub sources: Vec<usize>,
    /// Joint R² of the keys.
    pub keys: Vec<f64>,
    /// Joint R² of the values.
    pub values: Vec<f64>,
}

/// A figure of each mapped target layer's keys and values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PerSide {
    /// Of the keys.
    pub keys: Vec<f64>,
    /// Of the values.
    pub values: Vec<f64>,
}

impl Diagnostics {
    /// The file's bytes.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).expect("diagnostics hold numbers only");
        bytes.push(b'\n');
        bytes
    }

    pub(super) fn parse(label: &str, bytes: &[u8]) -> Result<Diagnostics, PairError> {
        from_json(bytes).map_err(|source| PairError::Diagnostics { file: file(label, DIAGNOSTICS), source })
    }
}
