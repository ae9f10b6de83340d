//! A decision on its way into the ledger.

use std::time::Duration;

use rusqlite::{ErrorCode, named_params};

use crate::{
    Candidate, Claim, Policy, Prediction, Reason, Request, Ticket,
    judge::Verdict,
    ledger::{Ledger, LedgerError, State, lease_end, now_ms},
};

/// What was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Migrate,
    Trial,
    Reprefill,
    Stay,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Migrate => "migrate",
            Kind::Trial => "trial",
            Kind::Reprefill => "reprefill",
            Kind::Stay => "stay",
        }
    }
}

/// A decision with what it was made from.
#[derive(Debug)]
pub(crate) struct Entry<'e> {
    pub(crate) kind: Kind,
    pub(crate) policy: &'e Policy,
    pub(crate) request: &'e Request<'e>,
    pub(crate) candidate: Option<&'e Candidate<'e>>,
    pub(crate) reason: &'e Reason,
    pub(crate) prediction: Option<&'e Prediction>,
    pub(crate) verdicts: &'e [Verdict<'e>],
}

impl Entry<'_> {
    /// Writes the row under a fresh ticket.
    pub(super) fn insert(&self, ledger: &Ledger, state: State, lease: Option<Duration>) -> Result<Ticket, LedgerError> {
        loop {
            let now = now_ms();
            let ticket = Ticket::issue(now.unsigned_abs());
            match self.insert_as(ledger, &ticket, now, state, lease) {
                // Two tickets of one millisecond with the same random digits: the key refuses the second.
                Err(error) if error.sqlite_error_code() == Some(ErrorCode::ConstraintViolation) => {
                    if ledger.state(&ticket).is_err() {
                        return Err(LedgerError::from_sqlite(ledger.path(), error));
                    }
                }
                Err(error) => return Err(LedgerError::from_sqlite(ledger.path(), error)),
                Ok(_) => return Ok(ticket),
            }
        }
    }

    fn insert_as(
        &self,
        ledger: &Ledger,
        ticket: &Ticket,
        now: i64,
        state: State,
        lease: Option<Duration>,
    ) -> Result<usize, rusqlite::Error> {
        let Entry { kind, policy, request, candidate, reason, prediction, verdicts } = self;
        let verdicts: serde_json::Value = verdicts.iter().map(Verdict::to_json).collect();
        let integer = |x: usize| i64::try_from(x).unwrap_or(i64::MAX);
        // An obstacle may stop a request before one candidate is looked at; it is then about what the first would have done.
        let about = candidate.or(request.candidates.first()).map(|candidate| candidate.claim);
        ledger.connection().execute(
            "INSERT INTO tickets (
                 ticket, decided_ms, policy, pair, source_model, target_model, cache_model, cache, tokens, hops, head,
                 tail, domain, backend, precision, mapper, artifact, module, candidates, decision, reason, explanation, metric,
                 predicted, bound, floor, alpha, evidence_n, state, lease_ms, ended_ms)
             VALUES (
                 :ticket, :now, :policy, :pair, :source_model, :target_model, :cache_model, :cache, :tokens, :hops, :head,
                 :tail, :domain, :backend, :precision, :mapper, :artifact, :module, :candidates, :decision, :reason, :explanation,
                 :metric, :predicted, :bound, :floor, :alpha, :evidence_n, :state, :lease_ms, :ended_ms)",
            named_params! {
                ":ticket": ticket.as_str(),
                ":now": now,
                ":policy": policy.digest().to_string(),
                ":pair": request.pair,
                ":source_model": about.map_or(request.cache.model, |claim: Claim| claim.source).to_string(),
                ":target_model": request.target.to_string(),
                ":cache_model": request.cache.model.to_string(),
                ":cache": request.cache.digest.to_string(),
                ":tokens": integer(request.cache.tokens),
                ":hops": request.cache.next_hop(),
                ":head": integer(about.map_or(0, |claim| claim.head)),
                ":tail": integer(about.map_or(0, |claim| claim.tail)),
                ":domain": request.domain,
                ":backend": request.backend,
                ":precision": request.precision,
                ":mapper": candidate.map(|candidate| candidate.mapper),
                ":artifact": candidate.map(|candidate| candidate.claim.artifact.to_string()),
                ":module": candidate.and_then(|candidate| candidate.claim.module).map(|module| module.to_string()),
                ":candidates": verdicts.to_string(),
                ":decision": kind.name(),
                ":reason": reason.name(),
                ":explanation": reason.to_string(),
                ":metric": prediction.map(|prediction| prediction.metric),
                ":predicted": prediction.map(|prediction| prediction.value),
                ":bound": prediction.map(|prediction| prediction.bound),
                ":floor": prediction.map(|prediction| prediction.floor),
                ":alpha": prediction.map(|prediction| prediction.alpha),
                ":evidence_n": prediction.map(|prediction| integer(prediction.n)),
                ":state": state.name(),
                ":lease_ms": lease.map(lease_end),
                ":ended_ms": (state == State::Refused).then_some(now),
            },
        )
    }
}
