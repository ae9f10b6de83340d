//! Held-out evidence: what a mapper did on documents that nothing was fitted or chosen on.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::{Claim, Digest, Quality, Reason};

/// Held-out evidence of one artifact, as the pair's manifest keeps it.
///
/// It is bound to the artifact's digest: with any byte of module, weights or pair changed it is evidence of something else.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evidence {
    /// [`Loaded::artifact`](crate::Loaded::artifact) of what was measured.
    pub artifact: Digest,
    /// Seed with which the documents were drawn.
    pub seed: u64,
    /// Device and adapter it was measured on.
    pub backend: String,
    /// In which numbers the two models computed meanwhile, in the host's words: a cache of rounded products is another cache.
    pub precision: String,
    /// One outcome a document; documents are the unit that is exchangeable, their tokens are not independent.
    pub documents: Vec<DocumentOutcome>,
}

/// What came of one held-out document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DocumentOutcome {
    /// Name of the document, unique within the evidence.
    pub id: String,
    /// Domain it stands for, such as `code` or `prose`.
    pub domain: String,
    /// Tokens of its prefix, head and tail included.
    pub tokens: usize,
    /// Continuation through the mapped cache.
    pub mapped: Quality,
    /// Continuation through the native head and tail alone, the middle dropped.
    pub ends_only: Quality,
    /// Continuation without any prefix.
    pub no_prefix: Quality,
    /// Continuation by the source model itself.
    pub source: Quality,
    /// From the source cache being ready to the target's first token, in milliseconds.
    pub handoff_ms: f64,
    /// The target's ordinary prefill to its first token, in milliseconds.
    pub reprefill_ms: f64,
}

/// Evidence that is about the artifact and the precision of a request, and holds only figures that a measurement can give.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checked<'e> {
    evidence: &'e Evidence,
    ends: usize,
}

impl<'e> Checked<'e> {
    /// The documents: at least one, ids unique, figures finite, longer than head and tail.
    pub(crate) fn documents(self) -> &'e [DocumentOutcome] {
        &self.evidence.documents
    }

    /// Device and adapter the evidence was made on.
    pub(crate) fn backend(self) -> &'e str {
        &self.evidence.backend
    }

    /// Tokens the target computes itself.
    pub(crate) fn ends(self) -> usize {
        self.ends
    }
}

impl Evidence {
    /// The domains that it has documents of, in the order of their first.
    pub fn domains(&self) -> Vec<&str> {
        let mut domains: Vec<&str> = Vec::new();
        for document in &self.documents {
            if !domains.contains(&document.domain.as_str()) {
                domains.push(&document.domain);
            }
        }
        domains
    }

    /// Holds the evidence against what is about to run.
    pub(crate) fn check(&self, claim: &Claim, precision: &str) -> Result<Checked<'_>, Reason> {
        if self.artifact != claim.artifact {
            return Err(Reason::EvidenceOfAnotherArtifact { evidence: self.artifact, artifact: claim.artifact });
        }
        if self.precision != precision {
            let (evidence, request) = (self.precision.clone(), precision.to_owned());
            return Err(Reason::EvidenceInAnotherPrecision { evidence, request });
        }
        match self.fault(claim) {
            Some(fault) => Err(Reason::EvidenceUnsound { fault }),
            None => Ok(Checked { evidence: self, ends: claim.head.saturating_add(claim.tail) }),
        }
    }

    /// The first thing in it that can't be true.
    fn fault(&self, claim: &Claim) -> Option<String> {
        let mut ids = HashSet::new();
        self.documents.iter().find_map(|document| {
            let id = &document.id;
            if !ids.insert(id.as_str()) {
                return Some(format!("document `{id}` is there twice"));
            }
            if claim.middle(document.tokens).is_empty() {
                return Some(format!(
                    "document `{id}` has {} tokens, not more than its native head {} and tail {}",
                    document.tokens, claim.head, claim.tail
                ));
            }
            let arms = [
                ("mapped", &document.mapped),
                ("ends_only", &document.ends_only),
                ("no_prefix", &document.no_prefix),
                ("source", &document.source),
            ];
            let quality = arms.into_iter().find_map(|(arm, quality)| {
                let (field, found, _) = quality.fault()?;
                Some(format!("document `{id}`: {arm}.{field} is {found}"))
            });
            let times = [("handoff_ms", document.handoff_ms), ("reprefill_ms", document.reprefill_ms)];
            let time = || {
                let (field, found) = times.into_iter().find(|(_, ms)| !(ms.is_finite() && *ms > 0.0))?;
                Some(format!("document `{id}`: {field} is {found}, expected a positive number of milliseconds"))
            };
            quality.or_else(time)
        })
    }
}
