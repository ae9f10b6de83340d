//! Fits the weights of a pair.

mod content;
pub mod corpus;
pub mod linalg;
pub mod moments;
mod product;
pub mod ridge;
pub mod select;
pub mod state;
