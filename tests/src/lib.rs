//! What several suites, and the programs they start, have in common.

pub mod gate;
