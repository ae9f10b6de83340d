//! What was decided on is what is mapped, and nothing else.

use kvmig::{
    bundled::Member,
    engine::Model,
    migrate::{Job, Mapper, Stages, execute},
};
use kvmig_gate::State;

use crate::bench::{Recipe, Scene, load, prefill, prompt, request};

/// Executes a permit for one cache and target against others, which must end in the ticket's failure.
fn refused(job: impl FnOnce(&Model, &[u32]) -> (kvmig::cache::KvCache, Option<Model>), word: &str) {
    let model = load(Member::Medium);
    let draft = Recipe::identity(4, 8).draft(&model);
    let Scene { gate, device, .. } = &Scene::new();
    let mapper = Mapper::load(draft.pair(), device).unwrap();
    let ids = prompt(&model, 40);
    let decided_on = prefill(&model, &ids);
    let permit = gate.trial(&request(draft.pair(), &decided_on, &model)).unwrap();
    let ticket = permit.ticket().clone();
    let (other, target) = job(&model, &ids);
    let cache = if target.is_some() { &decided_on } else { &other };
    let target = target.as_ref().unwrap_or(&model);
    let job = Job { cache, target, planes: target.reserve(41) };
    let error = execute(permit, &mapper, device, job, &mut Stages::default()).unwrap_err();
    assert_eq!(error.name(), "redeem_failed", "{error}");
    assert!(error.to_string().contains(word), "{error}");
    assert_eq!(gate.ticket(&ticket).unwrap().state, State::Failed);
}

#[test]
fn a_permit_is_for_one_prompt() {
    refused(|model, ids| (prefill(model, &ids[..39]), None), "39 tokens");
}

/// The same tokens prefilled another time have the same digest; their keys and values need not be the same.
#[test]
fn a_permit_is_for_one_cache() {
    refused(|model, ids| (prefill(model, ids), None), "ask anew for this cache");
}

/// A sibling of the same shape would take the cache without a murmur.
#[test]
fn a_permit_is_for_one_target() {
    refused(|model, ids| (prefill(model, ids), Some(load(Member::MediumCode))), "ask anew for this model");
}

/// A cache that was only tried can't be passed off as what another permit made.
#[test]
fn a_cache_is_resumed_under_its_own_ticket() {
    let model = load(Member::Medium);
    let draft = Recipe::identity(4, 8).draft(&model);
    let Scene { gate, device, .. } = &Scene::new();
    let mapper = Mapper::load(draft.pair(), device).unwrap();
    let ids = prompt(&model, 40);
    let cache = prefill(&model, &ids);
    let asked = request(draft.pair(), &cache, &model);
    let permit = || gate.trial(&asked).unwrap();
    let job = || Job { cache: &cache, target: &model, planes: model.reserve(41) };
    let tried = || execute(permit(), &mapper, device, job(), &mut Stages::default()).unwrap();
    let (own, receipt) = tried();
    model.resume_trial(own, &ids).unwrap();
    gate.unaudited(receipt).unwrap();

    let (tried, receipt) = tried();
    gate.unaudited(receipt).unwrap();
    let redeemed = permit().redeem(draft.pair().loaded(), asked.cache, asked.target).unwrap();
    let (passed_off, receipt) = redeemed.complete(tried.release());
    let error = model.resume_trial(passed_off, &ids).unwrap_err();
    assert!(error.to_string().contains("ticket it was mapped under"), "{error}");
    gate.failed(receipt, &error.to_string()).unwrap();
}

/// Which slots are native, the pair says; what comes out knows it, and the decoder asks nobody else.
#[test]
fn the_mapped_cache_knows_its_ends() {
    let model = load(Member::Medium);
    let Scene { gate, device, .. } = &Scene::new();
    let cache = prefill(&model, &prompt(&model, 40));
    for (head, tail) in [(4, 8), (0, 1), (7, 20)] {
        let draft = Recipe::identity(head, tail).draft(&model);
        let mapper = Mapper::load(draft.pair(), device).unwrap();
        let permit = gate.trial(&request(draft.pair(), &cache, &model)).unwrap();
        let job = Job { cache: &cache, target: &model, planes: model.reserve(41) };
        let (trialled, receipt) = execute(permit, &mapper, device, job, &mut Stages::default()).unwrap();
        let mapped = trialled.release();
        assert_eq!(mapped.mapped_slots(), head..40 - tail);
        assert_eq!(mapped.provenance().model, model.digest());
        gate.unaudited(receipt).unwrap();
    }
}
