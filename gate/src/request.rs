//! What a host asks the gate.

use crate::{Digest, Evidence, Latency, Loaded, Reason};

/// One wish: this cache, of this pair, through one of these candidates.
#[derive(Debug)]
pub struct Request<'a> {
    /// The pair.
    pub pair: PairFacts<'a>,
    /// The source cache.
    pub cache: CacheFacts,
    /// First positions that the target will compute itself, in tokens.
    pub head: usize,
    /// Last prompt tokens that the target will compute itself.
    pub tail: usize,
    /// Domain of the text, where the host knows it.
    pub domain: Option<&'a str>,
    /// Device and adapter that will run the mapper.
    pub backend: &'a str,
    /// A mismatch the host found while it read models, pair and cache: another tokenizer, another rotation. The gate knows
    /// nothing of either; it refuses, and writes the sentence down.
    pub mismatch: Option<&'a str>,
    /// The mappers to choose from.
    pub candidates: Vec<Candidate<'a>>,
}

/// The pair of a request.
#[derive(Clone, Copy, Debug)]
pub struct PairFacts<'a> {
    /// Its name.
    pub name: &'a str,
    /// Digest of the source model.
    pub source: Digest,
    /// Digest of the target model.
    pub target: Digest,
}

/// The source cache of a request.
#[derive(Clone, Copy, Debug)]
pub struct CacheFacts {
    /// Model that the cache belongs to.
    pub model: Digest,
    /// Digest of its tokens and positions.
    pub digest: Digest,
    /// Filled slots.
    pub tokens: usize,
    /// Mappings it has been through; 0 for a native cache.
    pub hops: u32,
}

/// One mapper that could run.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Its name, such as `ridge`.
    pub mapper: &'a str,
    /// The bytes that would run.
    pub loaded: &'a Loaded,
    /// Its held-out evidence; without it, it never runs outside a trial.
    pub evidence: Option<&'a Evidence>,
    /// What the handoff and the re-prefill take here, where it was measured; otherwise it is scaled from the evidence.
    pub latency: Option<Latency<'a>>,
}

impl Request<'_> {
    /// What speaks against the request whatever the candidate.
    pub(crate) fn obstacle(&self, max_hops: u32) -> Option<Reason> {
        if let Some(mismatch) = self.mismatch {
            return Some(Reason::Mismatch { what: mismatch.to_owned() });
        }
        if self.cache.model != self.pair.source {
            return Some(Reason::CacheOfAnotherModel { cache: self.cache.model, source: self.pair.source });
        }
        if self.cache.hops >= max_hops {
            return Some(Reason::TooManyHops { hops: self.hops(), max: max_hops });
        }
        if self.cache.tokens.saturating_sub(self.head) <= self.tail {
            return Some(Reason::NothingToMap { tokens: self.cache.tokens, head: self.head, tail: self.tail });
        }
        self.candidates.is_empty().then_some(Reason::NoCandidate)
    }

    /// Mappings the cache will have gone through after this one.
    pub(crate) fn hops(&self) -> u32 {
        self.cache.hops.saturating_add(1)
    }
}
