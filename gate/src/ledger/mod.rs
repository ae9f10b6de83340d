//! The ledger: every decision and what came of it, in one SQLite file.
//!
//! A row is written before a permit exists and never changes afterwards; its end is written once. Triggers in the schema hold
//! that against anyone who opens the file. Several processes may use one ledger: it is in WAL mode, every step is one
//! statement or one transaction, and a writer waits a few seconds for another. A process that is killed loses nothing that
//! it had been told was written; a power cut may lose the last moments of it, but not the file (`synchronous = NORMAL`: a
//! decision is on the way to the first token, and does not wait for the disk).

mod entry;
mod error;
pub(crate) mod lease;
mod open;
mod query;
mod row;
mod view;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rusqlite::{Connection, OptionalExtension as _, named_params, params};

use crate::{Policy, Quality, Ticket};

pub(crate) use entry::{Entry, Kind};
pub use error::LedgerError;
use lease::Lease;
pub use query::{PairSummary, TicketFilter};
pub use row::{State, TicketRow};
pub use view::LedgerView;

/// A handle on the ledger; its clones share one connection.
#[derive(Clone, Debug)]
pub(crate) struct Ledger(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    connection: Mutex<Connection>,
    /// Tickets that a lease of this process holds.
    open: Mutex<BTreeSet<Ticket>>,
}

/// How an open ticket ends.
#[derive(Debug)]
pub(crate) enum End<'a> {
    Settled { realised: &'a Quality, miss: Option<bool> },
    Unaudited,
    Failed { why: &'a str },
    Abandoned { why: &'a str },
}

impl Ledger {
    /// Opens the ledger, makes it where there is none, and ends tickets whose lease ran out.
    pub(crate) fn open(path: &Path) -> Result<Ledger, LedgerError> {
        let ledger = Ledger::new(path, open::open(path)?);
        ledger.abandon_expired(now_ms())?;
        Ok(ledger)
    }

    fn new(path: &Path, connection: Connection) -> Ledger {
        Ledger(Arc::new(Shared { path: path.to_owned(), connection: Mutex::new(connection), open: Mutex::default() }))
    }

    /// The file.
    pub(crate) fn path(&self) -> &Path {
        &self.0.path
    }

    /// Keeps the policy's text under its digest, so that a row says what it was decided by.
    pub(crate) fn keep_policy(&self, policy: &Policy) -> Result<(), LedgerError> {
        self.connection()
            .execute(
                "INSERT INTO policies (digest, json) VALUES (?1, ?2) ON CONFLICT (digest) DO NOTHING",
                params![policy.digest().to_string(), policy.to_json()],
            )
            .map_err(self.error())?;
        Ok(())
    }

    /// Writes down a refusal.
    pub(crate) fn refuse(&self, entry: &Entry<'_>) -> Result<Ticket, LedgerError> {
        entry.insert(self, State::Refused, None)
    }

    /// Writes down a permission, and leases its ticket.
    pub(crate) fn grant(&self, entry: &Entry<'_>, lease: Duration) -> Result<Lease, LedgerError> {
        let ticket = entry.insert(self, State::Decided, Some(lease))?;
        Ok(Lease::new(self.clone(), ticket, lease))
    }

    /// The tickets that leases of this process hold.
    pub(crate) fn open_tickets(&self) -> MutexGuard<'_, BTreeSet<Ticket>> {
        // A set is whole whatever panicked beside it.
        self.0.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves a decided ticket into flight, and renews its lease.
    pub(crate) fn take_off(&self, ticket: &Ticket, lease: Duration) -> Result<(), LedgerError> {
        let changed = self
            .connection()
            .execute(
                "UPDATE tickets SET state = 'in_flight', lease_ms = ?2 WHERE ticket = ?1 AND state = 'decided'",
                params![ticket.as_str(), lease_end(lease)],
            )
            .map_err(self.error())?;
        self.expect_change(changed, ticket, "decided")
    }

    /// Renews the lease of a ticket in flight.
    pub(crate) fn renew(&self, ticket: &Ticket, lease: Duration) -> Result<(), LedgerError> {
        let changed = self
            .connection()
            .execute(
                "UPDATE tickets SET lease_ms = ?2 WHERE ticket = ?1 AND state = 'in_flight'",
                params![ticket.as_str(), lease_end(lease)],
            )
            .map_err(self.error())?;
        self.expect_change(changed, ticket, "in_flight")
    }

    /// Ends a ticket.
    pub(crate) fn end(&self, ticket: &Ticket, end: &End<'_>) -> Result<(), LedgerError> {
        // Only what was mapped has an outcome; a permit that was never redeemed can still fail or be abandoned.
        let (state, detail, realised, miss, only_in_flight) = match *end {
            End::Settled { realised, miss } => (State::Settled, None, Some(realised), miss, true),
            End::Unaudited => (State::Unaudited, None, None, None, true),
            End::Failed { why } => (State::Failed, Some(why), None, None, false),
            End::Abandoned { why } => (State::Abandoned, Some(why), None, None, false),
        };
        let realised = realised.map(|quality| serde_json::to_string(quality).expect("plain numbers have a JSON form"));
        let changed = self
            .connection()
            .execute(
                "UPDATE tickets
                 SET state = :state, ended_ms = :now, detail = :detail, realised = :realised, miss = :miss
                 WHERE ticket = :ticket AND (state = 'in_flight' OR state = 'decided' AND NOT :only_in_flight)",
                named_params! {
                    ":ticket": ticket.as_str(), ":state": state.name(), ":now": now_ms(), ":detail": detail,
                    ":realised": realised, ":miss": miss, ":only_in_flight": only_in_flight,
                },
            )
            .map_err(self.error())?;
        self.expect_change(changed, ticket, if only_in_flight { "in_flight" } else { "decided or in_flight" })
    }

    /// Keeps the host's record of a run; once.
    pub(crate) fn attach_record(&self, ticket: &Ticket, record: &serde_json::Value) -> Result<(), LedgerError> {
        let connection = self.connection();
        let changed = connection
            .execute(
                "UPDATE tickets SET record = ?2 WHERE ticket = ?1 AND record IS NULL",
                params![ticket.as_str(), record.to_string()],
            )
            .map_err(self.error())?;
        drop(connection);
        if changed == 1 {
            return Ok(());
        }
        self.state(ticket)?;
        Err(LedgerError::RecordExists { path: self.path().to_owned(), ticket: ticket.clone() })
    }

    fn abandon_expired(&self, now: i64) -> Result<(), LedgerError> {
        self.connection()
            .execute(
                "UPDATE tickets SET state = 'abandoned', ended_ms = ?1, detail = 'its lease ran out'
                 WHERE state IN ('decided', 'in_flight') AND lease_ms < ?1",
                params![now],
            )
            .map_err(self.error())?;
        Ok(())
    }

    fn state(&self, ticket: &Ticket) -> Result<State, LedgerError> {
        self.connection()
            .query_row("SELECT state FROM tickets WHERE ticket = ?1", params![ticket.as_str()], |row| row.get(0))
            .optional()
            .map_err(self.error())?
            .ok_or_else(|| LedgerError::NoSuchTicket { path: self.path().to_owned(), ticket: ticket.clone() })
    }

    /// One row was to change; when none did, says which state the ticket was in instead.
    fn expect_change(&self, changed: usize, ticket: &Ticket, expected: &'static str) -> Result<(), LedgerError> {
        if changed == 1 {
            return Ok(());
        }
        Err(LedgerError::WrongState {
            path: self.path().to_owned(),
            ticket: ticket.clone(),
            found: self.state(ticket)?,
            expected,
        })
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        // A panic elsewhere leaves no half-written row behind: SQLite rolled it back.
        self.0.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self) -> impl Fn(rusqlite::Error) -> LedgerError {
        |source| LedgerError::from_sqlite(self.path(), source)
    }
}

/// Milliseconds since 1970.
fn now_ms() -> i64 {
    // A clock before 1970 or beyond the year 292 million only makes leases run out at once.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

fn lease_end(lease: Duration) -> i64 {
    now_ms().saturating_add(i64::try_from(lease.as_millis()).unwrap_or(i64::MAX))
}
