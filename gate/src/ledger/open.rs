//! Opening a ledger and bringing it to the schema of this version.

use std::{fs, path::Path, thread, time::Duration};

use rusqlite::{Connection, ErrorCode, TransactionBehavior};

use crate::ledger::LedgerError;

/// How long a writer waits for another; a transaction takes well under a millisecond.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// "kvmg", so that `file` and we know a ledger from any other SQLite file.
const APPLICATION_ID: i64 = 0x6b76_6d67;

/// Step i brings schema i to i + 1. A step that was released is never edited.
const MIGRATIONS: [&str; 2] = [include_str!("schema/0001_tickets.sql"), include_str!("schema/0002_precision.sql")];

const SCHEMA: i64 = MIGRATIONS.len() as i64;

pub(super) fn open(path: &Path) -> Result<Connection, LedgerError> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        fs::create_dir_all(folder).map_err(|source| LedgerError::Open { path: path.to_owned(), source })?;
    }
    let wrong = |source| LedgerError::from_sqlite(path, source);
    let mut connection = Connection::open(path).map_err(wrong)?;
    connection.busy_timeout(BUSY_TIMEOUT).map_err(wrong)?;
    connection.pragma_update(None, "foreign_keys", true).map_err(wrong)?;
    // A stranger's file is left as it is: look before anything is written, the journal mode included.
    check(&connection, path)?;
    enter_wal(&connection).map_err(wrong)?;
    connection.pragma_update(None, "synchronous", "NORMAL").map_err(wrong)?;
    migrate(&mut connection, path)?;
    Ok(connection)
}

/// The schema a file is at, if it is a ledger or empty.
fn check(connection: &Connection, path: &Path) -> Result<i64, LedgerError> {
    let wrong = |source| LedgerError::from_sqlite(path, source);
    let pragma = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0)).map_err(wrong);
    let (application, schema) = (pragma("application_id")?, pragma("user_version")?);
    let tables: i64 =
        connection.query_row("SELECT count(*) FROM sqlite_master", [], |row| row.get(0)).map_err(wrong)?;
    let fresh = application == 0 && schema == 0 && tables == 0;
    if !fresh && application != APPLICATION_ID {
        return Err(LedgerError::NotALedger { path: path.to_owned(), found: "a SQLite file of another program" });
    }
    if schema > SCHEMA {
        return Err(LedgerError::Newer { path: path.to_owned(), found: schema, supported: SCHEMA });
    }
    Ok(schema)
}

/// Readers and a writer at once. The mode is kept in the file, so this writes only the first time; two processes that do so
/// at once may be told `busy` without having waited, hence the loop.
///
/// Where the file system has no shared memory SQLite stays with its rollback journal: slower, as safe.
fn enter_wal(connection: &Connection) -> Result<(), rusqlite::Error> {
    let mut attempts = 0;
    loop {
        match connection.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get::<_, String>(0)) {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) && attempts < 100 => {
                attempts += 1;
                thread::sleep(Duration::from_millis(20));
            }
            other => return other.map(drop),
        }
    }
}

fn migrate(connection: &mut Connection, path: &Path) -> Result<(), LedgerError> {
    let wrong = |source| LedgerError::from_sqlite(path, source);
    if check(connection, path)? == SCHEMA {
        return Ok(());
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(wrong)?;
    // Asked again under the lock: another process may have been first.
    let schema = check(&transaction, path)?;
    for (step, sql) in (0..).zip(MIGRATIONS).filter(|(step, _)| *step >= schema) {
        transaction.execute_batch(sql).map_err(wrong)?;
        transaction.pragma_update(None, "user_version", step + 1).map_err(wrong)?;
    }
    transaction.pragma_update(None, "application_id", APPLICATION_ID).map_err(wrong)?;
    transaction.commit().map_err(wrong)
}
