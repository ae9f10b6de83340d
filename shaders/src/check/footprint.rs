//! Which elements of a binding a call touches.

use std::ops::Range;

/// A strided block of a binding: `planes` planes of `rows` rows of `cols` adjacent elements. All numbers in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Index of the binding.
    pub binding: u32,
    /// The first element.
    pub first: u32,
    /// Planes (heads).
    pub planes: u32,
    /// From one plane to the next.
    pub plane_stride: u32,
    /// Rows (tokens).
    pub rows: u32,
    /// From one row to the next.
    pub row_stride: u32,
    /// Adjacent elements of a row.
    pub cols: u32,
}

impl Footprint {
    /// A run of `cols` adjacent elements from the first on.
    pub(super) fn run(binding: u32, cols: u32) -> Self {
        Self { binding, first: 0, planes: 1, plane_stride: 0, rows: 1, row_stride: 0, cols }
    }

    /// How many elements there are (if they are distinct).
    pub fn elements(&self) -> u64 {
        let elements = u128::from(self.planes) * u128::from(self.rows) * u128::from(self.cols);
        u64::try_from(elements).unwrap_or(u64::MAX)
    }

    /// From the first element to the one after the last, the gaps included.
    pub fn span(&self) -> Range<u64> {
        u64::from(self.first)..u64::try_from(self.end()).unwrap_or(u64::MAX)
    }

    /// One after the last element.
    pub(super) fn end(&self) -> u128 {
        if self.planes == 0 || self.rows == 0 || self.cols == 0 {
            return self.first.into();
        }
        u128::from(self.first)
            + u128::from(self.planes - 1) * u128::from(self.plane_stride)
            + u128::from(self.rows - 1) * u128::from(self.row_stride)
            + u128::from(self.cols)
    }

    /// Whether no two elements coincide, told from the strides: each, in ascending order, passes the whole extent of those
    /// below it. (Some odd interleavings are disjoint without that; they are of no use here.)
    pub fn is_disjoint(&self) -> bool {
        let mut axes = [(self.row_stride, self.rows), (self.plane_stride, self.planes)];
        axes.sort_unstable();
        let mut extent = u128::from(self.cols.max(1) - 1);
        axes.into_iter().filter(|&(_, count)| count > 1).all(|(stride, count)| {
            let apart = u128::from(stride) > extent;
            extent += u128::from(stride) * u128::from(count - 1);
            apart
        })
    }
}
