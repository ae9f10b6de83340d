//! A migration that is only measured: of held-out documents, and of a request that the gate refused.

use kvmig_gate::{GateError, Receipt};

use crate::{
    cache::{KvCache, KvPlanes},
    engine::{EngineError, PrefillOptions, TrialSession},
    measure::audit::CONTINUATION,
};

use super::{
    Ask, ExecuteError, Setup, Trouble, execute,
    handoff::{Refused, audit, facts, page_in, with_request},
    record::{Record, Stages},
};

/// A trial that made nothing to measure.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// The gate allowed none, or could not write it down.
    #[error(transparent)]
    Gate(#[from] GateError),
    /// The cache could not be mapped.
    #[error(transparent)]
    Execute(Box<ExecuteError>),
    /// A model could not go on.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

// Boxed, because it is large.
impl From<ExecuteError> for TrialError {
    fn from(error: ExecuteError) -> TrialError {
        TrialError::Execute(Box::new(error))
    }
}

/// Maps the source's `cache` of `tokens` into `planes` under a permit to try the setup's one offer. The session can be scored, and not advanced.
///
/// # Errors
/// [`TrialError`]; a ticket that was issued has ended as failed.
pub fn trial<'m>(
    setup: &Setup<'m>,
    tokens: &[u32],
    domain: Option<&str>,
    cache: &KvCache,
    planes: KvPlanes,
) -> Result<(TrialSession<'m>, Receipt), TrialError> {
    let permit = with_request(setup, domain, facts(cache), |request| setup.gate.trial(request))?;
    // The gate tries one mapper, or it would have refused.
    let (permit, mapper) = page_in(setup, &setup.offers[0], permit, &mut Stages::default())?;
    let job = execute::Job { cache, target: setup.target, planes };
    let device = setup.store.device();
    let (trialled, receipt) = execute::execute(permit, &mapper, device, job, &mut Stages::default())?;
    drop(mapper);
    match setup.target.resume_trial(trialled, tokens) {
        Ok(session) => Ok((session, receipt)),
        Err(error) => {
            setup.gate.failed(receipt, &error.to_string())?;
            Err(error.into())
        }
    }
}

/// Measures what a request that the gate refused would have been worth, beside the answer that was given; `false` where
/// nothing can be tried either. Without the source's cache, on which the source went on itself, it is computed once more.
pub(super) fn of_refused(
    setup: &Setup<'_>,
    ask: Ask<'_>,
    Refused { offer, cache }: Refused,
    record: &mut Record,
) -> Result<bool, Trouble> {
    let again = || setup.source.prefill(ask.tokens, PrefillOptions::default()).map(|prefilled| prefilled.cache);
    let cache = cache.map_or_else(again, Ok).map_err(TrialError::from)?;
    let planes = setup.target.reserve(ask.tokens.len() + CONTINUATION);
    let setup = &Setup { offers: &setup.offers[offer..=offer], ..*setup };
    let (session, receipt) = match trial(setup, ask.tokens, ask.domain, &cache, planes) {
        Err(TrialError::Gate(GateError::NoTrial(_))) => return Ok(false),
        tried => tried?,
    };
    drop(cache);
    record.trial = Some(receipt.ticket().to_string());
    audit(setup, ask, &session, receipt, record).map(|()| true)
}
