//! The product itself.

use std::sync::Once;

use gemm::Parallelism;

use crate::{GemmError, MatMut, MatRef};

/// Element types the product is offered for: `f32` and `f64`.
pub trait Element: Copy + Send + Sync + PartialEq + sealed::Zero + 'static {}
impl Element for f32 {}
impl Element for f64 {}

mod sealed {
    /// Keeps `Element` to the types that `gemm` has kernels for: for any other it panics.
    pub trait Zero {
        const ZERO: Self;
    }
    impl Zero for f32 {
        const ZERO: Self = 0.0;
    }
    impl Zero for f64 {
        const ZERO: Self = 0.0;
    }
}

/// How many threads a product may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// The caller's own: for callers that are themselves spread over threads.
    One,
    /// All of the current rayon pool (for products large enough to be worth it).
    All,
}

/// `gemm` copies a left operand whose columns are dense into panels when more than this many tiles of the right one's columns
/// (6 each) meet it. Its default of 8 copies a mapper's weights once for each chunk of 256 tokens: read where they lie, in a
/// second-level cache, the whole map takes 5 % less. Larger products are packed as before.
const READ_IN_PLACE: usize = 64;

/// `dst = beta * dst + alpha * lhs * rhs`. With `beta == 0` the old contents of `dst` are not read: NaN there is
/// overwritten. The order of the sum over k is the kernel's own.
///
/// Shapes: `dst [m, n]`, `lhs [m, k]`, `rhs [k, n]`, each with its own strides. `k == 0` scales `dst`.
///
/// # Errors
/// [`GemmError::Shapes`] when the dimensions don't match.
pub fn matmul<T: Element>(
    mut dst: MatMut<'_, T>,
    beta: T,
    alpha: T,
    lhs: MatRef<'_, T>,
    rhs: MatRef<'_, T>,
    threads: Threads,
) -> Result<(), GemmError> {
    let (d, l, r) = (dst.shape(), lhs.shape(), rhs.shape());
    if d.rows != l.rows || d.cols != r.cols || l.cols != r.rows {
        return Err(GemmError::Shapes { dst: [d.rows, d.cols], lhs: [l.rows, l.cols], rhs: [r.rows, r.cols] });
    }
    let parallelism = match threads {
        Threads::One => Parallelism::None,
        Threads::All => Parallelism::Rayon(0),
    };
    static TUNED: Once = Once::new();
    TUNED.call_once(|| {
        gemm::set_lhs_packing_threshold_single_thread(READ_IN_PLACE);
        gemm::set_lhs_packing_threshold_multi_thread(READ_IN_PLACE);
    });
    // SAFETY: `gemm` reads lhs [m, k] and rhs [k, n] and writes dst [m, n] at the given strides. Each view has shown that
    // all its elements lie in a slice that it borrows for the length of this call; dst's are distinct and borrowed
    // exclusively, so they are neither elements of lhs or rhs nor seen by another thread. A slice has at most isize::MAX
    // bytes and taken strides lie within it (others are 1), so no stride changes sign in the cast. `T` is f32 or f64.
    // `gemm` names the factor of dst alpha and the factor of the product beta.
    unsafe {
        gemm::gemm(
            d.rows,
            d.cols,
            l.cols,
            dst.as_mut_ptr(),
            d.col_stride as isize,
            d.row_stride as isize,
            beta != T::ZERO,
            lhs.as_ptr(),
            l.col_stride as isize,
            l.row_stride as isize,
            rhs.as_ptr(),
            r.col_stride as isize,
            r.row_stride as isize,
            beta,
            alpha,
            false,
            false,
            false,
            parallelism,
        );
    }
    Ok(())
}
