//! Several processes on one ledger, some of them killed.

use std::{
    collections::HashSet,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, ChildStdout, Command, Stdio},
};

use kvmig_gate::{Gate, Policy, State, Ticket, TicketFilter};
use kvmig_tests::gate::{artifact, candidate, evidence, request};
use rusqlite::Connection;

fn child(arguments: &[&str], ledger: &Path) -> (Child, BufReader<ChildStdout>) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_gate_child"))
        .arg(arguments[0])
        .arg(ledger)
        .args(&arguments[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    (child, out)
}

fn ticket(line: &str) -> Ticket {
    line.trim_end().parse().unwrap()
}

#[test]
fn a_migration_whose_process_was_killed_is_abandoned_once_its_lease_ran_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.sqlite");
    let (mut child, mut out) = child(&["hold"], &path);
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    let ticket = ticket(&line);
    child.kill().unwrap();
    child.wait().unwrap();

    // Until then nobody can know that it is dead; it blocks nobody.
    let gate = Gate::open(Policy::default(), &path).unwrap();
    assert_eq!(gate.ticket(&ticket).unwrap().state, State::InFlight);
    let loaded = artifact(1);
    let evidence = evidence(&loaded, 30);
    assert_eq!(gate.decide(&request(&[candidate("ridge", &loaded, &evidence)])).unwrap().name(), "migrate");
    drop(gate);

    Connection::open(&path)
        .unwrap()
        .execute("UPDATE tickets SET lease_ms = 1 WHERE ticket = ?1", [ticket.as_str()])
        .unwrap();
    let gate = Gate::open(Policy::default(), &path).unwrap();
    assert_eq!(gate.ticket(&ticket).unwrap().state, State::Abandoned);
    assert_eq!(gate.pair_summary("small-to-large", "ridge").unwrap().abandoned, 2, "this one, and the permit dropped");
}

#[test]
fn what_was_written_before_a_kill_is_there_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.sqlite");
    let (mut child, mut out) = child(&["loop", "1000000"], &path);
    let mut told = Vec::new();
    for _ in 0..40 {
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        told.push(ticket(&line));
    }
    child.kill().unwrap();
    child.wait().unwrap();

    let gate = Gate::open(Policy::default(), &path).unwrap();
    for ticket in &told {
        assert_eq!(gate.ticket(ticket).unwrap().state, State::Settled);
    }
    let sound: String =
        Connection::open(&path).unwrap().query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(sound, "ok");
}

#[test]
fn processes_that_make_a_ledger_at_once_share_it() {
    const ROUNDS: usize = 50;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.sqlite");
    let children: Vec<_> = (0..4).map(|_| child(&["loop", &ROUNDS.to_string()], &path)).collect();
    let mut told = HashSet::new();
    for (mut child, out) in children {
        told.extend(out.lines().map(|line| ticket(&line.unwrap())));
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(told.len(), 4 * ROUNDS, "no ticket is issued twice");
    let gate = Gate::open(Policy::default(), &path).unwrap();
    let rows = gate.tickets(&TicketFilter { state: Some(State::Settled), ..Default::default() }).unwrap();
    assert_eq!(rows.into_iter().map(|row| row.ticket).collect::<HashSet<_>>(), told);
}
