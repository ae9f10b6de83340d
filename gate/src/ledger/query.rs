//! Questions to the ledger.

use rusqlite::{OptionalExtension as _, named_params, params};
use serde::Serialize;

use crate::{
    Digest, Metric, Ticket,
    ledger::{Ledger, LedgerError, State, TicketRow},
};

/// Which tickets to list, newest first; a field that is `None` asks for nothing.
#[derive(Clone, Debug, Default)]
pub struct TicketFilter {
    /// The pair's name.
    pub pair: Option<String>,
    /// The mapper's name.
    pub mapper: Option<String>,
    /// The artifact.
    pub artifact: Option<Digest>,
    /// `migrate`, `trial`, `reprefill` or `stay`.
    pub decision: Option<String>,
    /// Where the ticket stands.
    pub state: Option<State>,
    /// Most rows.
    pub limit: Option<u32>,
}

/// What is known of one mapper of one pair, from live requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PairSummary {
    /// Permits issued.
    pub migrations: u64,
    /// Of these still open.
    pub open: u64,
    /// Of these settled with a realised quality.
    pub settled: u64,
    /// Of the settled, how many fell short of their bound.
    pub misses: u64,
    /// Served without an audit.
    pub unaudited: u64,
    /// Failed.
    pub failed: u64,
    /// Abandoned: they count against the pair.
    pub abandoned: u64,
    /// Requests refused in which this mapper came furthest.
    pub refused: u64,
}

impl Ledger {
    pub(crate) fn tickets(&self, filter: &TicketFilter) -> Result<Vec<TicketRow>, LedgerError> {
        let connection = self.connection();
        let mut statement = connection
            .prepare(
                "SELECT * FROM tickets
                 WHERE (:pair IS NULL OR pair = :pair) AND (:mapper IS NULL OR mapper = :mapper)
                   AND (:artifact IS NULL OR artifact = :artifact) AND (:decision IS NULL OR decision = :decision)
                   AND (:state IS NULL OR state = :state)
                 ORDER BY ticket DESC LIMIT :limit",
            )
            .map_err(self.error())?;
        let rows = statement
            .query_map(
                named_params! {
                    ":pair": filter.pair,
                    ":mapper": filter.mapper,
                    ":artifact": filter.artifact.map(|digest| digest.to_string()),
                    ":decision": filter.decision,
                    ":state": filter.state.map(State::name),
                    // SQLite takes a negative limit for none.
                    ":limit": filter.limit.map_or(-1, i64::from),
                },
                TicketRow::read,
            )
            .map_err(self.error())?;
        rows.collect::<Result<_, _>>().map_err(self.error())
    }

    pub(crate) fn ticket(&self, ticket: &Ticket) -> Result<TicketRow, LedgerError> {
        self.connection()
            .query_row("SELECT * FROM tickets WHERE ticket = ?1", params![ticket.as_str()], TicketRow::read)
            .optional()
            .map_err(self.error())?
            .ok_or_else(|| LedgerError::NoSuchTicket { path: self.path().to_owned(), ticket: ticket.clone() })
    }

    /// The metric and bound that a ticket promised, if it promised any.
    pub(crate) fn promise(&self, ticket: &Ticket) -> Result<Option<(Metric, f64)>, LedgerError> {
        let row = self.ticket(ticket)?;
        Ok(row.metric.as_deref().and_then(Metric::from_name).zip(row.bound))
    }

    pub(crate) fn pair_summary(&self, pair: &str, mapper: &str) -> Result<PairSummary, LedgerError> {
        self.connection()
            .query_row(
                "SELECT count(*) FILTER (WHERE decision = 'migrate'),
                        count(*) FILTER (WHERE state IN ('decided', 'in_flight')),
                        count(*) FILTER (WHERE state = 'settled'),
                        count(*) FILTER (WHERE miss = 1),
                        count(*) FILTER (WHERE state = 'unaudited'),
                        count(*) FILTER (WHERE state = 'failed'),
                        count(*) FILTER (WHERE state = 'abandoned'),
                        count(*) FILTER (WHERE state = 'refused')
                 FROM tickets WHERE pair = ?1 AND mapper = ?2 AND decision <> 'trial'",
                params![pair, mapper],
                |row| {
                    let count = |index: usize| row.get::<_, i64>(index).map(i64::unsigned_abs);
                    Ok(PairSummary {
                        migrations: count(0)?,
                        open: count(1)?,
                        settled: count(2)?,
                        misses: count(3)?,
                        unaudited: count(4)?,
                        failed: count(5)?,
                        abandoned: count(6)?,
                        refused: count(7)?,
                    })
                },
            )
            .map_err(self.error())
    }
}
