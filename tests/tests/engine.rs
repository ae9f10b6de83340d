//! The engine on the bundled family: one forward pass, reached by every way into it, gives one answer.

use std::{ops::ControlFlow, path::Path};

use kvmig::{
    cache::{Elem, KvCache},
    engine::{
        EngineError, LoadOptions, Model, ModelSource, Observer, PrefillOptions, Progress, Sampler, Sampling,
        SessionCache,
    },
};

fn load(member: &str) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../host/assets/family").join(member);
    Model::load(&ModelSource::from(folder), LoadOptions::default()).unwrap()
}

fn prompt(model: &Model, tokens: usize) -> Vec<u32> {
    let text = "The old lighthouse keeper counted 12 ships that evening, and wrote each of them down in his book. ";
    let mut ids = model.tokenizer().encode(&text.repeat(tokens / 10 + 1)).unwrap();
    ids.truncate(tokens);
    ids
}

fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Largest difference of the filled slots' keys and values.
fn cache_difference(a: &KvCache, b: &KvCache) -> f32 {
    assert_eq!((a.tokens(), a.positions()), (b.tokens(), b.positions()));
    let layout = a.layout().clone();
    let mut worst = 0.0f32;
    for layer in 0..layout.layers {
        for head in 0..layout.kv_heads {
            for keys in [true, false] {
                let read = |cache: &KvCache| {
                    let kv = cache.planes().layer(layer);
                    let mut rows = vec![0.0; cache.len() * layout.head_dim];
                    if keys { &kv.k } else { &kv.v }.read(cache.planes().offset(head, 0), &mut rows);
                    rows
                };
                worst = worst.max(max_difference(&read(a), &read(b)));
            }
        }
    }
    worst
}

/// f32 sums over at most 512 terms, in an order that depends on the batch, through 8 layers: 1e-4 is some ten times what is
/// seen, and a hundredth of what one wrong position costs.
const SAME: f32 = 1e-4;

#[test]
fn chunks_of_any_size_give_one_cache() {
    let model = load("large");
    let tokens = prompt(&model, 300);
    let whole = model.prefill(&tokens, PrefillOptions { chunk: 512, ..Default::default() }).unwrap();
    for chunk in [1, 7, 128, 299] {
        let cut = model.prefill(&tokens, PrefillOptions { chunk, ..Default::default() }).unwrap();
        assert!(max_difference(&whole.logits, &cut.logits) < SAME, "logits, chunk {chunk}");
        assert!(cache_difference(&whole.cache, &cut.cache) < SAME, "cache, chunk {chunk}");
    }
}

#[test]
fn a_step_is_a_prefill_of_one_more_token() {
    let model = load("medium");
    let tokens = prompt(&model, 190);
    // Room for one token only: the cache has to grow twice.
    let prefilled = model.prefill(&tokens[..20], PrefillOptions { room: 1, ..Default::default() }).unwrap();
    let mut session = model.session(prefilled).unwrap();
    for &token in &tokens[20..] {
        session.step(token).unwrap();
    }
    let whole = model.prefill(&tokens, PrefillOptions::default()).unwrap();
    assert!(max_difference(session.logits(), &whole.logits) < SAME);
    let SessionCache::Native(cache) = session.into_cache() else { panic!("a native cache became a mapped one") };
    assert!(cache_difference(&cache, &whole.cache) < SAME);
}

/// What the gate decided on one cache must not hold for another, nor for what a session made of it.
#[test]
fn a_cache_has_a_number_of_its_own() {
    let model = load("medium");
    let tokens = prompt(&model, 20);
    let prefill = || model.prefill(&tokens, PrefillOptions::default()).unwrap();
    let (one, other) = (prefill(), prefill());
    let before = one.cache.serial();
    assert_ne!(before, other.cache.serial());
    let SessionCache::Native(after) = model.session(one).unwrap().into_cache() else { panic!("it was native") };
    assert!(after.serial() != before && after.serial() != other.cache.serial());
}

#[test]
fn resuming_a_cache_recovers_its_logits() {
    let model = load("medium");
    let tokens = prompt(&model, 50);
    let prefilled = model.prefill(&tokens, PrefillOptions::default()).unwrap();
    let session = model.resume(prefilled.cache).unwrap();
    assert!(max_difference(session.logits(), &prefilled.logits) < SAME);
}

#[test]
fn scoring_is_stepping_without_leaving_the_prefix() {
    let model = load("large");
    let tokens = prompt(&model, 120);
    let session = model.session(model.prefill(&tokens[..100], PrefillOptions::default()).unwrap()).unwrap();
    let other: Vec<u32> = tokens[..15].iter().rev().copied().collect();
    let long: Vec<u32> = tokens.iter().cycle().take(400).copied().collect();
    let continuations: [&[u32]; 5] = [&tokens[100..], &other, &[], &other[..1], &long];
    let scored = session.score(&continuations).unwrap();
    assert_eq!(session.tokens(), &tokens[..100]);
    let log_probs: Vec<_> = scored.iter().map(|scored| scored.log_probs.clone()).collect();
    assert_eq!(session.log_probs(&continuations).unwrap(), log_probs);
    for (continuation, scored) in continuations.iter().zip(&scored) {
        assert_eq!(scored.log_probs.len(), continuation.len());
        let mut stepped = model.session(model.prefill(&tokens[..100], PrefillOptions::default()).unwrap()).unwrap();
        for (row, &token) in scored.logits.chunks_exact(model.config().vocab).zip(*continuation) {
            assert!(max_difference(row, stepped.logits()) < SAME);
            stepped.step(token).unwrap();
        }
    }
}

#[test]
fn ends_that_meet_are_the_whole_prompt_and_a_dropped_middle_changes_the_answer() {
    let model = load("large");
    let tokens = prompt(&model, 80);
    let whole = model.prefill(&tokens, PrefillOptions::default()).unwrap();
    let all = model.ends_only(&tokens, 30, 50, Elem::F32).unwrap();
    assert!(max_difference(all.logits(), &whole.logits) < SAME);
    let ends = model.ends_only(&tokens, 4, 10, Elem::F32).unwrap();
    assert_eq!(ends.positions(), (0..4).chain(70..80).collect::<Vec<u32>>());
    assert!(max_difference(ends.logits(), &whole.logits) > 100.0 * SAME);
}

#[test]
fn a_half_precision_cache_is_close_to_a_single_precision_one() {
    let model = load("large");
    let tokens = prompt(&model, 200);
    let single = model.prefill(&tokens, PrefillOptions::default()).unwrap();
    let half = model.prefill(&tokens, PrefillOptions { elem: Elem::F16, ..Default::default() }).unwrap();
    assert_eq!(half.cache.layout().elem, Elem::F16);
    // Keys and values are rounded to 11 bits; logits are sums over them.
    assert!(max_difference(&single.logits, &half.logits) < 0.05);
    assert!(cache_difference(&single.cache, &half.cache) < 0.05);
}

#[test]
fn another_models_cache_is_refused() {
    let (large, medium, code) = (load("large"), load("medium"), load("medium-code"));
    assert_eq!(large.tokenizer().tokenizer_digest(), medium.tokenizer().tokenizer_digest());
    // Of the same shape, with other weights: only the digest tells.
    assert_eq!(medium.layout(), code.layout());
    let prefilled = medium.prefill(&prompt(&medium, 10), PrefillOptions::default()).unwrap();
    let error = code.resume(prefilled.cache).unwrap_err();
    let EngineError::ForeignCache { found, expected } = error else { panic!("{error}") };
    assert_eq!((found, expected), (medium.digest(), code.digest()));
}

#[test]
fn prompts_that_no_model_could_take_are_refused() {
    let model = load("medium");
    let prefill = |tokens: &[u32]| model.prefill(tokens, PrefillOptions::default()).unwrap_err();
    assert!(matches!(prefill(&[]), EngineError::EmptyPrompt));
    assert!(matches!(prefill(&[1, 4096]), EngineError::TokenRange { found: 4096, index: 1, expected: 4096 }));
    assert!(matches!(prefill(&[1; 2049]), EngineError::TooLong { found: 2049, expected: 2048 }));
}

#[test]
fn a_prefill_stops_between_chunks() {
    let model = load("medium");
    let tokens = prompt(&model, 100);
    let mut seen = Vec::new();
    let mut progress = |progress: Progress| {
        seen.push(progress.done);
        if progress.done >= 60 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let options = PrefillOptions { chunk: 30, progress: Some(&mut progress), ..Default::default() };
    let error = model.prefill(&tokens, options).unwrap_err();
    assert!(matches!(error, EngineError::Cancelled { done: 60, total: 100 }));
    assert_eq!(seen, [30, 60]);
}

#[test]
fn an_observer_sees_what_attention_makes_of_the_cache() {
    #[derive(Default)]
    struct Seen {
        layers: Vec<usize>,
        queries: usize,
        outputs: Vec<Vec<f32>>,
    }
    impl Observer for Seen {
        fn layer(&mut self, layer: usize, positions: &[u32], queries: &[f32], outputs: &[f32]) {
            assert_eq!(positions, (0..12).collect::<Vec<u32>>());
            self.layers.push(layer);
            self.queries = queries.len();
            self.outputs.push(outputs.to_vec());
        }
    }
    let model = load("medium");
    let tokens = prompt(&model, 12);
    let mut seen = Seen::default();
    let options = PrefillOptions { observer: Some(&mut seen), ..Default::default() };
    let observed = model.prefill(&tokens, options).unwrap();
    let plain = model.prefill(&tokens, PrefillOptions::default()).unwrap();
    assert!(max_difference(&observed.logits, &plain.logits) < SAME);
    let config = model.config();
    assert_eq!(seen.layers, (0..config.layers).collect::<Vec<_>>());
    assert_eq!(seen.queries, 12 * config.heads * config.head_dim);
    // The first row sees one slot: its output is that slot's value, whatever the query.
    let planes = observed.cache.planes();
    for (layer, outputs) in seen.outputs.iter().enumerate() {
        for head in 0..config.heads {
            let mut value = vec![0.0; config.head_dim];
            planes.layer(layer).v.read(planes.offset(head * config.kv_heads / config.heads, 0), &mut value);
            assert!(max_difference(&value, &outputs[head * config.head_dim..][..config.head_dim]) < 1e-6);
        }
    }
}

#[test]
fn text_streams_out_whole_characters_only() {
    let model = load("medium");
    let tokenizer = model.tokenizer();
    let text = "naïve — “quoted” 🙂 你好 end";
    let tokens = tokenizer.encode_continuation(text).unwrap();
    assert_eq!(tokenizer.decode(&tokens).unwrap(), text);
    let mut stream = tokenizer.stream();
    let mut pieces = Vec::new();
    for token in tokens {
        pieces.push(stream.push(token).unwrap());
    }
    pieces.push(stream.finish().unwrap());
    assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')), "{pieces:?}");
    assert_eq!(pieces.concat(), text);
}

#[test]
fn sampled_text_depends_on_the_seed_alone() {
    let model = load("medium");
    let run = |seed| {
        let prefilled = model.prefill(&prompt(&model, 30), PrefillOptions::default()).unwrap();
        let mut session = model.session(prefilled).unwrap();
        let mut sampler = Sampler::new(Sampling::TopP { temperature: 1.0, top_p: 0.95, seed });
        let mut tokens = Vec::new();
        for _ in 0..24 {
            let token = sampler.next(session.logits());
            tokens.push(token);
            session.step(token).unwrap();
        }
        tokens
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}
