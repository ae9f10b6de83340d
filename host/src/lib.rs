//! kvmig: a conversation moves from one language model to its sibling without the second one's prefill.
#![forbid(unsafe_code)]

pub mod bundled;
pub mod cache;
pub mod cli;
pub mod device;
pub mod engine;
pub mod eval;
pub mod fit;
pub mod gpu;
pub mod measure;
pub mod migrate;
pub mod pair;
pub mod sandbox;
