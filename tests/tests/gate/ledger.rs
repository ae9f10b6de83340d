//! The ledger's file: made, kept, and refused when it is not one.

use std::{fs, path::Path};

use kvmig_gate::{Gate, GateError, LedgerError, LedgerView, Policy, PolicySettings, State, TicketFilter};
use kvmig_tests::gate::{artifact, candidate, evidence, request};
use rusqlite::Connection;

use crate::{redeem, scene};

fn refusal(path: &Path) -> LedgerError {
    match Gate::open(Policy::default(), path) {
        Err(GateError::Ledger(error)) => error,
        other => panic!("{}: {other:?}", path.display()),
    }
}

#[test]
fn folders_are_made_and_rows_survive() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data").join("kvmig").join("ledger.sqlite");
    let gate = Gate::open(Policy::default(), &path).unwrap();
    let ticket = gate.decide(&request(&[])).unwrap().ticket().clone();
    drop(gate);
    let strict = Policy::try_from(PolicySettings { floor: Some(0.1), ..PolicySettings::default() }).unwrap();
    let gate = Gate::open(strict.clone(), &path).unwrap();
    let row = gate.ticket(&ticket).unwrap();
    assert_eq!((row.reason.as_str(), row.policy), ("no_candidate", Policy::default().digest()));

    // Every policy that ever decided is there under the digest that its rows name.
    let sqlite = Connection::open(&path).unwrap();
    for (policy, floor) in [(Policy::default(), 0.25), (strict, 0.1)] {
        let json: String = sqlite
            .query_row("SELECT json FROM policies WHERE digest = ?1", [policy.digest().to_string()], |row| row.get(0))
            .unwrap();
        assert_eq!(serde_json::from_str::<PolicySettings>(&json).unwrap().floor, Some(floor));
    }
}

#[test]
fn a_lease_that_ran_out_is_found_at_the_next_opening() {
    let scene = scene();
    let loaded = artifact(1);
    let evidence = evidence(&loaded, 30);
    let asked = request(&[candidate("ridge", &loaded, &evidence)]);
    let (_, late) = redeem(&scene.gate, &asked, &loaded).complete(());
    let (_, in_time) = redeem(&scene.gate, &asked, &loaded).complete(());
    Connection::open(&scene.path)
        .unwrap()
        .execute("UPDATE tickets SET lease_ms = 1 WHERE ticket = ?1", [late.ticket().as_str()])
        .unwrap();

    let reopened = Gate::open(Policy::default(), &scene.path).unwrap();
    let row = reopened.ticket(late.ticket()).unwrap();
    assert_eq!((row.state, row.detail.as_deref()), (State::Abandoned, Some("its lease ran out")));
    assert_eq!(reopened.ticket(in_time.ticket()).unwrap().state, State::InFlight);

    let ticket = late.ticket().clone();
    let error = scene.gate.unaudited(late).unwrap_err();
    assert!(error.to_string().contains("is abandoned, expected in_flight"), "{error}");
    assert!(error.to_string().contains("lease_seconds"), "{error}");
    assert_eq!(scene.gate.ticket(&ticket).unwrap().detail.as_deref(), Some("its lease ran out"));
    scene.gate.unaudited(in_time).unwrap();
}

#[test]
fn history_can_not_be_rewritten() {
    let scene = scene();
    let loaded = artifact(1);
    let evidence = evidence(&loaded, 30);
    let asked = request(&[candidate("ridge", &loaded, &evidence)]);
    let ticket = redeem(&scene.gate, &asked, &loaded).fail("device lost").unwrap();
    scene.gate.attach_record(&ticket, &serde_json::json!({})).unwrap();
    let sqlite = Connection::open(&scene.path).unwrap();
    for (sql, expected) in [
        ("DELETE FROM tickets", "a ticket is never deleted"),
        ("UPDATE tickets SET bound = 9.0", "a decision is never changed"),
        ("UPDATE tickets SET artifact = NULL", "a decision is never changed"),
        ("UPDATE tickets SET state = 'settled', realised = '{}'", "a ticket ends once"),
        ("UPDATE tickets SET detail = 'all went well'", "a ticket ends once"),
        ("UPDATE tickets SET record = NULL", "a record is written once"),
    ] {
        let error = sqlite.execute_batch(sql).expect_err(sql).to_string();
        assert!(error.contains(expected), "{sql}: {error}");
    }
    // Every column is either part of the decision or of the end: none was forgotten by the triggers.
    let columns: Vec<String> = sqlite
        .prepare("SELECT name FROM pragma_table_info('tickets')")
        .unwrap()
        .query_map([], |row| row.get(0))
        .unwrap()
        .collect::<Result<_, _>>()
        .unwrap();
    assert!(columns.len() > 30);
    for column in columns {
        assert!(sqlite.execute_batch(&format!("UPDATE tickets SET {column} = {column}")).is_err(), "{column}");
    }
}

/// Rows of before stay what they were, and say that nobody kept their precision.
#[test]
fn a_ledger_of_an_older_schema_is_brought_up() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.sqlite");
    let sqlite = Connection::open(&path).unwrap();
    sqlite.execute_batch(include_str!("../../../gate/src/ledger/schema/0001_tickets.sql")).unwrap();
    sqlite.pragma_update(None, "application_id", 0x6b76_6d67).unwrap();
    sqlite.pragma_update(None, "user_version", 1).unwrap();
    let digest = Policy::default().digest().to_string();
    sqlite.execute("INSERT INTO policies VALUES (?1, '{}')", [&digest]).unwrap();
    sqlite
        .execute(
            "INSERT INTO tickets (ticket, decided_ms, policy, pair, source_model, target_model, cache_model, cache, tokens,
                 hops, head, tail, backend, candidates, decision, reason, explanation, state, ended_ms)
             VALUES ('01jdw3k8x-7q2m9ab', 1, ?1, 'old', ?1, ?1, ?1, ?1, 9, 1, 4, 32, 'cpu', '[]', 'reprefill', 'no_evidence',
                 'none', 'refused', 1)",
            [&digest],
        )
        .unwrap();
    drop(sqlite);
    let gate = Gate::open(Policy::default(), &path).unwrap();
    let row = gate.ticket(&"01jdw3k8x-7q2m9ab".parse().unwrap()).unwrap();
    assert_eq!((row.pair.as_str(), row.precision), ("old", None));
    let ticket = gate.decide(&request(&[])).unwrap().ticket().clone();
    assert_eq!(gate.ticket(&ticket).unwrap().precision.as_deref(), Some("quantised"));
}

#[test]
fn a_ledger_of_a_newer_schema_is_left_alone() {
    let scene = scene();
    drop(scene.gate);
    Connection::open(&scene.path).unwrap().pragma_update(None, "user_version", 99).unwrap();
    let error = refusal(&scene.path);
    assert!(matches!(error, LedgerError::Newer { found: 99, supported: 2, .. }), "{error}");
    let version: i64 =
        Connection::open(&scene.path).unwrap().pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
    assert_eq!(version, 99);
}

#[test]
fn files_of_something_else_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("notes.txt");
    fs::write(&text, "not a database, but long enough to be asked whether it is one; ".repeat(40)).unwrap();
    let other = folder.path().join("other.sqlite");
    Connection::open(&other).unwrap().execute_batch("CREATE TABLE mine (x); INSERT INTO mine VALUES (1)").unwrap();
    for (path, found) in [(text, "no SQLite file"), (other, "a SQLite file of another program")] {
        let before = fs::read(&path).unwrap();
        let error = refusal(&path);
        assert!(matches!(&error, LedgerError::NotALedger { found: is, .. } if *is == found), "{error}");
        assert_eq!(fs::read(&path).unwrap(), before, "{}", path.display());
    }
}

#[test]
fn a_damaged_ledger_says_so() {
    let scene = scene();
    for _ in 0..50 {
        scene.gate.decide(&request(&[])).unwrap();
    }
    drop(scene.gate);
    // The last connection folded the write-ahead log into the file: what follows the first page is all rows and schema.
    let mut bytes = fs::read(&scene.path).unwrap();
    assert!(bytes.len() > 8192);
    bytes[100..].fill(0xff);
    fs::write(&scene.path, bytes).unwrap();
    let error = refusal(&scene.path);
    assert!(matches!(error, LedgerError::Damaged { .. }), "{error}");
    assert!(error.to_string().contains("ledger.sqlite"), "{error}");
}

#[test]
fn a_place_where_no_file_can_be_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = refusal(&file.join("ledger.sqlite"));
    assert!(matches!(error, LedgerError::Open { .. }), "{error}");
    let error = refusal(folder.path());
    assert!(matches!(error, LedgerError::Unwritable { .. }), "{error}");
}

#[test]
fn a_ledger_that_another_process_keeps_locked_says_so() {
    let scene = scene();
    let holder = Connection::open(&scene.path).unwrap();
    holder.execute_batch("BEGIN IMMEDIATE").unwrap();
    let error = scene.gate.decide(&request(&[])).unwrap_err();
    assert!(matches!(error, GateError::Ledger(LedgerError::Locked { .. })), "nothing migrates unrecorded: {error}");
    holder.execute_batch("ROLLBACK").unwrap();
    scene.gate.decide(&request(&[])).unwrap();
}

/// Names of everything in a folder, in order.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn looking_makes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    assert!(LedgerView::open(&folder.path().join("no").join("ledger.sqlite")).unwrap().is_none());
    assert_eq!(names(folder.path()), Vec::<String>::new());
    let error = LedgerView::open(folder.path()).unwrap_err();
    assert!(matches!(error, LedgerError::Open { .. }), "{error}");
    let empty = folder.path().join("empty.sqlite");
    fs::write(&empty, "").unwrap();
    assert!(LedgerView::open(&empty).unwrap().is_none());
    assert_eq!(fs::read(&empty).unwrap(), b"");
}

#[test]
fn looking_changes_nothing() {
    let scene = scene();
    let loaded = artifact(1);
    let evidence = evidence(&loaded, 30);
    let asked = request(&[candidate("ridge", &loaded, &evidence)]);
    let (_, receipt) = redeem(&scene.gate, &asked, &loaded).complete(());
    let ticket = receipt.hand_over(std::time::Duration::from_secs(60)).unwrap();
    Connection::open(&scene.path).unwrap().execute("UPDATE tickets SET lease_ms = 1", []).unwrap();

    let rows = || LedgerView::open(&scene.path).unwrap().unwrap().tickets(&TicketFilter::default()).unwrap();
    // While a gate has it open, and after.
    assert_eq!(rows()[0].state, State::InFlight, "a reader does not end what ran out");
    drop(scene.gate);
    let before = fs::read(&scene.path).unwrap();
    assert_eq!((rows().len(), &rows()[0].ticket), (1, &ticket));
    assert_eq!(fs::read(&scene.path).unwrap(), before);
    let policies: i64 = Connection::open(&scene.path)
        .unwrap()
        .query_row("SELECT count(*) FROM policies", [], |row| row.get(0))
        .unwrap();
    assert_eq!(policies, 1);
}

#[test]
fn a_ledger_of_an_older_schema_is_not_brought_up_to_date_by_looking() {
    let scene = scene();
    drop(scene.gate);
    let sqlite = Connection::open(&scene.path).unwrap();
    sqlite.pragma_update(None, "user_version", 1).unwrap();
    drop(sqlite);
    let error = LedgerView::open(&scene.path).unwrap_err();
    assert!(matches!(error, LedgerError::Older { found: 1, expected: 2, .. }), "{error}");
}
