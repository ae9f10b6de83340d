//! Guests: wasmtime, the WIT contract, limits, recordings. The only room that names `wasmtime`.
//!
//! [`Sandbox::load`] turns a component's bytes into a [`Module`], whose imports were checked; [`Module::plan`] asks what a
//! pair needs; [`Module::record`] lets the guest request the work of one chunk and gives back a [`Recording`]: plain data,
//! every step of which was checked against bounds, access, aliasing and budgets, and all of which together writes every
//! element of the target. Nothing has run on a device until then.
//!
//! The guest never sees a cache. It has no WASI, an upper bound on instructions, time, memory and stack, and a fresh
//! instance for every call.

mod bindings;
pub mod bundled;
mod engine;
mod error;
mod fault;
mod guest;
mod kept;
mod limits;
mod module;
mod plan;
mod recorder;
pub mod recording;
mod shape;
mod words;

pub use engine::Sandbox;
pub use error::{Call, HostError, LoadError, SandboxError, TrapKind};
pub use fault::Fault;
pub use kvmig_raw::compiled::Origin;
pub use limits::{DeviceLimits, SandboxLimits};
pub use module::{Metadata, Module, RecordRequest};
pub use plan::{PlanError, WeightShape, WeightSpec, WorkPlan, weight_shapes};
pub use recording::Recording;
pub use shape::{CacheShape, PairShape, ShapeError, ViewStrides};
pub use words::Refusal;
