//! What can go wrong between a model's files and its next token.

use std::{io, path::PathBuf};

use kvmig_gate::Digest;

/// An error of the engine. Every variant that concerns a file names it, with the field, what was found, what was
/// expected and, where it is not obvious, the mend.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A file or folder that isn't there.
    #[error("{file}: {what} not found; {mend}")]
    Absent {
        /// The path that was tried.
        file: PathBuf,
        /// What should have been there.
        what: &'static str,
        /// What the caller can do.
        mend: String,
    },
    /// A file that the system would not read.
    #[error("{file}: can't be read: {source}")]
    Read {
        /// The file.
        file: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file that ends too early.
    #[error(
        "{file}: {field}: the file ends at byte {found}, expected at least {expected}; it is truncated: fetch it again"
    )]
    Truncated {
        /// The file.
        file: PathBuf,
        /// The part that is cut off.
        field: String,
        /// Bytes that are there.
        found: u64,
        /// Bytes that were announced.
        expected: u64,
    },
    /// A field that is missing, of another type, or out of its range.
    #[error("{file}: {field}: found {found}, expected {expected}")]
    Malformed {
        /// The file.
        file: PathBuf,
        /// The field.
        field: String,
        /// What is there.
        found: String,
        /// What would have been accepted.
        expected: String,
    },
    /// A feature that this engine refuses by name, because no parity test covers it.
    #[error(
        "{file}: {field}: {found} is not supported; expected {expected}. Use a model that has it, or one without this feature"
    )]
    Unsupported {
        /// The file.
        file: PathBuf,
        /// The field that asks for the feature.
        field: String,
        /// The feature.
        found: String,
        /// What is supported.
        expected: String,
    },
    /// A tensor that the architecture needs and the file lacks.
    #[error(
        "{file}: tensor `{tensor}` is missing; expected it with shape {expected:?}. The file is incomplete or of another architecture"
    )]
    MissingTensor {
        /// The file or folder.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// The shape it should have, outermost extent first.
        expected: Vec<usize>,
    },
    /// A tensor of another shape than the configuration says.
    #[error(
        "{file}: tensor `{tensor}`: found shape {found:?}, expected {expected:?}; weights and configuration are of different models"
    )]
    Shape {
        /// The file.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Shape in the file, outermost extent first.
        found: Vec<usize>,
        /// Shape that the configuration asks for.
        expected: Vec<usize>,
    },
    /// A weight that is NaN or infinite.
    #[error(
        "{file}: tensor `{tensor}`: found {found} at element {index}, expected finite numbers; the file is damaged: fetch it again"
    )]
    NotFinite {
        /// The file.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// The first such element (of a quantised tensor: the first element of its block).
        index: usize,
        /// The value.
        found: f32,
    },
    /// A tokenizer that can't be built, or a text that it can't encode.
    #[error("{file}: tokenizer: {reason}")]
    Tokenizer {
        /// The file.
        file: PathBuf,
        /// What the tokenizer says.
        reason: String,
    },
    /// A token outside the vocabulary.
    #[error(
        "token {found} at place {index} is outside the vocabulary of {expected} tokens; was it made by another tokenizer?"
    )]
    TokenRange {
        /// The token.
        found: u32,
        /// Its place in the sequence.
        index: usize,
        /// Size of the vocabulary.
        expected: usize,
    },
    /// More tokens than the model has positions for.
    #[error("{found} tokens are more than the {expected} positions that the model was made for; shorten the prompt")]
    TooLong {
        /// Tokens asked for.
        found: usize,
        /// The model's positions.
        expected: usize,
    },
    /// A prompt without a token.
    #[error("the prompt is empty; expected at least one token")]
    EmptyPrompt,
    /// A cache that another model computed.
    #[error(
        "the cache belongs to model {found}, this is model {expected}; a cache of another model has to be migrated"
    )]
    ForeignCache {
        /// The cache's model.
        found: Digest,
        /// The model that was asked to resume it.
        expected: Digest,
    },
    /// A cache that does not fit its model or its prompt.
    #[error("cache: {field}: found {found}, expected {expected}")]
    CacheMismatch {
        /// What disagrees.
        field: &'static str,
        /// What the cache says.
        found: String,
        /// What the model or the prompt says.
        expected: String,
    },
    /// The caller asked to stop.
    #[error("stopped after {done} of {total} tokens")]
    Cancelled {
        /// Tokens computed.
        done: usize,
        /// Tokens asked for.
        total: usize,
    },
    /// A number that became NaN or infinite on the way.
    #[error("logits: found {found}, expected finite numbers; the cache or the weights are damaged")]
    NotFiniteLogits {
        /// The value.
        found: f32,
    },
    /// An operation of the tensor library failed.
    #[error("tensor operation: {0}")]
    Tensor(#[from] candle_core::Error),
    /// The threads asked for can't be started.
    #[error("threads: {0}")]
    Threads(#[from] rayon::ThreadPoolBuildError),
}
