-- One row a decision. What was decided never changes; how it ended is written once.
CREATE TABLE policies (
    digest TEXT PRIMARY KEY,
    json   TEXT NOT NULL
) STRICT;

CREATE TABLE tickets (
    ticket        TEXT PRIMARY KEY,
    decided_ms    INTEGER NOT NULL,  -- milliseconds since 1970, as every *_ms here
    policy        TEXT NOT NULL REFERENCES policies (digest),
    -- the request
    pair          TEXT NOT NULL,
    source_model  TEXT NOT NULL,
    target_model  TEXT NOT NULL,
    cache_model   TEXT NOT NULL,
    cache         TEXT NOT NULL,     -- digest of tokens and positions
    tokens        INTEGER NOT NULL,
    hops          INTEGER NOT NULL,  -- mappings the cache will have gone through
    head          INTEGER NOT NULL,
    tail          INTEGER NOT NULL,
    domain        TEXT,
    backend       TEXT NOT NULL,
    -- the candidate that was chosen, or came furthest
    mapper        TEXT,
    artifact      TEXT,
    module        TEXT,
    candidates    TEXT NOT NULL,     -- JSON: every candidate with its reason and prediction
    -- the decision
    decision      TEXT NOT NULL CHECK (decision IN ('migrate', 'trial', 'reprefill', 'stay')),
    reason        TEXT NOT NULL,
    explanation   TEXT NOT NULL,
    metric        TEXT,
    predicted     REAL,
    bound         REAL,
    floor         REAL,
    alpha         REAL,
    evidence_n    INTEGER,
    -- what came of it
    state         TEXT NOT NULL CHECK (state IN
                      ('refused', 'decided', 'in_flight', 'settled', 'unaudited', 'failed', 'abandoned')),
    lease_ms      INTEGER,           -- when an open ticket counts as abandoned
    ended_ms      INTEGER,
    detail        TEXT,              -- why it failed or was abandoned
    realised      TEXT,              -- JSON: the quality measured
    miss          INTEGER CHECK (miss IN (0, 1)),
    record        TEXT,              -- JSON: the host's record of the run
    CHECK ((state = 'refused') = (decision IN ('reprefill', 'stay'))),
    CHECK ((state IN ('decided', 'in_flight')) = (ended_ms IS NULL)),
    CHECK ((state = 'settled') = (realised IS NOT NULL))
) STRICT;

CREATE INDEX tickets_by_pair ON tickets (pair, mapper);
CREATE INDEX tickets_open ON tickets (lease_ms) WHERE state IN ('decided', 'in_flight');

CREATE TRIGGER tickets_are_kept BEFORE DELETE ON tickets
BEGIN SELECT RAISE (ABORT, 'a ticket is never deleted'); END;

CREATE TRIGGER decisions_are_final BEFORE UPDATE OF
    ticket, decided_ms, policy, pair, source_model, target_model, cache_model, cache, tokens, hops, head, tail, domain,
    backend, mapper, artifact, module, candidates, decision, reason, explanation, metric, predicted, bound, floor, alpha,
    evidence_n ON tickets
BEGIN SELECT RAISE (ABORT, 'a decision is never changed'); END;

CREATE TRIGGER ends_are_final BEFORE UPDATE OF state, lease_ms, ended_ms, detail, realised, miss ON tickets
WHEN OLD.state NOT IN ('decided', 'in_flight')
BEGIN SELECT RAISE (ABORT, 'a ticket ends once'); END;

CREATE TRIGGER records_are_final BEFORE UPDATE OF record ON tickets
WHEN OLD.record IS NOT NULL
BEGIN SELECT RAISE (ABORT, 'a record is written once'); END;
