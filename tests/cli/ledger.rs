//! The ledger from outside: looked into, and settled.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use kvmig::bundled;
use kvmig_gate::{CacheFacts, Candidate, Decision, Digest, Gate, Policy, Request, Ticket};
use serde_json::Value;

use crate::{kvmig, stderr, stdout};

/// A ticket in flight, as an engine outside the process leaves it.
fn in_flight(ledger: &Path) -> Ticket {
    let pair = bundled::default_pair().unwrap();
    let evidence = pair.evidence().unwrap();
    let cache =
        CacheFacts { model: pair.loaded().source(), digest: Digest::of(b"tokens"), serial: 1, tokens: 1280, hops: 0 };
    let candidate =
        Candidate { mapper: pair.mapper(), claim: pair.loaded().claim(), evidence: Some(evidence), latency: None };
    let request = Request {
        pair: pair.name(),
        cache,
        target: pair.loaded().target(),
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
    let (_, receipt) = permit.redeem(pair.loaded(), cache, pair.loaded().target()).unwrap().complete(());
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

/// Names that SQLite would take for databases in memory: nothing migrates unrecorded.
#[test]
fn a_ledger_is_a_file_whatever_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let run = |ledger: &str| {
        let mut command = kvmig(folder.path());
        command
            .current_dir(folder.path())
            .args(["run", "--device", "cpu", "-n", "1", "--prompt", "Hello", "--ledger", ledger]);
        command.output().unwrap()
    };
    for name in [":memory:", "file:x?mode=memory", "file::memory:?cache=shared"] {
        let output = run(name);
        assert!(output.status.success(), "{name}: {}", stderr(&output));
        assert!(folder.path().join(name).is_file(), "{name}");
        let log = kvmig(folder.path())
            .current_dir(folder.path())
            .args(["gate", "log", "--json", "--ledger", name])
            .output()
            .unwrap();
        let log: Value = serde_json::from_slice(&log.stdout).unwrap();
        assert_eq!(log.as_array().map(Vec::len), Some(1), "{name}: {log:#}");
    }
    let output = run("");
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("--ledger") && output.stdout.is_empty(), "{}", stderr(&output));
}

/// Another user's ledger, or one on a medium that can't be written.
#[cfg(unix)]
#[test]
fn a_read_only_ledger_can_be_looked_into() {
    use std::os::unix::{fs::PermissionsExt as _, process::CommandExt as _};
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let scene = tempfile::tempdir().unwrap();
    let folder = scene.path().join("ledgers");
    fs::create_dir(&folder).unwrap();
    let ledger = folder.join("ledger.sqlite");
    let ticket = in_flight(&ledger);
    // Both characters mean something in the name that SQLite is given.
    let odd = folder.join("50% of ?.sqlite");
    fs::copy(&ledger, &odd).unwrap();
    // A copy that other users can get at, wherever the program was built.
    let program = scene.path().join("kvmig");
    fs::copy(kvmig(scene.path()).get_program(), &program).unwrap();
    mode(scene.path(), 0o755);
    mode(&folder, 0o555);
    for path in [&ledger, &odd] {
        mode(path, 0o444);
        let mut command = Command::new(&program);
        command.args(["gate", "show", ticket.as_str(), "--ledger"]).arg(path).stdin(Stdio::null());
        // Root may write whatever the modes say, so that somebody else has to look.
        if fs::OpenOptions::new().append(true).open(path).is_ok() {
            command.uid(65_534).gid(65_534);
        }
        // A child that another test has forked meanwhile may still hold the copy open for writing, until it runs its own program.
        let output = loop {
            match command.output() {
                Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
                done => break done.unwrap(),
            }
        };
        assert!(output.status.success(), "{}: {}", path.display(), stderr(&output));
        let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(shown["ticket"], ticket.as_str());
    }
    mode(&folder, 0o755);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 2, "something was made beside the ledgers");
}

/// Settling writes, so that it brings an older ledger up to date as `run` does; what goes wrong is told of the ledger then.
#[test]
fn settling_brings_an_older_ledger_up_to_date() {
    let folder = tempfile::tempdir().unwrap();
    let (ledger, realised) = (folder.path().join("ledger.sqlite"), folder.path().join("realised.json"));
    fs::write(&realised, r#"{"agreement": 0.9, "kl_nats": 0.1, "nll_gap_nats": 0.1, "n": 32}"#).unwrap();
    let first = include_str!("../../gate/src/ledger/schema/0001_tickets.sql");
    let sqlite = rusqlite::Connection::open(&ledger).unwrap();
    sqlite.execute_batch(first).unwrap();
    sqlite.pragma_update(None, "application_id", 0x6b76_6d67).unwrap();
    sqlite.pragma_update(None, "user_version", 1).unwrap();
    drop(sqlite);
    let kvmig =
        |args: &[&str]| kvmig(folder.path()).arg("gate").args(args).arg("--ledger").arg(&ledger).output().unwrap();
    let ticket = "01jdw3k8x-7q2m9ab";
    let looked = kvmig(&["show", ticket]);
    assert!(stderr(&looked).contains("found schema 1"), "{}", stderr(&looked));
    let output = kvmig(&["settle", ticket, "--realised", realised.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    let message = stderr(&output);
    assert!(message.starts_with("error: ledger ") && message.contains(&format!("no ticket {ticket}")), "{message}");
    assert!(kvmig(&["log"]).status.success());
}

/// What `kvmig gate policy` prints is the whole policy: given back, it decides alike.
#[test]
fn a_policy_is_printed_whole() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("policy.toml");
    let policy = |args: &[&str]| {
        let output = kvmig(folder.path()).args(["gate", "policy"]).args(args).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output)
    };
    let shipped = policy(&[]);
    assert!(shipped.lines().any(|line| line == "floor = 0.25"), "{shipped}");
    fs::write(&file, &shipped).unwrap();
    assert_eq!(policy(&["--policy", file.to_str().unwrap()]), shipped);
    assert_eq!(Policy::load(&file).unwrap().digest(), Policy::default().digest());
}
