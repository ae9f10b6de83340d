//! Known answers of other people's implementations: the files under `tests/golden`, as plain structs.
//!
//! `tests/golden/README.md` says what there is and which scripts and versions made it.

mod answer;
mod cases;
mod error;

use std::path::{Path, PathBuf};

pub use answer::{Answer, KvSample, LastRow, Patch};
pub use cases::{
    Case, Location, RealCase, RealModel, Refused, RopeCase, RopeScaling, TokenIds, elements, engine, gguf, real_models,
    refused, rope, sentencepiece,
};
pub use error::GoldenError;

/// The folder of the known answers.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden")
}
