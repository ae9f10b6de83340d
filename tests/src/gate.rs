//! A pair that the gate admits, for the gate's suite to spoil one thing at a time.

use kvmig_gate::{
    CacheFacts, Candidate, Digest, DocumentOutcome, Evidence, Loaded, Loader, PairIdentity, Quality, Request,
    WeightElem,
};

/// Native head of the pair, in tokens.
pub const HEAD: usize = 4;
/// Native tail of the pair, in tokens.
pub const TAIL: usize = 32;
/// Tokens of every held-out document, and of the request.
pub const TOKENS: usize = 384;

/// The pair.
pub fn identity() -> PairIdentity<'static> {
    let (source, target) = (Digest::of(b"source model"), Digest::of(b"target model"));
    PairIdentity { source, target, head: HEAD, tail: TAIL, details: b"settings" }
}

/// An artifact; another tag is another weight.
pub fn artifact(tag: u8) -> Loaded {
    artifact_of(&identity(), tag)
}

/// An artifact of another pair.
pub fn artifact_of(pair: &PairIdentity<'_>, tag: u8) -> Loaded {
    let mut loader = Loader::new(b"component".to_vec(), pair);
    loader.shader("map", "@compute fn main() {}");
    loader.weight("w", WeightElem::F32, &[2, 2], &[tag; 16]);
    loader.finish()
}

/// A quality whose KL is `kl`, the other figures following it.
pub fn quality(kl: f64) -> Quality {
    Quality {
        agreement: 1.0 - kl / 2.0,
        kl_nats: kl,
        nll_gap_nats: kl / 2.0,
        cosine_mean: None,
        cosine_worst_layer: None,
        n: 32,
    }
}

/// Document `i` of the evidence: its mapped KL is i/1000 nats, the arms are worse.
pub fn document(i: usize) -> DocumentOutcome {
    DocumentOutcome {
        id: format!("document {i}"),
        domain: if i.is_multiple_of(2) { "code" } else { "prose" }.to_owned(),
        tokens: TOKENS,
        mapped: quality(i as f64 / 1000.0),
        ends_only: quality(0.5),
        no_prefix: quality(1.3),
        source: quality(0.7),
        handoff_ms: 10.0,
        reprefill_ms: 80.0,
    }
}

/// Evidence of `n` documents with mapped KL 1/1000 … n/1000.
pub fn evidence(loaded: &Loaded, n: usize) -> Evidence {
    Evidence {
        artifact: loaded.artifact(),
        seed: 7,
        backend: "cpu".to_owned(),
        precision: "quantised".to_owned(),
        documents: (1..=n).map(document).collect(),
    }
}

/// A candidate without a latency of its own.
pub fn candidate<'a>(mapper: &'a str, loaded: &'a Loaded, evidence: &'a Evidence) -> Candidate<'a> {
    Candidate { mapper, claim: loaded.claim(), evidence: Some(evidence), latency: None }
}

/// A request that every candidate with enough evidence is admitted for.
pub fn request<'a>(candidates: &[Candidate<'a>]) -> Request<'a> {
    let PairIdentity { source, target, .. } = identity();
    let digest = Digest::of(b"tokens and positions");
    Request {
        pair: "small-to-large",
        cache: CacheFacts { model: source, digest, serial: 1, tokens: TOKENS, hops: 0 },
        target,
        domain: None,
        backend: "cpu",
        precision: "quantised",
        mismatch: None,
        candidates: candidates.to_vec(),
    }
}
