//! Weights come and go on a device, and what runs afterwards computes the same.

use kvmig::{
    bundled::{self, Member},
    device::Device,
    engine::{LoadOptions, Model, PrefillOptions},
    migrate::{Job, Offer, Stages, Store, execute, facts, precision},
};
use kvmig_gate::{Gate, Policy, Request};
use libtest_mimic::Failed;

/// The bundled pair, and the same bytes under another identity, take turns in a budget that holds one of them.
pub(super) fn weights_are_paged_under_a_budget(device: &Device) -> Result<(), Failed> {
    let load = |member: Member| Model::load(&member.source(), LoadOptions::default());
    let (source, target) = (load(bundled::DEFAULT.0)?, load(bundled::DEFAULT.1)?);
    let folder = tempfile::tempdir()?;
    let pair = bundled::stored_pair()?;
    let mut manifest = pair.card().manifest().clone();
    manifest.identity.head += 1;
    let weights = include_bytes!("../../../host/assets/pairs/medium-large/ridge/weights.safetensors").to_vec();
    let other = kvmig::pair::Draft::new(manifest, kvmig::sandbox::bundled::RIDGE.to_vec(), weights)?;
    let offers = [Offer::new(&pair, device)?, Offer::of(other.pair(), device)?];
    let gate = Gate::open(Policy::default(), &folder.path().join("ledger.sqlite"))?;
    let mut tokens = source.tokenizer().encode(bundled::PROMPT)?;
    tokens.truncate(80);
    let cache = source.prefill(&tokens, PrefillOptions::default())?.cache;

    let bytes = device.weight_bytes(other.pair().loaded());
    let store = Store::new(device, Some(bytes));
    let mut logits: Vec<Vec<u32>> = Vec::new();
    for offer in [&offers[0], &offers[1], &offers[0]] {
        let mapper = store.get(offer)?;
        let artifact = offer.claim().artifact;
        assert_eq!(store.resident(), [(artifact, bytes)], "the budget is for one");
        let request = Request {
            pair: offer.card().name(),
            cache: facts(&cache),
            target: target.digest(),
            domain: None,
            backend: &device.info().backend,
            precision: precision(&source, &target),
            mismatch: None,
            candidates: vec![offer.candidate()],
        };
        let job = Job { cache: &cache, target: &target, planes: target.reserve(tokens.len() + 1) };
        let (mapped, receipt) = execute(gate.trial(&request)?, &mapper, device, job, &mut Stages::default())?;
        gate.unaudited(receipt)?;
        logits.push(target.resume_trial(mapped, &tokens)?.logits().iter().map(|x| x.to_bits()).collect());
    }
    assert!(logits[0] == logits[2], "paged in again, the weights map as before");
    assert!(logits[0] != logits[1], "another head is another map");
    Ok(())
}
