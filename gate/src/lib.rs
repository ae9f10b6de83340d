//! The gate: nothing migrates without it.
//!
//! Read [`permit`] first.
#![forbid(unsafe_code)]

pub mod digest;
pub mod loaded;
pub mod permit;

pub use digest::{Digest, DigestBuilder};
pub use loaded::{Loaded, Loader, WeightElem, WeightTensor};
pub use permit::Migrated;
