//! Hold on an open ticket.

use std::time::{Duration, Instant};

use crate::{
    Metric, Quality, Ticket,
    ledger::{End, Ledger, LedgerError},
};

/// Whoever holds this owes the ledger the ticket's end; dropping it writes the ticket down as abandoned.
#[derive(Debug)]
pub(crate) struct Lease {
    ledger: Ledger,
    ticket: Ticket,
    duration: Duration,
    /// When it was last renewed.
    renewed: Instant,
    owed: bool,
}

impl Lease {
    pub(super) fn new(ledger: Ledger, ticket: Ticket, duration: Duration) -> Lease {
        ledger.open_tickets().insert(ticket.clone());
        Lease { ledger, ticket, duration, renewed: Instant::now(), owed: true }
    }

    pub(crate) fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// The metric and bound that were promised, if any were.
    pub(crate) fn promise(&self) -> Result<Option<(Metric, f64)>, LedgerError> {
        self.ledger.promise(&self.ticket)
    }

    /// The permit was redeemed: the mapping begins.
    pub(crate) fn take_off(&mut self) -> Result<(), LedgerError> {
        self.ledger.take_off(&self.ticket, self.duration)?;
        self.renewed = Instant::now();
        Ok(())
    }

    /// Renews the lease once half of it is over.
    pub(crate) fn renew(&mut self) -> Result<(), LedgerError> {
        if self.renewed.elapsed() < self.duration / 2 {
            return Ok(());
        }
        self.ledger.renew(&self.ticket, self.duration)?;
        self.renewed = Instant::now();
        Ok(())
    }

    pub(crate) fn settle(self, realised: &Quality, miss: Option<bool>) -> Result<Ticket, LedgerError> {
        self.end(&End::Settled { realised, miss })
    }

    pub(crate) fn unaudited(self) -> Result<Ticket, LedgerError> {
        self.end(&End::Unaudited)
    }

    pub(crate) fn fail(self, why: &str) -> Result<Ticket, LedgerError> {
        self.end(&End::Failed { why })
    }

    /// Leaves the ticket in flight under a lease of `duration` from now.
    pub(crate) fn hand_over(mut self, duration: Duration) -> Result<Ticket, LedgerError> {
        self.ledger.renew(&self.ticket, duration)?;
        self.owed = false;
        Ok(self.ticket.clone())
    }

    fn end(mut self, end: &End<'_>) -> Result<Ticket, LedgerError> {
        self.ledger.end(&self.ticket, end)?;
        self.owed = false;
        Ok(self.ticket.clone())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.owed {
            // Nobody is left to tell of an error here; the lease runs out, and the next to open the ledger finds it.
            let _ = self.ledger.end(&self.ticket, &End::Abandoned { why: "dropped before it was settled" });
        }
        self.ledger.open_tickets().remove(&self.ticket);
    }
}
