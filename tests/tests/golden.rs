//! The engine against known answers of other implementations (`tests/golden`).
#![expect(
    clippy::print_stdout,
    reason = "the differences seen are worth reading beside the bounds: run with --nocapture"
)]

use std::{fmt, path::PathBuf};

use kvmig::engine::{EngineError, LoadOptions, Model, ModelSource, Precision, PrefillOptions, Session};
use kvmig_tests::golden::{self, Answer, Location};

/// Bounds on an engine that computes in f32, beside another that does: largest absolute difference.
struct Tolerance {
    /// Of logits: the project's own bar. They are sums of `hidden` products of numbers of order 1, and both sides round
    /// angles, norms and softmax differently.
    logits: f32,
    /// Of keys and values, which are sums as well but pass through fewer steps.
    cache: f32,
}

const EXACT: Tolerance = Tolerance { logits: 1e-3, cache: 1e-3 };

fn load(model: &Location, precision: Precision) -> Model {
    let path = match model {
        Location::Family(member) => {
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../host/assets/family").join(member)
        }
        Location::Path(path) => path.clone(),
    };
    Model::load(&ModelSource::from(path), LoadOptions { precision, threads: None }).unwrap()
}

/// The largest difference seen, and where.
#[derive(Default)]
struct Worst(f32, String);

impl Worst {
    fn see(&mut self, got: f32, expected: f32, place: impl FnOnce() -> String) {
        let difference = (got - expected).abs();
        if difference > self.0 || difference.is_nan() {
            *self = Worst(difference, place());
        }
    }

    fn hold(&self, bound: f32, what: impl fmt::Display) {
        // NaN is no number at most the bound.
        assert!(self.0 <= bound, "{what}: {} off by {}, allowed {bound}", self.1, self.0);
    }
}

/// Logits behind every token, `[T, vocab]`, by scoring all but the first behind the first.
fn all_logits(model: &Model, tokens: &[u32]) -> Vec<f32> {
    let session = model.session(model.prefill(&tokens[..1], PrefillOptions::default()).unwrap()).unwrap();
    let mut continuation = tokens[1..].to_vec();
    continuation.push(0);
    session.score(&[&continuation]).unwrap().remove(0).logits
}

fn continue_greedily(session: &mut Session<'_>, steps: usize) -> Vec<u32> {
    (0..steps)
        .map(|_| {
            let logits = session.logits();
            let best = (1..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
            session.step(best as u32).unwrap();
            best as u32
        })
        .collect()
}

fn hold_to(name: &str, model: &Model, answer: &Answer, tolerance: &Tolerance) {
    // Several chunks, the last one short.
    let options = || PrefillOptions { chunk: 48, ..Default::default() };
    let prefilled = model.prefill(&answer.tokens, options()).unwrap();
    let mut last = Worst::default();
    for (&id, &expected) in answer.last.ids.iter().zip(&answer.last.logits) {
        last.see(prefilled.logits[id as usize], expected, || format!("token {id}"));
    }
    for &(id, expected) in &answer.last.top {
        last.see(prefilled.logits[id as usize], expected, || format!("token {id}"));
    }
    last.hold(tolerance.logits, format!("{name}: last logits"));

    let vocab = model.config().vocab;
    let all = all_logits(model, &answer.tokens);
    let mut logits = Worst::default();
    for (row, id, expected) in answer.logits.iter() {
        logits.see(all[row * vocab + id], expected, || format!("row {row}, token {id}"));
    }
    logits.hold(tolerance.logits, format!("{name}: logits"));

    let layout = model.layout();
    assert_eq!((answer.kv.kv_heads, answer.kv.head_dim), (layout.kv_heads, layout.head_dim), "{name}");
    let (mut keys, mut values) = (Worst::default(), Worst::default());
    let planes = prefilled.cache.planes();
    for row in answer.kv.rows() {
        let offset = planes.offset(row.head, row.position);
        let mut got = vec![0.0; layout.head_dim];
        for (plane, expected, worst) in
            [(&planes.layer(row.layer).k, row.k, &mut keys), (&planes.layer(row.layer).v, row.v, &mut values)]
        {
            plane.read(offset, &mut got);
            for (dim, (got, expected)) in got.iter().zip(expected).enumerate() {
                let place = || format!("layer {}, head {}, position {}, {dim}", row.layer, row.head, row.position);
                worst.see(*got, *expected, place);
            }
        }
    }
    keys.hold(tolerance.cache, format!("{name}: keys"));
    values.hold(tolerance.cache, format!("{name}: values"));

    let mut session = model.session(prefilled).unwrap();
    assert_eq!(continue_greedily(&mut session, answer.greedy.len()), answer.greedy, "{name}: greedy continuation");
    println!("{name}: last {:.1e}, logits {:.1e}, keys {:.1e}, values {:.1e}", last.0, logits.0, keys.0, values.0);
}

#[test]
fn hugging_face_models_give_transformers_logits_caches_and_text() {
    let cases = golden::engine().unwrap();
    assert!(cases.len() >= 15);
    for case in &cases {
        hold_to(&case.name, &load(&case.model, Precision::Dequantised), &case.answer, &EXACT);
    }
}

#[test]
fn gguf_models_give_transformers_logits_caches_and_text() {
    for case in golden::gguf().unwrap() {
        let model = load(&case.model, Precision::Dequantised);
        hold_to(&case.name, &model, &case.answer, &EXACT);
        for string in &case.strings {
            let ids = model.tokenizer().encode_continuation(&string.text).unwrap();
            assert_eq!(ids, string.ids, "{}: {:?}", case.name, string.text);
        }
        hold_quantised_to(&case.name, &model, &load(&case.model, Precision::Quantised), &case.answer.tokens, true);
    }
}

/// Scores instead of merges, a space before the text, bytes for what no piece covers.
#[test]
fn gguf_pieces_give_sentencepieces_ids_and_texts() {
    let (file, strings) = golden::sentencepiece().unwrap();
    let model = load(&Location::Path(file), Precision::Dequantised);
    let tokenizer = model.tokenizer();
    assert!(strings.len() > 12 && strings.iter().any(|string| string.ids.len() > 300));
    for string in &strings {
        let ids = tokenizer.encode_continuation(&string.text).unwrap();
        assert_eq!(ids, string.ids, "{:?}", string.text);
        assert_eq!(tokenizer.decode(&ids).unwrap(), string.text);
        let mut stream = tokenizer.stream();
        let pushed: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        assert_eq!(pushed + &stream.finish().unwrap(), string.text);
    }
    // Files of this kind start a text with BOS unless they say otherwise.
    assert_eq!(
        tokenizer.encode("the").unwrap(),
        [&[1], tokenizer.encode_continuation("the").unwrap().as_slice()].concat()
    );
}

/// Mean KL(dequantised ‖ quantised) in nats, over the positions behind the first. The 8-bit products round each block of 256
/// activations to 8 bits, a relative error of about 1/250 of the largest; what that does to a distribution is measured, not
/// derived: 3e-3 on the 1.5B model that is quantised throughout, a hundredth of what the shipped policy lets a migration
/// cost. The first position is the attention sink: a few of its activations are hundreds of times the others and drown them
/// in their block, and its own distribution is off by nats. Nobody reads that one; what it does to the others' is counted.
const QUANTISED_KL: f64 = 0.01;

fn hold_quantised_to(name: &str, exact: &Model, quantised: &Model, tokens: &[u32], has_8_bit_products: bool) {
    assert_eq!(exact.digest(), quantised.digest());
    let (p, q) = (all_logits(exact, tokens), all_logits(quantised, tokens));
    // Where no matrix has a type and shape that the 8-bit kernels take, both precisions are one and the same.
    assert_eq!(p != q, has_8_bit_products, "{name}: a product in 8 bits was expected or not");
    hold_kl(name, &p, &q, exact.config().vocab);
}

/// Holds `[T, vocab]` logits to others by their mean divergence.
fn hold_kl(name: &str, exact: &[f32], quantised: &[f32], vocab: usize) {
    let rows = exact.chunks_exact(vocab).zip(quantised.chunks_exact(vocab)).skip(1);
    let kl = rows.map(|(p, q)| kl_nats(p, q)).sum::<f64>() / (exact.len() / vocab - 1) as f64;
    println!("{name}: KL(dequantised | quantised) {kl:.1e} nats");
    assert!(kl <= QUANTISED_KL, "{name}: KL {kl}");
}

fn kl_nats(p: &[f32], q: &[f32]) -> f64 {
    let log_softmax = |logits: &[f32]| {
        let peak = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mass: f64 = logits.iter().map(|x| f64::from(x - peak).exp()).sum();
        logits.iter().map(|x| f64::from(x - peak) - mass.ln()).collect::<Vec<_>>()
    };
    log_softmax(p).iter().zip(log_softmax(q)).map(|(p, q)| p.exp() * (p - q)).sum()
}

#[test]
fn configurations_without_a_parity_test_are_refused_by_name() {
    for case in golden::refused().unwrap() {
        let error = Model::load(&ModelSource::from(case.model.clone()), LoadOptions::default()).unwrap_err();
        let refused = matches!(error, EngineError::Unsupported { .. } | EngineError::Malformed { .. });
        assert!(refused, "{}: {error}", case.name);
        let message = error.to_string().to_lowercase();
        assert!(message.contains("config.json"), "{}: {message}", case.name);
        let named = case.must_name.iter().any(|word| message.contains(&word.to_lowercase()));
        assert!(named, "{}: `{message}` names none of {:?}", case.name, case.must_name);
    }
}

/// `models/get-models DIR` fetches them; `KVMIG_MODELS=DIR cargo test -p kvmig-tests --test golden -- --ignored`.
#[test]
#[ignore = "needs the models of models/get-models in the folder KVMIG_MODELS (500 MB)"]
fn real_gguf_models_give_transformers_answers() {
    let folder = PathBuf::from(std::env::var_os("KVMIG_MODELS").expect("KVMIG_MODELS names the folder of the models"));
    for real in golden::real_models().unwrap() {
        let location = Location::Path(folder.join(&real.model));
        let model = load(&location, Precision::Dequantised);
        let quantised = load(&location, Precision::Quantised);
        for string in &real.strings {
            let ids = model.tokenizer().encode_continuation(&string.text).unwrap();
            assert_eq!(ids, string.ids, "{}: {:?}", real.model, string.text);
        }
        for case in &real.cases {
            let answer = case.answer().unwrap();
            assert_eq!(model.tokenizer().encode_continuation(&case.prompt).unwrap(), answer.tokens, "{}", case.name);
            assert_eq!(model.tokenizer().decode(&answer.greedy).unwrap(), case.continuation, "{}", case.name);
            hold_to(&case.name, &model, &answer, &EXACT);
            hold_quantised_to(&case.name, &model, &quantised, &answer.tokens, !case.name.starts_with("smollm2"));
        }
    }
}

/// The same bound on a model whose every layer is multiplied in 8 bits. One precision at a time: 6 GB in single precision.
#[test]
#[ignore = "needs qwen25-coder-1.5b.gguf of models/get-models in the folder KVMIG_MODELS, and 8 GB of memory"]
fn a_model_quantised_throughout_keeps_to_the_bound() {
    let folder = PathBuf::from(std::env::var_os("KVMIG_MODELS").expect("KVMIG_MODELS names the folder of the models"));
    let location = Location::Path(folder.join("qwen25-coder-1.5b.gguf"));
    // A sibling's prompts: one tokenizer.
    let real = golden::real_models().unwrap().into_iter().find(|real| real.model.starts_with("qwen25")).unwrap();
    for case in &real.cases {
        let logits = |precision| {
            let model = load(&location, precision);
            let tokens = model.tokenizer().encode(&case.prompt).unwrap();
            (all_logits(&model, &tokens), model.config().vocab)
        };
        let (exact, vocab) = logits(Precision::Dequantised);
        let (quantised, _) = logits(Precision::Quantised);
        hold_kl(&case.name, &exact, &quantised, vocab);
    }
}
