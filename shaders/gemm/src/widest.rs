//! Loops that the compiler turns into vector instructions, for the processor at hand.

/// Runs `work` as it was compiled for the widest vector instructions that this processor has.
///
/// A binary for any processor of a family has the instructions of the oldest. `work` is compiled once for each set that
/// matters, and the choice is made when it runs. Only code that is inlined into `work` gains: mark the closure and the small
/// functions it calls `#[inline(always)]`.
///
/// ```
/// let mut x = vec![1.0f32; 1000];
/// kvmig_gemm::widest(
///     #[inline(always)]
///     || x.iter_mut().for_each(|x| *x = *x * 3.0 + 1.0),
/// );
/// assert!(x.iter().all(|x| *x == 4.0));
/// ```
#[inline]
pub fn widest<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}
