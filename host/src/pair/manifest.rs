//! The readable manifest, `pair.toml`.

use kvmig_gate::Digest;
use serde::{Deserialize, Serialize};

use crate::{
    cache::{CacheLayout, Elem},
    fit::ridge::Lambda,
    measure::summary::{DomainSummary, TextSummary},
};

/// Version of the folder's format.
pub const FORMAT: u32 = 3;

/// Everything about a pair but its weights, module and documents' outcomes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// What people and the ledger call it.
    pub name: String,
    /// SHA-256 of `diagnostics.json`, where there is one. It is for people: nothing that runs or decides reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diagnostics: Option<Digest>,
    /// What the mapper computes.
    pub identity: Identity,
    /// How it was fitted.
    pub fit: FitRecord,
    /// What it did on held-out documents; without it, the gate admits nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence: Option<EvidenceRecord>,
}

/// The part of the manifest that fixes what the mapper computes. Evidence is bound to it, so it does not hold evidence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// Version of the format, [`FORMAT`].
    pub format: u32,
    /// First positions that the target computes itself, in tokens.
    pub head: usize,
    /// Last prompt tokens that the target computes itself, at least 1.
    pub tail: usize,
    /// First layers that the target computes itself, for every token; the others are mapped.
    #[serde(default, skip_serializing_if = "super::kinds::is_zero")]
    pub native_layers: usize,
    /// The mapper.
    pub mapper: MapperRecord,
    /// Its weights.
    pub weights: WeightsRecord,
    /// The model whose caches are mapped.
    pub source: ModelRecord,
    /// The model they are mapped for.
    pub target: ModelRecord,
}

impl Identity {
    /// The details that [`kvmig_gate::PairIdentity`] hashes: the same for the same identity, however the file is laid out.
    pub fn bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("an identity holds strings, numbers and lists only")
    }
}

/// Which module maps, and how it is set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MapperRecord {
    /// Kind of mapper, such as `ridge`.
    pub kind: String,
    /// SHA-256 of the component.
    pub module: Digest,
    /// The JSON handed to the module's `plan` and `run`; of a ridge `{"layers":[[…],…]}`, the source layers of each target
    /// layer.
    pub settings: String,
}

/// The weights file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightsRecord {
    /// SHA-256 of the file.
    pub sha256: Digest,
    /// Element type of the matrices; biases are f32.
    pub elem: Elem,
}

/// One of the two models.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelRecord {
    /// What it was called when the pair was fitted.
    pub name: String,
    /// Digest of its weights and configuration.
    pub digest: Digest,
    /// Digest of its tokenizer; both models' are equal.
    pub tokenizer: Digest,
    /// Width of its residual stream.
    pub hidden: usize,
    /// Its caches.
    pub layout: CacheLayout,
}

impl ModelRecord {
    /// A loaded model's record.
    pub fn of(model: &crate::engine::Model) -> ModelRecord {
        ModelRecord {
            name: kvmig_gate::parse::printable(model.name()),
            digest: model.digest(),
            tokenizer: model.tokenizer().tokenizer_digest(),
            hidden: model.config().hidden,
            layout: model.layout().clone(),
        }
    }
}

/// How the weights came about.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FitRecord {
    /// Version of kvmig that fitted.
    pub kvmig: String,
    /// Source layers per target layer.
    pub k: usize,
    /// Columns of the projection, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// Seed of the split of documents.
    pub seed: u64,
    /// Tokens of a calibration sequence at most.
    pub context: usize,
    /// Every how many positions a row was taken.
    pub stride: usize,
    /// Calibration sequences.
    pub sequences: usize,
    /// Rows: tokens that the moments are over.
    pub rows: u64,
    /// Mean R² of the keys over target layers: in-sample where they were solved for, on sequences held out where a network was
    /// trained. A diagnostic.
    pub r2_keys: f64,
    /// The same of the values.
    pub r2_values: f64,
    /// Largest jitter that a factorisation needed; 0 in the ordinary case.
    pub jitter: f64,
    /// λ and what it multiplies.
    pub lambda: Lambda,
    /// How much rows counted, where not all alike.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weighting: Option<WeightingRecord>,
    /// How networks were trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub training: Option<TrainingRecord>,
    /// How k was chosen, where it was not given: each candidate's cosine on selection documents.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sweep: Vec<SweepPoint>,
    /// How the width of networks was chosen, where it was: each on the selection documents.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub widths: Vec<WidthPoint>,
    /// How the native ends were chosen, where they were: each choice on the selection documents.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ends: Vec<EndsPoint>,
    /// What parts of the fit are worth, where it was found out: each arm on the selection documents.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ablations: Vec<AblationPoint>,
    /// The texts and their split.
    pub corpora: Vec<CorpusRecord>,
}

/// Attention-weighted rows: `w = 1 + α (r − 1)`, α of each head's keys and values as large as the effective number of rows
/// allows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightingRecord {
    /// Mean α over layers, heads, keys and values.
    pub alpha_mean: f64,
    /// The least.
    pub alpha_least: f64,
    /// The least of Kish's effective numbers of rows.
    pub effective_rows_least: f64,
}

/// A training of networks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingRecord {
    /// Units of a hidden layer.
    pub width: usize,
    /// Times that the rows were gone through, at most.
    pub epochs: usize,
    /// Mean number of epochs behind the weights that were kept.
    pub epochs_kept: f64,
    /// Rows of a step.
    pub batch: usize,
    /// Sequences held out to stop by.
    pub held_out: usize,
}

/// One candidate of the sweep, on the selection documents.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SweepPoint {
    /// Source layers per target layer.
    pub k: usize,
    /// Strength of the ridge, by the fit's convention.
    pub lambda: f64,
    /// Columns of the projection, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// Millions of multiplications and additions that a mapped token costs.
    pub mflops: f64,
    /// Attention-output cosine over layers, heads and documents.
    pub cosine_mean: f64,
    /// The worst layer's, averaged over documents.
    pub cosine_worst_layer: f64,
    /// Selection documents.
    pub documents: usize,
}

/// One width of networks, on the selection documents; qualities as in evidence, times of this machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WidthPoint {
    /// Units of a hidden layer.
    pub width: usize,
    /// Millions of multiplications and additions that a mapped token costs.
    pub mflops: f64,
    /// Mean KL in nats per token.
    pub kl_nats: f64,
    /// Mean top-1 agreement.
    pub agreement: f64,
    /// Mean handoff, in milliseconds.
    pub handoff_ms: f64,
    /// Selection documents.
    pub documents: usize,
}

/// One choice of native ends, on the selection documents; qualities as in evidence, times of this machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EndsPoint {
    /// First positions.
    pub head: usize,
    /// Last prompt tokens.
    pub tail: usize,
    /// Mean KL in nats per token.
    pub kl_nats: f64,
    /// Mean top-1 agreement.
    pub agreement: f64,
    /// Mean handoff, in milliseconds.
    pub handoff_ms: f64,
    /// Mean ordinary prefill of the same prompts.
    pub reprefill_ms: f64,
    /// Selection documents.
    pub documents: usize,
}

/// One arm of an ablation, on the selection documents. Of arms that no mapper computes, the cosines alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AblationPoint {
    /// What was left out or put wrong.
    pub arm: String,
    /// Mean KL in nats per token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl_nats: Option<f64>,
    /// Mean top-1 agreement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agreement: Option<f64>,
    /// Mean attention-output cosine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cosine_mean: Option<f64>,
    /// The worst layer's, averaged over documents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cosine_worst_layer: Option<f64>,
    /// Selection documents.
    pub documents: usize,
}

/// One text file and which of its documents did what; numbers count documents from 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CorpusRecord {
    /// Domain it stands for.
    pub name: String,
    /// Its file, without folders.
    pub file: String,
    /// SHA-256 of the file.
    pub sha256: Digest,
    /// Documents the moments are over.
    pub calibration: Vec<usize>,
    /// Documents k was chosen on.
    pub selection: Vec<usize>,
    /// Held-out documents of the evidence.
    pub evidence: Vec<usize>,
}

/// Held-out evidence, in short; the documents' outcomes are a file of their own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvidenceRecord {
    /// SHA-256 of that file.
    pub sha256: Digest,
    /// The artifact it is about.
    pub artifact: Digest,
    /// Figures per domain and over all, with n and 95 % bootstrap intervals over documents; what the documents give, or the
    /// pair is refused.
    pub domains: Vec<DomainSummary>,
    /// The same arms on the documents' own next tokens instead of the target's greedy continuation: to be held against figures
    /// that others made so. As the fit reported it: the gate does not look at it, and the outcomes behind it are not kept.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub own_text: Vec<TextSummary>,
}
