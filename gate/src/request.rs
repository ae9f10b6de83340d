//! What a host asks the gate.

use std::fmt;

use crate::{Claim, Digest, Evidence, Latency, Reason};

/// One wish: this cache, of this pair, through one of these candidates.
#[derive(Debug)]
pub struct Request<'a> {
    /// Name of the pair.
    pub pair: &'a str,
    /// The source cache.
    pub cache: CacheFacts,
    /// The model that shall go on with it.
    pub target: Digest,
    /// Domain of the text, where the host knows it.
    pub domain: Option<&'a str>,
    /// Device and adapter that will run the mapper.
    pub backend: &'a str,
    /// In which numbers the two models compute, in the host's words.
    pub precision: &'a str,
    /// A mismatch the host found while it read models, pair and cache: another tokenizer, another rotation. The gate knows
    /// nothing of either; it refuses, and writes the sentence down.
    pub mismatch: Option<&'a str>,
    /// The mappers to choose from.
    pub candidates: Vec<Candidate<'a>>,
}

/// The source cache of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheFacts {
    /// Model that the cache belongs to.
    pub model: Digest,
    /// Digest of its tokens and positions.
    pub digest: Digest,
    /// Which cache of this process it is. Its keys and values are not in the digest, since hashing them would take longer than
    /// mapping them; so the host numbers its caches instead, and no two have one number.
    pub serial: u64,
    /// Filled slots.
    pub tokens: usize,
    /// Mappings it has been through; 0 for a native cache.
    pub hops: u32,
}

impl CacheFacts {
    /// Mappings it will have gone through after the next one.
    pub(crate) fn next_hop(&self) -> u32 {
        self.hops.saturating_add(1)
    }
}

impl fmt::Display for CacheFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CacheFacts { model, digest, serial, tokens, hops } = self;
        let (model, digest) = (model.short(), digest.short());
        write!(f, "number {serial} ({tokens} tokens {digest} of model {model}, {hops} hops)")
    }
}

/// One mapper that could run.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Its name, such as `ridge`.
    pub mapper: &'a str,
    /// What would run.
    pub claim: Claim,
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
        if self.cache.hops >= max_hops {
            return Some(Reason::TooManyHops { hops: self.cache.next_hop(), max: max_hops });
        }
        self.candidates.is_empty().then_some(Reason::NoCandidate)
    }
}

impl Candidate<'_> {
    /// What makes the candidate one for another request than this.
    pub(crate) fn obstacle(&self, request: &Request<'_>) -> Option<Reason> {
        let Claim { source, target, head, tail, .. } = self.claim;
        let cache = &request.cache;
        if cache.model != source {
            return Some(Reason::CacheOfAnotherModel { cache: cache.model, source });
        }
        if request.target != target {
            return Some(Reason::ForAnotherModel { request: request.target, target });
        }
        let tokens = cache.tokens;
        self.claim.middle(tokens).is_empty().then_some(Reason::NothingToMap { tokens, head, tail })
    }
}
