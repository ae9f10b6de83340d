//! Looking into a ledger without changing it.

use std::path::Path;

use crate::{
    PairSummary, Ticket, TicketFilter, TicketRow,
    ledger::{Ledger, LedgerError, open},
};

/// A ledger that is only read: nothing is made, no schema is brought up to date, and a ticket whose lease ran out stays as it
/// was written until a [`Gate`](crate::Gate) opens the file.
#[derive(Debug)]
pub struct LedgerView(Ledger);

impl LedgerView {
    /// Opens a ledger for reading; no right to write the file or its folder is needed. `None` where no decision was recorded
    /// yet: the file is not there, or empty.
    ///
    /// # Errors
    ///
    /// When the file can't be read, is damaged, locked, of another version, or something else.
    pub fn open(path: &Path) -> Result<Option<LedgerView>, LedgerError> {
        let connection = open::read(path)?;
        Ok(connection.map(|connection| LedgerView(Ledger::new(path, connection))))
    }

    /// One ticket.
    ///
    /// # Errors
    ///
    /// When there is no such ticket, or the ledger can't be read.
    pub fn ticket(&self, ticket: &Ticket) -> Result<TicketRow, LedgerError> {
        self.0.ticket(ticket)
    }

    /// Tickets, newest first.
    ///
    /// # Errors
    ///
    /// When the ledger can't be read.
    pub fn tickets(&self, filter: &TicketFilter) -> Result<Vec<TicketRow>, LedgerError> {
        self.0.tickets(filter)
    }

    /// What live requests showed of one mapper of one pair; trials don't count.
    ///
    /// # Errors
    ///
    /// When the ledger can't be read.
    pub fn pair_summary(&self, pair: &str, mapper: &str) -> Result<PairSummary, LedgerError> {
        self.0.pair_summary(pair, mapper)
    }
}
