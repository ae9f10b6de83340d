//! The kernels' definitions in f64, straight from the formulas, with an error bound for each element: the yardstick for the
//! CPU mirrors and for every adapter. Slow and plain on purpose.

mod affine;
mod gather;
mod heads;

pub use affine::affine;
pub use gather::gather;
pub use heads::heads;

use crate::tolerance::Expected;

/// An element of the output binding that a call writes, and what it should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Element {
    /// Its index in the output binding.
    pub index: usize,
    /// What it should be.
    pub expected: Expected,
}
