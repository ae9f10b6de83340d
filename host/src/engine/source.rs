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
    /// Q4_K, Q6_K and Q8_0 weights whose rows are whole blocks of 256 stay quantised, activations are rounded to 8 bits for
    /// them: faster and smaller, held to a bound on the KL divergence. All others are as above: their products in single
    /// precision are faster.
    #[default]
    Quantised,
}

impl Precision {
    /// The name in records.
    pub fn name(self) -> &'static str {
        match self {
            Precision::Dequantised => "dequantised",
            Precision::Quantised => "quantised",
        }
    }
}

/// How to load a model.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadOptions {
    /// In which numbers to compute.
    pub precision: Precision,
    /// Threads to compute with; all that the machine offers where it is `None`. A model most of whose weights are quantised
    /// runs on the tensor library's own threads instead, whose number `CANDLE_NUM_THREADS` or else `RAYON_NUM_THREADS` sets
    /// for the whole process.
    pub threads: Option<usize>,
}
