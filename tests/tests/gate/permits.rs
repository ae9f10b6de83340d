//! What a permit lets run, and what becomes of it.

use std::time::Duration;

use kvmig_gate::{
    CacheFacts, Candidate, Claim, Digest, Evidence, Gate, GateError, LedgerError, Loaded, Loader, PairIdentity, Permit,
    Policy, PolicySettings, Quality, Receipt, RedeemError, State, TicketFilter, Trial, WeightElem,
};
use kvmig_tests::gate::{HEAD, TAIL, TOKENS, artifact, artifact_of, candidate, evidence, identity, quality, request};

use crate::{permit, redeem, scene, scene_with};

fn admitted() -> (Loaded, Evidence) {
    let loaded = artifact(1);
    let evidence = evidence(&loaded, 30);
    (loaded, evidence)
}

#[test]
fn swapped_bytes_are_refused() {
    let (loaded, evidence) = admitted();
    let scene = scene();
    let load = |component: &[u8], wgsl: &str, weight: &[u8], pair: &PairIdentity<'_>| {
        let mut loader = Loader::new(component.to_vec(), pair);
        loader.shader("map", wgsl);
        loader.weight("w", WeightElem::F32, &[2, 2], weight);
        loader.finish()
    };
    let (component, wgsl, weight, pair) = (b"component", "@compute fn main() {}", [1; 16], &identity());
    let same = load(component, wgsl, &weight, pair);
    assert_eq!(same.artifact(), loaded.artifact(), "the fixture is the artifact, spoilt in one place at a time");
    let mut one_bit = weight;
    one_bit[15] ^= 1;
    let swapped = [
        ("module", load(b"Component", wgsl, &weight, pair)),
        ("shader", load(component, "@compute fn main() {;}", &weight, pair)),
        ("weight", load(component, wgsl, &one_bit, pair)),
        ("head", load(component, wgsl, &weight, &PairIdentity { head: HEAD - 1, ..identity() })),
        ("tail", load(component, wgsl, &weight, &PairIdentity { tail: TAIL - 1, ..identity() })),
        ("target", load(component, wgsl, &weight, &PairIdentity { target: Digest::of(b"a sibling"), ..identity() })),
        ("settings", load(component, wgsl, &weight, &PairIdentity { details: b"Settings", ..identity() })),
    ];
    for (what, other) in swapped {
        let asked = request(&[candidate("ridge", &loaded, &evidence)]);
        let permit = permit(&scene.gate, &asked);
        let ticket = permit.ticket().clone();
        let error = permit.redeem(&other, asked.cache, asked.target).unwrap_err();
        assert!(
            matches!(error, RedeemError::ArtifactSwapped { expected, found }
                if expected == loaded.artifact() && found == other.artifact()),
            "{what}: {error}"
        );
        let row = scene.gate.ticket(&ticket).unwrap();
        assert_eq!(row.state, State::Failed, "{what}");
        assert_eq!(row.detail.unwrap(), error.to_string());
    }
}

#[test]
fn another_cache_is_refused() {
    let (loaded, evidence) = admitted();
    let scene = scene();
    let asked = request(&[candidate("ridge", &loaded, &evidence)]);
    let others = [
        CacheFacts { digest: Digest::of(b"other tokens"), ..asked.cache },
        // The same tokens, prefilled another time: its keys and values may be others.
        CacheFacts { serial: 2, ..asked.cache },
        // A longer one has a longer middle.
        CacheFacts { tokens: TOKENS + 1, ..asked.cache },
        CacheFacts { hops: 1, ..asked.cache },
    ];
    for other in others {
        let permit = permit(&scene.gate, &asked);
        let ticket = permit.ticket().clone();
        let error = permit.redeem(&loaded, other, asked.target).unwrap_err();
        assert!(matches!(error, RedeemError::CacheSwapped { .. }), "{error}");
        assert_eq!(scene.gate.ticket(&ticket).unwrap().state, State::Failed);
    }
}

#[test]
fn another_target_is_refused() {
    let (loaded, evidence) = admitted();
    let scene = scene();
    let asked = request(&[candidate("ridge", &loaded, &evidence)]);
    let sibling = Digest::of(b"a sibling of the same shape");
    let live = permit(&scene.gate, &asked);
    let trial = scene.gate.trial(&asked).unwrap();
    let tickets = [live.ticket().clone(), trial.ticket().clone()];
    let errors = [
        live.redeem(&loaded, asked.cache, sibling).unwrap_err(),
        trial.redeem(&loaded, asked.cache, sibling).unwrap_err(),
    ];
    for (error, ticket) in errors.iter().zip(&tickets) {
        assert!(
            matches!(error, RedeemError::TargetSwapped { expected, found } if *expected == asked.target && *found == sibling),
            "{error}"
        );
        let row = scene.gate.ticket(ticket).unwrap();
        assert_eq!((row.state, row.detail), (State::Failed, Some(error.to_string())));
    }
}

/// A decision may rest on what a folder says of weights that nobody has read yet; that it was true, the bytes show.
#[test]
fn a_false_claim_is_refused() {
    let (loaded, evidence) = admitted();
    let scene = scene();
    let truth = loaded.claim();
    let another = Digest::of(b"a sibling");
    let lies = [
        ("source", Claim { source: another, ..truth }),
        ("target", Claim { target: another, ..truth }),
        ("head", Claim { head: HEAD + 1, ..truth }),
        ("tail", Claim { tail: TAIL - 1, ..truth }),
    ];
    for (field, lie) in lies {
        let mut asked = request(&[Candidate { claim: lie, ..candidate("ridge", &loaded, &evidence) }]);
        (asked.cache.model, asked.target) = (lie.source, lie.target);
        let permit = permit(&scene.gate, &asked);
        let ticket = permit.ticket().clone();
        let error = permit.redeem(&loaded, asked.cache, asked.target).unwrap_err();
        assert!(matches!(error, RedeemError::FalseClaim { field: found, .. } if found == field), "{field}: {error}");
        assert_eq!(scene.gate.ticket(&ticket).unwrap().state, State::Failed);
    }
    // Which module it would be is for the ledger alone: the artifact's digest covers it.
    let unread = Claim { module: None, ..truth };
    let asked = request(&[Candidate { claim: unread, ..candidate("ridge", &loaded, &evidence) }]);
    redeem(&scene.gate, &asked, &loaded).fail("enough").unwrap();
}

/// Which slots are mapped is the pair's and the prompt's to say: a request has no field for it, and neither has an executor.
#[test]
fn a_permit_says_which_slots_are_mapped() {
    for (head, tail) in [(HEAD, TAIL), (0, 1)] {
        let loaded = artifact_of(&PairIdentity { head, tail, ..identity() }, 1);
        let evidence = evidence(&loaded, 30);
        let scene = scene();
        let asked = request(&[candidate("ridge", &loaded, &evidence)]);
        let redeemed = redeem(&scene.gate, &asked, &loaded);
        assert_eq!((redeemed.slots(), redeemed.target()), (head..TOKENS - tail, asked.target));
        redeemed.fail("enough").unwrap();
        let redeemed = scene.gate.trial(&asked).unwrap().redeem(&loaded, asked.cache, asked.target).unwrap();
        assert_eq!(redeemed.slots(), head..TOKENS - tail);
        redeemed.fail("enough").unwrap();
    }
}

/// An answer may take longer than a lease; whoever gives it keeps the ticket in flight.
#[test]
fn a_lease_is_renewed_while_the_cache_is_in_use() {
    let (loaded, evidence) = admitted();
    let scene = scene_with(PolicySettings { lease_seconds: 1, ..PolicySettings::default() });
    let asked = request(&[candidate("ridge", &loaded, &evidence)]);
    let (_, mut receipt) = redeem(&scene.gate, &asked, &loaded).complete(());
    let ends = |receipt: &Receipt| scene.gate.ticket(receipt.ticket()).unwrap().lease_ms.unwrap();
    let before = ends(&receipt);
    std::thread::sleep(Duration::from_millis(600));
    receipt.renew().unwrap();
    assert!(ends(&receipt) >= before + 500, "more than half of the lease was over");
    scene.gate.unaudited(receipt).unwrap();

    let scene = scene_with(PolicySettings::default());
    let (_, mut receipt) = redeem(&scene.gate, &asked, &loaded).complete(());
    let before = scene.gate.ticket(receipt.ticket()).unwrap();
    (0..1000).for_each(|_| receipt.renew().unwrap());
    let after = scene.gate.ticket(receipt.ticket()).unwrap();
    assert_eq!(after.lease_ms, before.lease_ms, "one of an hour is not written anew for every token");
    scene.gate.unaudited(receipt).unwrap();
}

#[test]
fn a_settled_migration_is_a_hit_or_a_miss_by_its_own_bound() {
    let (loaded, evidence) = admitted();
    let scene = scene();
    let asked = request(&[candidate("ridge", &loaded, &evidence)]);
    // The bound is 0.028, far within the floor of 0.25: what was promised counts, not what would have been enough.
    for (kl, miss) in [(0.0, false), (0.028, false), (0.029, true), (0.2, true)] {
        let redeemed = redeem(&scene.gate, &asked, &loaded);
        assert_eq!(redeemed.loaded().artifact(), loaded.artifact());
        let (migrated, receipt) = redeemed.complete("cache");
        assert_eq!((migrated.ticket(), migrated.artifact()), (receipt.ticket(), loaded.artifact()));
        assert_eq!(migrated.release(), "cache");
        assert_eq!(scene.gate.ticket(receipt.ticket()).unwrap().state, State::InFlight);
        let settled = scene.gate.settle(receipt, &quality(kl)).unwrap();
        assert_eq!(settled.miss, Some(miss), "{kl}");
        let row = scene.gate.ticket(&settled.ticket).unwrap();
        assert_eq!((row.state, row.realised, row.miss), (State::Settled, Some(quality(kl)), Some(miss)));
    }
    let summary = scene.gate.pair_summary("small-to-large", "ridge").unwrap();
    assert_eq!((summary.migrations, summary.settled, summary.misses, summary.open), (4, 4, 2, 0));
}

#[test]
fn a_quality_that_no_measurement_gives_fails_the_ticket() {
    let (loaded, evidence) = admitted();
    let scene = scene();
    let asked = request(&[candidate("ridge", &loaded, &evidence)]);
    let (_, receipt) = redeem(&scene.gate, &asked, &loaded).complete(());
    let ticket = receipt.ticket().clone();
    let error = scene.gate.settle(receipt, &Quality { nll_gap_nats: f64::NAN, ..quality(0.0) }).unwrap_err();
    assert!(matches!(error, GateError::Realised { field: "nll_gap_nats", .. }), "{error}");
    let row = scene.gate.ticket(&ticket).unwrap();
    assert_eq!((row.state, row.detail.as_deref()), (State::Failed, Some("realised nll_gap_nats is NaN")));
}

#[test]
fn whatever_is_dropped_is_abandoned() {
    let (loaded, evidence) = admitted();
    let scene = scene();
    let asked = request(&[candidate("ridge", &loaded, &evidence)]);
    drop(permit(&scene.gate, &asked));
    drop(redeem(&scene.gate, &asked, &loaded));
    let (migrated, receipt) = redeem(&scene.gate, &asked, &loaded).complete(());
    drop(receipt);
    migrated.release();
    let panicked = std::thread::scope(|scope| {
        let held = redeem(&scene.gate, &asked, &loaded);
        scope
            .spawn(move || {
                let _held = held;
                std::panic::resume_unwind(Box::new("a panic while mapping"));
            })
            .join()
    });
    assert!(panicked.is_err());
    let summary = scene.gate.pair_summary("small-to-large", "ridge").unwrap();
    assert_eq!((summary.migrations, summary.abandoned, summary.open), (4, 4, 0));
    for row in scene.gate.tickets(&TicketFilter::default()).unwrap() {
        assert_eq!(row.detail.as_deref(), Some("dropped before it was settled"));
        assert!(row.ended_ms.unwrap() >= row.decided_ms);
    }
}

/// A process that is told to end at once drops nothing.
#[test]
fn whatever_is_open_can_be_abandoned_at_once() {
    let (loaded, evidence) = admitted();
    let scene = scene();
    let asked = request(&[candidate("ridge", &loaded, &evidence)]);
    let ended = redeem(&scene.gate, &asked, &loaded).fail("device lost").unwrap();
    let handed_over = redeem(&scene.gate, &asked, &loaded).complete(()).1.hand_over(Duration::from_secs(60)).unwrap();
    let (decided, redeemed) = (permit(&scene.gate, &asked), redeem(&scene.gate, &asked, &loaded));
    scene.gate.abandon_open("interrupted").unwrap();
    for ticket in [decided.ticket(), redeemed.ticket()] {
        let row = scene.gate.ticket(ticket).unwrap();
        assert_eq!((row.state, row.detail.as_deref()), (State::Abandoned, Some("interrupted")));
    }
    assert_eq!(scene.gate.ticket(&ended).unwrap().state, State::Failed);
    assert_eq!(scene.gate.ticket(&handed_over).unwrap().state, State::InFlight, "it is another process's");
    let late = redeemed.fail("too late").unwrap_err();
    assert!(matches!(late, LedgerError::WrongState { found: State::Abandoned, .. }), "{late}");
}

#[test]
fn the_other_ends_are_written_down() {
    let (loaded, evidence) = admitted();
    let scene = scene();
    let asked = request(&[candidate("ridge", &loaded, &evidence)]);
    let gate = &scene.gate;
    let complete = || redeem(gate, &asked, &loaded).complete(()).1;
    let ends = [
        (permit(gate, &asked).fail("no shader compiler").unwrap(), State::Failed, Some("no shader compiler")),
        (redeem(gate, &asked, &loaded).fail("device lost").unwrap(), State::Failed, Some("device lost")),
        (gate.failed(complete(), "NaN in layer 3").unwrap(), State::Failed, Some("NaN in layer 3")),
        (gate.unaudited(complete()).unwrap(), State::Unaudited, None),
    ];
    for (ticket, state, detail) in ends {
        let row = gate.ticket(&ticket).unwrap();
        assert_eq!((row.state, row.detail.as_deref(), row.miss), (state, detail, None));
    }
}

#[test]
fn a_trial_needs_no_evidence_and_counts_for_nothing() {
    let (loaded, _) = admitted();
    let scene = scene();
    let nothing = evidence(&loaded, 0);
    let mut asked = request(&[kvmig_gate::Candidate { evidence: None, ..candidate("ridge", &loaded, &nothing) }]);
    asked.cache.hops = 9;
    let permit: Permit<Trial> = scene.gate.trial(&asked).unwrap();
    assert_eq!(permit.hops(), 10, "how a cache fares after many mappings can be measured");
    let (trialled, receipt) = permit.redeem(&loaded, asked.cache, asked.target).unwrap().complete("cache");
    assert_eq!(trialled.release(), "cache");
    let settled = scene.gate.settle(receipt, &quality(0.4)).unwrap();
    assert_eq!(settled.miss, None, "nothing was promised");
    assert_eq!(scene.gate.ticket(&settled.ticket).unwrap().decision, "trial");
    assert_eq!(scene.gate.pair_summary("small-to-large", "ridge").unwrap(), kvmig_gate::PairSummary::default());
}

#[test]
fn a_trial_of_a_refused_request_is_held_to_what_would_have_been_promised() {
    let (loaded, mut evidence) = admitted();
    let scene = scene();
    evidence.documents.iter_mut().for_each(|d| d.mapped = quality(0.3));
    let asked = request(&[candidate("ridge", &loaded, &evidence)]);
    assert_eq!(scene.gate.decide(&asked).unwrap().reason().name(), "bound_misses_floor");
    for (kl, miss) in [(0.29, false), (0.31, true)] {
        let permit = scene.gate.trial(&asked).unwrap();
        let (_, receipt) = permit.redeem(&loaded, asked.cache, asked.target).unwrap().complete(());
        assert_eq!(scene.gate.settle(receipt, &quality(kl)).unwrap().miss, Some(miss));
    }
}

#[test]
fn what_can_not_be_measured_is_no_trial() {
    let (loaded, evidence) = admitted();
    let scene = scene();
    let one = candidate("ridge", &loaded, &evidence);
    let error = scene.gate.trial(&request(&[one, one])).unwrap_err();
    assert!(matches!(error, GateError::TrialOfSeveral { found: 2 }), "{error}");
    let mut asked = request(&[one]);
    asked.cache.model = Digest::of(b"a third model");
    let error = scene.gate.trial(&asked).unwrap_err();
    assert!(error.to_string().starts_with("no trial: the cache belongs to model"), "{error}");
    let mut asked = request(&[one]);
    asked.target = Digest::of(b"a third model");
    let error = scene.gate.trial(&asked).unwrap_err();
    assert!(error.to_string().starts_with("no trial: the target is model"), "{error}");
}

#[test]
fn another_process_settles_a_ticket_that_was_handed_over() {
    let (loaded, evidence) = admitted();
    let scene = scene();
    let asked = request(&[candidate("ridge", &loaded, &evidence)]);
    let (_, receipt) = redeem(&scene.gate, &asked, &loaded).complete(());
    let ticket = receipt.hand_over(Duration::from_secs(60)).unwrap();

    let elsewhere = Gate::open(Policy::default(), &scene.path).unwrap();
    assert_eq!(elsewhere.ticket(&ticket).unwrap().state, State::InFlight);
    assert_eq!(elsewhere.settle_ticket(&ticket, &quality(0.5)).unwrap().miss, Some(true));

    let again = scene.gate.settle_ticket(&ticket, &quality(0.0)).unwrap_err();
    assert!(
        matches!(&again, GateError::Ledger(LedgerError::WrongState { found: State::Settled, .. })),
        "a ticket ends once: {again}"
    );
    assert_eq!(scene.gate.ticket(&ticket).unwrap().miss, Some(true));
}

#[test]
fn only_what_was_mapped_can_be_settled() {
    let (loaded, evidence) = admitted();
    let scene = scene();
    let asked = request(&[candidate("ridge", &loaded, &evidence)]);
    let permit = permit(&scene.gate, &asked);
    let early = scene.gate.settle_ticket(permit.ticket(), &quality(0.0)).unwrap_err();
    assert!(early.to_string().contains("is decided, expected in_flight"), "{early}");
    permit.redeem(&loaded, asked.cache, asked.target).unwrap().fail("enough").unwrap();

    let refused = scene.gate.decide(&request(&[])).unwrap();
    let error = scene.gate.settle_ticket(refused.ticket(), &quality(0.0)).unwrap_err();
    assert!(error.to_string().contains("is refused, expected in_flight: nothing was mapped under it"), "{error}");

    let unknown = "01jdw3k8x-7q2m9ab".parse().unwrap();
    let error = scene.gate.settle_ticket(&unknown, &quality(0.0)).unwrap_err();
    assert!(error.to_string().contains("no ticket 01jdw3k8x-7q2m9ab"), "{error}");
}

#[test]
fn tickets_in_flight_block_nobody() {
    let (loaded, evidence) = admitted();
    let scene = scene();
    let asked = request(&[candidate("ridge", &loaded, &evidence)]);
    let held: Vec<_> = (0..5).map(|_| redeem(&scene.gate, &asked, &loaded)).collect();
    assert_eq!(scene.gate.decide(&asked).unwrap().name(), "migrate");
    assert_eq!(scene.gate.pair_summary("small-to-large", "ridge").unwrap().open, 5);
    drop(held);
}

#[test]
fn every_answer_leaves_a_row_with_its_numbers() {
    let (loaded, evidence) = admitted();
    let scene = scene();
    let mut asked = request(&[candidate("ridge", &loaded, &evidence)]);
    asked.domain = Some("law");
    let decision = scene.gate.decide(&asked).unwrap();
    let row = scene.gate.ticket(decision.ticket()).unwrap();
    assert_eq!((row.decision.as_str(), row.reason.as_str()), ("reprefill", "too_little_evidence"));
    assert_eq!(row.explanation, decision.reason().to_string());
    assert_eq!((row.state, row.policy), (State::Refused, scene.gate.policy().digest()));
    assert_eq!(
        (row.pair.as_str(), row.domain.as_deref(), row.backend.as_str()),
        ("small-to-large", Some("law"), "cpu")
    );
    assert_eq!(row.precision.as_deref(), Some("quantised"));
    assert_eq!((row.source_model, row.target_model), (loaded.source(), loaded.target()));
    assert_eq!((row.tokens, row.hops, row.ends), (TOKENS as u64, 1, (4, 32)));
    assert_eq!((row.artifact, row.module), (Some(loaded.artifact()), Some(loaded.module())));
    assert_eq!(scene.gate.pair_summary("small-to-large", "ridge").unwrap().refused, 1);

    let permit = permit(&scene.gate, &request(&[candidate("ridge", &loaded, &evidence)]));
    let row = scene.gate.ticket(permit.ticket()).unwrap();
    assert_eq!((row.metric.as_deref(), row.bound, row.floor), (Some("kl_nats"), Some(0.028), Some(0.25)));
    assert!(row.lease_ms.unwrap() > row.decided_ms);
    permit.fail("enough").unwrap();
}

#[test]
fn the_hosts_record_is_kept_once() {
    let scene = scene();
    let ticket = scene.gate.decide(&request(&[])).unwrap().ticket().clone();
    let record = serde_json::json!({ "schema": 1, "text": "…", "ms": { "gate": 0.25 } });
    scene.gate.attach_record(&ticket, &record).unwrap();
    assert_eq!(scene.gate.ticket(&ticket).unwrap().record.as_ref(), Some(&record));
    let again = scene.gate.attach_record(&ticket, &serde_json::json!({})).unwrap_err();
    assert!(matches!(again, GateError::Ledger(LedgerError::RecordExists { .. })), "{again}");
    assert_eq!(scene.gate.ticket(&ticket).unwrap().record, Some(record));
    let unknown = "01jdw3k8x-7q2m9ab".parse().unwrap();
    let error = scene.gate.attach_record(&unknown, &serde_json::json!({})).unwrap_err();
    assert!(matches!(error, GateError::Ledger(LedgerError::NoSuchTicket { .. })), "{error}");
}

#[test]
fn tickets_are_listed_newest_first_by_what_they_are() {
    let (loaded, evidence) = admitted();
    let scene = scene();
    let asked = request(&[candidate("ridge", &loaded, &evidence)]);
    let failed = redeem(&scene.gate, &asked, &loaded).fail("device lost").unwrap();
    let refused = scene.gate.decide(&request(&[])).unwrap().ticket().clone();
    let list = |filter: TicketFilter| -> Vec<_> {
        scene.gate.tickets(&filter).unwrap().into_iter().map(|row| row.ticket).collect()
    };
    let only_failed = [failed];
    let all = list(TicketFilter::default());
    assert!(all.is_sorted_by(|a, b| a > b) && all.len() == 2);
    assert_eq!(list(TicketFilter { limit: Some(1), ..Default::default() }), all[..1]);
    assert_eq!(list(TicketFilter { mapper: Some("ridge".into()), ..Default::default() }), only_failed);
    assert_eq!(list(TicketFilter { artifact: Some(loaded.artifact()), ..Default::default() }), only_failed);
    assert_eq!(list(TicketFilter { state: Some(State::Failed), ..Default::default() }), only_failed);
    assert_eq!(list(TicketFilter { decision: Some("reprefill".into()), ..Default::default() }), [refused]);
    assert!(list(TicketFilter { pair: Some("another".into()), ..Default::default() }).is_empty());
}

/// An engine outside the process may report nonsense: it is told so, and can report again.
#[test]
fn an_impossible_quality_from_outside_changes_nothing() {
    let (loaded, evidence) = admitted();
    let scene = scene();
    let asked = request(&[candidate("ridge", &loaded, &evidence)]);
    let (_, receipt) = redeem(&scene.gate, &asked, &loaded).complete(());
    let ticket = receipt.hand_over(Duration::from_secs(60)).unwrap();
    let good = quality(0.01);
    for (wrong, expected) in [
        (Quality { agreement: 7.0, ..good }, "agreement: found 7, expected a share in [0, 1]"),
        (Quality { kl_nats: -3.0, ..good }, "kl_nats: found -3, expected a finite number of nats, at least 0"),
        (Quality { kl_nats: f64::INFINITY, ..good }, "kl_nats: found inf"),
        (Quality { nll_gap_nats: f64::NAN, ..good }, "nll_gap_nats: found NaN, expected a finite number of nats"),
        (Quality { cosine_mean: Some(1.5), ..good }, "cosine_mean: found 1.5, expected a cosine in [-1, 1]"),
        (Quality { n: 0, ..good }, "n: found 0, expected at least 1 token"),
    ] {
        let error = scene.gate.settle_ticket(&ticket, &wrong).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        let row = scene.gate.ticket(&ticket).unwrap();
        assert_eq!((row.state, row.detail, row.realised), (State::InFlight, None, None), "{expected}");
    }
    assert_eq!(scene.gate.settle_ticket(&ticket, &good).unwrap().miss, Some(false));
}
