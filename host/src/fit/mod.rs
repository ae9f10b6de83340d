//! Fits the weights of a pair.

mod content;
pub mod linalg;
pub mod moments;
mod product;
pub mod ridge;
pub mod select;
