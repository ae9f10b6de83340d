//! The few unsafe calls of kvmig's host, each with its soundness argument. Nothing here knows of gates or caches.

pub mod compiled;
pub mod environment;

pub use compiled::CompiledStore;
