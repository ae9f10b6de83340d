//! Which native ends: the head s and the tail R, by what they are worth against what they cost (METHOD §4).
//!
//! Each choice is tried as it will run, through the gate's trial route, on the selection documents. The quickest wins that the
//! policy would admit if requests were like these documents; where it would admit none, the given ends stay.

use std::{ops::ControlFlow, time::Instant};

use kvmig_gate::{Gate, Policy, Quality};

use super::{FitError, FitOptions, Progress, Stage, plan::Prompt, step};
use crate::{
    cache::KvCache,
    device::Device,
    engine::{Model, PrefillOptions},
    measure::audit::{CONTINUATION, Native},
    migrate::{self, Offer, Setup, Store},
    pair::{Draft, EndsPoint, PairError},
};

/// Tails that are tried beside the given one.
const TAILS: [usize; 5] = [8, 16, 32, 64, 128];

/// Fewer mapped tokens than this share of a document, and a choice is about the native ends.
const LEAST_MAPPED: f64 = 0.5;

/// A document with the target's own continuation.
pub(super) struct Document<'m> {
    pub(super) tokens: Vec<u32>,
    domain: String,
    cache: KvCache,
    pub(super) native: Native<'m>,
}

impl<'m> Document<'m> {
    fn run(tools: Tools<'m>, prompt: &Prompt) -> Result<Document<'m>, FitError> {
        Ok(Document {
            tokens: prompt.tokens.clone(),
            domain: prompt.domain.clone(),
            cache: tools.source.prefill(&prompt.tokens, PrefillOptions::default())?.cache,
            native: Native::run(tools.target, &prompt.tokens, CONTINUATION, &[])?,
        })
    }

    /// Both models over each prompt.
    pub(super) fn run_all(
        tools: Tools<'m>,
        prompts: &[Prompt],
        watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Vec<Document<'m>>, FitError> {
        let mut documents = Vec::with_capacity(prompts.len());
        for (done, prompt) in prompts.iter().enumerate() {
            step(watch, Stage::Selection, done, prompts.len())?;
            documents.push(Document::run(tools, prompt)?);
        }
        Ok(documents)
    }
}

/// What trials need.
#[derive(Clone, Copy)]
pub(super) struct Tools<'a> {
    pub(super) gate: &'a Gate,
    pub(super) device: &'a Device,
    pub(super) source: &'a Model,
    pub(super) target: &'a Model,
}

impl Tools<'_> {
    /// Gives `work` what trials of a drafted pair take, its weights resident: what a handoff takes is measured with them there.
    pub(super) fn trials<T>(
        self,
        draft: &Draft,
        work: impl FnOnce(&Setup<'_>) -> Result<T, FitError>,
    ) -> Result<T, FitError> {
        let Tools { gate, device, source, target } = self;
        let pair = draft.pair();
        let (store, offer) = (Store::new(device, None), Offer::of(pair, device)?);
        store.get(&offer)?;
        let offers = std::slice::from_ref(&offer);
        work(&Setup { gate, source, target, pair: pair.name(), offers, store: &store, load_ms: 0.0 })
    }
}

/// Tries every choice and gives (s, R) with what was found. `draft` makes the pair with these ends.
pub(super) fn choose(
    tools: Tools<'_>,
    options: &FitOptions,
    documents: &[Document<'_>],
    draft: &dyn Fn(usize, usize) -> Result<Draft, PairError>,
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<((usize, usize), Vec<EndsPoint>), FitError> {
    let choices = choices(options);
    let total = choices.len();
    let mut points = Vec::with_capacity(choices.len());
    let mut admitted: Option<(usize, f64)> = None;
    for (index, (head, tail)) in choices.into_iter().enumerate() {
        step(watch, Stage::Ends, index, total)?;
        let (outcomes, handoff_ms) = attempt(tools, &draft(head, tail)?, documents)?;
        let point = summary(head, tail, &outcomes, handoff_ms, documents);
        let quicker = admitted.is_none_or(|(_, ms)| point.handoff_ms < ms);
        if quicker && within(tools.gate.policy(), &outcomes) {
            admitted = Some((index, point.handoff_ms));
        }
        points.push(point);
    }
    let chosen = admitted.map(|(index, _)| (points[index].head, points[index].tail));
    Ok((chosen.unwrap_or((options.head, options.tail)), points))
}

/// The ends to try: one native position or the given head, and every tail that leaves enough to map.
fn choices(options: &FitOptions) -> Vec<(usize, usize)> {
    let mut heads = vec![1.min(options.head), options.head];
    heads.dedup();
    let mut tails = TAILS.to_vec();
    tails.push(options.tail);
    tails.sort_unstable();
    tails.dedup();
    let most = options.context as f64 * (1.0 - LEAST_MAPPED);
    let fits = |&(head, tail): &(usize, usize)| tail == options.tail || (head + tail) as f64 <= most;
    tails.into_iter().flat_map(|tail| heads.iter().map(move |&head| (head, tail))).filter(fits).collect()
}

/// Maps every document: qualities, and the mean handoff in milliseconds.
pub(super) fn attempt(
    tools: Tools<'_>,
    draft: &Draft,
    documents: &[Document<'_>],
) -> Result<(Vec<Quality>, f64), FitError> {
    tools.trials(draft, |setup| {
        let (mut outcomes, mut ms) = (Vec::with_capacity(documents.len()), 0.0);
        for Document { tokens, domain, cache, native } in documents {
            let planes = setup.target.reserve(tokens.len() + CONTINUATION);
            let clock = Instant::now();
            let (session, receipt) = migrate::trial(setup, tokens, Some(domain), cache, planes)?;
            ms += clock.elapsed().as_secs_f64() * 1e3;
            let quality = native.quality_of_mapped(&session, tokens)?;
            setup.gate.settle(receipt, &quality)?;
            outcomes.push(quality);
        }
        Ok((outcomes, ms / documents.len().max(1) as f64))
    })
}

fn summary(head: usize, tail: usize, outcomes: &[Quality], handoff_ms: f64, documents: &[Document<'_>]) -> EndsPoint {
    let n = outcomes.len().max(1) as f64;
    let mean = |value: fn(&Quality) -> f64| outcomes.iter().map(value).sum::<f64>() / n;
    EndsPoint {
        head,
        tail,
        kl_nats: mean(|quality| quality.kl_nats),
        agreement: mean(|quality| quality.agreement),
        handoff_ms,
        reprefill_ms: documents.iter().map(|document| document.native.prefill_ms()).sum::<f64>() / n,
        documents: outcomes.len(),
    }
}

/// Whether at most a share α of the documents falls short of the policy's floor.
fn within(policy: &Policy, outcomes: &[Quality]) -> bool {
    let settings = policy.settings();
    let short = outcomes.iter().filter(|quality| settings.metric.falls_short(quality, policy.floor())).count();
    short as f64 <= settings.alpha * outcomes.len() as f64
}
