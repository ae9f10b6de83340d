//! The ledger from outside: looked into, and settled.

use std::{fs, path::Path, time::Duration};

use kvmig::bundled;
use kvmig_gate::{CacheFacts, Candidate, Decision, Digest, Gate, Policy, Request, Ticket};
use serde_json::Value;

use crate::{kvmig, stderr, stdout};

/// A ticket in flight, as an engine outside the process leaves it.
fn in_flight(ledger: &Path) -> Ticket {
    let pair = bundled::default_pair().unwrap();
    let evidence = pair.evidence().unwrap();
    let cache =
        CacheFacts { model: pair.source_digest(), digest: Digest::of(b"tokens"), serial: 1, tokens: 1280, hops: 0 };
    let candidate = Candidate { mapper: pair.mapper(), loaded: pair.loaded(), evidence: Some(evidence), latency: None };
    let request = Request {
        pair: pair.name(),
        cache,
        target: pair.target_digest(),
        domain: None,
        backend: &evidence.backend,
        precision: &evidence.precision,
        mismatch: None,
        candidates: vec![candidate],
    };
    let gate = Gate::open(Policy::default(), ledger).unwrap();
    let Decision::Migrate { permit, .. } = gate.decide(&request).unwrap() else {
        panic!("the bundled pair is refused")
    };
    let (_, receipt) = permit.redeem(pair.loaded(), cache, pair.target_digest()).unwrap().complete(());
    receipt.hand_over(Duration::from_secs(5 * 86_400)).unwrap()
}

#[test]
fn a_ledger_that_is_not_there_is_not_made() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = folder.path().join("deep").join("ledger.sqlite");
    let log = |json: &[&str]| {
        kvmig(folder.path()).args(["gate", "log", "--ledger"]).arg(&ledger).args(json).output().unwrap()
    };
    let (text, json) = (log(&[]), log(&["--json"]));
    assert!(text.status.success() && json.status.success());
    assert!(stdout(&text).starts_with("no decision was recorded yet at ") && stdout(&text).contains("ledger.sqlite"));
    assert_eq!(serde_json::from_slice::<Value>(&json.stdout).unwrap(), serde_json::json!([]));
    let realised = folder.path().join("realised.json");
    fs::write(&realised, r#"{"agreement": 0.9, "kl_nats": 0.1, "nll_gap_nats": 0.1, "n": 32}"#).unwrap();
    for command in [&["show"][..], &["settle", "--realised", realised.to_str().unwrap()]] {
        let mut asked = kvmig(folder.path());
        asked.arg("gate").args(command).args(["01jdw3k8x-7q2m9ab", "--ledger"]).arg(&ledger);
        let output = asked.output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(stderr(&output).contains("no decision was recorded yet"), "{}", stderr(&output));
    }
    assert!(!ledger.parent().unwrap().exists());
}

#[test]
fn a_ticket_in_flight_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = folder.path().join("ledger.sqlite");
    let ticket = in_flight(&ledger);
    let output = kvmig(folder.path()).args(["gate", "log", "--ledger"]).arg(&ledger).output().unwrap();
    let text = stdout(&output);
    assert!(text.contains("kvmig gate settle"), "{text}");
    assert!(text.contains(&format!("{ticket}      its lease ends in 5 days")), "{text}");
}

/// Nothing that an engine outside reports by mistake ends its ticket.
#[test]
fn an_impossible_quality_is_refused_and_the_ticket_stays_in_flight() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = folder.path().join("ledger.sqlite");
    let ticket = in_flight(&ledger);
    let file = folder.path().join("realised.json");
    let settle = |text: &str| {
        fs::write(&file, text).unwrap();
        let mut command = kvmig(folder.path());
        command.args(["gate", "settle", ticket.as_str(), "--realised"]).arg(&file).arg("--ledger").arg(&ledger);
        command.output().unwrap()
    };
    let quality = |agreement: &str, kl: &str, n: &str| {
        format!("{{\"agreement\": {agreement}, \"kl_nats\": {kl}, \"nll_gap_nats\": 0.1, \"n\": {n}}}")
    };
    for (text, expected) in [
        (quality("7", "0.1", "32"), "agreement: found 7, expected a share in [0, 1]"),
        (quality("0.9", "-3", "32"), "kl_nats: found -3, expected a finite number of nats, at least 0"),
        (quality("0.9", "0.1", "0"), "n: found 0, expected at least 1 token"),
        (quality("0.9", "0.1", "-4"), "field `n`: invalid value: integer `-4`, expected usize"),
        (quality("NaN", "0.1", "32"), "field `agreement`: expected value"),
        (quality("0.9", "1e999", "32"), "field `kl_nats`: number out of range"),
        (quality("\"high\"", "0.1", "32"), "field `agreement`: invalid type: string \"high\", expected f64"),
        ("{}".to_owned(), "line 1, column 2: missing field `agreement`"),
        (quality("0.9", "0.1", "32, \"m\": 1"), "field `m`: unknown field `m`"),
    ] {
        let output = settle(&text);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{text}: {message}");
        assert!(message.contains("realised.json") && message.contains(expected), "{text}: {message}");
        assert_eq!(message.lines().count(), 1, "{message}");
        let shown = kvmig(folder.path()).args(["gate", "show", ticket.as_str(), "--ledger"]).arg(&ledger).output();
        let shown: Value = serde_json::from_slice(&shown.unwrap().stdout).unwrap();
        assert_eq!((shown["state"].as_str(), &shown["realised"]), (Some("in_flight"), &Value::Null), "{text}");
    }
    let output = settle(&quality("0.9", "0.01", "32"));
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stdout(&output), format!("{ticket} settled: within its bound\n"));
}
