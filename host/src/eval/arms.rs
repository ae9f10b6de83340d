//! Every arm on one document.

use std::time::Instant;

use kvmig_gate::Gate;

use super::{
    Arm, Ends, EvalError, EvalOptions, Mapping, Measured, Subject,
    results::{SCHEMA, of_tokens},
};
use crate::{
    device::Device,
    engine::{Model, PrefillOptions, Session},
    fit::Prompt,
    measure::audit::{AuditError, CONTINUATION, Native},
    migrate::{self, FlopCount, Natively, Offer, Setup, Store},
    pair::Stored,
};

/// What measures, with every mapper's weights on the device.
pub(super) struct Bench<'a> {
    gate: &'a Gate,
    source: &'a Model,
    target: &'a Model,
    store: Store<'a>,
    offers: Vec<Offer>,
    subject: Subject,
}

impl<'a> Bench<'a> {
    pub(super) fn new(
        options: &EvalOptions,
        mappers: &[Stored],
        (source, target): (&'a Model, &'a Model),
        gate: &'a Gate,
        device: &'a Device,
    ) -> Result<Bench<'a>, EvalError> {
        let store = Store::new(device, options.device_budget);
        let (mut offers, mut mappings) = (Vec::new(), Vec::new());
        for stored in mappers {
            let identity = stored.card().identity();
            let own = [Ends { head: identity.head, tail: identity.tail }];
            for &ends in if options.ends.is_empty() { own.as_slice() } else { &options.ends } {
                let draft = stored.with_ends(ends.head, ends.tail)?;
                let (pair, fit) = (draft.pair(), &stored.card().manifest().fit);
                let offer = Offer::of(pair, device)?;
                let known = target.known(target.tokenizer().start(), ends.head);
                let natively = Natively::of(pair.identity(), known);
                let flops = FlopCount::new(target.config(), offer.flops_per_token(), options.context, &natively);
                mappings.push(Mapping {
                    pair: stored.card().name().to_owned(),
                    kind: stored.card().mapper().to_owned(),
                    k: fit.k,
                    rank: fit.rank,
                    native_layers: pair.native_layers(),
                    ends,
                    artifact: pair.loaded().artifact(),
                    weight_bytes: stored.weight_bytes()?,
                    mflops: offer.flops_per_token() / 1e6,
                    flop_limit: flops.limit(),
                });
                offers.push(offer);
            }
        }
        let subject = Subject {
            schema: SCHEMA,
            kvmig: env!("CARGO_PKG_VERSION").to_owned(),
            source: source.digest(),
            target: target.digest(),
            backend: device.info().backend,
            device: format!("{}, {}", device.info().name, device.info().driver),
            threads: rayon::current_num_threads(),
            precision: migrate::precision(source, target).to_owned(),
            context: options.context,
            mappings,
        };
        Ok(Bench { gate, source, target, store, offers, subject })
    }

    /// What is measured.
    pub(super) fn subject(&self) -> &Subject {
        &self.subject
    }

    /// Runs both models over a document, then every arm.
    pub(super) fn measure(&self, document: &Prompt) -> Result<Measured, EvalError> {
        let Bench { source, target, .. } = *self;
        let tokens = &document.tokens;
        let prefilled = source.prefill(tokens, PrefillOptions::default())?;
        let native = Native::run(target, tokens, CONTINUATION, &document.text)?;
        let on_text = |name: &'static str, session: &Session<'_>| match document.text.is_empty() {
            true => Ok(None),
            false => native.quality_on_text(name, session).map(Some),
        };
        let arm = |name: &'static str, session: &Session<'_>| -> Result<Arm, AuditError> {
            Ok(Arm { greedy: native.quality_of(name, session)?, text: on_text(name, session)?, handoff_ms: None })
        };
        let mut mapped = Vec::with_capacity(self.offers.len());
        for (offer, mapping) in self.offers.iter().zip(&self.subject.mappings) {
            let offers = std::slice::from_ref(offer);
            let (gate, store, pair) = (self.gate, &self.store, mapping.pair.as_str());
            let setup = Setup { gate, source, target, pair, offers, store, load_ms: 0.0 };
            let planes = target.reserve(tokens.len() + CONTINUATION);
            // What a handoff takes is measured with the weights there.
            store.get(offer)?;
            let clock = Instant::now();
            let tried = migrate::trial(&setup, tokens, Some(&document.domain), &prefilled.cache, planes);
            let (session, receipt) = tried.map_err(|source| EvalError::Trial {
                mapper: format!("{}: {}, {}", mapping.pair, mapping.kind, mapping.ends),
                document: document.id.clone(),
                source: Box::new(source),
            })?;
            let handoff_ms = Some(clock.elapsed().as_secs_f64() * 1e3);
            let greedy = native.quality_of_mapped(&session, tokens)?;
            self.gate.settle(receipt, &greedy)?;
            mapped.push(Arm { greedy, text: on_text("mapped", &session)?, handoff_ms });
        }
        let mut ends_only: Vec<(Ends, Arm)> = Vec::new();
        for Mapping { ends, .. } in &self.subject.mappings {
            if ends_only.iter().all(|(other, _)| other != ends) {
                let session = target.ends_only(tokens, ends.head, ends.tail, target.layout().elem)?;
                ends_only.push((*ends, arm("ends_only", &session)?));
            }
        }
        let alone = [target.tokenizer().encode("")?.as_slice(), &tokens[tokens.len() - 1..]].concat();
        let alone = target.session(target.prefill(&alone, PrefillOptions::default())?)?;
        let stay = source.session(prefilled)?;
        Ok(Measured {
            id: document.id.clone(),
            domain: document.domain.clone(),
            tokens: of_tokens(document),
            reprefill_ms: native.prefill_ms(),
            source: arm("source", &stay)?,
            no_prefix: arm("no_prefix", &alone)?,
            ends_only,
            mapped,
        })
    }
}
