//! Guests: wasmtime, the WIT contract, limits, recordings.

pub mod recording;
