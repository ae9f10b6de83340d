//! Strided two-dimensional views whose construction proves that they stay in their slice.

use std::{fmt, marker::PhantomData};

use crate::GemmError;

/// Shape and strides of a view, in elements. A stride is never 0, and 1 where its dimension has fewer than two elements,
/// so that a stride that is never taken can't overflow anything later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

impl Shape {
    /// Checks that every element lies in `offset .. len` and that strides that are taken are positive.
    fn check(self, offset: usize, len: usize) -> Result<Self, GemmError> {
        let Self { rows, cols, row_stride, col_stride } = self;
        if rows == 0 || cols == 0 {
            return Ok(Self { rows, cols, row_stride: 1, col_stride: 1 });
        }
        if (rows > 1 && row_stride == 0) || (cols > 1 && col_stride == 0) {
            return Err(GemmError::Overlap { rows, cols, row_stride, col_stride });
        }
        let last = (rows - 1)
            .checked_mul(row_stride)
            .zip((cols - 1).checked_mul(col_stride))
            .and_then(|(r, c)| r.checked_add(c))
            .and_then(|reach| reach.checked_add(offset));
        match last {
            Some(last) if last < len => Ok(Self {
                rows,
                cols,
                row_stride: if rows > 1 { row_stride } else { 1 },
                col_stride: if cols > 1 { col_stride } else { 1 },
            }),
            _ => Err(GemmError::OutOfBounds { rows, cols, row_stride, col_stride, offset, len }),
        }
    }

    /// Checks that no two elements coincide: the longer stride passes the shorter one's whole extent. Call it on a checked
    /// shape only: its extents don't overflow.
    fn disjoint(self) -> Result<Self, GemmError> {
        let Self { rows, cols, row_stride, col_stride } = self;
        let apart = rows <= 1
            || cols <= 1
            || if row_stride >= col_stride {
                row_stride > (cols - 1) * col_stride
            } else {
                col_stride > (rows - 1) * row_stride
            };
        if apart { Ok(self) } else { Err(GemmError::Overlap { rows, cols, row_stride, col_stride }) }
    }

    /// Elements from the first to the last, both included; 0 for an empty view.
    fn span(self) -> usize {
        if self.rows == 0 || self.cols == 0 {
            return 0;
        }
        (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride + 1
    }

    fn transposed(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride }
    }
}

/// A matrix `[rows, cols]` that is read. Element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy)]
pub struct MatRef<'a, T> {
    data: &'a [T],
    shape: Shape,
}

impl<'a, T> MatRef<'a, T> {
    /// A view of `data` with both strides given, in elements.
    ///
    /// # Errors
    /// [`GemmError::OutOfBounds`] when an element lies beyond `data`, [`GemmError::Overlap`] when the stride of a dimension
    /// with two or more elements is 0.
    pub fn new(
        data: &'a [T],
        rows: usize,
        cols: usize,
        row_stride: usize,
        col_stride: usize,
    ) -> Result<Self, GemmError> {
        let shape = Shape { rows, cols, row_stride, col_stride }.check(0, data.len())?;
        Ok(Self { data, shape })
    }

    /// A row-major view without gaps.
    ///
    /// # Errors
    /// [`GemmError::OutOfBounds`] when `data` has fewer than `rows * cols` elements.
    pub fn row_major(data: &'a [T], rows: usize, cols: usize) -> Result<Self, GemmError> {
        Self::new(data, rows, cols, cols, 1)
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.shape.cols
    }

    /// The transpose, by swapped strides.
    pub fn transposed(self) -> Self {
        Self { data: self.data, shape: self.shape.transposed() }
    }

    /// The rows `from .. to`, both cut to the rows there are.
    pub fn row_range(self, from: usize, to: usize) -> Self {
        let to = to.min(self.shape.rows);
        let from = from.min(to);
        let rows = to - from;
        let start = if rows == 0 { 0 } else { from * self.shape.row_stride };
        Self { data: &self.data[start..], shape: Shape { rows, ..self.shape } }
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    pub(crate) fn as_ptr(&self) -> *const T {
        self.data.as_ptr()
    }
}

impl<T> fmt::Debug for MatRef<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MatRef").field(&self.shape).finish()
    }
}

/// A matrix `[rows, cols]` that is written. It borrows its elements, not the gaps between them: several views with
/// disjoint elements of one slice can be held, and filled by several threads ([`MatMut::row_blocks`], [`MatMut::planes`]).
pub struct MatMut<'a, T> {
    /// The first element, or any pointer if the view is empty. All `rows * cols` elements reached from here by the strides
    /// are borrowed exclusively for `'a`, and are distinct.
    ptr: *mut T,
    shape: Shape,
    borrow: PhantomData<&'a mut T>,
}

// SAFETY: a `MatMut` is an exclusive borrow of its elements, like `&mut [T]`, which is `Send` when `T` is.
unsafe impl<T: Send> Send for MatMut<'_, T> {}
// SAFETY: through `&MatMut` only shared references to elements are given out, like through `&&mut [T]`.
unsafe impl<T: Sync> Sync for MatMut<'_, T> {}

impl<'a, T> MatMut<'a, T> {
    /// A view of `data` with both strides given, in elements.
    ///
    /// # Errors
    /// [`GemmError::OutOfBounds`] when an element lies beyond `data`; [`GemmError::Overlap`] when two elements may coincide.
    pub fn new(
        data: &'a mut [T],
        rows: usize,
        cols: usize,
        row_stride: usize,
        col_stride: usize,
    ) -> Result<Self, GemmError> {
        let shape = Shape { rows, cols, row_stride, col_stride }.check(0, data.len())?.disjoint()?;
        Ok(Self { ptr: data.as_mut_ptr(), shape, borrow: PhantomData })
    }

    /// A row-major view without gaps.
    ///
    /// # Errors
    /// [`GemmError::OutOfBounds`] when `data` has fewer than `rows * cols` elements.
    pub fn row_major(data: &'a mut [T], rows: usize, cols: usize) -> Result<Self, GemmError> {
        Self::new(data, rows, cols, cols, 1)
    }

    /// `planes` views `[rows, cols]` of one slice, the first element of plane p at `p * plane_stride`: the heads of a cache
    /// layer `[n_kv, T, d]`, or of one stored `[T, n_kv, d]`.
    ///
    /// # Errors
    /// As [`MatMut::new`], and [`GemmError::PlanesOverlap`] when two planes may share an element.
    pub fn planes(
        data: &'a mut [T],
        planes: usize,
        plane_stride: usize,
        rows: usize,
        cols: usize,
        row_stride: usize,
        col_stride: usize,
    ) -> Result<Vec<Self>, GemmError> {
        if planes == 0 {
            return Ok(Vec::new());
        }
        let shape = Shape { rows, cols, row_stride, col_stride };
        let beyond = GemmError::OutOfBounds { rows, cols, row_stride, col_stride, offset: usize::MAX, len: data.len() };
        let last = (planes - 1).checked_mul(plane_stride).ok_or(beyond)?;
        let shape = shape.check(last, data.len())?.disjoint()?;
        let span = shape.span();
        if planes > 1 && span > 0 && !planes_apart(shape, planes, plane_stride) {
            return Err(GemmError::PlanesOverlap { planes, plane_stride, span });
        }
        let ptr = data.as_mut_ptr();
        Ok((0..planes)
            .map(|p| {
                // An empty plane may start beyond the slice: it has no element to point at.
                let start = if span == 0 { 0 } else { p * plane_stride };
                // SAFETY: `start <= last`, and `check` has shown that `last` plus the shape's extent lies in `data`.
                let ptr = unsafe { ptr.add(start) };
                Self { ptr, shape, borrow: PhantomData }
            })
            .collect())
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.shape.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.shape.cols
    }

    /// The transpose, by swapped strides.
    pub fn transposed(self) -> Self {
        Self { shape: self.shape.transposed(), ..self }
    }

    /// A shorter borrow of the same elements.
    pub fn reborrow(&mut self) -> MatMut<'_, T> {
        MatMut { ptr: self.ptr, shape: self.shape, borrow: PhantomData }
    }

    /// The rows before and from `row` on (cut to the rows there are).
    pub fn split_at_row(self, row: usize) -> (Self, Self) {
        let row = row.min(self.shape.rows);
        let rest = self.shape.rows - row;
        let start = if rest == 0 || self.shape.cols == 0 { 0 } else { row * self.shape.row_stride };
        // SAFETY: element (row, 0) exists when `start` is not 0, so the offset stays in the borrowed slice.
        let tail = unsafe { self.ptr.add(start) };
        (
            Self { ptr: self.ptr, shape: Shape { rows: row, ..self.shape }, borrow: PhantomData },
            Self { ptr: tail, shape: Shape { rows: rest, ..self.shape }, borrow: PhantomData },
        )
    }

    /// The view cut into blocks of `block` rows, the last one shorter, for a thread each.
    ///
    /// # Panics
    /// When `block` is 0.
    pub fn row_blocks(self, block: usize) -> Vec<Self> {
        assert!(block > 0, "row_blocks needs blocks of at least one row");
        let mut blocks = Vec::with_capacity(self.shape.rows.div_ceil(block));
        let mut rest = self;
        while rest.shape.rows > block {
            let (head, tail) = rest.split_at_row(block);
            blocks.push(head);
            rest = tail;
        }
        if rest.shape.rows > 0 {
            blocks.push(rest);
        }
        blocks
    }

    /// Row `row` as a slice; `None` when there is no such row or its elements aren't adjacent.
    pub fn row_mut(&mut self, row: usize) -> Option<&mut [T]> {
        let Shape { rows, cols, row_stride, col_stride } = self.shape;
        if row >= rows || (cols > 1 && col_stride != 1) {
            return None;
        }
        let start = if cols == 0 { 0 } else { row * row_stride };
        // SAFETY: the row's `cols` elements are adjacent, lie in the slice the view borrows, and belong to this view alone.
        Some(unsafe { std::slice::from_raw_parts_mut(self.ptr.add(start), cols) })
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut T {
        self.ptr
    }
}

impl<T> fmt::Debug for MatMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MatMut").field(&self.shape).finish()
    }
}

/// Whether planes of a checked, self-disjoint shape share no element: with the three (stride, count) pairs in ascending
/// order of stride, each stride has to pass the whole extent of those below it.
fn planes_apart(shape: Shape, planes: usize, plane_stride: usize) -> bool {
    let mut axes = [(shape.row_stride, shape.rows), (shape.col_stride, shape.cols), (plane_stride, planes)].map(
        |(stride, count)| {
            // A dimension that is never stepped along constrains nothing: sort it first.
            if count > 1 { (stride, count) } else { (0, 1) }
        },
    );
    axes.sort_unstable();
    let mut extent = 0usize;
    axes.into_iter().all(|(stride, count)| {
        let apart = count == 1 || stride > extent;
        extent += stride * (count - 1);
        apart
    })
}
