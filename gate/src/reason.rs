//! Why the gate decided as it did: a stable name for scripts, a sentence with the numbers for people.

use std::fmt;

use crate::{Digest, Metric};

/// Why the gate decided as it did.
#[derive(Clone, Debug, PartialEq)]
pub enum Reason {
    /// The bound meets the floor, and every other demand is met.
    BoundMeetsFloor {
        /// What is promised.
        promise: Promise,
        /// How many times quicker than the re-prefill the handoff is.
        speed_up: f64,
        /// Where that figure is from.
        origin: String,
    },
    /// A trial: measured, never served.
    Trial,
    /// The host found that models, pair and cache don't belong together.
    Mismatch {
        /// Its sentence.
        what: String,
    },
    /// The cache is not one of the pair's source model.
    CacheOfAnotherModel {
        /// Model of the cache.
        cache: Digest,
        /// Source model of the pair.
        source: Digest,
    },
    /// The mapper is for another target than the one that shall go on.
    ForAnotherModel {
        /// The model that shall go on.
        request: Digest,
        /// Target model of the pair.
        target: Digest,
    },
    /// The cache was mapped too often already.
    TooManyHops {
        /// Mappings it would have gone through.
        hops: u32,
        /// Most that the policy allows.
        max: u32,
    },
    /// Head and tail cover the whole prompt.
    NothingToMap {
        /// Tokens of the cache.
        tokens: usize,
        /// Native head.
        head: usize,
        /// Native tail.
        tail: usize,
    },
    /// The pair has no mapper.
    NoCandidate,
    /// The mapper has no held-out evidence.
    NoEvidence,
    /// The evidence is about other bytes than those that would run.
    EvidenceOfAnotherArtifact {
        /// What the evidence names.
        evidence: Digest,
        /// What would run.
        artifact: Digest,
    },
    /// The models computed in other numbers when the evidence was made.
    EvidenceInAnotherPrecision {
        /// Precision of the evidence.
        evidence: String,
        /// Precision of the request.
        request: String,
    },
    /// The evidence holds something that can't be true.
    EvidenceUnsound {
        /// What.
        fault: String,
    },
    /// Too few held-out documents for a bound.
    TooLittleEvidence {
        /// The domain, where the request named one.
        domain: Option<String>,
        /// Documents found.
        found: usize,
        /// Documents needed.
        needed: usize,
    },
    /// The request's length is too far from that of any held-out document.
    LengthOutsideEvidence {
        /// Tokens of the request.
        tokens: usize,
        /// Shortest and longest held-out document.
        evidence: (usize, usize),
        /// Factor that the policy allows beyond either.
        max: f64,
    },
    /// The source model itself is at least as close to the target.
    SourceBetter {
        /// The metric.
        metric: Metric,
        /// Mean of the mapped caches.
        mapped: f64,
        /// Mean of the source model over the same documents.
        source: f64,
        /// Documents.
        n: usize,
    },
    /// The map adds nothing to its native head and tail.
    NoBetterThanEndsOnly {
        /// The metric.
        metric: Metric,
        /// Mean of the mapped caches.
        mapped: f64,
        /// Mean of the ends alone over the same documents.
        ends_only: f64,
        /// Documents.
        n: usize,
    },
    /// The bound falls short of the floor.
    BoundMissesFloor {
        /// What could have been promised.
        promise: Promise,
    },
    /// Nothing is known of the speed on the device that would run, and the policy asks for some.
    LatencyUnmeasured {
        /// Backend that the evidence was made on.
        evidence: String,
        /// Backend that would run.
        request: String,
        /// Factor that the policy asks for.
        factor: f64,
    },
    /// The handoff is not quick enough.
    TooSlow {
        /// The handoff, in milliseconds.
        handoff_ms: f64,
        /// The re-prefill, in milliseconds.
        reprefill_ms: f64,
        /// Factor that the policy asks for.
        factor: f64,
        /// Where the figures are from.
        origin: String,
    },
}

/// A bound beside the floor it is held to.
#[derive(Clone, Debug, PartialEq)]
pub struct Promise {
    /// The metric.
    pub metric: Metric,
    /// Bound, in the metric's unit.
    pub bound: f64,
    /// Floor, in the metric's unit.
    pub floor: f64,
    /// Share of requests that may fall short of the bound.
    pub alpha: f64,
    /// Documents it rests on.
    pub n: usize,
    /// Shortest and longest of them, in tokens.
    pub evidence_tokens: (usize, usize),
    /// Tokens of the request.
    pub tokens: usize,
}

impl Reason {
    /// The name in records; never renamed.
    pub fn name(&self) -> &'static str {
        match self {
            Reason::BoundMeetsFloor { .. } => "bound_meets_floor",
            Reason::Trial => "trial",
            Reason::Mismatch { .. } => "mismatch",
            Reason::CacheOfAnotherModel { .. } => "cache_of_another_model",
            Reason::ForAnotherModel { .. } => "for_another_model",
            Reason::TooManyHops { .. } => "too_many_hops",
            Reason::NothingToMap { .. } => "nothing_to_map",
            Reason::NoCandidate => "no_candidate",
            Reason::NoEvidence => "no_evidence",
            Reason::EvidenceOfAnotherArtifact { .. } => "evidence_of_another_artifact",
            Reason::EvidenceInAnotherPrecision { .. } => "evidence_in_another_precision",
            Reason::EvidenceUnsound { .. } => "evidence_unsound",
            Reason::TooLittleEvidence { .. } => "too_little_evidence",
            Reason::LengthOutsideEvidence { .. } => "length_outside_evidence",
            Reason::SourceBetter { .. } => "source_better",
            Reason::NoBetterThanEndsOnly { .. } => "no_better_than_ends_only",
            Reason::BoundMissesFloor { .. } => "bound_misses_floor",
            Reason::TooSlow { .. } => "too_slow",
            Reason::LatencyUnmeasured { .. } => "latency_unmeasured",
        }
    }

    /// How far a candidate came before this stopped it. Of several refused candidates, the one that came furthest gives the
    /// decision's reason.
    pub(crate) fn stage(&self) -> u8 {
        match self {
            Reason::Mismatch { .. }
            | Reason::CacheOfAnotherModel { .. }
            | Reason::ForAnotherModel { .. }
            | Reason::TooManyHops { .. }
            | Reason::NothingToMap { .. }
            | Reason::NoCandidate => 0,
            Reason::NoEvidence => 1,
            Reason::EvidenceOfAnotherArtifact { .. }
            | Reason::EvidenceInAnotherPrecision { .. }
            | Reason::EvidenceUnsound { .. } => 2,
            Reason::TooLittleEvidence { .. } | Reason::LengthOutsideEvidence { .. } => 3,
            Reason::SourceBetter { .. } => 4,
            Reason::NoBetterThanEndsOnly { .. } => 5,
            Reason::BoundMissesFloor { .. } => 6,
            Reason::TooSlow { .. } | Reason::LatencyUnmeasured { .. } => 7,
            Reason::BoundMeetsFloor { .. } | Reason::Trial => 8,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::BoundMeetsFloor { promise, speed_up, origin } => {
                write!(f, "{promise}, within the floor {:.3}; {speed_up:.1}x quicker ({origin})", promise.floor)
            }
            Reason::Trial => f.write_str("a trial: measured, never served"),
            Reason::Mismatch { what } => f.write_str(what),
            Reason::CacheOfAnotherModel { cache, source } => write!(
                f,
                "the cache belongs to model {}, the pair maps from {}: use the pair of that model",
                cache.short(),
                source.short()
            ),
            Reason::ForAnotherModel { request, target } => write!(
                f,
                "the target is model {}, the pair maps for {}: use the pair of that model",
                request.short(),
                target.short()
            ),
            Reason::TooManyHops { hops, max } => write!(
                f,
                "the cache would have gone through {hops} mappings, the policy allows {max}: migrate from a native cache"
            ),
            Reason::NothingToMap { tokens, head, tail } => write!(
                f,
                "the prompt has {tokens} tokens, and the target computes the first {head} and the last {tail} itself: \
                 nothing is left to map"
            ),
            Reason::NoCandidate => f.write_str("the pair has no mapper: fit one"),
            Reason::NoEvidence => f.write_str("the mapper has no held-out evidence: fit it with held-out documents"),
            Reason::EvidenceOfAnotherArtifact { evidence, artifact } => write!(
                f,
                "the evidence is about artifact {}, what would run is {}: a module, weight or setting changed since; \
                 measure the pair again",
                evidence.short(),
                artifact.short()
            ),
            Reason::EvidenceInAnotherPrecision { evidence, request } => write!(
                f,
                "the evidence was made with {evidence} models, these are {request}: load them as they were then \
                 (--precision), or fit the pair anew as they are"
            ),
            Reason::EvidenceUnsound { fault } => write!(f, "the evidence is unsound: {fault}; measure the pair again"),
            Reason::TooLittleEvidence { domain, found, needed } => {
                write!(f, "{found} held-out documents")?;
                if let Some(domain) = domain {
                    write!(f, " of domain `{domain}`")?;
                }
                write!(f, ", a bound needs {needed}: measure the pair on more of them")
            }
            Reason::LengthOutsideEvidence { tokens, evidence, max } => write!(
                f,
                "the prompt has {tokens} tokens, the held-out documents {} to {}, and the policy allows {max}x beyond: \
                 measure the pair at this length, or raise max_extrapolation",
                evidence.0, evidence.1
            ),
            Reason::SourceBetter { metric, mapped, source, n } => write!(
                f,
                "staying on the source is better: {} {source:.3} against {mapped:.3} mapped, means over {n} held-out \
                 documents",
                metric.name()
            ),
            Reason::NoBetterThanEndsOnly { metric, mapped, ends_only, n } => write!(
                f,
                "the map adds nothing to its native head and tail: {} {mapped:.3} mapped against {ends_only:.3}, means \
                 over {n} held-out documents",
                metric.name()
            ),
            Reason::BoundMissesFloor { promise } => write!(f, "{promise}, beyond the floor {:.3}", promise.floor),
            Reason::TooSlow { handoff_ms, reprefill_ms, factor, origin } => write!(
                f,
                "the handoff takes {handoff_ms:.0} ms and the re-prefill {reprefill_ms:.0} ms ({origin}): \
                 {:.1}x, the policy asks for {factor:.1}x",
                reprefill_ms / handoff_ms
            ),
            Reason::LatencyUnmeasured { evidence, request, factor } => write!(
                f,
                "the evidence was timed on {evidence}, the mapper would run on {request}, and the policy asks for {factor:.1}x: \
                 measure the pair there (kvmig fit --device), or ask for nothing (latency_factor = 0)"
            ),
        }
    }
}

impl fmt::Display for Promise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = match self.metric {
            Metric::KlNats | Metric::NllGapNats => "≤",
            Metric::Agreement => "≥",
        };
        write!(
            f,
            "{} {side} {:.3} in {:.0} % of requests by {} held-out documents of {} to {} tokens",
            self.metric.name(),
            self.bound,
            100.0 * (1.0 - self.alpha),
            self.n,
            self.evidence_tokens.0,
            self.evidence_tokens.1
        )?;
        let beyond = self.tokens as f64 / self.evidence_tokens.1 as f64;
        if beyond > 2.0 { write!(f, " (the prompt is {beyond:.1}x longer)") } else { Ok(()) }
    }
}
