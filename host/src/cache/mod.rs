//! KV caches: where keys and values lie, at which positions, rotated how, and whose they are.
//!
//! [`KvCache`] is native: only an engine's prefill and the provenance-checking reader make one. [`MappedCache`] is what a
//! migration makes: a type of its own, so that it cannot be stored, read or resumed as a native one.

mod file;
mod layout;
mod planes;
mod provenance;

use std::{
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
};

pub use file::{CacheFileError, read, write, write_mapped};
pub use layout::{CacheLayout, Elem, Pairing, Rope, RopeScaling};
pub use planes::{KvPlanes, LayerKv, Plane};
pub use provenance::{Hop, Provenance};

/// A native cache: every slot was computed by the model whose digest it carries.
///
/// Slots are ordered by position; slot `i` holds token `tokens[i]` at position `positions[i]`. Positions may have gaps
/// (a middle that was dropped), but never decrease.
///
/// A cache can't be copied, and has a number that no other cache of the process has: the gate's permits hold for it by that.
/// What a session advanced comes out of it as another cache.
#[derive(Debug)]
pub struct KvCache {
    pub(crate) planes: KvPlanes,
    pub(crate) tokens: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    model: kvmig_gate::Digest,
    serial: u64,
}

impl KvCache {
    /// A cache of `model`, under a number of its own.
    pub(crate) fn new(planes: KvPlanes, tokens: Vec<u32>, positions: Vec<u32>, model: kvmig_gate::Digest) -> KvCache {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        KvCache { planes, tokens, positions, model, serial: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    /// The same contents as another cache.
    pub(crate) fn renumbered(self) -> KvCache {
        let KvCache { planes, tokens, positions, model, serial: _ } = self;
        KvCache::new(planes, tokens, positions, model)
    }

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

    /// Its number in this process.
    pub fn serial(&self) -> u64 {
        self.serial
    }
}

/// A cache that a mapper made. It reaches a decoder only inside a [`kvmig_gate::Migrated`].
#[derive(Debug)]
pub struct MappedCache {
    pub(crate) planes: KvPlanes,
    pub(crate) tokens: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    /// The slots that were mapped. The others hold nothing until the target computes them.
    pub(crate) slots: Range<usize>,
    pub(crate) provenance: Provenance,
}

impl MappedCache {
    /// Where the keys and values lie, in the target model's terms.
    pub fn layout(&self) -> &CacheLayout {
        self.planes.layout()
    }

    /// The slots that were mapped; every other one is the target's own to compute.
    pub fn mapped_slots(&self) -> Range<usize> {
        self.slots.clone()
    }

    /// The models, modules and permits that this cache went through.
    pub fn provenance(&self) -> &Provenance {
        &self.provenance
    }
}
