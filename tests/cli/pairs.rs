//! Pairs: the bundled one by its name, and one that is fitted.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
};

use kvmig::{bundled, pair::Draft, sandbox::bundled::RIDGE};
use serde_json::Value;

use crate::{kvmig, kvmig_after, record, stderr, stdout};

#[test]
fn the_bundled_pair_has_a_name() {
    let folder = tempfile::tempdir().unwrap();
    let shown = kvmig(folder.path()).args(["pair", "bundled"]).output().unwrap();
    let text = stdout(&shown);
    assert!(shown.status.success(), "{}", stderr(&shown));
    let run = |args: &[&str]| {
        let run = ["run", "--device", "cpu", "--json", "-n", "2", "--pair", "bundled"];
        record(&kvmig(folder.path()).args(run).args(args).output().unwrap())
    };
    let default = run(&[]);
    assert_eq!((default["decision"].as_str(), default["pair"].as_str()), (Some("migrate"), Some("medium-large")));
    assert!(!default["realised"].is_null(), "the bundled default audits itself");
    // What the pair's page calls the module is what a ticket calls it.
    let module = &default["module_digest"].as_str().unwrap()[..12];
    assert!(text.contains(&format!("module     {module} in tickets")), "{text}");
    for answer in ["no domain named", "--domain prose", "--domain wiki"] {
        assert!(text.lines().any(|line| line.trim_start().starts_with(answer)), "no line `{answer}` in\n{text}");
    }
    let json = kvmig(folder.path()).args(["pair", "bundled", "--json"]).output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let mappers: Vec<&serde_json::Value> = json.as_array().unwrap().iter().collect();
    let kinds: Vec<_> = mappers.iter().map(|m| m["manifest"]["identity"]["mapper"]["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["head-matched", "mlp", "ridge"]);
    for mapper in mappers {
        let forecasts = mapper["forecasts"].as_array().unwrap();
        let domains: Vec<_> = forecasts.iter().map(|forecast| forecast["domain"].as_str()).collect();
        assert_eq!(domains, [Some("prose"), Some("wiki"), None]);
        assert!(forecasts.iter().all(|forecast| forecast["decision"] == "migrate"), "{forecasts:#?}");
    }
    // With another model the pair is refused, and the answer given all the same.
    let other = run(&["--source", "bundled:medium-code", "--prompt", "Once upon a time"]);
    assert_eq!((other["decision"].as_str(), other["reason"].as_str()), (Some("reprefill"), Some("mismatch")));
}

#[test]
fn a_misspelt_bundled_pair_is_no_folder() {
    let folder = tempfile::tempdir().unwrap();
    for command in [&["run", "--pair", "bundled:nope"][..], &["eval", "--pair", "bundled:nope", "--held-out", "x.txt"]]
    {
        let output = kvmig(folder.path()).args(command).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(
            stderr(&output).contains("there are bundled:medium-large, bundled:large-medium"),
            "{}",
            stderr(&output)
        );
    }
}

/// What is kept of compiled modules saves time, and is worth no refusal.
#[test]
fn a_pair_is_shown_without_a_folder_for_compiled_modules() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("no-folder");
    fs::write(&file, "").unwrap();
    let output = kvmig(folder.path()).env("XDG_CACHE_HOME", &file).args(["pair", "bundled"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn an_unknown_domain_is_told_from_the_known() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["run", "--device", "cpu", "-n", "1", "--json", "--domain"];
    let output = kvmig(folder.path()).args(args).arg("poetry").output().unwrap();
    assert!(stderr(&output).contains("warning: --domain poetry") && stderr(&output).contains("prose, wiki"));
    assert_eq!(record(&output)["reason"], "too_little_evidence");
    let output = kvmig(folder.path()).args(args).arg("prose").output().unwrap();
    assert!(!stderr(&output).contains("warning"), "{}", stderr(&output));
}

/// A member of the bundled family in a folder, to be changed.
fn member(folder: &Path, name: &str) -> PathBuf {
    let (family, copy) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/family"), folder.join(name));
    fs::create_dir(&copy).unwrap();
    for file in [
        &format!("{name}/config.json"),
        &format!("{name}/model.safetensors"),
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        let from = family.join(file);
        fs::copy(&from, copy.join(from.file_name().unwrap())).unwrap();
    }
    copy
}

fn edit(file: &Path, change: impl FnOnce(&mut Value)) {
    let mut json = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    change(&mut json);
    fs::write(file, serde_json::to_vec(&json).unwrap()).unwrap();
}

/// Models that a prompt or a pair can't be meant for: an error and no answer, where other weights of the same kind are refused
/// by the gate.
#[test]
fn models_of_another_kind_are_an_error() {
    type Change = fn(&mut Value);
    let changes: [(&str, Change, &[&str]); 4] = [
        // Two words change places: the same vocabulary, and every prompt with either is another one.
        (
            "tokenizer.json",
            |json| {
                let vocab = json["model"]["vocab"].as_object_mut().unwrap();
                let words: Vec<String> = vocab.keys().rev().take(2).cloned().collect();
                let (a, b) = (vocab[&words[0]].clone(), vocab[&words[1]].clone());
                (vocab[&words[0]], vocab[&words[1]]) = (b, a);
            },
            &["large/tokenizer.json: tokenizer: found ", "expected ", "bundled:medium/tokenizer.json", "use a sibling"],
        ),
        (
            "tokenizer_config.json",
            |json| json["add_bos_token"] = false.into(),
            &["large/tokenizer.json: start of a text (BOS): found tokens [], expected tokens [0]", "use a sibling"],
        ),
        (
            "config.json",
            |json| json["rope_theta"] = 5e5.into(),
            &["pair.toml: identity.target.layout.rope (large)", "500000", "10000", "fit a pair for these"],
        ),
        (
            "config.json",
            |json| json["rope_scaling"] = serde_json::json!({"rope_type": "linear", "factor": 4.0}),
            &["pair.toml: identity.target.layout.rope (large)", "Linear", "fit a pair for these"],
        ),
    ];
    for (file, change, needles) in changes {
        let folder = tempfile::tempdir().unwrap();
        let target = member(folder.path(), "large");
        edit(&target.join(file), change);
        let run = ["run", "--device", "cpu", "--prompt", "Hello", "--pair", "bundled", "--source", "bundled:medium"];
        let output = kvmig(folder.path()).args(run).arg("--target").arg(&target).output().unwrap();
        let message = stderr(&output);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{file}: {message}");
        for needle in needles {
            assert!(message.contains(needle), "{file}: `{needle}` is not in {message}");
        }
        assert_eq!(message.lines().count(), 1, "{message}");
        assert!(!folder.path().join("kvmig").exists(), "nothing was decided, so that nothing is recorded");
    }
    // The pair's models, each in the other's place.
    let folder = tempfile::tempdir().unwrap();
    let run = ["run", "--device", "cpu", "--prompt", "Hello", "--pair", "bundled"];
    let swapped = ["--source", "bundled:large", "--target", "bundled:medium"];
    let output = kvmig(folder.path()).args(run).args(swapped).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("identity.source.layout (bundled:large): found 8 layers"), "{}", stderr(&output));
}

/// Each comes with its models; the one that was fitted without code, from a source that knows it, is refused on code alone.
#[test]
fn every_bundled_pair_answers() {
    for pair in bundled::BundledPair::ALL {
        let folder = tempfile::tempdir().unwrap();
        let run = ["run", "--device", "cpu", "--json", "-n", "2", "--pair", pair.name(), "--domain"];
        let domain = |domain| record(&kvmig(folder.path()).args(run).arg(domain).output().unwrap());
        let prose = domain("prose");
        assert_eq!(prose["decision"], "migrate", "{}: {}", pair.name(), prose["reason_text"]);
        if pair == bundled::BundledPair::MediumCodeLarge {
            let code = domain("code");
            assert_eq!((&code["decision"], &code["reason"]), (&"reprefill".into(), &"bound_misses_floor".into()));
        }
    }
}

/// Evidence whose lengths no document has is shown and judged, and overflows nothing.
#[test]
fn absurd_evidence_is_no_panic() {
    let folder = tempfile::tempdir().unwrap();
    let pair = bundled::default_pair().unwrap();
    let mut evidence = pair.evidence().unwrap().clone();
    evidence.documents.iter_mut().for_each(|document| document.tokens = usize::MAX);
    let weights = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/pairs/medium-large/ridge/weights.safetensors");
    let draft = Draft::new(pair.manifest().clone(), RIDGE.to_vec(), fs::read(weights).unwrap()).unwrap();
    let out = folder.path().join("absurd");
    draft.write(&out, Some(evidence), &[]).unwrap();
    for args in [&[][..], &["--json"]] {
        let shown = kvmig(folder.path()).arg("pair").arg(&out).args(args).output().unwrap();
        assert!(shown.status.success() && stderr(&shown).is_empty(), "{}", stderr(&shown));
    }
}

/// Passages to fit on, few and short: two files of one domain.
pub(super) fn corpus(folder: &Path) -> [String; 2] {
    let texts = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/family/texts/prose.calib.txt");
    let text = fs::read_to_string(texts).unwrap();
    let short: Vec<String> =
        text.split("\n<|end|>\n").take(20).map(|p| p.trim_start().chars().take(900).collect()).collect();
    let file = |name: &str, passages: &[String]| {
        let file = folder.join(name);
        fs::write(&file, passages.join("\n<|end|>\n")).unwrap();
        format!("prose={}", file.display())
    };
    [file("first.txt", &short[..10]), file("second.txt", &short[10..])]
}

#[test]
fn a_fit_without_a_terminal_says_how_far_it_is_and_what_it_is_worth() {
    let folder = tempfile::tempdir().unwrap();
    let ([first, second], out) = (corpus(folder.path()), folder.path().join("pair"));
    let models = ["--source", "bundled:medium", "--target", "bundled:large"];
    let fit = |more: &[&str]| {
        let small = ["--context", "96", "--tokens", "2000", "--tail", "8", "--evidence", "3"];
        let mut command = if cfg!(unix) { kvmig_after("umask 027", folder.path()) } else { kvmig(folder.path()) };
        command.arg("fit").args(models).args(small).args(["--device", "cpu", "--corpus", &first, "--corpus", &second]);
        command.arg("--out").arg(&out);
        command.args(more).output().unwrap()
    };
    let refused = fit(&["--k", "7"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("k: found 7, expected 1 to 6"), "{}", stderr(&refused));
    let refused = fit(&["--k", "1", "--name", "a\u{1b}b"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("--name NAME: found `a\\u{1b}b`"), "{}", stderr(&refused));
    assert!(!out.exists());

    let fitted = fit(&["--k", "1"]);
    let (text, said) = (stdout(&fitted), stderr(&fitted));
    assert!(fitted.status.success(), "{said}");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let mode = fs::metadata(&out).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o750, "{mode:o}: the umask decides who may read a pair");
    }
    assert!(said.contains("warning: --evidence 3: the policy's min_evidence is 30"), "{said}");
    for line in ["capture: 0 of ", "solve: 0 of 1", "evidence: 6 of 6 documents"] {
        assert!(said.lines().any(|said| said.starts_with(line)), "no line `{line}` in\n{said}");
    }
    let answers: Vec<&str> = text.lines().filter(|line| line.contains("reprefill: 6 held-out documents")).collect();
    assert_eq!(answers.len(), 2, "one for the domain and one for none:\n{text}");

    // Documents are numbered through the files of their domain: two of one name would make the evidence unsound.
    let shown = kvmig(folder.path()).arg("pair").arg(&out).arg("--json").output().unwrap();
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    let documents = shown["evidence"]["documents"].as_array().unwrap();
    let ids: HashSet<&str> = documents.iter().map(|document| document["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), 6, "{ids:?}");
}
