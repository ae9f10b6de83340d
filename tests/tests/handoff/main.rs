//! The whole path from a source's cache to the target's tokens: gate, guest, kernels, decoder.

mod answers;
mod bench;
mod identity;
mod permits;
mod residency;
