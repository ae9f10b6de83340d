//! Held-out evidence: the fitted pair, tried as it will run, through the gate's trial route.

use std::{ops::ControlFlow, time::Instant};

use kvmig_gate::{Digest, DocumentOutcome, Evidence, Gate};
use serde::{Deserialize, Serialize};

use super::{FitError, FitOptions, Progress, Stage, digest, plan::Prompt};
use crate::{
    device::Device,
    engine::{Model, PrefillOptions, Session},
    measure::{
        Log, OfAnother,
        audit::{CONTINUATION, Native},
        summary::TextArms,
    },
    migrate::{self, Offer, Setup, Store},
    pair::Pair,
};

/// What the outcomes are of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Subject {
    /// The artifact that was tried.
    artifact: Digest,
    /// Where it ran.
    backend: String,
    /// In which numbers the models computed.
    precision: String,
}

/// An outcome and the digest of what it is about.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    /// Digest of the document's tokens.
    tokens: Digest,
    /// What came of it.
    outcome: DocumentOutcome,
    /// And on its own next tokens, where it has enough.
    text: Option<TextArms>,
}

/// What runs a trial.
pub(super) struct Bench<'a> {
    pub(super) gate: &'a Gate,
    pub(super) device: &'a Device,
    pub(super) source: &'a Model,
    pub(super) target: &'a Model,
    pub(super) pair: &'a Pair,
}

impl<'a> Bench<'a> {
    /// Measures every prompt that the log doesn't have yet.
    pub(super) fn measure(
        &self,
        options: &FitOptions,
        prompts: &[Prompt],
        watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<(Evidence, Vec<(String, TextArms)>), FitError> {
        let Bench { gate, device, source, target, pair } = *self;
        let (store, offer) = (Store::new(device, None), Offer::of(pair, device)?);
        // What a handoff takes is measured with the weights there.
        store.get(&offer)?;
        let offers = std::slice::from_ref(&offer);
        let setup = Setup { gate, source, target, pair: pair.name(), offers, store: &store, load_ms: 0.0 };
        let backend = self.device.info().backend;
        let precision = migrate::precision(self.source, self.target).to_owned();
        let subject = Subject { artifact: self.pair.loaded().artifact(), backend: backend.clone(), precision };
        let path = options.evidence_log();
        let mut log: Log<Entry> = Log::open(&path, &subject, OfAnother::Replaced)?;
        let (mut entries, total) = (Vec::with_capacity(prompts.len()), prompts.len());
        for prompt in prompts {
            let tokens = digest(&[prompt.tokens.as_slice(), &prompt.text].concat());
            let same = |entry: &&Entry| entry.tokens == tokens && entry.outcome.id == prompt.id;
            if let Some(entry) = log.entries().iter().find(same) {
                entries.push(entry.clone());
                continue;
            }
            if watch(Progress { stage: Stage::Evidence, done: entries.len(), total }).is_break() {
                return Err(FitError::Interrupted { stage: Stage::Evidence.name(), file: path });
            }
            let (outcome, text) = self.outcome(&setup, prompt)?;
            let entry = Entry { tokens, outcome, text };
            log.push(entry.clone())?;
            entries.push(entry);
        }
        let _ = watch(Progress { stage: Stage::Evidence, done: total, total });
        let texts = entries.iter().filter_map(|entry| Some((entry.outcome.domain.clone(), entry.text?))).collect();
        let evidence = Evidence {
            artifact: subject.artifact,
            seed: options.seed,
            backend,
            precision: subject.precision,
            documents: entries.into_iter().map(|entry| entry.outcome).collect(),
        };
        Ok((evidence, texts))
    }

    fn outcome(&self, setup: &Setup<'_>, prompt: &Prompt) -> Result<(DocumentOutcome, Option<TextArms>), FitError> {
        let tokens = &prompt.tokens;
        let prefilled = self.source.prefill(tokens, PrefillOptions::default())?;
        let planes = self.target.reserve(tokens.len() + CONTINUATION);
        let clock = Instant::now();
        let (session, receipt) = migrate::trial(setup, tokens, Some(&prompt.domain), &prefilled.cache, planes)?;
        let handoff_ms = clock.elapsed().as_secs_f64() * 1e3;
        let native = Native::run(self.target, tokens, CONTINUATION, &prompt.text)?;
        let on_text = |arm, session: &Session<'_>| match prompt.text.is_empty() {
            true => Ok(None),
            false => native.quality_on_text(arm, session).map(Some),
        };
        let mapped = native.quality_of_mapped(&session, tokens)?;
        let mapped_text = on_text("mapped", &session)?;
        drop(session);
        self.gate.settle(receipt, &mapped)?;
        let ends = self.target.ends_only(tokens, self.pair.head(), self.pair.tail(), self.target.layout().elem)?;
        let ends_only = native.quality_of("ends_only", &ends)?;
        let alone = [self.target.tokenizer().encode("")?.as_slice(), &tokens[tokens.len() - 1..]].concat();
        let alone = self.target.session(self.target.prefill(&alone, PrefillOptions::default())?)?;
        let no_prefix = native.quality_of("no_prefix", &alone)?;
        let stay = self.source.session(prefilled)?;
        let source = native.quality_of("source", &stay)?;
        let text =
            [mapped_text, on_text("ends_only", &ends)?, on_text("no_prefix", &alone)?, on_text("source", &stay)?];
        let text = match text {
            [Some(mapped), Some(ends_only), Some(no_prefix), Some(source)] => {
                Some(TextArms { mapped, ends_only, no_prefix, source })
            }
            _ => None,
        };
        let outcome = DocumentOutcome {
            id: prompt.id.clone(),
            domain: prompt.domain.clone(),
            tokens: tokens.len(),
            mapped,
            ends_only,
            no_prefix,
            source,
            handoff_ms,
            reprefill_ms: native.prefill_ms(),
        };
        Ok((outcome, text))
    }
}
