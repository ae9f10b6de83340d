//! The WGSL kernels of kvmig as data: sources, reflection, parameter blocks, lints, and a CPU mirror of each.
#![forbid(unsafe_code)]

pub mod params;

/// The host's kernels, by versioned name. A module asks for one with `kernel("affine@1", …)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// `gather@1`: strips the rotation of one source layer's keys (or copies its values) into a panel.
    Gather,
    /// `affine@1`: matrix product over a panel's blocks, bias and the target's rotation in one.
    Affine,
    /// `scan@1`: counts words that are poison, infinite or NaN. The host's own; not offered to modules.
    Scan,
}
