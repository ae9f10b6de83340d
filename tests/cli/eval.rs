//! Mappers side by side.

use std::{fs, path::Path};

use serde_json::Value;

use crate::{kvmig, record, stderr, stdout};

fn texts(file: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../host/assets/family/texts");
    folder.join(file).display().to_string()
}

/// The bundled pair's three mappers on a few documents.
fn eval(folder: &Path, args: &[&str]) -> std::process::Output {
    let held_out = format!("wiki={}", texts("wiki.eval.txt"));
    let fixed = ["eval", "--device", "cpu", "--context", "96", "--held-out", &held_out];
    kvmig(folder).args(fixed).args(args).output().unwrap()
}

#[test]
fn every_mapper_with_every_choice_of_ends_beside_the_arms_it_has_to_beat() {
    let folder = tempfile::tempdir().unwrap();
    let results = folder.path().join("results.jsonl");
    let out = results.to_str().unwrap();
    let ends = ["--ends", "1+8", "--ends", "4+32", "--out", out, "--json"];
    let first = record(&eval(folder.path(), &[&ends[..], &["--documents", "1"]].concat()));
    let mappings = first["subject"]["mappings"].as_array().unwrap();
    let kinds: Vec<_> = mappings.iter().map(|m| m["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["head-matched", "head-matched", "mlp", "mlp", "ridge", "ridge"]);
    let kept = fs::read_to_string(&results).unwrap();
    assert_eq!(kept.lines().count(), 2, "the subject and a document");

    // More documents go on behind those that are kept, which are not measured again: their times are still these.
    let more = record(&eval(folder.path(), &[&ends[..], &["--documents", "3"]].concat()));
    let now = fs::read_to_string(&results).unwrap();
    assert!(now.starts_with(&kept) && now.lines().count() == 4, "{now}");
    let domain = &more["greedy"][0];
    assert_eq!((domain["domain"].as_str(), domain["n"].as_u64()), (Some("wiki"), Some(3)));
    let kl = |row: &Value| row["kl_nats"][0].as_f64().unwrap();
    let rows = domain["rows"].as_array().unwrap();
    let of = |arm: &str| rows.iter().filter(|row| row["arm"].get(arm).is_some()).collect::<Vec<_>>();
    let (ends_only, mapped) = (of("ends_only"), of("mapped"));
    assert_eq!((ends_only.len(), mapped.len()), (2, 6));
    let no_prefix = rows.iter().find(|row| row["arm"] == "no_prefix").unwrap();
    for (i, row) in mapped.iter().enumerate() {
        let alone = ends_only[i % 2];
        assert!(kl(row) < kl(alone) && kl(alone) < kl(no_prefix), "{row:#} {alone:#} {no_prefix:#}");
        assert!(row["handoff_ms"].as_f64().unwrap() > 0.0 && row["speed_up"].as_f64().is_some());
    }

    // What is kept of something else is neither taken over nor lost.
    let other = eval(folder.path(), &["--ends", "2+8", "--out", out]);
    assert_eq!(other.status.code(), Some(2));
    assert!(stderr(&other).contains("results.jsonl") && stderr(&other).contains("another file"), "{}", stderr(&other));
    assert_eq!(fs::read_to_string(&results).unwrap(), now);
}

#[test]
fn what_a_pair_was_fitted_on_is_no_evidence() {
    let folder = tempfile::tempdir().unwrap();
    let calibration = format!("prose={}", texts("prose.calib.txt"));
    let output = kvmig(folder.path()).args(["eval", "--device", "cpu", "--held-out", &calibration]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stdout(&output));
    assert!(stderr(&output).contains("was fitted or chosen on is no evidence"), "{}", stderr(&output));
}

#[test]
fn settings_that_measure_nothing_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (args, words) in [
        (&["--ends", "4+64"][..], &["context", "4+64", "136"][..]),
        (&["--documents", "0"], &["documents", "at least 1"]),
        (&["--ends", "4"], &["HEAD+TAIL"]),
        (&["--pair", "nowhere", "--documents", "1"], &["--source"]),
    ] {
        let output = eval(folder.path(), args);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {said}");
    }
}
