//! What a handoff and the re-prefill it replaces take.

use crate::{DocumentOutcome, evidence::Checked};

/// A handoff beside the re-prefill it replaces, at the request's length.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latency<'a> {
    /// From the source cache being ready to the target's first token, in milliseconds.
    pub handoff_ms: f64,
    /// The target's ordinary prefill to its first token, in milliseconds.
    pub reprefill_ms: f64,
    /// Where the figures are from, for people: `measured on cpu`.
    pub origin: &'a str,
}

impl Latency<'_> {
    /// How many times quicker the handoff is. Figures that are no positive numbers are no speed-up.
    pub(crate) fn speed_up(&self) -> f64 {
        let sound = |ms: f64| ms.is_finite() && ms > 0.0;
        if sound(self.handoff_ms) && sound(self.reprefill_ms) { self.reprefill_ms / self.handoff_ms } else { 0.0 }
    }
}

/// The evidence's mean times, scaled to a prompt of `tokens`; `(handoff_ms, reprefill_ms)`.
///
/// The re-prefill is taken as proportional to the length, which understates it beyond the evidence (attention is quadratic).
/// Of the handoff, the native head and tail cost their share of a re-prefill at any length. The rest grows with the mapped
/// tokens, and is not taken to shrink below the evidence's length, where overheads that this knows nothing of remain.
/// So the speed-up errs towards refusing.
pub(crate) fn scaled(evidence: Checked<'_>, documents: &[&DocumentOutcome], tokens: usize) -> (f64, f64) {
    let mean = |figure: &dyn Fn(&DocumentOutcome) -> f64| {
        documents.iter().map(|document| figure(document)).sum::<f64>() / documents.len() as f64
    };
    let ends = evidence.ends() as f64;
    let mean_tokens = mean(&|document| document.tokens as f64);
    let per_token = mean(&|document| document.reprefill_ms) / mean_tokens;
    let native = ends * per_token;
    let rest = (mean(&|document| document.handoff_ms) - native).max(0.0);
    let growth = ((tokens as f64 - ends) / (mean_tokens - ends)).max(1.0);
    (native + rest * growth, per_token * tokens as f64)
}
