//! A mirror of each kernel in plain Rust, for the CPU device: the same calls, the same checks, written from the
//! definitions in [`params`](crate::params) and not from the WGSL.
//!
//! The mirrors spread over the current rayon pool. Buffers are f32; the CPU device widens f16 weights once.

mod affine;
mod gather;
mod heads;
mod scan;

pub use affine::affine;
pub use gather::gather;
pub use heads::heads;
pub use scan::{Counts, scan};

use kvmig_gemm::GemmError;

/// Names of the mirrors; a test holds them against the WGSL entry points.
pub const MIRRORS: [&str; 4] = ["affine", "gather", "heads", "scan"];

/// Slices that aren't those the call was checked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpuError {
    /// A slice is shorter than what the call touches.
    #[error("{kernel}: {binding} has {found} elements; the checked call touches {needed}")]
    Short {
        /// The kernel.
        kernel: &'static str,
        /// The slice.
        binding: &'static str,
        /// Elements that the call touches.
        needed: u64,
        /// Elements of the slice.
        found: usize,
    },
    /// A matrix view of a slice didn't hold; the check should have excluded it.
    #[error(transparent)]
    View(#[from] GemmError),
}

fn long_enough<T>(kernel: &'static str, binding: &'static str, slice: &[T], needed: u64) -> Result<(), CpuError> {
    if slice.len() as u64 >= needed {
        return Ok(());
    }
    Err(CpuError::Short { kernel, binding, needed, found: slice.len() })
}

/// Rows for a task: enough tasks to share the work among `threads`, few enough rows to stay in cache, and not so few
/// that each task reads the weights for nothing.
fn rows_per_task(rows: usize, threads: usize) -> usize {
    rows.div_ceil(threads.max(1)).clamp(32, 128)
}
