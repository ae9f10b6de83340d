//! What a migration is worth: quality, cosine, intervals (METHOD §5).

pub mod audit;
pub mod cosine;
mod log;
pub mod quality;
pub mod random;
pub mod statistics;
pub mod summary;

pub use log::LogError;
pub(crate) use log::{Log, OfAnother};
