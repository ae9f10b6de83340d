//! Why a known answer could not be read.

use std::path::PathBuf;

/// A file of known answers that is missing, or not what its README says.
#[derive(Debug, thiserror::Error)]
pub enum GoldenError {
    /// The file could not be read at all.
    #[error("{}: {source}; the script beside it makes it again", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A list that is not the JSON expected.
    #[error("{}: {source}; make it again with the script beside it", file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A file that is not safetensors.
    #[error("{}: {source}; make it again with the script beside it", file.display())]
    Safetensors {
        /// The file.
        file: PathBuf,
        /// Why.
        source: safetensors::SafeTensorError,
    },
    /// A tensor of another element type or shape, or none.
    #[error("{}: tensor {tensor}: found {found}, expected {expected}; make it again with the script beside it", file.display())]
    Tensor {
        /// The file.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// What is there.
        found: String,
        /// What should be.
        expected: String,
    },
}
