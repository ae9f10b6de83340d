//! The program as a person runs it.

mod eval;
#[cfg(unix)]
mod full_disk;
mod ledger;
mod pairs;
mod store;

use std::{
    fs,
    io::Read as _,
    path::Path,
    process::{Child, Command, Output, Stdio},
};

use serde_json::Value;

/// The program, with a ledger of its own so that tests don't meet.
fn kvmig(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvmig"));
    command.stdin(Stdio::null()).env("XDG_DATA_HOME", folder).env("XDG_CACHE_HOME", folder.join("cache"));
    // Mesa complains on stderr where there is no display.
    command.env("NODEVICE_SELECT", "1");
    command
}

/// The same, started by a shell that has done `first`.
fn kvmig_after(first: &str, folder: &Path) -> Command {
    let plain = kvmig(folder);
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{first}; exec \"$0\" \"$@\"")]).arg(plain.get_program()).stdin(Stdio::null());
    command.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn record(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).expect("--json prints one JSON object")
}

#[test]
fn the_bundled_default_migrates_and_is_audited() {
    let folder = tempfile::tempdir().unwrap();
    let output = kvmig(folder.path()).args(["run", "--device", "cpu", "--json"]).output().unwrap();
    let record = record(&output);
    assert_eq!(record["decision"], "migrate", "{record:#}");
    assert!(record["tokens"]["prompt"].as_u64().unwrap() >= 1000);
    let tokens = &record["tokens"];
    let parts = ["mapped", "native_head", "native_tail"].map(|part| tokens[part].as_u64().unwrap());
    assert_eq!(parts.iter().sum::<u64>(), tokens["prompt"].as_u64().unwrap());
    assert!(parts.iter().all(|&part| part > 0));
    let realised = &record["realised"];
    assert!(realised["kl_nats"].as_f64().unwrap() < 0.25, "{realised:#}");
    assert!(record["ms"]["reprefill"].as_f64().unwrap() > 0.0);
    assert!(record["flops"]["limit"].as_f64().unwrap() > 2.0);
    assert!(!record["text"].as_str().unwrap().is_empty());
    // The ledger keeps the same record.
    let ticket = record["ticket"].as_str().unwrap();
    let shown = kvmig(folder.path()).args(["gate", "show", ticket]).output().unwrap();
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(shown["state"], "settled");
    assert_eq!(shown["record"]["ticket"], record["ticket"]);
}

#[test]
fn a_person_sees_the_answer_on_stdout_and_the_report_on_stderr() {
    let folder = tempfile::tempdir().unwrap();
    let output = kvmig(folder.path()).args(["run", "--device", "cpu", "-n", "12"]).output().unwrap();
    let (answer, report) = (stdout(&output), stderr(&output));
    assert!(output.status.success(), "{report}");
    assert!(!answer.trim().is_empty());
    for label in [
        "models",
        "pair",
        "device",
        "prompt",
        "decision",
        "tokens",
        "source",
        "handoff",
        "re-prefill",
        "quality",
        "ticket",
    ] {
        assert!(report.lines().any(|line| line.starts_with(label)), "no line `{label}` in\n{report}");
    }
}

#[test]
fn refused_is_as_if_nothing_had_been_tried() {
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("strict.toml");
    fs::write(&policy, "floor = 1e-9\n").unwrap();
    let run = |extra: &[&str]| {
        let args = ["run", "--device", "cpu", "--json", "-n", "24", "--policy"];
        kvmig(folder.path()).args(args).arg(&policy).args(extra).output().unwrap()
    };
    let refused = record(&run(&[]));
    assert_eq!(refused["decision"], "reprefill");
    assert_eq!(refused["tokens"]["mapped"], 0);
    assert!(refused["reason_text"].as_str().unwrap().contains("floor"), "{refused:#}");
    // The bundled default audits itself: what was refused is tried, measured, and not served.
    assert!(refused["realised"]["kl_nats"].as_f64().unwrap() < 0.25, "{refused:#}");
    let shown = kvmig(folder.path()).args(["gate", "show", refused["trial"].as_str().unwrap()]).output().unwrap();
    let trial: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!((trial["decision"].as_str(), trial["state"].as_str()), (Some("trial"), Some("settled")));
    let required = run(&["--require-migration"]);
    assert_eq!(required.status.code(), Some(1));
    let required: Value = serde_json::from_slice(&required.stdout).unwrap();
    assert_eq!(required["text"], refused["text"], "the answer is given all the same");
}

/// What can't be used: exit code 2, one line that names the thing and the mend, and nothing on stdout.
#[test]
fn errors_name_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path.display().to_string()
    };
    let absent = folder.path().join("absent").display().to_string();
    let latin = file("latin.txt", b"caf\xe9");
    let empty = file("empty.txt", b"");
    let policy = file("policy.toml", b"flor = 0.2\n");
    let range = file("range.toml", b"alpha = 1.5\n");
    let gguf = file("cut.gguf", b"GGUF\x03\0\0\0");
    let pair = ["run", "--device", "cpu", "--prompt", "x"];
    let cases: &[(&[&str], &[&str])] = &[
        (&["run", "--prompt-file", &absent], &["absent"]),
        (&["run", "--prompt-file", &latin], &["latin.txt", "UTF-8"]),
        (&["run", "--device", "cpu", "--prompt-file", &empty], &["empty"]),
        (&["run", "--policy", &policy], &["policy.toml: line 1, column 1, field `flor`: unknown field `flor`"]),
        (&["run", "--policy", &range], &["range.toml", "alpha", "1.5"]),
        (&["run", "--device", "no-such-gpu"], &["no-such-gpu", "kvmig devices"]),
        (
            &[pair[0], pair[1], pair[2], pair[3], pair[4], "--pair", &absent, "--source", &gguf, "--target", &gguf],
            &["absent"],
        ),
        (&["fit", "--source", &gguf, "--target", &gguf, "--corpus", &latin, "--out", &absent], &["latin.txt"]),
        (&["fit", "--source", &gguf, "--target", &gguf, "--corpus", &absent, "--out", &absent], &["absent"]),
        (
            &[
                "fit",
                "--source",
                "bundled:medium",
                "--target",
                "bundled:large",
                "--corpus",
                &policy,
                "--out",
                &absent,
                "--tail",
                "18446744073709551615",
            ],
            &["context"],
        ),
        (&["pair", &absent], &["absent"]),
        (&["run", "--pair", &absent, "--prompt", "x"], &["--source", "--target"]),
        (&["run", "--domain", "two words"], &["two words", "letters"]),
        (&["gate", "show", "nonsense"], &["nonsense"]),
    ];
    for (args, needles) in cases {
        let output = kvmig(folder.path()).args(*args).output().unwrap();
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}\n{message}");
        assert!(output.stdout.is_empty(), "{args:?}");
        for needle in *needles {
            assert!(message.contains(needle), "{args:?}: `{needle}` is not in\n{message}");
        }
        assert!(!message.contains("panicked"), "{message}");
        // What the command line itself refuses comes with its usage.
        if !message.contains("Usage:") && !message.contains("For more information") {
            assert_eq!(message.lines().count(), 1, "{args:?}\n{message}");
        }
    }
}

#[test]
fn a_prompt_too_long_for_the_model_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = folder.path().join("long.txt");
    fs::write(&prompt, "All work and no play. ".repeat(2000)).unwrap();
    let output = kvmig(folder.path()).args(["run", "--device", "cpu", "--prompt-file"]).arg(&prompt).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("2048"), "{}", stderr(&output));
}

/// Close to the model's last position the answer and the audit are as long as there is room for.
#[test]
fn a_prompt_that_leaves_little_room_is_answered_and_audited() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = folder.path().join("near.txt");
    // One token a word, and the BOS: 2,041 of 2,048 positions.
    fs::write(&prompt, " the".repeat(2040)).unwrap();
    let output = kvmig(folder.path())
        .args(["run", "--device", "cpu", "--json", "--audit", "-n", "18446744073709551615", "--prompt-file"])
        .arg(&prompt)
        .output()
        .unwrap();
    let record = record(&output);
    let (prompt, generated) = (&record["tokens"]["prompt"], &record["tokens"]["generated"]);
    assert!(prompt.as_u64().unwrap() > 2000, "{prompt}");
    assert!(prompt.as_u64().unwrap() + generated.as_u64().unwrap() <= 2049);
}

#[test]
fn a_prompt_without_a_middle_is_prefilled() {
    let folder = tempfile::tempdir().unwrap();
    let output = kvmig(folder.path()).args(["run", "--device", "cpu", "--json", "--prompt", "Hello"]).output().unwrap();
    let record = record(&output);
    assert_eq!((record["decision"].as_str(), record["reason"].as_str()), (Some("reprefill"), Some("nothing_to_map")));
    let told = kvmig(folder.path()).args(["run", "--device", "cpu", "-n", "1", "--prompt", "Hello"]).output().unwrap();
    assert!(stderr(&told).contains("audit       nothing was mapped, nothing to audit"), "{}", stderr(&told));
}

/// The answer goes to standard output; that nobody reads what is said beside it changes nothing.
#[test]
fn an_answer_is_given_though_nobody_reads_the_report() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = kvmig(folder.path());
    command.args(["run", "--device", "cpu", "-n", "8", "--domain", "unknown"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && !stdout(&output).trim().is_empty(), "{}", output.status);
    // Whereas who reads the answer may have had enough of it.
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && !stderr(&output).contains("error"), "{}", stderr(&output));
}

/// The answer comes first, on standard output as always; then what went wrong, and the exit code of an error.
#[test]
fn a_ledger_that_fails_after_the_answer_does_not_keep_it() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = folder.path().join("ledger.sqlite");
    let run = || {
        let args = ["run", "--device", "cpu", "--json", "-n", "8", "--ledger"];
        kvmig(folder.path()).args(args).arg(&ledger).output().unwrap()
    };
    let whole = record(&run());
    let trigger = "CREATE TRIGGER broken BEFORE UPDATE OF state ON tickets WHEN NEW.state = 'settled'
                   BEGIN SELECT RAISE (ABORT, 'the disk is full'); END";
    rusqlite::Connection::open(&ledger).unwrap().execute_batch(trigger).unwrap();
    let output = run();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let message = stderr(&output);
    assert!(message.contains("the answer was given") && message.contains("the disk is full"), "{message}");
    let kept: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&kept["decision"], &kept["text"]), (&whole["decision"], &whole["text"]));
    assert_eq!(kept["realised"]["n"], whole["realised"]["n"], "what the audit found is not lost either");
}

/// `kvmig run`, for an answer that takes a while, once that has begun.
#[cfg(unix)]
fn answering(command: &mut Command) -> Child {
    command.args(["--device", "cpu", "-n", "500"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    child
}

#[cfg(unix)]
fn send(signal: &str, child: &Child) {
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
}

/// One thread count for the whole process: many more than anyone would start unasked.
#[cfg(target_os = "linux")]
#[test]
fn threads_are_as_many_as_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let asked = 4 * std::thread::available_parallelism().unwrap().get() + 40;
    let mut child = answering(kvmig(folder.path()).args(["run", "--threads", &asked.to_string()]));
    let found = fs::read_dir(format!("/proc/{}/task", child.id())).unwrap().count();
    send("-INT", &child);
    child.wait().unwrap();
    assert!(found >= asked, "{found} threads, asked for {asked}");
}

/// `nohup` ignores SIGHUP for the program it starts, which leaves it so: a long fit outlives its terminal.
#[cfg(unix)]
#[test]
fn who_was_told_to_ignore_a_hangup_does() {
    let folder = tempfile::tempdir().unwrap();
    let child = answering(kvmig_after("trap '' HUP", folder.path()).arg("run"));
    send("-HUP", &child);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}: {}", output.status, stderr(&output));
}

/// Ctrl-C: the answer ends, and the ticket with it.
#[cfg(unix)]
#[test]
fn an_interrupted_answer_leaves_no_open_ticket() {
    let folder = tempfile::tempdir().unwrap();
    // The handler is there once the answer has begun.
    let child = answering(kvmig(folder.path()).arg("run"));
    send("-INT", &child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("error: interrupted; ticket"), "{}", stderr(&output));
    let log = kvmig(folder.path()).args(["gate", "log", "--json"]).output().unwrap();
    let log: Value = serde_json::from_slice(&log.stdout).unwrap();
    assert_eq!(log[0]["state"], "unaudited", "{log:#}");
}

#[test]
fn help_teaches() {
    let folder = tempfile::tempdir().unwrap();
    for command in ["run", "fit", "pair", "devices", "conform", "gate"] {
        let output = kvmig(folder.path()).args([command, "--help"]).output().unwrap();
        assert!(output.status.success());
        assert!(stdout(&output).len() > 200, "{command}");
    }
}

#[test]
fn devices_lists_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let output = kvmig(folder.path()).args(["devices", "--json"]).output().unwrap();
    let list: Value = serde_json::from_slice(&output.stdout).unwrap();
    let devices = list["devices"].as_array().unwrap();
    assert!(devices.iter().any(|device| device["kind"] == "cpu"), "{list:#}");
}

#[test]
fn nothing_to_say_is_no_line() {
    let folder = tempfile::tempdir().unwrap();
    let output = kvmig(folder.path()).args(["run", "--device", "cpu", "-n", "0"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stdout(&output), "");
}

#[test]
fn exit_codes_are_told() {
    let folder = tempfile::tempdir().unwrap();
    for args in [&["--help"][..], &["run", "--help"], &["conform", "--help"]] {
        let output = kvmig(folder.path()).args(args).output().unwrap();
        assert!(stdout(&output).contains("Exit codes: 0"), "{args:?}");
    }
}
