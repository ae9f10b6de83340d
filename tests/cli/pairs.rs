//! Pairs: the bundled one by its name, and one that is fitted.

use std::{fs, path::Path};

use crate::{kvmig, record, stderr, stdout};

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
    let forecasts = json["forecasts"].as_array().unwrap();
    let domains: Vec<_> = forecasts.iter().map(|forecast| forecast["domain"].as_str()).collect();
    assert_eq!(domains, [Some("prose"), Some("wiki"), None]);
    assert!(forecasts.iter().all(|forecast| forecast["decision"] == "migrate"), "{forecasts:#?}");
    // With another model the pair is refused, and the answer given all the same.
    let other = run(&["--source", "bundled:medium-code", "--prompt", "Once upon a time"]);
    assert_eq!((other["decision"].as_str(), other["reason"].as_str()), (Some("reprefill"), Some("mismatch")));
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

/// Passages to fit on, few and short.
fn corpus(folder: &Path) -> String {
    let texts = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/family/texts/prose.calib.txt");
    let text = fs::read_to_string(texts).unwrap();
    let short: Vec<String> =
        text.split("\n<|end|>\n").take(20).map(|p| p.trim_start().chars().take(900).collect()).collect();
    let file = folder.join("prose.txt");
    fs::write(&file, short.join("\n<|end|>\n")).unwrap();
    file.display().to_string()
}

#[test]
fn a_fit_without_a_terminal_says_how_far_it_is_and_what_it_is_worth() {
    let folder = tempfile::tempdir().unwrap();
    let (corpus, out) = (corpus(folder.path()), folder.path().join("pair"));
    let models = ["--source", "bundled:medium", "--target", "bundled:large"];
    let fit = |more: &[&str]| {
        let small = ["--context", "96", "--tokens", "2000", "--tail", "8", "--evidence", "3"];
        let mut command = kvmig(folder.path());
        command.arg("fit").args(models).args(small).args(["--device", "cpu", "--corpus", &corpus, "--out"]).arg(&out);
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
    assert!(said.contains("warning: --evidence 3: the policy's min_evidence is 30"), "{said}");
    for line in ["capture: 0 of ", "solve: 0 of 1", "evidence: 3 of 3 steps"] {
        assert!(said.lines().any(|said| said.starts_with(line)), "no line `{line}` in\n{said}");
    }
    let answers: Vec<&str> = text.lines().filter(|line| line.contains("reprefill: 3 held-out documents")).collect();
    assert_eq!(answers.len(), 2, "one for the domain and one for none:\n{text}");
}
