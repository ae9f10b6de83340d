//! What a policy would answer to a request that nobody made: nothing is permitted or written down.

use crate::{Policy, Prediction, Reason, Request, judge};

/// The answer that [`Gate::decide`](crate::Gate::decide) would give.
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
    /// `migrate`, `reprefill` or `stay`.
    pub decision: &'static str,
    /// Why.
    pub reason: Reason,
    /// What would be promised, or could be.
    pub prediction: Option<Prediction>,
}

impl Policy {
    /// What a gate with this policy would answer.
    pub fn forecast(&self, request: &Request<'_>) -> Forecast {
        if let Some(reason) = request.obstacle(self.settings().max_hops) {
            return Forecast { decision: "reprefill", reason, prediction: None };
        }
        let judge = |candidate| judge::judge(self, request, candidate);
        let mut verdicts: Vec<_> = request.candidates.iter().map(judge).collect();
        let verdict = verdicts.swap_remove(judge::preferred(&verdicts));
        let decision = match verdict.reason {
            _ if verdict.admitted => "migrate",
            Reason::SourceBetter { .. } => "stay",
            _ => "reprefill",
        };
        Forecast { decision, reason: verdict.reason, prediction: verdict.prediction }
    }
}
