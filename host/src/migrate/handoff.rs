//! One handoff from the source's cache to the target's tokens: decide, map, resume, answer, audit.
//!
//! Refused, or failed on the way, the target's ordinary prefill runs, and what follows is bit-identical to never having
//! tried.

use std::{ops::ControlFlow, sync::Arc, thread, time::Instant};

use kvmig_gate::{
    CacheFacts, Decision, Digest, DigestBuilder, Gate, GateError, Live, Permit, Prediction, Purpose, Reason, Receipt,
    Request, Ticket,
};

use crate::{
    cache::{KvCache, KvPlanes},
    engine::{EngineError, Model, OtherTokenizer, Precision, PrefillOptions, Progress, Sampling, Session},
    measure::audit,
};

use super::{
    ExecuteError, Mapper, Offer, PageIn, Store, TrialError,
    answer::Answer,
    execute,
    flops::{FlopCount, Natively},
    record::{Record, SCHEMA, Stages, Tokens},
    trial,
};

/// Everything that outlives a request.
#[derive(Clone, Copy, Debug)]
pub struct Setup<'a> {
    /// The gate.
    pub gate: &'a Gate,
    /// The model that has the conversation.
    pub source: &'a Model,
    /// The model that shall have it.
    pub target: &'a Model,
    /// What people and the ledger call the pair.
    pub pair: &'a str,
    /// Its mappers, at least one, all for the same two models.
    pub offers: &'a [Offer],
    /// Where their weights are made resident: the device that maps.
    pub store: &'a Store<'a>,
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
    /// Whether to measure afterwards what the migration was worth, against the target's own prefill; or, where the gate refused
    /// it, what it would have been worth.
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
    /// The target has prefilled so many of the prompt's tokens itself.
    Reprefilled {
        /// Tokens done.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
    },
    /// The target stands behind the prompt; everything of the record but answer and audit is known.
    Ready {
        /// The record so far.
        record: &'a Record,
        /// Logits behind the prompt, `[vocab]`: what the first token is chosen from.
        logits: &'a [f32],
    },
    /// More of the answer.
    Text(&'a str),
    /// The answer is complete; an audit follows.
    Auditing,
}

/// A request that got no answer, or not all of it.
#[derive(Debug, thiserror::Error)]
pub enum HandoffError {
    /// The two models read texts as different tokens: the prompt's would be nonsense to the target.
    #[error(transparent)]
    Tokenizers(#[from] Box<OtherTokenizer>),
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The gate could not write its decision down: nothing is tried unrecorded.
    #[error(transparent)]
    Gate(#[from] GateError),
    /// The caller's callback asked to stop before the answer began.
    #[error("stopped in the {model}'s prefill after {done} of {total} tokens, {}", match ticket {
        Some(ticket) => format!("nothing of ticket {ticket} is left open"),
        None => "before anything was decided".to_owned(),
    })]
    Stopped {
        /// `source` or `target`.
        model: &'static str,
        /// Tokens prefilled.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
        /// The decision, once it was made: a refusal, or a migration that failed.
        ticket: Option<Ticket>,
    },
}

/// Something that went wrong without keeping the answer from anyone.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    /// The ledger does not know how it ended; once its lease has run out, it holds the ticket for abandoned.
    #[error("the answer was given, but what came of it could not be written down: {0}")]
    Unrecorded(#[from] GateError),
    /// The audit failed.
    #[error("the answer was given, its audit failed: {0}")]
    Audit(#[from] audit::AuditError),
    /// What was refused could not be tried.
    #[error("the answer was given, the audit of what was refused failed: {0}")]
    Trial(#[from] TrialError),
}

/// A request that was answered, as far as the caller let it.
#[derive(Debug)]
pub struct Answered {
    /// The record, whole.
    pub record: Record,
    /// Whether the caller's callback asked to stop before the answer was complete.
    pub stopped: bool,
    /// Whether an audit was asked for and there was nothing to measure: nothing was mapped, and nothing could be tried.
    pub nothing_to_audit: bool,
    /// The first thing that went wrong beside the answer.
    pub trouble: Option<Trouble>,
}

/// Answers a request.
///
/// `each` sees every [`Event`]; an answer of `false` stops, with the ticket ended as far as it got. While the source prefills, the
/// weights of the mapper that the policy would choose are brought onto the device, where they are not yet.
///
/// # Errors
/// [`HandoffError`]; two models of different tokenizers are refused before anything runs. A mapper that fails is no error: the
/// ordinary prefill runs, and the record says why. A ledger that can't be written once something was mapped is none either: the
/// answer comes first, then [`Answered::trouble`].
pub fn run(
    setup: &Setup<'_>,
    ask: Ask<'_>,
    each: &mut (dyn FnMut(Event<'_>) -> bool + Send),
) -> Result<Answered, HandoffError> {
    setup.target.tokenizer().check_sibling(setup.source.tokenizer()).map_err(Box::new)?;
    let cold: Vec<bool> = setup.offers.iter().map(|offer| !setup.store.is_resident(offer)).collect();
    let likely = forecast(setup, ask).filter(|&index| cold[index]).map(|index| &setup.offers[index]);
    thread::scope(|scope| {
        if let Some(offer) = likely {
            let prefetch = thread::Builder::new().name("kvmig-page-in".into());
            // Whoever needs the weights asks for them again, and tells what was wrong; so it is with a thread that can't start.
            let _ = prefetch.spawn_scoped(scope, || drop(setup.store.get(offer)));
        }
        answer(setup, ask, &cold, each)
    })
}

/// Index of the offer that the policy would choose for such a prompt, before there is a cache.
fn forecast(setup: &Setup<'_>, ask: Ask<'_>) -> Option<usize> {
    let cache = CacheFacts {
        model: setup.source.digest(),
        digest: Digest::of(&[]),
        serial: 0,
        tokens: ask.tokens.len(),
        hops: 0,
    };
    let forecast = with_request(setup, ask.domain, cache, |request| setup.gate.policy().forecast(request));
    forecast.candidate.filter(|_| forecast.decision == "migrate")
}

/// `cold` says of each offer whether its weights were not on the device when the request came.
fn answer(
    setup: &Setup<'_>,
    ask: Ask<'_>,
    cold: &[bool],
    each: &mut (dyn FnMut(Event<'_>) -> bool + Send),
) -> Result<Answered, HandoffError> {
    let mut ms = Stages { load: setup.load_ms, ..Stages::default() };
    let clock = Instant::now();
    let planes = reserve(setup.target, ask);
    ms.reserve = millis(clock);
    let clock = Instant::now();
    let mut progress = |Progress { done, total }: Progress| go_on(each(Event::Prefilled { done, total }));
    let options = PrefillOptions { progress: Some(&mut progress), ..PrefillOptions::default() };
    let prefilled = setup.source.prefill(ask.tokens, options).map_err(|error| stopped(error, "source", None))?;
    ms.source_prefill = millis(clock);

    let clock = Instant::now();
    let decision = decide(setup, ask, &prefilled.cache)?;
    ms.gate = millis(clock);
    let reached = match decision {
        Decision::Migrate { permit, candidate, prediction, reason } => {
            let job = execute::Job { cache: &prefilled.cache, target: setup.target, planes };
            let verdict = Verdict::new("migrate", permit.ticket(), candidate, &reason, Some(prediction));
            let mut reached = migrate(setup, ask, job, permit, verdict, &mut ms, each)?;
            reached.page_in = reached.page_in.filter(|_| cold[candidate]);
            reached
        }
        Decision::Reprefill { ticket, candidate, reason, prediction } => {
            let offer = candidate.unwrap_or(0);
            let verdict = Verdict::new("reprefill", &ticket, offer, &reason, prediction);
            let session = reprefill(setup, ask, planes, &verdict, &mut ms, each)?;
            let refused = Some(Refused { offer, cache: Some(prefilled.cache) });
            Reached { refused, ..Reached::natively(session, verdict) }
        }
        Decision::Stay { ticket, candidate: offer, reason, prediction } => {
            let verdict = Verdict::new("stay", &ticket, offer, &reason, prediction);
            let session = setup.source.session(prefilled)?;
            Reached { refused: Some(Refused { offer, cache: None }), ..Reached::natively(session, verdict) }
        }
    };
    ms.close(millis(clock));
    finish(setup, ask, reached, ms, each)
}

/// A session behind the prompt, by whatever way.
struct Reached<'m> {
    session: Session<'m>,
    receipt: Option<Receipt>,
    refused: Option<Refused>,
    verdict: Verdict,
    hops: u32,
    page_in: Option<PageIn>,
    trouble: Option<Trouble>,
}

impl<'m> Reached<'m> {
    fn natively(session: Session<'m>, verdict: Verdict) -> Reached<'m> {
        Reached { session, receipt: None, refused: None, verdict, hops: 0, page_in: None, trouble: None }
    }
}

/// A request that the gate refused.
pub(super) struct Refused {
    /// Index of the offer that came furthest.
    pub(super) offer: usize,
    /// The source's cache, unless the source itself goes on from that.
    pub(super) cache: Option<KvCache>,
}

/// A decision, once its permit is spent.
struct Verdict {
    decision: &'static str,
    ticket: Ticket,
    /// Index of the offer that it is about.
    offer: usize,
    reason: &'static str,
    text: String,
    prediction: Option<Prediction>,
}

impl Verdict {
    fn new(
        decision: &'static str,
        ticket: &Ticket,
        offer: usize,
        reason: &Reason,
        prediction: Option<Prediction>,
    ) -> Verdict {
        Verdict { decision, ticket: ticket.clone(), offer, reason: reason.name(), text: reason.to_string(), prediction }
    }

    /// The migration was allowed and came to nothing.
    fn failed(self, error: &ExecuteError) -> Verdict {
        let text = format!("allowed, but the mapper failed: {error}");
        Verdict { decision: "reprefill", reason: error.name(), text, ..self }
    }
}

fn decide(setup: &Setup<'_>, ask: Ask<'_>, cache: &KvCache) -> Result<Decision, GateError> {
    with_request(setup, ask.domain, facts(cache), |request| setup.gate.decide(request))
}

/// Puts what the gate is asked together, for a decision, a trial and a forecast alike.
pub(super) fn with_request<T>(
    setup: &Setup<'_>,
    domain: Option<&str>,
    cache: CacheFacts,
    answer: impl FnOnce(&Request<'_>) -> T,
) -> T {
    let Setup { source, target, pair, offers, store, .. } = setup;
    answer(&Request {
        pair,
        cache,
        target: target.digest(),
        domain,
        backend: &store.device().info().backend,
        precision: precision(source, target),
        // All are for the same models.
        mismatch: offers.first().and_then(|offer| offer.card().mismatch(source, target)).as_deref(),
        candidates: offers.iter().map(Offer::candidate).collect(),
    })
}

/// What the gate is told of a native cache.
///
/// Its keys and values are not hashed: SHA-256 takes 24 ms for the 50 MB of 2,048 tokens of a 0.5B model, a twentieth of the
/// whole handoff. They need not be: a [`KvCache`] is filled by a prefill or by a reader that checks, can't be copied, does not
/// change, and has a number that no other one has. Another cache under the same tokens has another number.
pub fn facts(cache: &KvCache) -> CacheFacts {
    let digest = DigestBuilder::new("cache")
        .field("model", cache.model().as_bytes())
        .field("tokens", bytemuck::cast_slice(cache.tokens()))
        .field("positions", bytemuck::cast_slice(cache.positions()))
        .finish();
    CacheFacts { model: cache.model(), digest, serial: cache.serial(), tokens: cache.len(), hops: 0 }
}

/// What the gate is told of the numbers that source and target compute in.
pub fn precision(source: &Model, target: &Model) -> &'static str {
    match (source.precision(), target.precision()) {
        (Precision::Dequantised, Precision::Dequantised) => "dequantised",
        (Precision::Quantised, Precision::Quantised) => "quantised",
        (Precision::Quantised, Precision::Dequantised) => "quantised source, dequantised target",
        (Precision::Dequantised, Precision::Quantised) => "dequantised source, quantised target",
    }
}

/// The mapper that a permit is for, resident; the permit is given back where it can't be.
pub(super) fn page_in<P: Purpose>(
    setup: &Setup<'_>,
    offer: &Offer,
    permit: Permit<P>,
    ms: &mut Stages,
) -> Result<(Permit<P>, Arc<Mapper>), ExecuteError> {
    let clock = Instant::now();
    let mapper = setup.store.get(offer);
    ms.weights = millis(clock);
    match mapper {
        Ok(mapper) => Ok((permit, mapper)),
        Err(error) => {
            permit.fail(&error.to_string())?;
            Err(ExecuteError::Weights(Box::new(error)))
        }
    }
}

fn migrate<'m>(
    setup: &Setup<'m>,
    ask: Ask<'_>,
    job: execute::Job<'_>,
    permit: Permit<Live>,
    verdict: Verdict,
    ms: &mut Stages,
    each: &mut (dyn FnMut(Event<'_>) -> bool + Send),
) -> Result<Reached<'m>, HandoffError> {
    let hops = permit.hops();
    let mut paged_in = None;
    let executed = page_in(setup, &setup.offers[verdict.offer], permit, ms).and_then(|(permit, mapper)| {
        paged_in = Some(mapper.page_in());
        execute::execute(permit, &mapper, setup.store.device(), job, ms)
    });
    let (migrated, receipt) = match executed {
        Ok(done) => done,
        Err(error) => {
            let verdict = verdict.failed(&error);
            return Ok(Reached::natively(
                reprefill(setup, ask, reserve(setup.target, ask), &verdict, ms, each)?,
                verdict,
            ));
        }
    };
    let clock = Instant::now();
    let resumed = setup.target.resume_mapped(migrated, ask.tokens);
    ms.native_ends = millis(clock);
    match resumed {
        Ok(session) => {
            Ok(Reached { receipt: Some(receipt), hops, page_in: paged_in, ..Reached::natively(session, verdict) })
        }
        Err(error) => {
            let error = ExecuteError::Resume(error);
            let trouble = setup.gate.failed(receipt, &error.to_string()).err().map(Trouble::from);
            let verdict = verdict.failed(&error);
            let session = reprefill(setup, ask, reserve(setup.target, ask), &verdict, ms, each)?;
            Ok(Reached { trouble, ..Reached::natively(session, verdict) })
        }
    }
}

/// What a callback's answer means to a prefill.
fn go_on(going: bool) -> ControlFlow<()> {
    if going { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
}

/// An error of a prefill, or its being stopped.
fn stopped(error: EngineError, model: &'static str, ticket: Option<&Ticket>) -> HandoffError {
    match error {
        EngineError::Cancelled { done, total } => HandoffError::Stopped { model, done, total, ticket: ticket.cloned() },
        other => other.into(),
    }
}

fn reprefill<'m>(
    setup: &Setup<'m>,
    ask: Ask<'_>,
    planes: KvPlanes,
    verdict: &Verdict,
    ms: &mut Stages,
    each: &mut (dyn FnMut(Event<'_>) -> bool + Send),
) -> Result<Session<'m>, HandoffError> {
    let clock = Instant::now();
    let mut progress = |Progress { done, total }: Progress| go_on(each(Event::Reprefilled { done, total }));
    let options = PrefillOptions { planes: Some(planes), progress: Some(&mut progress), ..PrefillOptions::default() };
    let prefilled = setup.target.prefill(ask.tokens, options);
    let prefilled = prefilled.map_err(|error| stopped(error, "target", Some(&verdict.ticket)))?;
    ms.reprefill = Some(millis(clock));
    Ok(setup.target.session(prefilled)?)
}

/// Memory for the prompt and what will be generated, as far as the model goes; none for a prompt that it will refuse.
fn reserve(model: &Model, ask: Ask<'_>) -> KvPlanes {
    let behind = model.config().max_positions.checked_sub(ask.tokens.len());
    model.reserve(behind.map_or(0, |behind| ask.tokens.len() + ask.generate.min(behind) + 1))
}

/// Answers, settles and writes the record down.
fn finish(
    setup: &Setup<'_>,
    ask: Ask<'_>,
    reached: Reached<'_>,
    ms: Stages,
    each: &mut (dyn FnMut(Event<'_>) -> bool + Send),
) -> Result<Answered, HandoffError> {
    let mut record = record(setup, ask, &reached, ms);
    let Reached { mut session, mut receipt, refused, verdict, mut trouble, .. } = reached;
    let prompt_logits = session.logits().to_vec();
    let spoken = match each(Event::Ready { record: &record, logits: &prompt_logits }) {
        true => speak(&mut session, ask, receipt.as_mut(), &mut record, &mut trouble, each),
        false => Ok(false),
    };
    let going = match spoken {
        Ok(going) => going,
        Err(error) => {
            // The engine's error is the one to tell; a ledger that fails as well finds the ticket by its lease.
            let _ = receipt.map(|receipt| setup.gate.failed(receipt, &error.to_string()));
            return Err(error.into());
        }
    };
    let auditing = going && ask.audit;
    if auditing {
        each(Event::Auditing);
    }
    // Each says whether there was something to audit.
    let ended = match (receipt, refused) {
        (Some(receipt), _) if auditing => {
            session.rewind(ask.tokens.len(), prompt_logits);
            audit(setup, ask, &session, receipt, &mut record).map(|()| true)
        }
        (Some(receipt), _) => setup.gate.unaudited(receipt).map(|_| true).map_err(Trouble::from),
        (None, Some(refused)) if auditing => {
            drop(session);
            trial::of_refused(setup, ask, refused, &mut record)
        }
        (None, _) => Ok(false),
    };
    let json = serde_json::to_value(&record).expect("a record has no map with non-string keys and no NaN");
    let kept = setup.gate.attach_record(&verdict.ticket, &json).map_err(Trouble::from);
    let nothing_to_audit = auditing && matches!(ended, Ok(false));
    let trouble = trouble.or(ended.err()).or(kept.err());
    Ok(Answered { record, stopped: !going, nothing_to_audit, trouble })
}

/// The record as far as it is known before the answer.
fn record(setup: &Setup<'_>, ask: Ask<'_>, reached: &Reached<'_>, ms: Stages) -> Record {
    let Reached { verdict, hops, page_in, .. } = reached;
    let (offer, prompt) = (&setup.offers[verdict.offer], ask.tokens.len());
    let claim = offer.claim();
    let tokens = match verdict.decision {
        "migrate" => {
            let mapped = claim.middle(prompt);
            Tokens {
                prompt,
                mapped: mapped.len(),
                native_head: mapped.start,
                native_tail: prompt - mapped.end,
                native_layers: offer.card().identity().native_layers,
                generated: 0,
            }
        }
        _ => Tokens { prompt, ..Tokens::default() },
    };
    let identity = offer.card().identity();
    let natively = Natively::of(identity, setup.target.known(ask.tokens, identity.head));
    let flops = FlopCount::new(setup.target.config(), offer.flops_per_token(), prompt, &natively);
    Record {
        schema: SCHEMA,
        ticket: verdict.ticket.to_string(),
        decision: verdict.decision,
        reason: verdict.reason.to_owned(),
        reason_text: verdict.text.clone(),
        pair: setup.pair.to_owned(),
        mapper: offer.card().mapper().to_owned(),
        hops: *hops,
        module_digest: offer.module_digest(),
        policy_digest: setup.gate.policy().digest(),
        domain: ask.domain.map(str::to_owned),
        leverage: None,
        predicted: verdict.prediction.clone(),
        realised: None,
        trial: None,
        miss: None,
        tokens,
        ms,
        page_in: *page_in,
        flops: flops.into(),
        device: setup.store.device().info(),
        text: String::new(),
    }
}

/// Decodes the answer into `record`; whether `each` let it come to its end.
fn speak(
    session: &mut Session<'_>,
    ask: Ask<'_>,
    mut receipt: Option<&mut Receipt>,
    record: &mut Record,
    trouble: &mut Option<Trouble>,
    each: &mut (dyn FnMut(Event<'_>) -> bool + Send),
) -> Result<bool, EngineError> {
    // The last token needs no slot of its own: it is not computed on.
    let room = (session.model().config().max_positions + 1).saturating_sub(ask.tokens.len());
    let generate = ask.generate.min(room);
    let mut answer = Answer::new(session.model(), ask.sampling);
    let mut going = true;
    while going && record.tokens.generated < generate {
        let Some((token, text)) = answer.next(session.logits())? else { break };
        record.tokens.generated += 1;
        record.text.push_str(&text);
        going = each(Event::Text(&text));
        if record.tokens.generated < generate {
            session.step(token)?;
        }
        // An answer may take longer than a lease. One that can't be renewed does not stop it.
        if let Some(Err(error)) = receipt.as_mut().map(|receipt| receipt.renew()) {
            trouble.get_or_insert(Trouble::Unrecorded(error.into()));
            receipt = None;
        }
    }
    let rest = answer.rest()?;
    record.text.push_str(&rest);
    Ok(each(Event::Text(&rest)) && going)
}

/// Measures what a migration or its trial was worth, and settles it.
pub(super) fn audit(
    setup: &Setup<'_>,
    ask: Ask<'_>,
    session: &Session<'_>,
    receipt: Receipt,
    record: &mut Record,
) -> Result<(), Trouble> {
    match audit::audit(setup.target, session, ask.tokens) {
        Ok(audited) => {
            // Where it ran for the answer, that is its time.
            record.ms.reprefill.get_or_insert(audited.reprefill_ms);
            record.realised = Some(audited.quality);
            record.miss = setup.gate.settle(receipt, &audited.quality)?.miss;
            Ok(())
        }
        Err(error) => {
            setup.gate.failed(receipt, &format!("audit: {error}"))?;
            Err(error.into())
        }
    }
}

/// Milliseconds since `clock`.
pub(super) fn millis(clock: Instant) -> f64 {
    clock.elapsed().as_secs_f64() * 1e3
}
