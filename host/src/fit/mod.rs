//! Fits the weights of a pair.

pub mod linalg;
mod product;
