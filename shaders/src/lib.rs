//! The WGSL kernels of kvmig as data: sources, reflection, parameter blocks, checks, lints, and a CPU mirror of each.
//!
//! The way of a call: [`Kernel::from_name`], [`Kernel::check`] on the parameter bytes and the binding sizes, then either
//! [`Kernel::shader`] with [`Checked::slices`] and [`Checked::gpu_params`] on a GPU, or its mirror in [`cpu`]. This crate runs
//! nothing on a GPU itself.
#![forbid(unsafe_code)]

pub mod check;
pub mod cpu;
mod kernel;
pub mod lint;
pub mod params;
pub mod reference;
pub mod reflect;
pub mod table;
pub mod tolerance;

pub use check::{Bound, Checked, Footprint, ParamError, Slice};
pub use kernel::{Kernel, UnknownKernel, WeightFormat};
pub use reflect::{Access, Element};
