//! What came of a migration, and what the ledger knows.

use serde::Serialize;

use crate::{
    Gate, GateError, LedgerError, PairSummary, Quality, Receipt, Ticket, TicketFilter, TicketRow, ledger::End,
};

/// A settled migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Settled {
    /// Its ticket.
    pub ticket: Ticket,
    /// Whether the realised quality fell short of the promised bound; `None` for a trial that nothing was promised of.
    pub miss: Option<bool>,
}

impl Gate {
    /// Settles a migration with the quality that an audit realised.
    ///
    /// # Errors
    ///
    /// When the quality holds what no measurement can give; the ticket then ends as failed. When the lease ran out before,
    /// or the ledger can't be written.
    pub fn settle(&self, receipt: Receipt, realised: &Quality) -> Result<Settled, GateError> {
        let lease = receipt.into_lease();
        let ticket = lease.ticket().clone();
        if let Some((field, found, _)) = realised.fault() {
            lease.fail(&format!("realised {field} is {found}"))?;
            return Err(GateError::Realised { ticket, field, found });
        }
        let miss = lease.promise()?.map(|(metric, bound)| metric.worse(metric.value(realised), bound));
        Ok(Settled { ticket: lease.settle(realised, miss)?, miss })
    }

    /// Settles a ticket by its name, for an engine outside the process that holds the receipt
    /// (see [`Receipt::hand_over`]).
    ///
    /// # Errors
    ///
    /// When the quality holds what no measurement can give: nothing is written then, and the ticket stays in flight for
    /// the right figures. When there is no such ticket, it is not in flight, or the ledger can't be written.
    pub fn settle_ticket(&self, ticket: &Ticket, realised: &Quality) -> Result<Settled, GateError> {
        if let Some((field, found, expected)) = realised.fault() {
            return Err(GateError::Impossible { ticket: ticket.clone(), field, found, expected });
        }
        let miss = self.ledger.promise(ticket)?.map(|(metric, bound)| metric.worse(metric.value(realised), bound));
        self.ledger.end(ticket, &End::Settled { realised, miss })?;
        Ok(Settled { ticket: ticket.clone(), miss })
    }

    /// Ends a migration that was served and not audited.
    ///
    /// # Errors
    ///
    /// When the lease ran out before, or the ledger can't be written.
    pub fn unaudited(&self, receipt: Receipt) -> Result<Ticket, GateError> {
        Ok(receipt.into_lease().unaudited()?)
    }

    /// Ends a migration whose cache turned out to be of no use after it was made.
    ///
    /// # Errors
    ///
    /// When the lease ran out before, or the ledger can't be written.
    pub fn failed(&self, receipt: Receipt, why: &str) -> Result<Ticket, GateError> {
        Ok(receipt.into_lease().fail(why)?)
    }

    /// Ends every ticket that this process still holds as abandoned, for `why`: for a process that is about to end without
    /// dropping what it holds.
    ///
    /// # Errors
    ///
    /// When the ledger can't be written.
    pub fn abandon_open(&self, why: &str) -> Result<(), GateError> {
        for ticket in self.ledger.open_tickets().iter() {
            match self.ledger.end(ticket, &End::Abandoned { why }) {
                // Its holder was quicker.
                Ok(()) | Err(LedgerError::WrongState { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Keeps the host's record of a run beside its ticket; once.
    ///
    /// # Errors
    ///
    /// When there is no such ticket, it has a record, or the ledger can't be written.
    pub fn attach_record(&self, ticket: &Ticket, record: &serde_json::Value) -> Result<(), GateError> {
        Ok(self.ledger.attach_record(ticket, record)?)
    }

    /// One ticket.
    ///
    /// # Errors
    ///
    /// When there is no such ticket, or the ledger can't be read.
    pub fn ticket(&self, ticket: &Ticket) -> Result<TicketRow, GateError> {
        Ok(self.ledger.ticket(ticket)?)
    }

    /// Tickets, newest first.
    ///
    /// # Errors
    ///
    /// When the ledger can't be read.
    pub fn tickets(&self, filter: &TicketFilter) -> Result<Vec<TicketRow>, GateError> {
        Ok(self.ledger.tickets(filter)?)
    }

    /// What live requests showed of one mapper of one pair; trials don't count.
    ///
    /// # Errors
    ///
    /// When the ledger can't be read.
    pub fn pair_summary(&self, pair: &str, mapper: &str) -> Result<PairSummary, GateError> {
        Ok(self.ledger.pair_summary(pair, mapper)?)
    }
}
