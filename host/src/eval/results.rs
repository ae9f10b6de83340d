//! What came of it, as it is kept: a line of what it is about, then one for each document.

use kvmig_gate::{Digest, Quality};
use serde::{Deserialize, Serialize};

use super::Ends;
use crate::fit::{Prompt, digest};

/// Version of the results' form.
pub(super) const SCHEMA: u32 = 1;

/// An evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Results {
    /// What was evaluated.
    pub subject: Subject,
    /// The texts in turn.
    pub documents: Vec<Measured>,
}

/// What was evaluated, and where. Results of equal subjects can be put together, their times as far as the machine was as busy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subject {
    /// Version of the form.
    pub schema: u32,
    /// Version of kvmig.
    pub kvmig: String,
    /// Digest of the source's weights and configuration.
    pub source: Digest,
    /// Of the target's.
    pub target: Digest,
    /// Backend of the device that mapped.
    pub backend: String,
    /// Its name and driver: times of several machines are no one's.
    pub device: String,
    /// Threads that the models computed with.
    pub threads: usize,
    /// In which numbers the models computed.
    pub precision: String,
    /// Tokens of a document's prefix.
    pub context: usize,
    /// The mappers, each with its native ends.
    pub mappings: Vec<Mapping>,
}

/// A mapper with native ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mapping {
    /// What people call the pair.
    pub pair: String,
    /// Kind of mapper.
    pub kind: String,
    /// Source layers that a target layer reads.
    pub k: usize,
    /// Columns of the projection, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<usize>,
    /// First layers that the target computes itself.
    pub native_layers: usize,
    /// First and last tokens that the target computes itself.
    pub ends: Ends,
    /// What ran.
    pub artifact: Digest,
    /// Bytes of the weights as they are stored.
    pub weight_bytes: u64,
    /// Millions of multiplications and additions that a mapped token costs.
    pub mflops: f64,
    /// How many times fewer operations the handoff of such a document takes than the prefill: the limit of a speed-up.
    pub flop_limit: f64,
}

/// One document through every arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Domain and number.
    pub id: String,
    /// Its domain.
    pub domain: String,
    /// Digest of its tokens, and of those behind them.
    pub tokens: Digest,
    /// The target's ordinary prefill to its first token, in milliseconds.
    pub reprefill_ms: f64,
    /// The source goes on itself.
    pub source: Arm,
    /// The target without any of the prefix.
    pub no_prefix: Arm,
    /// The native ends alone, each choice of them once.
    pub ends_only: Vec<(Ends, Arm)>,
    /// Through the mapped cache, in the order of [`Subject::mappings`].
    pub mapped: Vec<Arm>,
}

/// How close one arm came to the target itself.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arm {
    /// On the target's own greedy continuation, which is what the gate judges by.
    pub greedy: Quality,
    /// On the document's own next tokens, where it has enough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<Quality>,
    /// The handoff to the first token, in milliseconds; of mapped arms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handoff_ms: Option<f64>,
}

impl Measured {
    /// Whether it is of this document.
    pub(super) fn is_of(&self, document: &Prompt) -> bool {
        self.id == document.id && self.tokens == of_tokens(document)
    }
}

/// Digest of a document's prefix and of what is behind it.
pub(super) fn of_tokens(document: &Prompt) -> Digest {
    digest(&[document.tokens.as_slice(), &document.text].concat())
}
