//! Programs that pass the gate by. Each must not compile, for the reason its `.stderr` gives.
//!
//! Those are rustc 1.95's words; `TRYBUILD=overwrite cargo test -p kvmig-compile-fail` writes them anew, to be read
//! before they are kept.

use std::fs;

/// As many as there are files: one that is lost or never found by the pattern would prove nothing.
const FIXTURES: usize = 20;

#[test]
fn nothing_passes_the_gate_by() {
    let programs = fs::read_dir("fixtures")
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().path().extension().is_some_and(|extension| extension == "rs"))
        .count();
    assert_eq!(programs, FIXTURES);
    trybuild::TestCases::new().compile_fail("fixtures/*.rs");
}
