//! The only room that names `wgpu`: adapters, buffers, pipelines, and the replay of recordings on them.
//!
//! The rest of the host reaches a GPU through [`crate::device`].

mod adapters;
mod buffers;
mod context;
mod pipelines;
mod prepare;
mod replay;
mod scan;
mod slices;
mod weights;

pub(crate) use adapters::{Adapter, AdapterKind, adapters};
pub(crate) use context::Context;
pub(crate) use replay::execute;
pub(crate) use weights::GpuWeights;
