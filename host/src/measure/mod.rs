//! What a migration is worth: quality, cosine, intervals (METHOD §5).

pub mod random;
pub mod statistics;
