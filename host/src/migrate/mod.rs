//! The executor and the handoff: a permit goes in by value, a [`Migrated`](kvmig_gate::Migrated) cache and a receipt come
//! out, and the target answers.
//!
//! Modules can be recorded and recordings executed elsewhere too, on planes that whoever does so made: the tests of sandbox
//! and device do. What comes of that stays a block of numbers. A [`MappedCache`](crate::cache::MappedCache) is put together
//! here alone, from a redeemed permit, and a [`KvCache`](crate::cache::KvCache) by an engine's prefill or by
//! [`cache::read`](crate::cache::read). A file's provenance, which that reader checks, is a label and no seal: it tells a cache
//! that was mapped from one that was not, and can't tell who wrote either.

mod answer;
mod execute;
mod flops;
mod handoff;
mod mapper;
mod record;
mod store;
mod trial;

pub use execute::{ExecuteError, Job, execute};
pub use flops::{FlopCount, Natively};
pub use handoff::{Answered, Ask, Event, HandoffError, Setup, Trouble, facts, precision, run};
pub use mapper::{Mapper, MapperError, Offer, PageIn};
pub use record::{Flops, Leverage, Record, SCHEMA, Stages, Tokens};
pub use store::Store;
pub use trial::{TrialError, trial};
