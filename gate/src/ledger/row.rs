//! A ticket as the ledger tells it.

use rusqlite::{
    Row,
    types::{FromSql, FromSqlError, FromSqlResult, ValueRef},
};
use serde::Serialize;

use crate::{Digest, Quality, Ticket};

/// Where a ticket stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The answer was no; nothing is owed.
    Refused,
    /// A permit exists that was not redeemed yet.
    Decided,
    /// The permit was redeemed.
    InFlight,
    /// Its realised quality is known.
    Settled,
    /// It was served, and not audited.
    Unaudited,
    /// It made no cache, or none that could be used.
    Failed,
    /// Nobody said what became of it.
    Abandoned,
}

impl State {
    const ALL: [State; 7] = [
        State::Refused,
        State::Decided,
        State::InFlight,
        State::Settled,
        State::Unaudited,
        State::Failed,
        State::Abandoned,
    ];

    /// The name in the ledger.
    pub fn name(self) -> &'static str {
        match self {
            State::Refused => "refused",
            State::Decided => "decided",
            State::InFlight => "in_flight",
            State::Settled => "settled",
            State::Unaudited => "unaudited",
            State::Failed => "failed",
            State::Abandoned => "abandoned",
        }
    }

    /// What to do about it, where that is not plain.
    pub(super) fn hint(self) -> &'static str {
        match self {
            State::Abandoned => ": it was dropped, or not settled within its lease (policy field lease_seconds)",
            State::Refused => ": nothing was mapped under it",
            _ => "",
        }
    }
}

impl FromSql for State {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<State> {
        let name = value.as_str()?;
        State::ALL.into_iter().find(|state| state.name() == name).ok_or(FromSqlError::InvalidType)
    }
}

/// One decision and what came of it. Times in milliseconds since 1970.
#[derive(Clone, Debug, Serialize)]
pub struct TicketRow {
    /// Its name.
    pub ticket: Ticket,
    /// When it was decided.
    pub decided_ms: i64,
    /// Digest of the policy that decided.
    pub policy: Digest,
    /// The pair's name.
    pub pair: String,
    /// Source model of the pair.
    pub source_model: Digest,
    /// The model that was to go on.
    pub target_model: Digest,
    /// Digest of the cache's tokens and positions.
    pub cache: Digest,
    /// Tokens of the cache.
    pub tokens: u64,
    /// Mappings the cache will have gone through.
    pub hops: u32,
    /// Native head and tail of the pair, in tokens; 0 where there was no candidate.
    pub ends: (u64, u64),
    /// Domain that the request named.
    pub domain: Option<String>,
    /// Device and adapter.
    pub backend: String,
    /// In which numbers the models computed; `None` in rows of before it was kept.
    pub precision: Option<String>,
    /// The mapper that was chosen, or came furthest.
    pub mapper: Option<String>,
    /// Its artifact.
    pub artifact: Option<Digest>,
    /// Its module.
    pub module: Option<Digest>,
    /// Every candidate with its reason and prediction.
    pub candidates: serde_json::Value,
    /// `migrate`, `trial`, `reprefill` or `stay`.
    pub decision: String,
    /// [`Reason::name`](crate::Reason::name).
    pub reason: String,
    /// The reason's sentence.
    pub explanation: String,
    /// Metric of the prediction.
    pub metric: Option<String>,
    /// Expected value.
    pub predicted: Option<f64>,
    /// Bound that was promised, or could have been.
    pub bound: Option<f64>,
    /// Floor of the policy.
    pub floor: Option<f64>,
    /// Where it stands.
    pub state: State,
    /// When an open ticket counts as abandoned.
    pub lease_ms: Option<i64>,
    /// When it ended.
    pub ended_ms: Option<i64>,
    /// Why it failed or was abandoned.
    pub detail: Option<String>,
    /// What was measured.
    pub realised: Option<Quality>,
    /// Whether that fell short of the bound.
    pub miss: Option<bool>,
    /// The host's record.
    pub record: Option<serde_json::Value>,
}

impl TicketRow {
    pub(super) fn read(row: &Row<'_>) -> rusqlite::Result<TicketRow> {
        Ok(TicketRow {
            ticket: parsed(row, "ticket")?,
            decided_ms: row.get("decided_ms")?,
            policy: parsed(row, "policy")?,
            pair: row.get("pair")?,
            source_model: parsed(row, "source_model")?,
            target_model: parsed(row, "target_model")?,
            cache: parsed(row, "cache")?,
            tokens: row.get::<_, i64>("tokens")?.unsigned_abs(),
            hops: row.get("hops")?,
            ends: (row.get::<_, i64>("head")?.unsigned_abs(), row.get::<_, i64>("tail")?.unsigned_abs()),
            domain: row.get("domain")?,
            backend: row.get("backend")?,
            precision: row.get("precision")?,
            mapper: row.get("mapper")?,
            artifact: parsed_if_any(row, "artifact")?,
            module: parsed_if_any(row, "module")?,
            candidates: from_json(row, "candidates")?.unwrap_or_default(),
            decision: row.get("decision")?,
            reason: row.get("reason")?,
            explanation: row.get("explanation")?,
            metric: row.get("metric")?,
            predicted: row.get("predicted")?,
            bound: row.get("bound")?,
            floor: row.get("floor")?,
            state: row.get("state")?,
            lease_ms: row.get("lease_ms")?,
            ended_ms: row.get("ended_ms")?,
            detail: row.get("detail")?,
            realised: from_json(row, "realised")?,
            miss: row.get("miss")?,
            record: from_json(row, "record")?,
        })
    }
}

fn parsed<T>(row: &Row<'_>, column: &str) -> rusqlite::Result<T>
where
    T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>,
{
    row.get::<_, String>(column)?.parse().map_err(|error| unreadable(row, column, error))
}

fn parsed_if_any<T>(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<T>>
where
    T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>,
{
    row.get::<_, Option<String>>(column)?
        .map(|text| text.parse().map_err(|error| unreadable(row, column, error)))
        .transpose()
}

fn from_json<T: serde::de::DeserializeOwned>(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<T>> {
    row.get::<_, Option<String>>(column)?
        .map(|text| serde_json::from_str(&text).map_err(|error| unreadable(row, column, error)))
        .transpose()
}

fn unreadable(row: &Row<'_>, column: &str, error: impl std::error::Error + Send + Sync + 'static) -> rusqlite::Error {
    let index = row.as_ref().column_index(column).unwrap_or_default();
    rusqlite::Error::FromSqlConversionFailure(index, rusqlite::types::Type::Text, Box::new(error))
}
