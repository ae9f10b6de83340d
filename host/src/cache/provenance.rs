//! Where a cache comes from.

use kvmig_gate::Digest;
use serde::{Deserialize, Serialize};

/// One mapping that a cache went through.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hop {
    /// Model whose cache was mapped.
    pub source: Digest,
    /// Pair whose weights mapped it.
    pub pair: Digest,
    /// Module that orchestrated the mapping.
    pub module: Digest,
    /// Ticket of the permit it was mapped under.
    pub ticket: String,
}

/// A cache's history: the model it now belongs to, and every mapping before that, oldest first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// Model that the cache can be decoded by.
    pub model: Digest,
    /// Mappings; empty for a native cache.
    pub hops: Vec<Hop>,
}
