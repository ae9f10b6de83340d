//! Policies that are taken, and policies that are not.

use std::collections::HashSet;

use kvmig_gate::{Metric, Policy, PolicySettings};

#[test]
fn an_empty_file_is_the_shipped_policy() {
    let policy = Policy::from_toml("").unwrap();
    assert_eq!(policy, Policy::default());
    assert_eq!(policy.floor(), 0.25);
    // These figures are frozen: what is reported was decided by them.
    let shipped = PolicySettings {
        metric: Metric::KlNats,
        floor: Some(0.25),
        alpha: 0.1,
        delta: 0.01,
        audit_rate: 0.05,
        aci_gamma: 0.02,
        min_evidence: 30,
        latency_factor: 2.0,
        beats_source: true,
        beats_ends_only: true,
        max_extrapolation: 8.0,
        max_hops: 1,
        lease_seconds: 3600,
    };
    assert_eq!(policy.settings(), &shipped);
}

#[test]
fn what_means_nothing_is_refused_by_its_field() {
    let cases = [
        ("flor = 0.3", "unknown field `flor`"),
        ("metric = \"cosine\"", "unknown variant `cosine`"),
        ("metric = \"agreement\"", "field `floor`: found none, and metric `agreement` has no default"),
        ("metric = \"agreement\"\nfloor = 1.5", "field `floor`: found 1.5, expected a share in [0, 1]"),
        ("floor = -0.1", "field `floor`: found -0.1"),
        ("floor = nan", "field `floor`: found NaN"),
        ("floor = inf", "field `floor`: found inf"),
        ("alpha = 0", "field `alpha`: found 0"),
        ("alpha = 1.0", "field `alpha`: found 1"),
        ("alpha = nan", "field `alpha`: found NaN"),
        ("delta = 0.0", "field `delta`: found 0"),
        ("audit_rate = 1.1", "field `audit_rate`: found 1.1"),
        ("aci_gamma = -1.0", "field `aci_gamma`: found -1"),
        ("min_evidence = 0", "field `min_evidence`: found 0"),
        ("min_evidence = -1", "line 1, column 16, field `min_evidence`: invalid value"),
        ("latency_factor = -2.0", "field `latency_factor`: found -2"),
        ("latency_factor = inf", "field `latency_factor`: found inf"),
        ("max_extrapolation = 0.5", "field `max_extrapolation`: found 0.5"),
        ("max_hops = 0", "field `max_hops`: found 0"),
        ("lease_seconds = 0", "field `lease_seconds`: found 0"),
        ("beats_source = 1", "line 1, column 16, field `beats_source`: invalid type: integer `1`, expected a boolean"),
        ("\nalpha =", "line 2, column 8: "),
    ];
    for (text, expected) in cases {
        let error = Policy::from_toml(text).expect_err(text).to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn a_file_is_named_in_its_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("policy.toml");
    let absent = Policy::load(&path).unwrap_err().to_string();
    assert!(absent.contains("policy.toml"), "{absent}");
    std::fs::write(&path, "alpha = 7.0").unwrap();
    let wrong = Policy::load(&path).unwrap_err().to_string();
    assert!(wrong.contains("policy.toml: field `alpha`: found 7, expected a share"), "{wrong}");
    std::fs::write(&path, "alpha = 0.2").unwrap();
    assert_eq!(Policy::load(&path).unwrap().settings().alpha, 0.2);
}

#[test]
fn every_field_is_in_the_digest() {
    let texts = [
        "",
        "metric = \"nll_gap_nats\"\nfloor = 0.25",
        "floor = 0.3",
        "alpha = 0.2",
        "delta = 0.02",
        "audit_rate = 0.1",
        "aci_gamma = 0.1",
        "min_evidence = 31",
        "latency_factor = 3.0",
        "beats_source = false",
        "beats_ends_only = false",
        "max_extrapolation = 4.0",
        "max_hops = 2",
        "lease_seconds = 60",
    ];
    let digests: HashSet<_> = texts.iter().map(|text| Policy::from_toml(text).unwrap().digest()).collect();
    assert_eq!(digests.len(), texts.len());
    assert_eq!(
        Policy::from_toml("floor = 0.25").unwrap().digest(),
        Policy::default().digest(),
        "a default that is written out decides alike"
    );
}
