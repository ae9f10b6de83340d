//! Where a model comes from and how it is to be held.

use std::path::PathBuf;

/// A model's files.
#[derive(Clone, Debug)]
pub enum ModelSource {
    /// A Hugging Face folder (`config.json`, `model.safetensors` or its shards, `tokenizer.json`) or a `.gguf` file.
    Path(PathBuf),
    /// The same files as a folder's, compiled into the program.
    Embedded {
        /// What messages call it.
        name: &'static str,
        /// `config.json`.
        config: &'static [u8],
        /// The safetensors files, in order.
        weights: &'static [&'static [u8]],
        /// `tokenizer.json`.
        tokenizer: &'static [u8],
        /// `tokenizer_config.json`, which says whether a text starts with the BOS token.
        tokenizer_config: Option<&'static [u8]>,
    },
}

impl<P: Into<PathBuf>> From<P> for ModelSource {
    fn from(path: P) -> ModelSource {
        ModelSource::Path(path.into())
    }
}

/// In which numbers the weights are multiplied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Every weight as f32: the exact path, and the reference. Four bytes a weight.
    Dequantised,
    /// Quantised weights stay quantised, activations are rounded to 8 bits for them: faster and smaller, held to a bound on
    /// the KL divergence. Unquantised weights are as above.
    #[default]
    Quantised,
}

/// How to load a model.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadOptions {
    /// In which numbers to compute.
    pub precision: Precision,
    /// Threads to compute with; all that the machine offers where it is `None`.
    pub threads: Option<usize>,
}
