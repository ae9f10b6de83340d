//! A mapped cache of the same model onto itself with the identity map continues with the same greedy tokens.

use kvmig::{
    bundled::Member,
    engine::PrefillOptions,
    migrate::{Job, Mapper, Stages, execute},
};
use kvmig_gate::Quality;

use crate::bench::{Recipe, Scene, load, prompt, request};

fn identity_continues(head: usize, tail: usize, tokens: usize) {
    let model = load(Member::Large);
    let draft = Recipe::identity(head, tail).draft(&model);
    let Scene { gate, device, .. } = &Scene::new();
    let mapper = Mapper::load(draft.pair(), device).unwrap();

    let ids = prompt(&model, tokens);
    let native = model.prefill(&ids, PrefillOptions::default()).unwrap();
    let permit = gate.trial(&request(draft.pair(), &native.cache, &model)).unwrap();
    let job = Job { cache: &native.cache, target: &model, planes: model.reserve(ids.len() + 32) };
    let (trialled, receipt) = execute(permit, &mapper, device, job, &mut Stages::default()).unwrap();
    let mapped = model.resume_trial(trialled, &ids).unwrap();
    assert!(mapped.mapped_by().is_some(), "a mapped cache says so");

    let worst = mapped.logits().iter().zip(&native.logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    // Stripping and rotating again costs two roundings a key.
    assert!(worst < 2e-3, "logits differ by {worst}");
    let mut own = model.session(native).unwrap();
    // A trial can't be decoded from; scored on the model's own continuation, it would have chosen each token of it.
    let continuation = own.greedy(24).unwrap();
    let scored = &mapped.score(&[&continuation]).unwrap()[0];
    let vocab = model.config().vocab;
    let best = |row: &[f32]| (0..vocab).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a))).unwrap() as u32;
    let chosen: Vec<u32> = scored.logits.chunks_exact(vocab).map(best).collect();
    assert_eq!(chosen, continuation);
    let quality =
        Quality { agreement: 1.0, kl_nats: 0.0, nll_gap_nats: 0.0, cosine_mean: None, cosine_worst_layer: None, n: 24 };
    assert_eq!(gate.settle(receipt, &quality).unwrap().miss, None, "nothing is promised of a trial");
}

#[test]
fn the_identity_map_continues_as_the_model_itself() {
    identity_continues(4, 32, 700);
}

#[test]
fn the_identity_map_with_the_last_token_alone_native() {
    identity_continues(0, 1, 300);
}

/// One token to map: a chunk of one.
#[test]
fn the_identity_map_of_a_single_token() {
    identity_continues(4, 8, 13);
}
