//! The decoder: prefill, resume, score.
//!
//! [`Model::load`] reads a Hugging Face folder or a GGUF file; [`Model::prefill`] fills a [`KvCache`](crate::cache::KvCache);
//! a [`Session`] continues one, native or mapped. Weights go through candle; the attention is this room's own, on the
//! planes of the cache as they lie, so that a cache is never copied in or out. Inside, keys are always rotated in the
//! half-split pairing.

mod attention;
mod config;
mod error;
mod forward;
mod gguf;
mod hf;
mod json;
mod linear;
mod model;
mod norm;
mod opening;
mod prefill;
mod resume;
mod sampling;
mod session;
mod source;
mod team;
mod tokenizer;
mod weights;

pub use config::{Architecture, ModelConfig};
pub use error::EngineError;
pub use forward::Observer;
pub use model::Model;
pub use prefill::{PrefillOptions, Prefilled, Progress};
pub use resume::TrialSession;
pub use sampling::{Sampler, Sampling};
pub use session::{Scored, Session, SessionCache};
pub use source::{LoadOptions, ModelSource, Precision};
pub use tokenizer::{OtherTokenizer, TextStream, Tokenizer};
