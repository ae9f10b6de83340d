//! Whatever becomes of a migration, the answer is the target's own or says that it is not.

use kvmig::{
    bundled::Member,
    engine::{LoadOptions, Model, ModelSource, PrefillOptions, Sampling},
    migrate::{Answered, Ask, Event, HandoffError, Offer, Setup, Store, Trouble, run},
    pair::Pair,
};
use kvmig_gate::{State, TicketFilter, TicketRow};
use rusqlite::Connection;

use crate::bench::{Recipe, Scene, load, prompt};

const GENERATE: usize = 24;

/// An answer: the bits of the logits behind the prompt, and the text.
type Answer = (Vec<u32>, String);

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

/// What the model says by itself: prefill and greedy choice, without any of the machinery of a handoff.
fn own(model: &Model, ids: &[u32]) -> Answer {
    let mut session = model.session(model.prefill(ids, PrefillOptions::default()).unwrap()).unwrap();
    let logits = bits(session.logits());
    let mut stream = model.tokenizer().stream();
    let mut text = String::new();
    for token in session.greedy(GENERATE).unwrap().into_iter().filter(|&token| !model.is_eos(token)) {
        text.push_str(&stream.push(token).unwrap());
    }
    text.push_str(&stream.finish().unwrap());
    (logits, text)
}

/// The handoff's answer; `ready` is called when the target stands behind the prompt.
fn handed_over(
    scene: &Scene,
    model: &Model,
    pair: &Pair,
    ids: &[u32],
    ready: &mut (dyn FnMut() + Send),
) -> (Answered, Answer) {
    let offer = Offer::of(pair, &scene.device).unwrap();
    let Scene { gate, device, .. } = scene;
    let store = Store::new(device, None);
    let offers = std::slice::from_ref(&offer);
    let setup = Setup { gate, source: model, target: model, pair: pair.name(), offers, store: &store, load_ms: 0.0 };
    let ask = Ask { tokens: ids, domain: None, generate: GENERATE, sampling: Sampling::Greedy, audit: false };
    let (mut behind, mut text) = (Vec::new(), String::new());
    let answered = run(&setup, ask, &mut |event| {
        match event {
            Event::Ready { logits, .. } => {
                behind = bits(logits);
                ready();
            }
            Event::Text(more) => text.push_str(more),
            Event::Prefilled { .. } | Event::Reprefilled { .. } | Event::Auditing => {}
        }
        true
    })
    .unwrap();
    assert_eq!(text, answered.record.text);
    (answered, (behind, text))
}

/// Answers without a migration are those of never having tried, to the bit.
fn as_if_nothing_had_been_tried(pair: impl FnOnce(&Model) -> Pair, reason: &str, states: &[State]) {
    let model = load(Member::Medium);
    let (scene, pair, ids) = (Scene::new(), pair(&model), prompt(&model, 200));
    let (Answered { record, stopped, trouble, .. }, answer) = handed_over(&scene, &model, &pair, &ids, &mut || {});
    assert_eq!((record.decision, record.reason.as_str()), ("reprefill", reason), "{}", record.reason_text);
    assert_eq!((record.tokens.mapped, record.hops, stopped), (0, 0, false));
    assert!(trouble.is_none(), "{trouble:?}");
    assert!(answer == own(&model, &ids), "an answer after `{reason}` is not the model's own");
    let rows = scene.gate.tickets(&TicketFilter::default()).unwrap();
    assert_eq!(rows.iter().map(|row| row.state).collect::<Vec<_>>(), states);
    assert_eq!(rows[0].record.as_ref().unwrap()["text"], record.text);
}

/// A pair without evidence.
fn unmeasured(model: &Model) -> Pair {
    let folder = tempfile::tempdir().unwrap();
    Recipe::identity(4, 8).draft(model).write(&folder.path().join("pair"), None, &[]).unwrap()
}

#[test]
fn after_a_refusal() {
    as_if_nothing_had_been_tried(unmeasured, "no_evidence", &[State::Refused]);
}

/// The guest asks for weights of another shape than there are.
#[test]
fn after_a_guest_that_goes_wrong() {
    let recipe = Recipe { narrow: true, ..Recipe::identity(4, 8) };
    as_if_nothing_had_been_tried(|model| recipe.admitted(model), "module_failed", &[State::Failed]);
}

/// Weights that were poisoned, though each is finite: the mapped values overflow.
#[test]
fn after_a_map_to_infinity() {
    let recipe = Recipe { values: f32::MAX, ..Recipe::identity(4, 8) };
    as_if_nothing_had_been_tried(|model| recipe.admitted(model), "device_failed", &[State::Failed]);
}

/// Every mapped value is finite, and the target's logits behind them are not.
#[test]
fn after_a_map_that_the_target_can_not_go_on_from() {
    let recipe = Recipe { values: 1e37, ..Recipe::identity(4, 8) };
    as_if_nothing_had_been_tried(|model| recipe.admitted(model), "resume_failed", &[State::Failed]);
}

#[test]
fn a_migrated_answer_says_so() {
    let model = load(Member::Medium);
    let (scene, pair, ids) = (Scene::new(), Recipe::identity(4, 8).admitted(&model), prompt(&model, 200));
    let (Answered { record, trouble, .. }, (_, text)) = handed_over(&scene, &model, &pair, &ids, &mut || {});
    assert_eq!((record.decision, record.hops), ("migrate", 1), "{}", record.reason_text);
    let tokens = record.tokens;
    assert_eq!((tokens.native_head, tokens.mapped, tokens.native_tail), (4, 188, 8));
    assert!(trouble.is_none(), "{trouble:?}");
    assert_eq!(text, own(&model, &ids).1, "the map is the identity");
}

/// What a request that got no migration shows of one when it is audited: quality and tickets, newest first.
fn audited(pair: impl FnOnce(&Model) -> Pair, tokens: usize) -> (Answered, Vec<TicketRow>) {
    let model = load(Member::Medium);
    let (scene, pair, ids) = (Scene::new(), pair(&model), prompt(&model, tokens));
    let offer = Offer::of(&pair, &scene.device).unwrap();
    let Scene { gate, device, .. } = &scene;
    let store = Store::new(device, None);
    let offers = std::slice::from_ref(&offer);
    let setup = Setup { gate, source: &model, target: &model, pair: pair.name(), offers, store: &store, load_ms: 0.0 };
    let ask = Ask { tokens: &ids, domain: None, generate: GENERATE, sampling: Sampling::Greedy, audit: true };
    let answered = run(&setup, ask, &mut |_| true).unwrap();
    assert_eq!(answered.record.text, own(&model, &ids).1, "an audit changes no answer");
    let rows = gate.tickets(&TicketFilter::default()).unwrap();
    (answered, rows)
}

/// Refused and staying alike: the map is tried, under a ticket of its own, and measured.
#[test]
fn what_was_refused_can_be_audited() {
    let stays = |model: &Model| Recipe::identity(4, 8).judged(model, 1e-6);
    for (pair, decision) in [(&unmeasured as &dyn Fn(&Model) -> Pair, "reprefill"), (&stays, "stay")] {
        let (Answered { record, nothing_to_audit, trouble, .. }, rows) = audited(pair, 200);
        assert_eq!((record.decision, nothing_to_audit), (decision, false), "{}", record.reason_text);
        assert!(trouble.is_none(), "{trouble:?}");
        let realised = record.realised.expect("the trial was measured");
        assert!(realised.kl_nats < 1e-3 && record.ms.reprefill.is_some(), "the map is the identity: {realised:?}");
        assert_eq!(rows.iter().map(|row| row.state).collect::<Vec<_>>(), [State::Settled, State::Refused]);
        assert_eq!(record.trial.as_deref(), Some(rows[0].ticket.as_str()));
        assert_eq!(rows[0].realised.as_ref().map(|quality| quality.kl_nats), Some(realised.kl_nats));
    }
}

#[test]
fn where_nothing_can_be_mapped_an_audit_says_so() {
    let broken = |model: &Model| Recipe { values: f32::MAX, ..Recipe::identity(4, 8) }.admitted(model);
    for (pair, tokens, state) in
        [(&unmeasured as &dyn Fn(&Model) -> Pair, 10, State::Refused), (&broken, 200, State::Failed)]
    {
        let (Answered { record, nothing_to_audit, trouble, .. }, rows) = audited(pair, tokens);
        assert!(nothing_to_audit && record.realised.is_none() && record.trial.is_none(), "{record:?}");
        assert!(trouble.is_none(), "{trouble:?}");
        assert_eq!(rows.iter().map(|row| row.state).collect::<Vec<_>>(), [state]);
    }
}

/// The prompt's tokens would be nonsense to the target, whatever way it gets them.
#[test]
fn models_of_two_tokenizers_are_refused_before_anything_runs() {
    let source = load(Member::Medium);
    let ModelSource::Embedded { name, config, weights, tokenizer, .. } = Member::Medium.source() else {
        panic!("the family is embedded")
    };
    let silent = ModelSource::Embedded { name, config, weights, tokenizer, tokenizer_config: None };
    let target = Model::load(&silent, LoadOptions::default()).unwrap();
    let (scene, pair) = (Scene::new(), Recipe::identity(4, 8).admitted(&source));
    let offer = Offer::of(&pair, &scene.device).unwrap();
    let Scene { gate, device, .. } = &scene;
    let store = Store::new(device, None);
    let offers = std::slice::from_ref(&offer);
    let setup =
        Setup { gate, source: &source, target: &target, pair: pair.name(), offers, store: &store, load_ms: 0.0 };
    let ids = prompt(&source, 200);
    let ask = Ask { tokens: &ids, domain: None, generate: 1, sampling: Sampling::Greedy, audit: false };
    let error = run(&setup, ask, &mut |event| panic!("{event:?}")).unwrap_err();
    assert!(matches!(error, HandoffError::Tokenizers(_)), "{error}");
    let message = error.to_string();
    assert!(
        message.contains("tokenizer.json") && message.contains("found tokens [], expected tokens [0]"),
        "{message}"
    );
    assert!(gate.tickets(&TicketFilter::default()).unwrap().is_empty());
}

/// A caller that says no to one event.
fn stopped_at(pair: &Pair, model: &Model, scene: &Scene, at: fn(&Event<'_>) -> bool) -> Result<Answered, HandoffError> {
    let (offer, ids) = (Offer::of(pair, &scene.device).unwrap(), prompt(model, 700));
    let Scene { gate, device, .. } = scene;
    let store = Store::new(device, None);
    let offers = std::slice::from_ref(&offer);
    let setup = Setup { gate, source: model, target: model, pair: pair.name(), offers, store: &store, load_ms: 0.0 };
    let ask = Ask { tokens: &ids, domain: None, generate: GENERATE, sampling: Sampling::Greedy, audit: true };
    run(&setup, ask, &mut |event| !at(&event))
}

#[test]
fn who_stops_leaves_nothing_open() {
    let model = load(Member::Medium);
    let (whole, broken) = (Recipe::identity(4, 8), Recipe { values: f32::MAX, ..Recipe::identity(4, 8) });
    let states = |scene: &Scene| -> Vec<State> {
        scene.gate.tickets(&TicketFilter::default()).unwrap().iter().map(|row| row.state).collect()
    };

    let scene = Scene::new();
    let error =
        stopped_at(&whole.admitted(&model), &model, &scene, |e| matches!(e, Event::Prefilled { .. })).unwrap_err();
    assert_eq!(
        error.to_string(),
        "stopped in the source's prefill after 512 of 700 tokens, before anything was decided"
    );
    assert_eq!(states(&scene), []);

    let error =
        stopped_at(&broken.admitted(&model), &model, &scene, |e| matches!(e, Event::Reprefilled { .. })).unwrap_err();
    assert!(matches!(error, HandoffError::Stopped { model: "target", ticket: Some(_), .. }), "{error}");
    assert_eq!(states(&scene), [State::Failed]);

    for at in [|e: &Event<'_>| matches!(e, Event::Ready { .. }), |e: &Event<'_>| matches!(e, Event::Text(_))] {
        let scene = Scene::new();
        let Answered { record, stopped, trouble, .. } =
            stopped_at(&whole.admitted(&model), &model, &scene, at).unwrap();
        assert!(stopped && record.realised.is_none() && trouble.is_none(), "{trouble:?}");
        assert!(record.tokens.generated <= 1);
        assert_eq!(states(&scene), [State::Unaudited]);
        assert!(scene.gate.tickets(&TicketFilter::default()).unwrap()[0].record.is_some());
    }
}

/// Stages add up to the whole, and what they leave of it has a name.
#[test]
fn the_stages_sum_to_the_handoff() {
    let model = load(Member::Medium);
    for (values, decision) in [(1.0, "migrate"), (f32::MAX, "reprefill"), (1e37, "reprefill")] {
        let (scene, ids) = (Scene::new(), prompt(&model, 200));
        let pair = Recipe { values, ..Recipe::identity(4, 8) }.admitted(&model);
        let (Answered { record, .. }, _) = handed_over(&scene, &model, &pair, &ids, &mut || {});
        assert_eq!(record.decision, decision);
        let ms = record.ms;
        let stages =
            [ms.gate, ms.weights, ms.module, ms.upload, ms.map, ms.readback, ms.install, ms.native_ends, ms.other];
        let sum = stages.iter().sum::<f64>() + ms.reprefill.unwrap_or(0.0);
        // The device adds its three times up chunk by chunk, each rounded to nanoseconds.
        assert!((sum - ms.handoff).abs() < 1e-2, "{sum} of {}: {ms:?}", ms.handoff);
        assert!(stages.iter().all(|&ms| ms >= 0.0));
    }
}

/// Nothing can be written into the ledger from here on.
fn break_ledger(scene: &Scene, condition: &str) {
    let sql = format!(
        "CREATE TRIGGER broken BEFORE UPDATE ON tickets {condition} BEGIN SELECT RAISE (ABORT, 'the disk is full'); END"
    );
    Connection::open(&scene.ledger).unwrap().execute_batch(&sql).unwrap();
}

/// The answer comes first; that the ledger does not know of it is said after it.
#[test]
fn a_ledger_that_fails_after_mapping_does_not_keep_the_answer() {
    let model = load(Member::Medium);
    let (scene, pair, ids) = (Scene::new(), Recipe::identity(4, 8).admitted(&model), prompt(&model, 200));
    let mut ready = || break_ledger(&scene, "");
    let (Answered { record, trouble, .. }, (_, text)) = handed_over(&scene, &model, &pair, &ids, &mut ready);
    assert_eq!((record.decision, record.tokens.generated), ("migrate", GENERATE));
    assert_eq!(text, own(&model, &ids).1);
    let trouble = trouble.expect("the ledger could not be written");
    assert!(matches!(trouble, Trouble::Unrecorded(_)), "{trouble}");
    assert!(trouble.to_string().contains("the disk is full"), "{trouble}");
}

/// The mapper fails, and the ledger can't be told.
#[test]
fn a_ledger_that_fails_with_the_mapper_does_not_keep_the_answer() {
    for values in [f32::MAX, 1e37] {
        let model = load(Member::Medium);
        let pair = Recipe { values, ..Recipe::identity(4, 8) }.admitted(&model);
        let (scene, ids) = (Scene::new(), prompt(&model, 200));
        break_ledger(&scene, "WHEN NEW.state = 'failed'");
        let (Answered { record, .. }, answer) = handed_over(&scene, &model, &pair, &ids, &mut || {});
        assert_eq!(record.decision, "reprefill");
        assert!(answer == own(&model, &ids));
        let row = &scene.gate.tickets(&TicketFilter::default()).unwrap()[0];
        assert_eq!(row.state, State::Abandoned, "nobody could say what became of it");
    }
}
