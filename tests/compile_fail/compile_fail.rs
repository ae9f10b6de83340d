//! Programs that pass the gate by. Each must not compile, for the reason its `.stderr` gives.
//!
//! Every rustc words its errors in its own way, so the `.stderr` files are compared word by word only by the one that
//! `fixtures/RUSTC` names. Every other one has to refuse each program with the same error codes. With a new rustc,
//! `TRYBUILD=overwrite cargo test --workspace --test compile_fail` writes the words anew, to be read before they are kept, and
//! `RUSTC` takes its number.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// As many as there are files: one that is lost or never found by the pattern would prove nothing.
const FIXTURES: usize = 20;

/// Where [`refused_anew`] finds the programs.
const COPIES: &str = "KVMIG_COMPILE_FAIL_COPIES";

#[test]
fn nothing_passes_the_gate_by() {
    let programs = files("fixtures".as_ref(), "rs");
    assert_eq!(programs.len(), FIXTURES);
    with_the_same_codes(&programs);
    if rustc() == fs::read_to_string("fixtures/RUSTC").unwrap().trim() {
        trybuild::TestCases::new().compile_fail("fixtures/*.rs");
    }
}

/// This rustc refuses every program with the error codes that are written down.
fn with_the_same_codes(programs: &[PathBuf]) {
    let copies = Path::new(env!("CARGO_TARGET_TMPDIR")).join("refused_anew");
    let _ = fs::remove_dir_all(&copies);
    fs::create_dir_all(&copies).unwrap();
    for program in programs {
        fs::copy(program, copies.join(program.file_name().unwrap())).unwrap();
    }
    // trybuild takes what to do with words that it doesn't know from its process's environment alone.
    let output = Command::new(env::current_exe().unwrap())
        .args(["--ignored", "--exact", "refused_anew", "--nocapture"])
        .env("TRYBUILD", "overwrite")
        .env(COPIES, &copies)
        .output()
        .unwrap();
    let said = || [output.stdout.as_slice(), &output.stderr].map(String::from_utf8_lossy).concat();
    assert!(output.status.success(), "{}", said());
    for program in programs {
        let name = program.file_stem().unwrap().to_string_lossy();
        let words = |folder: &Path| fs::read_to_string(folder.join(format!("{name}.stderr"))).unwrap();
        let (found, expected) = (words(&copies), words("fixtures".as_ref()));
        let (found, expected) = (codes(&found), codes(&expected));
        assert!(!expected.is_empty(), "{name}.stderr holds no error");
        let (said, recorded) = (rustc(), "rustc of fixtures/RUSTC");
        assert!(
            found.is_superset(&expected),
            "{name}: rustc {said} refuses it with {found:?}, {recorded} with {expected:?}"
        );
    }
}

#[test]
#[ignore = "nothing_passes_the_gate_by runs it, in a process and on programs of its own"]
fn refused_anew() {
    let copies =
        env::var(COPIES).unwrap_or_else(|_| panic!("{COPIES} names no folder; run the test that runs this one"));
    trybuild::TestCases::new().compile_fail(format!("{copies}/*.rs"));
}

/// What a program was refused for: the code of each error, nothing for one that has none.
fn codes(stderr: &str) -> BTreeSet<&str> {
    let errors = stderr.lines().filter_map(|line| line.strip_prefix("error"));
    fn code(error: &str) -> Option<&str> {
        error.strip_prefix('[')?.split_once(']').map(|(code, _)| code)
    }
    errors.map(|error| code(error).unwrap_or_default()).collect()
}

/// Number of the rustc that compiles the programs.
fn rustc() -> String {
    let output = Command::new(env::var_os("RUSTC").unwrap_or("rustc".into())).arg("--version").output().unwrap();
    String::from_utf8(output.stdout).unwrap().split_whitespace().nth(1).unwrap_or_default().to_owned()
}

fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|found| found == extension)).collect()
}

#[test]
fn errors_are_told_apart_by_their_codes() {
    let stderr = "warning: unreachable\n\nerror[E0451]: fields are private\n --> a\n\nerror: type `T` is private\n";
    assert_eq!(codes(stderr), ["E0451", ""].into());
    assert!(codes("warning: error[E0451]\n").is_empty());
}
