//! What can be wrong with a view or a product.

/// A view that doesn't fit its slice, or shapes that don't match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GemmError {
    /// The last element of the view lies beyond the slice.
    #[error(
        "matrix view [{rows} x {cols}] with strides ({row_stride}, {col_stride}) from element {offset} reaches beyond its \
         slice of {len} elements"
    )]
    OutOfBounds {
        /// Rows of the view.
        rows: usize,
        /// Columns of the view.
        cols: usize,
        /// Elements from one row to the next.
        row_stride: usize,
        /// Elements from one column to the next.
        col_stride: usize,
        /// First element of the view in the slice.
        offset: usize,
        /// Elements of the slice.
        len: usize,
    },
    /// Two elements of the view are, or can't be shown not to be, the same element of the slice.
    #[error(
        "matrix view [{rows} x {cols}] with strides ({row_stride}, {col_stride}) overlaps itself: the longer stride has to \
         pass the whole extent of the shorter one"
    )]
    Overlap {
        /// Rows of the view.
        rows: usize,
        /// Columns of the view.
        cols: usize,
        /// Elements from one row to the next.
        row_stride: usize,
        /// Elements from one column to the next.
        col_stride: usize,
    },
    /// Planes of [`MatMut::planes`](crate::MatMut::planes) share elements.
    #[error("{planes} planes of stride {plane_stride} overlap: a plane spans {span} elements")]
    PlanesOverlap {
        /// Planes.
        planes: usize,
        /// Elements from one plane to the next.
        plane_stride: usize,
        /// Elements from the first to the last of a plane, both included.
        span: usize,
    },
    /// The inner or outer dimensions of a product differ.
    #[error(
        "product of [{} x {}] and [{} x {}] doesn't fit a destination of [{} x {}]",
        lhs[0], lhs[1], rhs[0], rhs[1], dst[0], dst[1]
    )]
    Shapes {
        /// Rows and columns of the destination.
        dst: [usize; 2],
        /// Rows and columns of the left factor.
        lhs: [usize; 2],
        /// Rows and columns of the right factor.
        rhs: [usize; 2],
    },
}
