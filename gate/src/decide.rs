//! The gate itself: a request in, a decision out, and both written down.

use std::path::Path;

use crate::{
    Candidate, Live, Permit, Policy, Prediction, Reason, Request, Ticket, Trial,
    judge::{self, Verdict},
    ledger::{Entry, Kind, Ledger, LedgerError},
    permit::Terms,
};

/// Decides what may migrate, and keeps the ledger.
#[derive(Debug)]
pub struct Gate {
    policy: Policy,
    pub(crate) ledger: Ledger,
}

/// The gate's answer to a [`Request`]; every answer has a ticket in the ledger.
#[derive(Debug)]
pub enum Decision {
    /// Map the cache, with this candidate.
    Migrate {
        /// Leave to do so, once.
        permit: Permit<Live>,
        /// Index into the request's candidates.
        candidate: usize,
        /// What is promised.
        prediction: Prediction,
        /// Why.
        reason: Reason,
    },
    /// Run the target's ordinary prefill.
    Reprefill {
        /// The decision's name in the ledger.
        ticket: Ticket,
        /// Index of the candidate that came furthest, whose reason it is; none where the request itself was at fault.
        candidate: Option<usize>,
        /// Why.
        reason: Reason,
        /// What could have been promised, where the evidence gave a bound.
        prediction: Option<Prediction>,
    },
    /// Go on with the source model: on held-out documents it is as close to the target as the mapped cache was.
    Stay {
        /// The decision's name in the ledger.
        ticket: Ticket,
        /// Index of the candidate that came furthest, whose reason it is.
        candidate: usize,
        /// Why.
        reason: Reason,
        /// What could have been promised.
        prediction: Option<Prediction>,
    },
}

impl Decision {
    /// The name in records.
    pub fn name(&self) -> &'static str {
        match self {
            Decision::Migrate { .. } => "migrate",
            Decision::Reprefill { .. } => "reprefill",
            Decision::Stay { .. } => "stay",
        }
    }

    /// The decision's name in the ledger.
    pub fn ticket(&self) -> &Ticket {
        match self {
            Decision::Migrate { permit, .. } => permit.ticket(),
            Decision::Reprefill { ticket, .. } | Decision::Stay { ticket, .. } => ticket,
        }
    }

    /// Why.
    pub fn reason(&self) -> &Reason {
        match self {
            Decision::Migrate { reason, .. } | Decision::Reprefill { reason, .. } | Decision::Stay { reason, .. } => {
                reason
            }
        }
    }

    /// What is promised, or could have been.
    pub fn prediction(&self) -> Option<&Prediction> {
        match self {
            Decision::Migrate { prediction, .. } => Some(prediction),
            Decision::Reprefill { prediction, .. } | Decision::Stay { prediction, .. } => prediction.as_ref(),
        }
    }
}

/// Why the gate could give no answer, or not take one.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// The ledger can't be read or written: nothing migrates unrecorded.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// A trial measures one candidate.
    #[error("a trial takes one candidate, found {found}")]
    TrialOfSeveral {
        /// Candidates of the request.
        found: usize,
    },
    /// A trial that could measure nothing.
    #[error("no trial: {0}")]
    NoTrial(Reason),
    /// A quality reported from outside the process that no measurement can give. Nothing was written.
    #[error(
        "realised {field}: found {found}, expected {expected}; nothing was written down: settle ticket {ticket} again \
         with what was measured"
    )]
    Impossible {
        /// The ticket.
        ticket: Ticket,
        /// Field of the quality.
        field: &'static str,
        /// Its value.
        found: f64,
        /// What it may be.
        expected: &'static str,
    },
    /// A realised quality that no measurement can give. The ticket ends as failed.
    #[error("ticket {ticket}: realised {field} is {found}; the migration is written down as failed")]
    Realised {
        /// The ticket.
        ticket: Ticket,
        /// Field of the quality.
        field: &'static str,
        /// Its value.
        found: f64,
    },
}

impl Gate {
    /// Opens the ledger, which is made where there is none, and writes down as abandoned what a crash left in flight.
    ///
    /// # Errors
    ///
    /// When the ledger can't be opened, is damaged, locked, or of a newer version.
    pub fn open(policy: Policy, ledger: &Path) -> Result<Gate, GateError> {
        let ledger = Ledger::open(ledger)?;
        ledger.keep_policy(&policy)?;
        Ok(Gate { policy, ledger })
    }

    /// The policy that decides.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Decides on one request.
    ///
    /// Of the candidates that meet every demand, the one with the quickest handoff; of refused ones, the one that came
    /// furthest gives the reason. Tickets of other requests that are still in flight block nobody.
    ///
    /// # Errors
    ///
    /// When the decision can't be written down.
    pub fn decide(&self, request: &Request<'_>) -> Result<Decision, GateError> {
        if let Some(reason) = request.obstacle(self.policy.settings().max_hops) {
            let ticket = self.ledger.refuse(&self.entry(Kind::Reprefill, request, &reason))?;
            return Ok(Decision::Reprefill { ticket, candidate: None, reason, prediction: None });
        }
        let verdicts: Vec<Verdict<'_>> =
            request.candidates.iter().map(|candidate| judge::judge(&self.policy, request, candidate)).collect();
        let index = judge::preferred(&verdicts);
        let Verdict { candidate, ref reason, ref prediction, admitted, .. } = verdicts[index];
        let kind = match reason {
            _ if admitted => Kind::Migrate,
            Reason::SourceBetter { .. } => Kind::Stay,
            _ => Kind::Reprefill,
        };
        let entry = Entry {
            candidate: Some(candidate),
            prediction: prediction.as_ref(),
            verdicts: &verdicts,
            ..self.entry(kind, request, reason)
        };
        let (reason, prediction) = (reason.clone(), prediction.clone());
        if let (Kind::Migrate, Some(prediction)) = (kind, &prediction) {
            let lease = self.ledger.grant(&entry, self.policy.lease())?;
            let permit = Permit::mint(lease, terms(request, candidate));
            return Ok(Decision::Migrate { permit, candidate: index, prediction: prediction.clone(), reason });
        }
        let ticket = self.ledger.refuse(&entry)?;
        Ok(match kind {
            Kind::Stay => Decision::Stay { ticket, candidate: index, reason, prediction },
            _ => Decision::Reprefill { ticket, candidate: Some(index), reason, prediction },
        })
    }

    /// A permit to run the request's one candidate for measurement; it needs no evidence, and what it makes can't be served.
    ///
    /// # Errors
    ///
    /// When there is not exactly one candidate, when nothing could be measured (another model's cache, a mismatch, nothing
    /// to map), or when the trial can't be written down.
    pub fn trial(&self, request: &Request<'_>) -> Result<Permit<Trial>, GateError> {
        let [candidate] = request.candidates.as_slice() else {
            return Err(GateError::TrialOfSeveral { found: request.candidates.len() });
        };
        // How a cache fares after many mappings is a thing to measure: a trial has no limit of hops.
        if let Some(reason) = request.obstacle(u32::MAX).or_else(|| candidate.obstacle(request)) {
            return Err(GateError::NoTrial(reason));
        }
        // The audit of a refused request has evidence, and is held to what would have been promised.
        let verdict = judge::judge(&self.policy, request, candidate);
        let entry = Entry {
            candidate: Some(candidate),
            prediction: verdict.prediction.as_ref(),
            ..self.entry(Kind::Trial, request, &Reason::Trial)
        };
        let lease = self.ledger.grant(&entry, self.policy.lease())?;
        Ok(Permit::mint(lease, terms(request, candidate)))
    }

    fn entry<'e>(&'e self, kind: Kind, request: &'e Request<'e>, reason: &'e Reason) -> Entry<'e> {
        Entry { kind, policy: &self.policy, request, candidate: None, reason, prediction: None, verdicts: &[] }
    }
}

fn terms(request: &Request<'_>, candidate: &Candidate<'_>) -> Terms {
    Terms { claim: candidate.claim, cache: request.cache }
}
