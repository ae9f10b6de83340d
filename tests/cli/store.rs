//! Pairs as a store: listed, verified, removed, and several mappers of one pair.

use std::{
    fs,
    path::{Path, PathBuf},
};

use kvmig::{
    bundled,
    pair::{Diagnostics, Draft, ForwardCurve, HeatMap, Pair, PerSide},
    sandbox::bundled::RIDGE,
};
use serde_json::Value;

use crate::{kvmig, record, stderr, stdout};

/// The bundled pair as `folder`, called a mapper of `kind` whose handoffs take `factor` times as long.
fn pair(folder: &Path, kind: &str, factor: f64) -> PathBuf {
    let pair = bundled::default_pair().unwrap();
    let mut manifest = pair.manifest().clone();
    manifest.identity.mapper.kind = kind.to_owned();
    let weights = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/pairs/medium-large/ridge/weights.safetensors");
    let draft = Draft::new(manifest, RIDGE.to_vec(), fs::read(weights).unwrap()).unwrap();
    let mut evidence = pair.evidence().unwrap().clone();
    evidence.artifact = draft.pair().loaded().artifact();
    evidence.documents.iter_mut().for_each(|document| document.handoff_ms *= factor);
    draft.write(folder, Some(evidence), &[]).unwrap();
    folder.to_owned()
}

/// A byte in the middle of a file is another one.
fn spoil(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(file, bytes).unwrap();
}

fn json(output: &std::process::Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", stderr(output)))
}

#[test]
fn pairs_are_listed_and_damaged_ones_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let pairs = folder.path().join("pairs");
    pair(&pairs.join("both/ridge"), "ridge", 1.0);
    pair(&pairs.join("both/other"), "other", 0.5);
    pair(&pairs.join("deep/er/single"), "ridge", 1.0);
    let damaged = pair(&pairs.join("damaged"), "ridge", 1.0);
    spoil(&damaged.join("evidence.json"));
    // Weights are not read: that is what `verify` is for.
    spoil(&pairs.join("deep/er/single/weights.safetensors"));
    pair(&pairs.join(".hidden"), "ridge", 1.0);

    let listed = kvmig(folder.path()).args(["pair", "list"]).arg(&pairs).output().unwrap();
    let (text, lines) = (stdout(&listed), stdout(&listed).lines().count());
    assert!(listed.status.success() && stderr(&listed).is_empty(), "{}", stderr(&listed));
    assert_eq!(lines, 4, "a heading, two pairs and a damaged one:\n{text}");
    for part in
        ["other, ridge", "bundled:medium → bundled:large", "MiB", "migrate", "damaged: ", "evidence.json: sha256"]
    {
        assert!(text.contains(part), "no `{part}` in\n{text}");
    }
    let listed = kvmig(&pairs).current_dir(&pairs).args(["pair", "list", "--json"]).output().unwrap();
    let rows = json(&listed);
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 3, "{rows:#?}");
    assert_eq!(rows[0]["mappers"], serde_json::json!(["other", "ridge"]));
    assert_eq!((rows[0]["decision"].as_str(), rows[0]["documents"][0].as_u64()), (Some("migrate"), Some(60)));
    assert!(rows[1]["error"].as_str().unwrap().contains("sha256"), "{rows:#?}");

    let empty = tempfile::tempdir().unwrap();
    let listed = kvmig(folder.path()).args(["pair", "list"]).arg(empty.path()).output().unwrap();
    assert!(listed.status.success() && stdout(&listed).starts_with("no pair below"));
    let listed = kvmig(folder.path()).args(["pair", "list"]).arg(empty.path().join("absent")).output().unwrap();
    assert_eq!(listed.status.code(), Some(2));
}

#[test]
fn verify_finds_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let whole = pair(&folder.path().join("whole"), "ridge", 1.0);
    let verified = kvmig(folder.path()).args(["pair", "verify", "bundled"]).arg(&whole).output().unwrap();
    assert!(verified.status.success(), "{}", stderr(&verified));
    assert_eq!(stdout(&verified).lines().filter(|line| line.starts_with("ok     ")).count(), 3 + 1);
    for (name, needle) in [
        ("weights.safetensors", "weights.safetensors: sha256: found"),
        ("mapper.wasm", "mapper.wasm: sha256: found"),
        ("evidence.json", "evidence.json: sha256: found"),
    ] {
        let spoilt = pair(&folder.path().join(name), "ridge", 1.0);
        spoil(&spoilt.join(name));
        let verified = kvmig(folder.path()).args(["pair", "verify"]).args([&spoilt, &whole]).output().unwrap();
        assert_eq!(verified.status.code(), Some(1), "{}", stderr(&verified));
        let text = stdout(&verified);
        assert!(text.starts_with("wrong  ") && text.contains(needle) && text.contains("ok     "), "{text}");
        let verified = kvmig(folder.path()).args(["pair", "verify", "--json"]).arg(&spoilt).output().unwrap();
        assert_eq!(verified.status.code(), Some(1));
        let found = json(&verified);
        assert_eq!(found[0]["ok"], false);
        assert!(found[0]["error"].as_str().unwrap().contains(needle), "{found}");
    }
}

#[test]
fn remove_takes_a_pair_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let remove = |args: &[&str], path: &Path| {
        kvmig(folder.path()).args(["pair", "remove"]).args(args).arg(path).output().unwrap()
    };
    let damaged = pair(&at("damaged"), "ridge", 1.0);
    spoil(&damaged.join("weights.safetensors"));
    fs::remove_file(damaged.join("evidence.json")).unwrap();

    // Nobody to ask.
    let refused = remove(&[], &damaged);
    assert!(refused.status.code() == Some(2) && stderr(&refused).contains("--yes"), "{}", stderr(&refused));
    assert!(damaged.join("pair.toml").exists());
    let removed = remove(&["--yes", "--json"], &damaged);
    assert!(removed.status.success() && !damaged.exists(), "{}", stderr(&removed));
    assert_eq!(json(&removed)[0].as_str(), damaged.to_str());

    let kept = pair(&at("kept"), "ridge", 1.0);
    fs::write(kept.join("notes.txt"), "mine").unwrap();
    let foreign = at("foreign");
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join("pair.toml"), "title = \"a recipe\"\n").unwrap();
    let empty = at("empty");
    fs::create_dir(&empty).unwrap();
    for (path, needle) in [
        (&kept, "holds notes.txt, which is no part of a pair"),
        (&foreign, "missing field `identity`"),
        (&empty, "pair.toml: can't be read"),
        (&at("absent"), "absent"),
    ] {
        let refused = remove(&["--yes"], path);
        assert_eq!(refused.status.code(), Some(2), "{}", path.display());
        assert!(stderr(&refused).contains(needle), "{}", stderr(&refused));
    }
    assert_eq!(fs::read_dir(&kept).unwrap().count(), 5, "nothing was touched");
    assert!(foreign.join("pair.toml").exists() && empty.exists());

    let both = at("both");
    pair(&both.join("ridge"), "ridge", 1.0);
    pair(&both.join("other"), "other", 1.0);
    let removed = remove(&["--yes"], &both);
    assert!(removed.status.success() && !both.exists(), "{}", stderr(&removed));
    let hidden = fs::read_dir(folder.path())
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with(".kvmig"));
    assert_eq!(hidden.count(), 0, "nothing is left of what was removed");
}

#[cfg(unix)]
#[test]
fn a_link_to_a_pair_is_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let whole = pair(&folder.path().join("whole"), "ridge", 1.0);
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&whole, &link).unwrap();
    let refused = kvmig(folder.path()).args(["pair", "remove", "--yes"]).arg(&link).output().unwrap();
    assert!(refused.status.code() == Some(2) && stderr(&refused).contains("is a link"), "{}", stderr(&refused));
    assert!(Pair::open(&whole).is_ok() && link.exists());
}

#[test]
fn several_mappers_are_candidates() {
    let folder = tempfile::tempdir().unwrap();
    let both = folder.path().join("both");
    pair(&both.join("ridge"), "ridge", 1.0);
    pair(&both.join("other"), "other", 0.5);
    let run = |args: &[&str]| {
        let models = ["--source", "bundled:medium", "--target", "bundled:large", "--device", "cpu", "-n", "2"];
        let mut command = kvmig(folder.path());
        command.args(["run", "--json", "--prompt", bundled::PROMPT, "--pair"]).arg(&both).args(models).args(args);
        command.output().unwrap()
    };
    let migrated = record(&run(&[]));
    let found = ["decision", "pair", "mapper"].map(|field| migrated[field].as_str().unwrap());
    assert_eq!(found, ["migrate", "medium-large", "other"], "the quicker by its evidence");
    assert!(migrated["page_in"]["bytes"].as_u64().unwrap() > 0, "{migrated:#}");
    assert_eq!(record(&run(&["--mapper", "ridge"]))["mapper"], "ridge");
    let refused = run(&["--mapper", "mlp"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("no mlp mapper, expected other, ridge"), "{}", stderr(&refused));
    // What does not fit re-prefills, and says why.
    let refused = record(&run(&["--device-budget", "1KiB"]));
    assert_eq!((refused["decision"].as_str(), refused["reason"].as_str()), (Some("reprefill"), Some("weights_failed")));
    assert!(refused["reason_text"].as_str().unwrap().contains("raise --device-budget"), "{refused:#}");

    let shown = kvmig(folder.path()).args(["pair", "show"]).arg(&both).output().unwrap();
    let text = stdout(&shown);
    assert_eq!(text.lines().filter(|line| line.starts_with("mapper ")).count(), 2, "{text}");
    let old = kvmig(folder.path()).arg("pair").arg(&both).output().unwrap();
    assert_eq!(stdout(&old), text, "`kvmig pair FOLDER` shows it as `kvmig pair show FOLDER` does");
}

#[test]
fn diagnostics_are_shown() {
    let folder = tempfile::tempdir().unwrap();
    let pair = bundled::default_pair().unwrap();
    let weights = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/pairs/medium-large/ridge/weights.safetensors");
    let weights = fs::read(weights).unwrap();
    let draft = Draft::new(pair.manifest().clone(), RIDGE.to_vec(), weights.clone()).unwrap();
    let diagnostics = Diagnostics {
        r2: Some(HeatMap {
            keys: vec![vec![0.873, -0.2], vec![1.0, 0.05]],
            values: vec![vec![0.5, 0.4], vec![0.3, 0.2]],
        }),
        forward: vec![ForwardCurve { layer: 1, sources: vec![0, 1], keys: vec![0.9, 0.95], values: vec![0.3, 0.35] }],
        cosine: vec![0.91, 0.87],
        concentration: Some(PerSide { keys: vec![1.25, 0.75], values: vec![2.0, 0.5] }),
        effective_features: Some(PerSide { keys: vec![120.0, 96.4], values: vec![110.0, 80.0] }),
        rows_per_feature: Some(312.5),
        weight_bytes: Some(1 << 20),
    };
    let out = folder.path().join("pair");
    draft.with_diagnostics(diagnostics.clone()).write(&out, None, &[]).unwrap();
    let show = |args: &[&str]| kvmig(folder.path()).args(["pair", "show"]).arg(&out).args(args).output().unwrap();
    let text = stdout(&show(&["--diagnostics"]));
    for line in [
        "         0  1",
        "    0   87  0",
        "    1   99  5",
        "    1  +0   0.90 / 0.30  +1   0.95 / 0.35",
        "     0.91   0.87",
        "     1.25   0.75",
        "      120     96",
        "rows per feature  312.5",
        "weights           1.00 MiB",
    ] {
        assert!(text.lines().any(|found| found == line), "no line `{line}` in\n{text}");
    }
    assert!(!text.contains('\u{1b}'), "no colour off a terminal");
    assert!(!stdout(&show(&[])).contains("R² of keys"));
    let shown = json(&show(&["--json"]));
    assert_eq!(shown["diagnostics"], serde_json::to_value(&diagnostics).unwrap());
    assert!(!text.contains("kept no documents"));
    let (unseen, blind) =
        (folder.path().join("unseen"), Diagnostics { cosine: vec![], concentration: None, ..diagnostics });
    let draft = Draft::new(pair.manifest().clone(), RIDGE.to_vec(), weights).unwrap();
    draft.with_diagnostics(blind).write(&unseen, None, &[]).unwrap();
    let text = kvmig(folder.path()).args(["pair", "show", "--diagnostics"]).arg(&unseen).output().unwrap();
    assert!(stdout(&text).contains("kept no documents"), "what is absent is said to be");
    let bundled = kvmig(folder.path()).args(["pair", "show", "bundled", "--diagnostics"]).output().unwrap();
    assert!(bundled.status.success(), "{}", stderr(&bundled));
    spoil(&out.join("diagnostics.json"));
    assert_eq!(show(&["--diagnostics"]).status.code(), Some(2));
    assert!(show(&[]).status.success(), "what nobody asks for is in nobody's way");
}

#[test]
fn mappers_that_do_not_belong_together_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    pair(&folder.path().join("twins/a"), "ridge", 1.0);
    pair(&folder.path().join("twins/b"), "ridge", 1.0);
    let mixed = folder.path().join("mixed");
    pair(&mixed.join("a"), "ridge", 1.0);
    let pair = bundled::default_pair().unwrap();
    let mut manifest = pair.manifest().clone();
    manifest.identity.target.digest = kvmig_gate::Digest::of(b"another");
    manifest.identity.mapper.kind = "other".to_owned();
    let weights = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/pairs/medium-large/ridge/weights.safetensors");
    let draft = Draft::new(manifest, RIDGE.to_vec(), fs::read(weights).unwrap()).unwrap();
    draft.write(&mixed.join("b"), None, &[]).unwrap();
    for (name, needle) in [("twins", "both are ridge mappers"), ("mixed", "the target is bundled:large")] {
        let refused = kvmig(folder.path()).args(["pair", "show"]).arg(folder.path().join(name)).output().unwrap();
        assert_eq!(refused.status.code(), Some(2));
        assert!(stderr(&refused).contains(needle), "{}", stderr(&refused));
    }
}
