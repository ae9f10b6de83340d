//! Cutting a call into dispatches.

use std::ops::Range;

/// Workgroups that every adapter allows in a dimension.
pub const MAX_WORKGROUPS: u32 = 65_535;

/// One dispatch of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The rows (tokens) it covers; `rows.start` goes into the parameter block.
    pub rows: Range<u32>,
    /// Workgroups in x, y, z.
    pub workgroups: [u32; 3],
}

impl Slice {
    /// Workgroups of the dispatch.
    pub fn workgroup_count(&self) -> u64 {
        self.workgroups.iter().map(|&n| u64::from(n)).product()
    }
}

/// Cuts `rows` rows, `tile` of them to a workgroup, with `across` workgroups in x and z.
pub(super) fn cut(rows: u32, tile: u32, across: [u32; 2], flops: u64, max_flops: u64) -> Vec<Slice> {
    let tiles = rows.div_ceil(tile);
    let per_tile = flops.div_ceil(tiles.into()).max(1);
    let step = (max_flops / per_tile).clamp(1, MAX_WORKGROUPS.into()) as u32;
    (0..tiles)
        .step_by(step as usize)
        .map(|first| {
            let count = step.min(tiles - first);
            Slice { rows: first * tile..((first + count) * tile).min(rows), workgroups: [across[0], count, across[1]] }
        })
        .collect()
}
