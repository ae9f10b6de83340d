//! One candidate held against the policy, demand by demand.

use serde_json::json;

use crate::{
    Candidate, DocumentOutcome, Evidence, Latency, Policy, Prediction, Quality, Reason, Request, latency,
    predict::predict,
};

/// What is thought of one candidate.
#[derive(Debug)]
pub(crate) struct Verdict<'a> {
    pub(crate) candidate: &'a Candidate<'a>,
    pub(crate) admitted: bool,
    pub(crate) reason: Reason,
    pub(crate) prediction: Option<Prediction>,
    /// Infinite for a candidate that was refused before its latency was looked at.
    handoff_ms: f64,
}

impl Verdict<'_> {
    /// The verdict as the ledger keeps it.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        json!({
            "mapper": self.candidate.mapper,
            "artifact": self.candidate.claim.artifact,
            "admitted": self.admitted,
            "reason": self.reason.name(),
            "explanation": self.reason.to_string(),
            "predicted": self.prediction,
        })
    }
}

/// Index of the verdict that decides: of admitted candidates the quickest, of refused ones the one that came furthest; the
/// earlier of two equals.
pub(crate) fn preferred(verdicts: &[Verdict<'_>]) -> usize {
    let rank = |verdict: &Verdict<'_>| (verdict.reason.stage(), -verdict.handoff_ms);
    let mut best = 0;
    for (index, verdict) in verdicts.iter().enumerate().skip(1) {
        if rank(verdict) > rank(&verdicts[best]) {
            best = index;
        }
    }
    best
}

/// Holds a candidate against the policy. The demands come in the order of [`Reason::stage`].
pub(crate) fn judge<'a>(policy: &Policy, request: &Request<'_>, candidate: &'a Candidate<'a>) -> Verdict<'a> {
    let mut prediction = None;
    let (admitted, reason, handoff_ms) = match demands(policy, request, candidate, &mut prediction) {
        Ok((reason, handoff_ms)) => (true, reason, handoff_ms),
        Err(reason) => (false, reason, f64::INFINITY),
    };
    Verdict { candidate, admitted, reason, prediction, handoff_ms }
}

/// The reason to admit and the handoff's milliseconds, or the first demand that is not met. What was predicted on the way is
/// left in `prediction` in either case.
fn demands(
    policy: &Policy,
    request: &Request<'_>,
    candidate: &Candidate<'_>,
    prediction: &mut Option<Prediction>,
) -> Result<(Reason, f64), Reason> {
    let settings = policy.settings();
    if let Some(obstacle) = candidate.obstacle(request) {
        return Err(obstacle);
    }
    let evidence = candidate.evidence.ok_or(Reason::NoEvidence)?;
    let evidence = Evidence::check(evidence, &candidate.claim, request.precision)?;
    let tokens = request.cache.tokens;
    let predicted = predict(policy, evidence, request.domain, tokens, request.candidates.len())?;
    let Prediction { value: mapped, bound, floor, n, .. } = *prediction.insert(predicted.prediction);

    let metric = settings.metric;
    let mean = |arm: fn(&DocumentOutcome) -> &Quality| {
        predicted.documents.iter().map(|document| metric.value(arm(document))).sum::<f64>() / n as f64
    };
    // A tie is no gain.
    let gains_on = |other: f64| metric.worse(other, mapped);
    let source = mean(|document| &document.source);
    if settings.beats_source && !gains_on(source) {
        return Err(Reason::SourceBetter { metric, mapped, source, n });
    }
    let ends_only = mean(|document| &document.ends_only);
    if settings.beats_ends_only && !gains_on(ends_only) {
        return Err(Reason::NoBetterThanEndsOnly { metric, mapped, ends_only, n });
    }
    if metric.worse(bound, floor) {
        return Err(Reason::BoundMissesFloor { promise: predicted.promise });
    }

    let factor = settings.latency_factor;
    if candidate.latency.is_none() && factor > 0.0 && request.backend != evidence.backend() {
        let (evidence, request) = (evidence.backend().to_owned(), request.backend.to_owned());
        return Err(Reason::LatencyUnmeasured { evidence, request, factor });
    }
    let scaled_from = format!("scaled from the evidence, {}", evidence.backend());
    let latency = candidate.latency.unwrap_or_else(|| {
        let (handoff_ms, reprefill_ms) = latency::scaled(evidence, &predicted.documents, tokens);
        Latency { handoff_ms, reprefill_ms, origin: &scaled_from }
    });
    let (Latency { handoff_ms, reprefill_ms, .. }, speed_up) = (latency, latency.speed_up());
    let origin = latency.origin.to_owned();
    if speed_up < factor {
        return Err(Reason::TooSlow { handoff_ms, reprefill_ms, factor, origin });
    }
    Ok((Reason::BoundMeetsFloor { promise: predicted.promise, speed_up, origin }, handoff_ms))
}
