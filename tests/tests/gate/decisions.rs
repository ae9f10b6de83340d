//! Which request gets which answer.

use kvmig_gate::{
    CacheFacts, Decision, Digest, Evidence, Gate, Latency, Metric, Policy, PolicySettings, Prediction, Quality,
};
use kvmig_tests::gate::{HEAD, TAIL, TOKENS, artifact, candidate, document, evidence, quality, request};

use crate::{scene, scene_with};

#[test]
fn good_evidence_is_admitted_with_its_numbers() {
    let loaded = artifact(1);
    let evidence = evidence(&loaded, 30);
    let decision = scene().gate.decide(&request(&[candidate("ridge", &loaded, &evidence)])).unwrap();
    let Decision::Migrate { permit, candidate: 0, prediction, reason } = decision else {
        panic!("refused: {}", decision.reason());
    };
    // Losses 0.001 … 0.030: mean 0.0155, and ⌈31 · 0.9⌉ = 28.
    assert!((prediction.value - 0.0155).abs() < 1e-12, "{}", prediction.value);
    let expected = Prediction { metric: "kl_nats", bound: 0.028, floor: 0.25, alpha: 0.1, n: 30, ..prediction.clone() };
    assert_eq!(prediction, expected);
    assert_eq!(permit.artifact(), loaded.artifact());
    assert_eq!(permit.hops(), 1);
    assert_eq!(
        reason.to_string(),
        "kl_nats ≤ 0.028 in 90 % of requests by 30 held-out documents of 384 to 384 tokens, within the floor 0.250; \
         8.0x quicker (scaled from the evidence, cpu)"
    );
}

#[test]
fn agreement_is_bounded_from_below() {
    let settings = PolicySettings { metric: Metric::Agreement, floor: Some(0.98), ..PolicySettings::default() };
    let loaded = artifact(1);
    let evidence = evidence(&loaded, 30);
    let ask = |settings| scene_with(settings).gate.decide(&request(&[candidate("ridge", &loaded, &evidence)])).unwrap();
    let decision = ask(settings.clone());
    assert_eq!(decision.name(), "migrate", "{}", decision.reason());
    let bound = decision.prediction().unwrap().bound;
    assert!((bound - 0.986).abs() < 1e-12, "1 − 0.028/2, found {bound}");
    assert!(decision.prediction().unwrap().value > bound);
    let refused = ask(PolicySettings { floor: Some(0.99), ..settings });
    assert_eq!((refused.name(), refused.reason().name()), ("reprefill", "bound_misses_floor"));
}

/// What is asked, for a case to spoil.
struct Case {
    settings: PolicySettings,
    evidence: Evidence,
    cache: CacheFacts,
    target: Digest,
    precision: &'static str,
    domain: Option<&'static str>,
    mismatch: Option<&'static str>,
    latency: Option<Latency<'static>>,
    candidates: usize,
}

fn ask(spoil: impl FnOnce(&mut Case)) -> (&'static str, &'static str, String) {
    let loaded = artifact(1);
    let sound = evidence(&loaded, 40);
    let asked = request(&[candidate("ridge", &loaded, &sound)]);
    let mut case = Case {
        settings: PolicySettings::default(),
        evidence: sound.clone(),
        cache: asked.cache,
        target: asked.target,
        precision: "quantised",
        domain: None,
        mismatch: None,
        latency: None,
        candidates: 1,
    };
    spoil(&mut case);
    let mut one = candidate("ridge", &loaded, &case.evidence);
    one.latency = case.latency;
    let mut asked = request(&vec![one; case.candidates]);
    (asked.cache, asked.target, asked.precision) = (case.cache, case.target, case.precision);
    (asked.domain, asked.mismatch) = (case.domain, case.mismatch);
    let gate = scene_with(case.settings).gate;
    let decision = gate.decide(&asked).unwrap();
    // Nobody has to ask to know the answer.
    let forecast = gate.policy().forecast(&asked);
    let sentence = decision.reason().to_string();
    assert_eq!((forecast.decision, forecast.reason.to_string()), (decision.name(), sentence.clone()));
    assert_eq!(forecast.prediction.as_ref(), decision.prediction());
    (decision.name(), decision.reason().name(), sentence)
}

macro_rules! cases {
    ($($name:ident: |$case:ident| $spoil:expr => $decision:literal, $reason:literal;)*) => {$(
        #[test]
        fn $name() {
            let (decision, reason, sentence) = ask(|$case| { $spoil; });
            assert_eq!((decision, reason), ($decision, $reason), "{sentence}");
        }
    )*};
}

cases! {
    // The request.
    mismatch_found_by_the_host: |c| c.mismatch = Some("tokenizer: found 49152 tokens, expected 151936")
        => "reprefill", "mismatch";
    target_of_another_pair: |c| c.target = Digest::of(b"a third model") => "reprefill", "for_another_model";
    cache_of_another_model: |c| c.cache.model = Digest::of(b"a third model") => "reprefill", "cache_of_another_model";
    cache_that_was_mapped_before: |c| c.cache.hops = 1 => "reprefill", "too_many_hops";
    cache_that_was_mapped_before_where_allowed: |c| { c.cache.hops = 1; c.settings.max_hops = 2 }
        => "migrate", "bound_meets_floor";
    hops_do_not_overflow: |c| { c.cache.hops = u32::MAX; c.settings.max_hops = u32::MAX } => "reprefill", "too_many_hops";
    prompt_of_ends_only: |c| c.cache.tokens = HEAD + TAIL => "reprefill", "nothing_to_map";
    prompt_of_nothing: |c| c.cache.tokens = 0 => "reprefill", "nothing_to_map";
    no_candidate: |c| c.candidates = 0 => "reprefill", "no_candidate";

    // Evidence that is about something else, or can't be true.
    evidence_of_another_artifact: |c| c.evidence.artifact = artifact(2).artifact()
        => "reprefill", "evidence_of_another_artifact";
    evidence_of_dequantised_models: |c| c.evidence.precision = "dequantised".to_owned()
        => "reprefill", "evidence_in_another_precision";
    models_that_are_dequantised: |c| c.precision = "dequantised" => "reprefill", "evidence_in_another_precision";
    dequantised_as_the_evidence: |c| {
        c.precision = "dequantised";
        c.evidence.precision = "dequantised".to_owned();
    } => "migrate", "bound_meets_floor";
    evidence_with_nan_kl: |c| c.evidence.documents[7].mapped.kl_nats = f64::NAN => "reprefill", "evidence_unsound";
    evidence_with_nan_control: |c| c.evidence.documents[7].no_prefix.agreement = f64::NAN
        => "reprefill", "evidence_unsound";
    evidence_with_nan_cosine: |c| c.evidence.documents[7].mapped.cosine_worst_layer = Some(f64::NAN)
        => "reprefill", "evidence_unsound";
    evidence_with_infinite_gap: |c| c.evidence.documents[7].source.nll_gap_nats = f64::INFINITY
        => "reprefill", "evidence_unsound";
    evidence_with_negative_kl: |c| c.evidence.documents[7].mapped.kl_nats = -1.0 => "reprefill", "evidence_unsound";
    evidence_with_agreement_above_one: |c| c.evidence.documents[7].mapped.agreement = 1.5
        => "reprefill", "evidence_unsound";
    evidence_over_no_tokens: |c| c.evidence.documents[7].mapped.n = 0 => "reprefill", "evidence_unsound";
    evidence_with_nan_time: |c| c.evidence.documents[7].handoff_ms = f64::NAN => "reprefill", "evidence_unsound";
    evidence_with_no_time: |c| c.evidence.documents[7].reprefill_ms = 0.0 => "reprefill", "evidence_unsound";
    evidence_counted_twice: |c| c.evidence.documents[7].id = "document 1".to_owned() => "reprefill", "evidence_unsound";
    evidence_without_a_middle: |c| c.evidence.documents[7].tokens = HEAD + TAIL => "reprefill", "evidence_unsound";

    // Too little of it.
    no_document: |c| c.evidence.documents.clear() => "reprefill", "too_little_evidence";
    one_document_too_few: |c| c.evidence.documents.truncate(29) => "reprefill", "too_little_evidence";
    just_enough_documents: |c| c.evidence.documents.truncate(30) => "migrate", "bound_meets_floor";
    min_evidence_below_what_alpha_needs: |c| { c.settings.min_evidence = 1; c.evidence.documents.truncate(8) }
        => "reprefill", "too_little_evidence";
    what_alpha_needs: |c| { c.settings.min_evidence = 1; c.evidence.documents.truncate(9) }
        => "migrate", "bound_meets_floor";
    two_candidates_share_alpha: |c| { c.settings.min_evidence = 1; c.evidence.documents.truncate(18); c.candidates = 2 }
        => "reprefill", "too_little_evidence";
    two_candidates_with_enough: |c| { c.settings.min_evidence = 1; c.evidence.documents.truncate(19); c.candidates = 2 }
        => "migrate", "bound_meets_floor";
    domain_nobody_measured: |c| c.domain = Some("law") => "reprefill", "too_little_evidence";
    domain_with_half_the_documents: |c| c.domain = Some("code") => "reprefill", "too_little_evidence";
    domain_with_enough: |c| { c.domain = Some("code"); c.settings.min_evidence = 20 } => "migrate", "bound_meets_floor";

    // Length.
    prompt_as_long_as_allowed: |c| c.cache.tokens = 8 * TOKENS => "migrate", "bound_meets_floor";
    prompt_longer_than_allowed: |c| c.cache.tokens = 8 * TOKENS + 1 => "reprefill", "length_outside_evidence";
    prompt_shorter_than_allowed: |c| c.cache.tokens = TOKENS / 8 - 1 => "reprefill", "length_outside_evidence";
    prompt_longer_under_another_policy: |c| { c.cache.tokens = 8 * TOKENS + 1; c.settings.max_extrapolation = 9.0 }
        => "migrate", "bound_meets_floor";

    // Quality.
    source_better: |c| c.evidence.documents.iter_mut().for_each(|d| d.source = quality(0.001))
        => "stay", "source_better";
    source_as_good: |c| c.evidence.documents.iter_mut().for_each(|d| d.source = d.mapped) => "stay", "source_better";
    source_better_where_that_is_allowed: |c| {
        c.settings.beats_source = false;
        c.evidence.documents.iter_mut().for_each(|d| d.source = quality(0.001))
    } => "migrate", "bound_meets_floor";
    ends_only_as_good: |c| c.evidence.documents.iter_mut().for_each(|d| d.ends_only = d.mapped)
        => "reprefill", "no_better_than_ends_only";
    ends_only_as_good_where_that_is_allowed: |c| {
        c.settings.beats_ends_only = false;
        c.evidence.documents.iter_mut().for_each(|d| d.ends_only = d.mapped)
    } => "migrate", "bound_meets_floor";
    bound_beyond_the_floor: |c| c.settings.floor = Some(0.02) => "reprefill", "bound_misses_floor";
    bound_on_the_floor: |c| c.settings.floor = Some(0.037) => "migrate", "bound_meets_floor";
    // The mean is far within the floor; one document in five is not.
    bad_tail_of_good_evidence: |c| c.evidence.documents.iter_mut().step_by(5).for_each(|d| d.mapped = quality(0.4))
        => "reprefill", "bound_misses_floor";

    // Latency.
    handoff_that_is_slow_here: |c| c.latency = Some(latency(50.0, 80.0)) => "reprefill", "too_slow";
    handoff_just_quick_enough: |c| c.latency = Some(latency(40.0, 80.0)) => "migrate", "bound_meets_floor";
    handoff_of_unknown_speed: |c| c.latency = Some(latency(f64::NAN, 80.0)) => "reprefill", "too_slow";
    handoff_in_no_time: |c| c.latency = Some(latency(0.0, 80.0)) => "reprefill", "too_slow";
    speed_that_nobody_asks_for: |c| { c.latency = Some(latency(90.0, 80.0)); c.settings.latency_factor = 0.0 }
        => "migrate", "bound_meets_floor";
    evidence_timed_on_another_backend: |c| c.evidence.backend = "vulkan".to_owned()
        => "reprefill", "latency_unmeasured";
    measured_here_whatever_the_evidence: |c| {
        c.evidence.backend = "vulkan".to_owned();
        c.latency = Some(latency(10.0, 80.0));
    } => "migrate", "bound_meets_floor";
    another_backend_where_speed_is_not_asked_for: |c| {
        c.evidence.backend = "vulkan".to_owned();
        c.settings.latency_factor = 0.0;
    } => "migrate", "bound_meets_floor";
    // 36 of 60 tokens are computed natively either way.
    prompt_too_short_to_gain: |c| c.cache.tokens = 60 => "reprefill", "too_slow";
}

fn latency(handoff_ms: f64, reprefill_ms: f64) -> Latency<'static> {
    Latency { handoff_ms, reprefill_ms, origin: "measured" }
}

#[test]
fn only_documents_of_the_length_bucket_count_where_there_are_enough() {
    let loaded = artifact(1);
    let mut evidence = evidence(&loaded, 60);
    for (i, document) in evidence.documents.iter_mut().enumerate() {
        let long = i < 30;
        document.tokens = if long { 2000 } else { 100 };
        document.mapped = quality(if long { 0.3 } else { 0.01 });
    }
    let gate = scene().gate;
    let ask = |tokens| {
        let mut asked = request(&[candidate("ridge", &loaded, &evidence)]);
        asked.cache.tokens = tokens;
        asked.candidates[0].latency = Some(latency(10.0, 80.0));
        let decision = gate.decide(&asked).unwrap();
        (decision.reason().name(), decision.prediction().unwrap().n)
    };
    assert_eq!(ask(150), ("bound_meets_floor", 30));
    assert_eq!(ask(200), ("bound_meets_floor", 30), "twice as long is in the bucket");
    assert_eq!(ask(1000), ("bound_misses_floor", 30), "half as long is in the bucket");
    assert_eq!(ask(500), ("bound_misses_floor", 60), "between the buckets every document counts");
}

#[test]
fn a_named_domain_is_judged_by_its_own_documents() {
    let loaded = artifact(1);
    let mut evidence = evidence(&loaded, 60);
    evidence.documents.iter_mut().filter(|d| d.domain == "code").for_each(|d| d.source = quality(0.001));
    let gate = scene().gate;
    let ask = |domain| {
        let mut asked = request(&[candidate("ridge", &loaded, &evidence)]);
        asked.domain = domain;
        gate.decide(&asked).unwrap().name()
    };
    assert_eq!(ask(Some("code")), "stay", "on code the source is the better choice");
    assert_eq!(ask(Some("prose")), "migrate");
    assert_eq!(ask(None), "migrate");
}

#[test]
fn of_two_admitted_candidates_the_quicker_runs() {
    let (ridge, mlp) = (artifact(1), artifact(2));
    let (ridge_evidence, mut mlp_evidence) = (evidence(&ridge, 30), evidence(&mlp, 30));
    mlp_evidence.documents.iter_mut().for_each(|d| d.handoff_ms = 9.0);
    let gate = scene().gate;
    let chosen = |candidates: &[_]| match gate.decide(&request(candidates)).unwrap() {
        Decision::Migrate { candidate, permit, .. } => (candidate, permit.artifact()),
        refused => panic!("refused: {}", refused.reason()),
    };
    let (a, b) = (candidate("ridge", &ridge, &ridge_evidence), candidate("mlp", &mlp, &mlp_evidence));
    assert_eq!(chosen(&[a, b]), (1, mlp.artifact()));
    assert_eq!(chosen(&[b, a]), (0, mlp.artifact()));

    // Once the quicker one no longer qualifies, the other runs.
    let mut spoilt = mlp_evidence.clone();
    spoilt.documents.iter_mut().for_each(|d| d.mapped = quality(0.4));
    assert_eq!(chosen(&[candidate("mlp", &mlp, &spoilt), a]), (1, ridge.artifact()));
}

#[test]
fn of_refused_candidates_the_one_that_came_furthest_gives_the_reason() {
    let loaded = artifact(1);
    let (mut slow, few) = (evidence(&loaded, 30), evidence(&loaded, 3));
    slow.documents.iter_mut().for_each(|d| d.handoff_ms = d.reprefill_ms);
    let bare = kvmig_gate::Candidate { evidence: None, ..candidate("mlp", &loaded, &few) };
    let asked = request(&[bare, candidate("ridge", &loaded, &slow), candidate("head-matched", &loaded, &few)]);
    let scene = scene();
    let decision = scene.gate.decide(&asked).unwrap();
    assert_eq!(decision.reason().name(), "too_slow");
    assert_eq!(&scene.gate.policy().forecast(&asked).reason, decision.reason());
    let row = scene.gate.ticket(decision.ticket()).unwrap();
    assert_eq!(row.mapper.as_deref(), Some("ridge"));
    let reasons: Vec<_> = (0..3).map(|i| row.candidates[i]["reason"].as_str().unwrap()).collect();
    assert_eq!(reasons, ["no_evidence", "too_slow", "too_little_evidence"], "the ledger has every verdict");
}

#[test]
fn sentences_name_the_numbers_and_the_mend() {
    let sentence = |spoil: fn(&mut Case)| ask(spoil).2;
    assert_eq!(
        sentence(|c| c.domain = Some("code")),
        "20 held-out documents of domain `code`, a bound needs 30: measure the pair on more of them"
    );
    assert_eq!(
        sentence(|c| c.evidence.documents[7].mapped.kl_nats = f64::NAN),
        "the evidence is unsound: document `document 8`: mapped.kl_nats is NaN; measure the pair again"
    );
    assert_eq!(
        sentence(|c| c.latency = Some(latency(50.0, 80.0))),
        "the handoff takes 50 ms and the re-prefill 80 ms (measured): 1.6x, the policy asks for 2.0x"
    );
    assert_eq!(
        sentence(|c| (c.cache.tokens, c.settings.floor) = (2048, Some(0.01))),
        "kl_nats ≤ 0.037 in 90 % of requests by 40 held-out documents of 384 to 384 tokens (the prompt is 5.3x longer), \
         beyond the floor 0.010"
    );
}

#[test]
fn evidence_with_an_unknown_field_is_not_read() {
    let text = serde_json::to_string(&evidence(&artifact(1), 2)).unwrap();
    let back: Evidence = serde_json::from_str(&text).unwrap();
    assert_eq!(back, evidence(&artifact(1), 2));
    for (field, with) in [(r#""seed":"#, r#""sed":1,"seed":"#), (r#""kl_nats":"#, r#""kl":0,"kl_nats":"#)] {
        assert!(text.contains(field));
        let error = serde_json::from_str::<Evidence>(&text.replacen(field, with, 1)).unwrap_err();
        assert!(error.to_string().contains("unknown field"), "{error}");
    }
    // JSON has no NaN; what writers put in its place is no number either.
    let with_null = serde_json::to_string(&Quality { kl_nats: f64::NAN, ..quality(0.0) }).unwrap();
    assert!(serde_json::from_str::<Quality>(&with_null).is_err(), "{with_null}");
}

#[test]
fn two_gates_of_one_policy_decide_alike() {
    let loaded = artifact(1);
    let mut spoilt = evidence(&loaded, 30);
    spoilt.documents.push(kvmig_gate::DocumentOutcome { mapped: quality(9.0), ..document(99) });
    let decide = |gate: &Gate| {
        let decision = gate.decide(&request(&[candidate("ridge", &loaded, &spoilt)])).unwrap();
        (decision.name(), decision.reason().clone(), decision.prediction().cloned())
    };
    assert_eq!(decide(&scene().gate), decide(&scene().gate));
    assert_eq!(Policy::default().digest(), scene().gate.policy().digest());
}
