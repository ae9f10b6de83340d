//! The executor and the handoff: a permit goes in by value, a [`Migrated`](kvmig_gate::Migrated) cache and a receipt come
//! out, and the target answers.
//!
//! Only this room lets a module's recording touch a cache, and it asks for a permit.

mod answer;
mod execute;
mod flops;
mod handoff;
mod mapper;
mod record;

pub use execute::{ExecuteError, Job, execute};
pub use flops::FlopCount;
pub use handoff::{Answered, Ask, Event, HandoffError, Setup, Trouble, facts, precision, run};
pub use mapper::{Mapper, MapperError};
pub use record::{Flops, Leverage, Record, SCHEMA, Stages, Tokens};
