//! The whole path from a source's cache to the target's tokens: gate, guest, kernels, decoder.

use std::collections::HashMap;

use kvmig::{
    bundled::Member,
    cache::Elem,
    device::{Device, DeviceChoice},
    engine::{LoadOptions, Model, PrefillOptions},
    fit::ridge::{Lambda, LambdaConvention},
    migrate::{Job, Mapper, Stages, execute, facts},
    pair::{Draft, FORMAT, FitRecord, Identity, Manifest, MapperRecord, ModelRecord, Pair, WeightsRecord},
    sandbox::bundled::RIDGE,
};
use kvmig_gate::{Candidate, Digest, Gate, PairFacts, Policy, Quality, Request};
use safetensors::{Dtype, tensor::TensorView};

/// The pair of a model with itself whose map is the identity, layer by layer.
fn identity_pair(model: &Model, head: usize, tail: usize) -> Draft {
    let layout = model.layout();
    let width = layout.width();
    let bytes = |numbers: &[f32]| numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let eye = bytes(&(0..width * width).map(|i| if i % (width + 1) == 0 { 1.0 } else { 0.0 }).collect::<Vec<f32>>());
    let zero = bytes(&vec![0.0; width]);
    let mut tensors = Vec::new();
    for layer in 0..layout.layers {
        for side in ["k", "v"] {
            let weight = TensorView::new(Dtype::F32, vec![width, width], &eye).unwrap();
            let bias = TensorView::new(Dtype::F32, vec![width], &zero).unwrap();
            tensors.push((format!("layers.{layer}.{side}.weight"), weight));
            tensors.push((format!("layers.{layer}.{side}.bias"), bias));
        }
    }
    let weights = safetensors::serialize(tensors, None::<HashMap<String, String>>).unwrap();
    let layers: Vec<Vec<usize>> = (0..layout.layers).map(|layer| vec![layer]).collect();
    let record = ModelRecord::of(model);
    let identity = Identity {
        format: FORMAT,
        head,
        tail,
        mapper: MapperRecord {
            kind: "ridge".into(),
            module: Digest::of(RIDGE),
            settings: serde_json::json!({ "layers": layers }).to_string(),
        },
        weights: WeightsRecord { sha256: Digest::of(&weights), elem: Elem::F32 },
        source: record.clone(),
        target: record,
    };
    let fit = FitRecord {
        kvmig: env!("CARGO_PKG_VERSION").into(),
        k: 1,
        seed: 0,
        context: 0,
        stride: 1,
        sequences: 0,
        rows: 0,
        r2_keys: 1.0,
        r2_values: 1.0,
        jitter: 0.0,
        lambda: Lambda { value: 0.0, convention: LambdaConvention::Sum },
        sweep: vec![],
        corpora: vec![],
    };
    Draft::new(Manifest { name: "identity".into(), identity, fit, evidence: None }, RIDGE.to_vec(), weights).unwrap()
}

/// What is asked of the gate for a trial of `pair` on `cache`.
fn request<'a>(pair: &'a Pair, cache: &kvmig::cache::KvCache) -> Request<'a> {
    Request {
        pair: PairFacts { name: pair.name(), source: pair.source_digest(), target: pair.target_digest() },
        cache: facts(cache),
        head: pair.head(),
        tail: pair.tail(),
        domain: None,
        backend: "cpu",
        mismatch: None,
        candidates: vec![Candidate { mapper: pair.mapper(), loaded: pair.loaded(), evidence: None, latency: None }],
    }
}

fn prompt(model: &Model, tokens: usize) -> Vec<u32> {
    let text = kvmig::bundled::PROMPT;
    let mut ids = model.tokenizer().encode(text).unwrap();
    ids.truncate(tokens);
    ids
}

/// A mapped cache of the same model onto itself with the identity map continues with the same greedy tokens.
fn identity_continues(head: usize, tail: usize, tokens: usize) {
    let model = Model::load(&Member::Large.source(), LoadOptions::default()).unwrap();
    let draft = identity_pair(&model, head, tail);
    let device = Device::open(&DeviceChoice::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let gate = Gate::open(Policy::default(), &folder.path().join("ledger.sqlite")).unwrap();
    let mapper = Mapper::load(draft.pair(), &device).unwrap();

    let ids = prompt(&model, tokens);
    let native = model.prefill(&ids, PrefillOptions::default()).unwrap();
    let permit = gate.trial(&request(draft.pair(), &native.cache)).unwrap();
    let job = Job { cache: &native.cache, layout: model.layout(), target: model.digest(), head, tail, room: 32 };
    let mut ms = Stages::default();
    let (trialled, receipt) = execute(permit, &mapper, &device, &job, &mut ms).unwrap();
    let mapped = model.resume_trial(trialled, &ids, head, tail).unwrap();
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

/// What was decided on for one prompt can't be used for another.
#[test]
fn a_permit_is_for_one_cache() {
    let model = Model::load(&Member::Medium.source(), LoadOptions::default()).unwrap();
    let draft = identity_pair(&model, 4, 8);
    let device = Device::open(&DeviceChoice::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let gate = Gate::open(Policy::default(), &folder.path().join("ledger.sqlite")).unwrap();
    let mapper = Mapper::load(draft.pair(), &device).unwrap();
    let cache = |tokens| model.prefill(&prompt(&model, tokens), PrefillOptions::default()).unwrap().cache;
    let (one, other) = (cache(40), cache(41));
    let permit = gate.trial(&request(draft.pair(), &one)).unwrap();
    let job = Job { cache: &other, layout: model.layout(), target: model.digest(), head: 4, tail: 8, room: 1 };
    let error = execute(permit, &mapper, &device, &job, &mut Stages::default()).unwrap_err();
    assert_eq!(error.name(), "redeem_failed", "{error}");
}
