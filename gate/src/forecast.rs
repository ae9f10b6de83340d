//! What a policy would answer to a request that nobody made: nothing is permitted or written down.

use crate::{Policy, Prediction, Reason, Request, judge};

/// The answer that [`Gate::decide`](crate::Gate::decide) would give.
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
    /// `migrate`, `reprefill` or `stay`.
    pub decision: &'static str,
    /// Index of the candidate that would run, or came furthest; none where the request itself was at fault.
    pub candidate: Option<usize>,
    /// Why.
    pub reason: Reason,
    /// What would be promised, or could be.
    pub prediction: Option<Prediction>,
}

impl Policy {
    /// What a gate with this policy would answer.
    pub fn forecast(&self, request: &Request<'_>) -> Forecast {
        if let Some(reason) = request.obstacle(self.settings().max_hops) {
            return Forecast { decision: "reprefill", candidate: None, reason, prediction: None };
        }
        let judge = |candidate| judge::judge(self, request, candidate);
        let mut verdicts: Vec<_> = request.candidates.iter().map(judge).collect();
        let index = judge::preferred(&verdicts);
        let verdict = verdicts.swap_remove(index);
        let decision = match verdict.reason {
            _ if verdict.admitted => "migrate",
            Reason::SourceBetter { .. } => "stay",
            _ => "reprefill",
        };
        Forecast { decision, candidate: Some(index), reason: verdict.reason, prediction: verdict.prediction }
    }
}
