//! Matrix products of the fit: views whose shapes this module's callers own, so that a mismatch is a fault of theirs.

use kvmig_gemm::{Element, GemmError, MatMut, MatRef, Threads, matmul};

/// A matrix inside a slice, strides in elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> View<'a, T> {
    /// Rows of `cols` elements, `row_stride` apart.
    pub(super) fn rows(data: &'a [T], rows: usize, cols: usize, row_stride: usize) -> View<'a, T> {
        View { data, rows, cols, row_stride, col_stride: 1 }
    }

    fn checked(self) -> Result<MatRef<'a, T>, GemmError> {
        MatRef::new(self.data, self.rows, self.cols, self.row_stride, self.col_stride)
    }

    /// The transpose.
    pub(super) fn transposed(self) -> View<'a, T> {
        View { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }
}

/// `into = keep · into + factor · left · right`; `into` is row-major with rows `stride` elements apart.
///
/// # Panics
/// If the shapes do not match or a view leaves its slice: both are fixed by the calling module.
pub(super) fn multiply<T: Element>(
    into: &mut [T],
    stride: usize,
    keep: T,
    factor: T,
    left: View<'_, T>,
    right: View<'_, T>,
) {
    let (rows, cols) = (left.rows, right.cols);
    let mut product = || -> Result<(), GemmError> {
        matmul(MatMut::new(into, rows, cols, stride, 1)?, keep, factor, left.checked()?, right.checked()?, Threads::All)
    };
    product().expect("the fit's own shapes match");
}
