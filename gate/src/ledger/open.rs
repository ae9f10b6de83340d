//! Opening a ledger: to write, which brings it to the schema of this version, or only to read.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior};

use crate::ledger::LedgerError;

/// How long a writer waits for another; a transaction takes well under a millisecond.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// "kvmg", so that `file` and we know a ledger from any other SQLite file.
const APPLICATION_ID: i64 = 0x6b76_6d67;

/// Step i brings schema i to i + 1. A step that was released is never edited.
const MIGRATIONS: [&str; 2] = [include_str!("schema/0001_tickets.sql"), include_str!("schema/0002_precision.sql")];

const SCHEMA: i64 = MIGRATIONS.len() as i64;

/// A name that SQLite takes for nothing but a file: `:memory:`, `file:` URIs and the empty name are databases that end with
/// the process to it, and nothing migrates unrecorded. It is built to know URIs whatever the flags say, so that absolute paths,
/// which are none, are what helps.
fn plain(path: &Path) -> Result<PathBuf, LedgerError> {
    std::path::absolute(path).map_err(|source| LedgerError::Open { path: path.to_owned(), source })
}

pub(super) fn open(path: &Path) -> Result<Connection, LedgerError> {
    let path = &*plain(path)?;
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        fs::create_dir_all(folder).map_err(|source| LedgerError::Open { path: path.to_owned(), source })?;
    }
    let wrong = |source| LedgerError::from_sqlite(path, source);
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(path, flags).map_err(wrong)?;
    connection.busy_timeout(BUSY_TIMEOUT).map_err(wrong)?;
    connection.pragma_update(None, "foreign_keys", true).map_err(wrong)?;
    // A stranger's file is left as it is: look before anything is written, the journal mode included.
    check(&connection, path)?;
    enter_wal(&connection).map_err(wrong)?;
    connection.pragma_update(None, "synchronous", "NORMAL").map_err(wrong)?;
    migrate(&mut connection, path)?;
    Ok(connection)
}

/// Opens a ledger to read it alone; `None` where there is no file, or one without tables.
///
/// Beside a file in WAL mode SQLite wants a log and an index of it, even to read. A connection that may write removes them
/// when it is the last to close, one that may not leaves them lying about. So the file is opened to be written wherever it
/// can be, under a rule that no statement of ours does; where it can't be, and nobody else writes it (there is no log), it is
/// read as it lies.
pub(super) fn read(path: &Path) -> Result<Option<Connection>, LedgerError> {
    let path = &*plain(path)?;
    match fs::File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(LedgerError::Open { path: path.to_owned(), source }),
        Ok(file) if file.metadata().is_ok_and(|metadata| metadata.is_dir()) => {
            let source = io::ErrorKind::IsADirectory.into();
            return Err(LedgerError::Open { path: path.to_owned(), source });
        }
        Ok(_) => {}
    }
    let as_it_lies =
        || looked_into(path, &immutable(path), OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI);
    let writable = fs::OpenOptions::new().append(true).open(path).is_ok();
    let alone = !beside(path, "-wal").exists();
    let (schema, connection) = if alone && !writable {
        as_it_lies()?
    } else {
        match looked_into(path, path, OpenFlags::SQLITE_OPEN_READ_WRITE) {
            // The folder can't be written.
            Err(LedgerError::Unwritable { .. }) if alone => as_it_lies()?,
            other => other?,
        }
    };
    match schema {
        SCHEMA => Ok(Some(connection)),
        0 => Ok(None),
        found => Err(LedgerError::Older { path: path.to_owned(), found, expected: SCHEMA }),
    }
}

fn looked_into(path: &Path, name: &Path, flags: OpenFlags) -> Result<(i64, Connection), LedgerError> {
    let wrong = |source| LedgerError::from_sqlite(path, source);
    let connection = Connection::open_with_flags(name, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX).map_err(wrong)?;
    connection.busy_timeout(BUSY_TIMEOUT).map_err(wrong)?;
    connection.pragma_update(None, "query_only", true).map_err(wrong)?;
    Ok((check(&connection, path)?, connection))
}

/// A file that SQLite keeps beside the ledger.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// The URI of a file that nobody writes: SQLite then makes nothing beside it.
fn immutable(path: &Path) -> PathBuf {
    let escaped = path.to_string_lossy().replace('%', "%25").replace('?', "%3f").replace('#', "%23");
    format!("file:{escaped}?immutable=1").into()
}

/// The schema a file is at, if it is a ledger or empty.
fn check(connection: &Connection, path: &Path) -> Result<i64, LedgerError> {
    let wrong = |source| LedgerError::from_sqlite(path, source);
    // One statement sees one state of the file: asked one by one, they could straddle another process that makes the ledger.
    let (application, schema, tables): (i64, i64, i64) = connection
        .query_row(
            "SELECT (SELECT application_id FROM pragma_application_id), (SELECT user_version FROM pragma_user_version),
                    (SELECT count(*) FROM sqlite_master)",
            [],
            |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
        )
        .map_err(wrong)?;
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
