//! Matrix products on strided views of slices, checked before the `gemm` crate's unsafe kernels run.
//!
//! A view proves at its construction that every element lies in its slice, and a mutable one that no two of its elements
//! are the same; [`matmul`] then has only the three shapes left to compare. Transposes are strides, so that nothing is
//! copied:
//!
//! ```
//! use kvmig_gemm::{MatMut, MatRef, Threads, matmul};
//!
//! let a = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]; // [2, 3], row major
//! let mut gram = [0.0f32; 9]; // aᵀa, [3, 3]
//! let a = MatRef::row_major(&a, 2, 3)?;
//! matmul(MatMut::row_major(&mut gram, 3, 3)?, 0.0, 1.0, a.transposed(), a, Threads::One)?;
//! assert_eq!(gram, [17.0, 22.0, 27.0, 22.0, 29.0, 36.0, 27.0, 36.0, 45.0]);
//! # Ok::<(), kvmig_gemm::GemmError>(())
//! ```
//!
//! This crate holds unsafe code so that the crates above it need none; each block says why it is sound.

mod error;
mod product;
mod rows;
mod view;
mod widest;

pub use error::GemmError;
pub use product::{Element, Threads, matmul};
pub use rows::{FEW_ROWS, rows_times_transposed};
pub use view::{MatMut, MatRef};
pub use widest::widest;
