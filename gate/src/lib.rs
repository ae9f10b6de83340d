//! The gate decides whether a mapped KV cache may be used, and keeps the record of what came of it.
//!
//! Nothing migrates without it, and that is a matter of types rather than of discipline:
//!
//! 1. A host describes what it wants in a [`Request`]: the source cache, the target model, and the candidates, each a
//!    [`Claim`] of what would run with the held-out [`Evidence`] of its quality.
//! 2. [`Gate::decide`] weighs the evidence against the [`Policy`] and writes the decision down. The answer is a
//!    [`Decision`]: migrate, re-prefill, or stay on the source, with a [`Reason`] that carries the numbers.
//! 3. Only *migrate* holds a [`Permit`]. It can't be made, copied or stored; it is moved into [`Permit::redeem`], which
//!    compares what was decided on with what is about to run: cache, target, and the [`Loaded`] artifact, whose bytes this crate
//!    has hashed.
//! 4. The [`Redeemed`] permit says which slots to map, wraps the mapped cache in a [`Migrated`], the one form a decoder
//!    takes, and leaves a [`Receipt`].
//! 5. The receipt is settled with the realised [`Quality`], or ends as unaudited or failed. Dropped, it is written down as
//!    abandoned, which counts against the pair; a crash is found by its expired lease when the ledger is next opened.
//!
//! Held-out evaluation runs the same way through [`Gate::trial`], but its permit completes to a [`Trialled`], which no
//! decoder serves from.
//!
//! Reading order: [`permit`], [`decide`], [`policy`], [`evidence`], [`predict`], [`ledger`].
#![forbid(unsafe_code)]

pub mod decide;
pub mod digest;
pub mod evidence;
pub mod forecast;
mod judge;
pub mod latency;
pub mod ledger;
pub mod loaded;
pub mod parse;
pub mod permit;
pub mod policy;
pub mod predict;
pub mod quality;
pub mod reason;
pub mod request;
pub mod settle;
pub mod ticket;

pub use decide::{Decision, Gate, GateError};
pub use digest::{Digest, DigestBuilder};
pub use evidence::{DocumentOutcome, Evidence};
pub use forecast::Forecast;
pub use latency::Latency;
pub use ledger::{LedgerError, LedgerView, PairSummary, State, TicketFilter, TicketRow};
pub use loaded::{Claim, Loaded, Loader, PairIdentity, WeightElem, WeightTensor};
pub use permit::{Live, Migrated, Permit, Purpose, Receipt, RedeemError, Redeemed, Trial, Trialled};
pub use policy::{Policy, PolicyError, PolicySettings};
pub use predict::Prediction;
pub use quality::{Metric, Quality};
pub use reason::Reason;
pub use request::{CacheFacts, Candidate, Request};
pub use settle::Settled;
pub use ticket::Ticket;
