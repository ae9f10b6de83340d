//! Weights on the device: read and hashed when they run, given up under a budget, and what a cold handoff says of it.

use std::{fs, path::Path, slice, sync::Arc, thread};

use kvmig::{
    bundled::Member,
    device::{Device, DeviceChoice},
    engine::{Model, Sampling},
    migrate::{Answered, Ask, MapperError, Offer, Setup, Store, run},
    pair::{Cards, Stored, WEIGHTS},
};
use kvmig_gate::{Digest, State, TicketFilter};

use crate::bench::{Recipe, Scene, load, prompt};

/// A pair that is stored in `folder/name`; another head makes it another artifact of the same size.
fn stored(model: &Model, folder: &Path, name: &str, recipe: Recipe) -> Stored {
    let folder = folder.join(name);
    recipe.written(model, 0.7, 10.0, &folder);
    Stored::open(&folder).unwrap()
}

fn offers<const N: usize>(model: &Model, folder: &Path, device: &Device) -> [Offer; N] {
    std::array::from_fn(|i| {
        let stored = stored(model, folder, &format!("pair-{i}"), Recipe::identity(i, 8));
        Offer::new(&stored, device).unwrap()
    })
}

fn artifacts(store: &Store<'_>) -> Vec<Digest> {
    store.resident().into_iter().map(|(artifact, _)| artifact).collect()
}

#[test]
fn the_longest_unused_is_given_up() {
    let (model, folder) = (load(Member::Medium), tempfile::tempdir().unwrap());
    let device = Device::open(&DeviceChoice::Cpu).unwrap();
    let [a, b, c] = offers(&model, folder.path(), &device);
    let bytes = Store::new(&device, None).get(&a).unwrap().page_in().bytes;
    assert!(bytes > 0);

    let store = Store::new(&device, Some(2 * bytes));
    let first = Arc::downgrade(&store.get(&a).unwrap());
    let second = Arc::downgrade(&store.get(&b).unwrap());
    store.get(&a).unwrap();
    store.get(&c).unwrap();
    assert_eq!(artifacts(&store), [a.claim().artifact, c.claim().artifact]);
    assert_eq!(store.resident().iter().map(|(_, bytes)| bytes).sum::<u64>(), 2 * bytes);
    assert!(second.upgrade().is_none() && first.upgrade().is_some(), "its memory is given back");

    // Without a budget, everything stays.
    let store = Store::new(&device, None);
    for offer in [&a, &b, &c] {
        store.get(offer).unwrap();
    }
    assert_eq!(store.resident().len(), 3);
}

#[test]
fn what_is_in_use_is_not_given_up() {
    let (model, folder) = (load(Member::Medium), tempfile::tempdir().unwrap());
    let device = Device::open(&DeviceChoice::Cpu).unwrap();
    let [a, b] = offers(&model, folder.path(), &device);
    let bytes = Store::new(&device, None).get(&a).unwrap().page_in().bytes;
    let store = Store::new(&device, Some(bytes));
    let used = store.get(&a).unwrap();
    let error = store.get(&b).unwrap_err();
    assert!(matches!(error, MapperError::BudgetInUse { held, .. } if held == bytes), "{error}");
    assert!(error.to_string().contains("raise --device-budget"), "{error}");
    assert_eq!(artifacts(&store), [a.claim().artifact]);
    drop(used);
    store.get(&b).unwrap();
    assert_eq!(artifacts(&store), [b.claim().artifact]);
}

#[test]
fn a_pair_larger_than_the_budget_is_refused() {
    let (model, folder) = (load(Member::Medium), tempfile::tempdir().unwrap());
    let device = Device::open(&DeviceChoice::Cpu).unwrap();
    let [a, b] = offers(&model, folder.path(), &device);
    let bytes = Store::new(&device, None).get(&a).unwrap().page_in().bytes;
    let store = Store::new(&device, Some(bytes - 1));
    let error = store.get(&a).unwrap_err().to_string();
    for part in ["pair-0", &bytes.to_string(), &(bytes - 1).to_string(), "raise --device-budget"] {
        assert!(error.contains(part), "`{error}` does not name `{part}`");
    }
    assert!(store.get(&b).is_err() && store.resident().is_empty(), "the place of what failed is free again");
}

/// Two requests at once read it once.
#[test]
fn who_comes_second_waits_for_the_first() {
    let (model, folder) = (load(Member::Medium), tempfile::tempdir().unwrap());
    let device = Device::open(&DeviceChoice::Cpu).unwrap();
    let [a] = offers(&model, folder.path(), &device);
    let store = Store::new(&device, None);
    let get = || store.get(&a).unwrap();
    let (one, two) = thread::scope(|scope| {
        let other = scope.spawn(get);
        (get(), other.join().unwrap())
    });
    assert!(Arc::ptr_eq(&one, &two));
}

/// Answers 200 tokens of a prompt by itself through a store.
fn asked(scene: &Scene, model: &Model, store: &Store<'_>, offers: &[Offer], audit: bool) -> Answered {
    let setup = Setup { gate: &scene.gate, source: model, target: model, pair: "pair", offers, store, load_ms: 0.0 };
    let ids = prompt(model, 200);
    let ask = Ask { tokens: &ids, domain: None, generate: 4, sampling: Sampling::Greedy, audit };
    run(&setup, ask, &mut |_| true).unwrap()
}

#[test]
fn only_a_cold_handoff_pages_in() {
    let (model, folder, scene) = (load(Member::Medium), tempfile::tempdir().unwrap(), Scene::new());
    let [offer] = offers(&model, folder.path(), &scene.device);
    let store = Store::new(&scene.device, None);
    assert!(store.resident().is_empty(), "an offer with evidence reads no weights");
    let cold = asked(&scene, &model, &store, slice::from_ref(&offer), false).record;
    let warm = asked(&scene, &model, &store, slice::from_ref(&offer), false).record;
    assert_eq!((cold.decision, warm.decision), ("migrate", "migrate"), "{}", cold.reason_text);
    let page_in = cold.page_in.expect("the weights were not there");
    assert!(page_in.bytes > 0 && page_in.read_ms > 0.0);
    assert!(warm.page_in.is_none());
    assert_eq!(cold.module_digest, store.get(&offer).unwrap().loaded().module(), "as tickets name it");
}

/// What is refused is not read, unless it is to be audited.
#[test]
fn a_refused_pair_is_not_paged_in() {
    let (model, folder, scene) = (load(Member::Medium), tempfile::tempdir().unwrap(), Scene::new());
    let stays = folder.path().join("stays");
    Recipe::identity(4, 8).written(&model, 1e-6, 10.0, &stays);
    let offer = Offer::new(&Stored::open(&stays).unwrap(), &scene.device).unwrap();
    let store = Store::new(&scene.device, None);
    let record = asked(&scene, &model, &store, slice::from_ref(&offer), false).record;
    assert_eq!((record.decision, store.resident().len()), ("stay", 0));
    let audited = asked(&scene, &model, &store, slice::from_ref(&offer), true);
    assert!(audited.record.realised.is_some() && audited.trouble.is_none(), "{:?}", audited.trouble);
    assert_eq!(store.resident().len(), 1);
}

/// The card was read, the decision rests on it, and then the weights are others: the target answers by itself.
#[test]
fn weights_that_changed_after_the_card_was_read_are_refused() {
    let (model, folder, scene) = (load(Member::Medium), tempfile::tempdir().unwrap(), Scene::new());
    let [offer] = offers(&model, folder.path(), &scene.device);
    let file = folder.path().join("pair-0").join(WEIGHTS);
    let mut bytes = fs::read(&file).unwrap();
    // The last weight's sign: still finite, still of the same shape.
    *bytes.last_mut().unwrap() ^= 0x80;
    fs::write(&file, bytes).unwrap();
    let store = Store::new(&scene.device, None);
    let Answered { record, trouble, .. } = asked(&scene, &model, &store, slice::from_ref(&offer), false);
    assert_eq!((record.decision, record.reason.as_str()), ("reprefill", "weights_failed"), "{}", record.reason_text);
    assert!(record.reason_text.contains("weights.safetensors: sha256: found"), "{}", record.reason_text);
    assert!(trouble.is_none() && record.tokens.generated == 4 && store.resident().is_empty());
    let rows = scene.gate.tickets(&TicketFilter::default()).unwrap();
    assert_eq!(rows.iter().map(|row| row.state).collect::<Vec<_>>(), [State::Failed]);
}

/// Of two mappers that the gate admits, the quicker by its evidence runs, whichever is asked for first.
#[test]
fn the_quicker_of_two_mappers_runs() {
    let (model, folder, scene) = (load(Member::Medium), tempfile::tempdir().unwrap(), Scene::new());
    let write = |kind, head, handoff_ms| {
        Recipe { kind, ..Recipe::identity(head, 8) }.written(&model, 0.7, handoff_ms, &folder.path().join(kind));
    };
    write("ridge", 4, 20.0);
    write("quick", 5, 9.0);
    let cards = Cards::open(folder.path()).unwrap();
    let kinds: Vec<_> = cards.stored().iter().map(|stored| stored.card().mapper()).collect();
    assert_eq!(kinds, ["quick", "ridge"]);
    let mut offers: Vec<_> = cards.stored().iter().map(|s| Offer::new(s, &scene.device).unwrap()).collect();
    for _ in 0..2 {
        let store = Store::new(&scene.device, None);
        let record = asked(&scene, &model, &store, &offers, false).record;
        assert_eq!((record.decision, record.mapper.as_str()), ("migrate", "quick"), "{}", record.reason_text);
        assert_eq!((record.tokens.native_head, store.resident().len()), (5, 1), "the other is not read");
        offers.reverse();
    }
    let ridge = cards.of_kind("ridge").unwrap();
    let offers = [Offer::new(ridge.first(), &scene.device).unwrap()];
    let record = asked(&scene, &model, &Store::new(&scene.device, None), &offers, false).record;
    assert_eq!((record.mapper.as_str(), record.tokens.native_head), ("ridge", 4));
}

/// Audited, the one that came furthest is tried.
#[test]
fn of_refused_mappers_the_furthest_is_tried() {
    let (model, folder, scene) = (load(Member::Medium), tempfile::tempdir().unwrap(), Scene::new());
    let bare = folder.path().join("bare");
    Recipe { kind: "bare", ..Recipe::identity(3, 8) }.draft(&model).write(&bare, None, &[]).unwrap();
    Recipe::identity(4, 8).written(&model, 0.7, 70.0, &folder.path().join("ridge"));
    let cards = Cards::open(folder.path()).unwrap();
    let offers: Vec<_> = cards.stored().iter().map(|s| Offer::new(s, &scene.device).unwrap()).collect();
    let store = Store::new(&scene.device, None);
    let Answered { record, trouble, .. } = asked(&scene, &model, &store, &offers, true);
    assert_eq!((record.decision, record.reason.as_str()), ("reprefill", "too_slow"), "{}", record.reason_text);
    assert_eq!(record.mapper, "ridge");
    assert!(record.trial.is_some() && trouble.is_none(), "{trouble:?}");
    assert_eq!(artifacts(&store), [offers[1].claim().artifact]);
}
