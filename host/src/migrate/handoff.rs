//! One handoff from the source's cache to the target's tokens: decide, map, resume, answer, audit.
//!
//! Refused, or failed on the way, the target's ordinary prefill runs, and what follows is bit-identical to never having
//! tried.

use std::time::Instant;

use kvmig_gate::{
    CacheFacts, Candidate, Decision, Digest, Gate, GateError, Live, PairFacts, Permit, Prediction, Reason, Receipt,
    Request, Ticket,
};

use crate::{
    cache::KvCache,
    device::Device,
    engine::{EngineError, Model, PrefillOptions, Sampling, Session},
    measure::audit,
    pair::Pair,
};

use super::{
    ExecuteError, Mapper,
    answer::Answer,
    execute,
    flops::FlopCount,
    record::{Record, SCHEMA, Stages, Tokens},
};

/// Everything that outlives a request.
#[derive(Debug)]
pub struct Setup<'a> {
    /// The gate.
    pub gate: &'a Gate,
    /// The device that maps.
    pub device: &'a Device,
    /// The model that has the conversation.
    pub source: &'a Model,
    /// The model that shall have it.
    pub target: &'a Model,
    /// The pair.
    pub pair: &'a Pair,
    /// Its mapper, resident on the device.
    pub mapper: &'a Mapper,
    /// Milliseconds that loading all of this took.
    pub load_ms: f64,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The prompt.
    pub tokens: &'a [u32],
    /// Domain it belongs to, where the caller knows.
    pub domain: Option<&'a str>,
    /// Tokens to generate at most.
    pub generate: usize,
    /// How they are chosen.
    pub sampling: Sampling,
    /// Whether to re-prefill afterwards and measure what the migration was worth.
    pub audit: bool,
}

/// What happens while a request runs; for progress and streaming.
#[derive(Debug)]
pub enum Event<'a> {
    /// The source has prefilled so many of the prompt's tokens.
    Prefilled {
        /// Tokens done.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
    },
    /// The first token is there; everything of the record but answer and audit is known.
    Ready(&'a Record),
    /// More of the answer.
    Text(&'a str),
    /// The answer is complete; an audit follows.
    Auditing,
}

/// A request that got no answer.
#[derive(Debug, thiserror::Error)]
pub enum HandoffError {
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The gate could not decide or write down.
    #[error(transparent)]
    Gate(#[from] GateError),
    /// The ledger could not be written while a migration ended.
    #[error(transparent)]
    Ledger(#[from] kvmig_gate::LedgerError),
    /// The audit failed.
    #[error("the answer was given, its audit failed: {0}")]
    Audit(#[from] audit::AuditError),
    /// The caller's callback asked to stop.
    #[error("stopped")]
    Stopped,
}

/// Answers a request.
///
/// `each` sees every [`Event`]; an answer of `false` stops, with the ticket settled as far as it got.
///
/// # Errors
/// [`HandoffError`]. A mapper that fails is no error: the ordinary prefill runs, and the record says why.
pub fn run(
    setup: &Setup<'_>,
    ask: Ask<'_>,
    each: &mut (dyn FnMut(Event<'_>) -> bool + Send),
) -> Result<Record, HandoffError> {
    let mut ms = Stages { load: setup.load_ms, ..Stages::default() };
    let clock = Instant::now();
    let prefilled = {
        let mut progress = |p: crate::engine::Progress| match each(Event::Prefilled { done: p.done, total: p.total }) {
            true => std::ops::ControlFlow::Continue(()),
            false => std::ops::ControlFlow::Break(()),
        };
        let options = PrefillOptions { progress: Some(&mut progress), ..PrefillOptions::default() };
        setup.source.prefill(ask.tokens, options).map_err(|error| match error {
            EngineError::Cancelled { .. } => HandoffError::Stopped,
            other => other.into(),
        })?
    };
    ms.source_prefill = millis(clock);

    let clock = Instant::now();
    let decision = decide(setup, ask, &prefilled.cache)?;
    ms.gate = millis(clock);
    let reached = match decision {
        Decision::Migrate { permit, prediction, reason, .. } => {
            let verdict = Verdict::new("migrate", permit.ticket(), &reason, Some(prediction));
            migrate(setup, ask, &prefilled.cache, permit, verdict, &mut ms)?
        }
        Decision::Reprefill { ticket, reason, prediction } => {
            let verdict = Verdict::new("reprefill", &ticket, &reason, prediction);
            Reached { session: reprefill(setup, ask, &mut ms)?, receipt: None, verdict, hops: 0 }
        }
        Decision::Stay { ticket, reason, prediction } => {
            let verdict = Verdict::new("stay", &ticket, &reason, prediction);
            Reached { session: setup.source.session(prefilled)?, receipt: None, verdict, hops: 0 }
        }
    };
    ms.handoff = millis(clock);
    finish(setup, ask, reached, ms, each)
}

/// A session behind the prompt, by whatever way.
struct Reached<'m> {
    session: Session<'m>,
    receipt: Option<Receipt>,
    verdict: Verdict,
    hops: u32,
}

/// A decision, once its permit is spent.
struct Verdict {
    decision: &'static str,
    ticket: Ticket,
    reason: &'static str,
    text: String,
    prediction: Option<Prediction>,
}

impl Verdict {
    fn new(decision: &'static str, ticket: &Ticket, reason: &Reason, prediction: Option<Prediction>) -> Verdict {
        Verdict { decision, ticket: ticket.clone(), reason: reason.name(), text: reason.to_string(), prediction }
    }

    /// The migration was allowed and came to nothing.
    fn failed(self, error: &ExecuteError) -> Verdict {
        let text = format!("allowed, but the mapper failed: {error}");
        Verdict { decision: "reprefill", reason: error.name(), text, ..self }
    }
}

fn decide(setup: &Setup<'_>, ask: Ask<'_>, cache: &KvCache) -> Result<Decision, GateError> {
    let pair = setup.pair;
    let mismatch = pair.mismatch(setup.source, setup.target);
    setup.gate.decide(&Request {
        pair: PairFacts { name: pair.name(), source: pair.source_digest(), target: pair.target_digest() },
        cache: facts(cache),
        head: pair.head(),
        tail: pair.tail(),
        domain: ask.domain,
        backend: &setup.device.info().backend,
        mismatch: mismatch.as_deref(),
        candidates: vec![Candidate {
            mapper: pair.mapper(),
            loaded: pair.loaded(),
            evidence: pair.evidence(),
            latency: None,
        }],
    })
}

/// What the gate is told of a native cache.
pub fn facts(cache: &KvCache) -> CacheFacts {
    let digest = kvmig_gate::DigestBuilder::new("cache")
        .field("model", cache.model().as_bytes())
        .field("tokens", bytemuck::cast_slice(cache.tokens()))
        .field("positions", bytemuck::cast_slice(cache.positions()))
        .finish();
    CacheFacts { model: cache.model(), digest, tokens: cache.len(), hops: 0 }
}

fn migrate<'m>(
    setup: &Setup<'m>,
    ask: Ask<'_>,
    cache: &KvCache,
    permit: Permit<Live>,
    verdict: Verdict,
    ms: &mut Stages,
) -> Result<Reached<'m>, HandoffError> {
    let job = execute::Job {
        cache,
        layout: setup.target.layout(),
        target: setup.target.digest(),
        head: setup.pair.head(),
        tail: setup.pair.tail(),
        room: room(setup.target, ask),
    };
    let hops = permit.hops();
    let (migrated, receipt) = match execute::execute(permit, setup.mapper, setup.device, &job, ms) {
        Ok(done) => done,
        Err(error) => {
            let session = reprefill(setup, ask, ms)?;
            return Ok(Reached { session, receipt: None, verdict: verdict.failed(&error), hops: 0 });
        }
    };
    let clock = Instant::now();
    let resumed = setup.target.resume_mapped(migrated, ask.tokens, job.head, job.tail);
    ms.native_ends = millis(clock);
    let finite = |session: &Session<'_>| session.logits().iter().all(|x| x.is_finite());
    match resumed {
        Ok(session) if finite(&session) => Ok(Reached { session, receipt: Some(receipt), verdict, hops }),
        other => {
            let error = match other {
                Err(error) => ExecuteError::Resume(error.to_string()),
                Ok(_) => ExecuteError::Resume("the target's logits behind the mapped cache are not finite".into()),
            };
            setup.gate.failed(receipt, &error.to_string())?;
            let session = reprefill(setup, ask, ms)?;
            Ok(Reached { session, receipt: None, verdict: verdict.failed(&error), hops: 0 })
        }
    }
}

fn reprefill<'m>(setup: &Setup<'m>, ask: Ask<'_>, ms: &mut Stages) -> Result<Session<'m>, HandoffError> {
    let clock = Instant::now();
    let options = PrefillOptions { room: room(setup.target, ask), ..PrefillOptions::default() };
    let prefilled = setup.target.prefill(ask.tokens, options)?;
    ms.reprefill = Some(millis(clock));
    Ok(setup.target.session(prefilled)?)
}

/// Tokens to keep room for behind the prompt: those that will be generated, as far as the model goes.
fn room(model: &Model, ask: Ask<'_>) -> usize {
    ask.generate.min(model.config().max_positions.saturating_sub(ask.tokens.len())) + 1
}

/// Answers, settles and writes the record down.
fn finish(
    setup: &Setup<'_>,
    ask: Ask<'_>,
    reached: Reached<'_>,
    ms: Stages,
    each: &mut (dyn FnMut(Event<'_>) -> bool + Send),
) -> Result<Record, HandoffError> {
    let Reached { mut session, receipt, verdict, hops } = reached;
    let migrated = verdict.decision == "migrate";
    let pair = setup.pair;
    let (head, tail) = if migrated { (pair.head(), pair.tail()) } else { (0, 0) };
    let mapped = if migrated { ask.tokens.len().saturating_sub(head + tail) } else { 0 };
    let mut record = Record {
        schema: SCHEMA,
        ticket: verdict.ticket.to_string(),
        decision: verdict.decision,
        reason: verdict.reason.to_owned(),
        reason_text: verdict.text,
        pair: pair.name().to_owned(),
        mapper: pair.mapper().to_owned(),
        hops,
        module_digest: pair.loaded().module(),
        policy_digest: setup.gate.policy().digest(),
        domain: ask.domain.map(str::to_owned),
        leverage: None,
        predicted: verdict.prediction,
        realised: None,
        miss: None,
        tokens: Tokens { prompt: ask.tokens.len(), mapped, native_head: head, native_tail: tail, generated: 0 },
        ms,
        flops: FlopCount::new(
            setup.target.config(),
            setup.mapper.flops_per_token(),
            ask.tokens.len(),
            pair.head(),
            pair.tail(),
        )
        .into(),
        device: setup.device.info(),
        text: String::new(),
    };
    let mut going = each(Event::Ready(&record));
    // The last token needs no slot of its own: it is not computed on.
    let room = (session.model().config().max_positions + 1).saturating_sub(ask.tokens.len());
    let generate = ask.generate.min(room);
    let prompt_logits = session.logits().to_vec();
    let mut answer = Answer::new(session.model(), ask.sampling);
    while going && record.tokens.generated < generate {
        let Some((token, text)) = answer.next(session.logits())? else { break };
        record.tokens.generated += 1;
        record.text.push_str(&text);
        going = each(Event::Text(&text));
        if record.tokens.generated < generate {
            session.step(token)?;
        }
    }
    let rest = answer.rest()?;
    record.text.push_str(&rest);
    going &= each(Event::Text(&rest));
    match receipt {
        Some(receipt) if going && ask.audit => {
            each(Event::Auditing);
            session.rewind(ask.tokens.len(), prompt_logits);
            let audited = match audit::audit(setup.target, &session, ask.tokens) {
                Ok(audited) => audited,
                Err(error) => {
                    setup.gate.failed(receipt, &format!("audit: {error}"))?;
                    return Err(error.into());
                }
            };
            record.ms.reprefill = Some(audited.reprefill_ms);
            record.miss = setup.gate.settle(receipt, &audited.quality)?.miss;
            record.realised = Some(audited.quality);
        }
        Some(receipt) => {
            setup.gate.unaudited(receipt)?;
        }
        None => {}
    }
    let ticket: Ticket = verdict.ticket;
    let json = serde_json::to_value(&record).expect("a record has no map with non-string keys and no NaN");
    setup.gate.attach_record(&ticket, &json)?;
    if going { Ok(record) } else { Err(HandoffError::Stopped) }
}

/// Milliseconds since `clock`.
pub(super) fn millis(clock: Instant) -> f64 {
    clock.elapsed().as_secs_f64() * 1e3
}

/// Digest of a cache as the gate binds permits to it.
pub(super) fn cache_digest(cache: &KvCache) -> Digest {
    facts(cache).digest
}
