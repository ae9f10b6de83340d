//! KV caches: where keys and values lie, at which positions, rotated how, and whose they are.
//!
//! [`KvCache`] is native: only an engine's prefill and the provenance-checking reader make one. [`MappedCache`] is what a
//! migration makes: a type of its own, so that it cannot be stored, read or resumed as a native one.

mod file;
mod layout;
mod planes;
mod provenance;

pub use file::{CacheFileError, read, write, write_mapped};
pub use layout::{CacheLayout, Elem, Pairing, Rope, RopeScaling};
pub use planes::{KvPlanes, LayerKv, Plane};
pub use provenance::{Hop, Provenance};

/// A native cache: every slot was computed by the model whose digest it carries.
///
/// Slots are ordered by position; slot `i` holds token `tokens[i]` at position `positions[i]`. Positions may have gaps
/// (a middle that was dropped), but never decrease.
#[derive(Debug)]
pub struct KvCache {
    pub(crate) planes: KvPlanes,
    pub(crate) tokens: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    pub(crate) model: kvmig_gate::Digest,
}

impl KvCache {
    /// Where the keys and values lie: `[layers, n_kv, T, d]`, rotation, element type.
    pub fn layout(&self) -> &CacheLayout {
        self.planes.layout()
    }

    /// The keys and values themselves.
    pub fn planes(&self) -> &KvPlanes {
        &self.planes
    }

    /// Number of filled slots.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether no slot is filled.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The token in each slot.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The position of each slot, in tokens from the start of the conversation.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Digest of the model that computed this cache.
    pub fn model(&self) -> kvmig_gate::Digest {
        self.model
    }
}

/// A cache that a mapper made. It reaches a decoder only inside a [`kvmig_gate::Migrated`].
#[derive(Debug)]
pub struct MappedCache {
    pub(crate) planes: KvPlanes,
    pub(crate) tokens: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    pub(crate) provenance: Provenance,
}

impl MappedCache {
    /// Where the keys and values lie, in the target model's terms.
    pub fn layout(&self) -> &CacheLayout {
        self.planes.layout()
    }

    /// The models, modules and permits that this cache went through.
    pub fn provenance(&self) -> &Provenance {
        &self.provenance
    }
}
