//! What several suites, and the programs they start, have in common.
#![forbid(unsafe_code)]

pub mod gate;
pub mod golden;
