//! What a migration is worth: quality, cosine, intervals (METHOD §5).

pub mod audit;
pub mod cosine;
pub mod quality;
pub mod random;
pub mod statistics;
pub mod summary;
