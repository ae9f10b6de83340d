//! What can be wrong with a ledger.

use std::{io, path::Path, path::PathBuf};

use rusqlite::ErrorCode;

use crate::{Ticket, ledger::State};

/// What can be wrong with a ledger.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The folder or the file can't be made or opened.
    #[error("ledger {}: {source}; name another file with --ledger", path.display())]
    Open {
        /// The ledger.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// SQLite can't open or write the file.
    #[error("ledger {}: can't be opened ({source}); name another file with --ledger", path.display())]
    Unwritable {
        /// The ledger.
        path: PathBuf,
        /// What SQLite said.
        source: rusqlite::Error,
    },
    /// A file of something else.
    #[error("ledger {}: found {found}, expected a ledger of kvmig; name another file with --ledger", path.display())]
    NotALedger {
        /// The file.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// A ledger whose pages contradict each other.
    #[error(
        "ledger {}: the file is damaged ({source}); `sqlite3 FILE .recover` may save its rows, then move it away",
        path.display()
    )]
    Damaged {
        /// The ledger.
        path: PathBuf,
        /// What SQLite said.
        source: rusqlite::Error,
    },
    /// A ledger written by a later version.
    #[error(
        "ledger {}: found schema {found}, expected {supported} or less; use the kvmig that wrote it, or a newer one",
        path.display()
    )]
    Newer {
        /// The ledger.
        path: PathBuf,
        /// Its schema.
        found: i64,
        /// The latest this version knows.
        supported: i64,
    },
    /// A ledger of an earlier version, opened to be read alone.
    #[error(
        "ledger {}: found schema {found}, expected {expected}; the next `kvmig run` with it brings it up to date",
        path.display()
    )]
    Older {
        /// The ledger.
        path: PathBuf,
        /// Its schema.
        found: i64,
        /// This version's.
        expected: i64,
    },
    /// Another process has been writing for longer than one waits.
    #[error("ledger {}: another process holds it locked; wait for it, or end it", path.display())]
    Locked {
        /// The ledger.
        path: PathBuf,
    },
    /// A ticket that is not in this ledger.
    #[error("ledger {}: no ticket {ticket}; `--ledger` names the file it was issued from", path.display())]
    NoSuchTicket {
        /// The ledger.
        path: PathBuf,
        /// The ticket.
        ticket: Ticket,
    },
    /// A ticket that is not where this step could take it on.
    #[error("ledger {}: ticket {ticket} is {}, expected {expected}{}", path.display(), found.name(), found.hint())]
    WrongState {
        /// The ledger.
        path: PathBuf,
        /// The ticket.
        ticket: Ticket,
        /// State it is in.
        found: State,
        /// State that the step needs.
        expected: &'static str,
    },
    /// A ticket that already has its record.
    #[error("ledger {}: ticket {ticket} has its record already; a record is written once", path.display())]
    RecordExists {
        /// The ledger.
        path: PathBuf,
        /// The ticket.
        ticket: Ticket,
    },
    /// Anything else SQLite reports.
    #[error("ledger {}: {source}", path.display())]
    Sqlite {
        /// The ledger.
        path: PathBuf,
        /// What SQLite said.
        source: rusqlite::Error,
    },
}

impl LedgerError {
    /// Sorts SQLite's errors by what a caller could do about them.
    pub(super) fn from_sqlite(path: &Path, source: rusqlite::Error) -> LedgerError {
        let path = path.to_owned();
        match source.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => LedgerError::Locked { path },
            Some(ErrorCode::NotADatabase) => LedgerError::NotALedger { path, found: "no SQLite file" },
            Some(ErrorCode::DatabaseCorrupt) => LedgerError::Damaged { path, source },
            Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => {
                LedgerError::Unwritable { path, source }
            }
            _ => LedgerError::Sqlite { path, source },
        }
    }
}
