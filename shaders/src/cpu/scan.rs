//! Mirror of `scan@1`.

use kvmig_gemm::widest;
use rayon::prelude::*;

use super::{CpuError, long_enough};
use crate::{check::Scan, params::ScanParams};

/// What a scan found; all zero where every word was written and is a finite number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Words that hold the poison pattern: never written.
    pub poison: u64,
    /// Other NaN.
    pub nan: u64,
    /// Infinities.
    pub infinite: u64,
}

impl Counts {
    /// Whether nothing was found.
    pub fn is_clean(&self) -> bool {
        *self == Self::default()
    }

    fn add(self, other: Self) -> Self {
        Self { poison: self.poison + other.poison, nan: self.nan + other.nan, infinite: self.infinite + other.infinite }
    }
}

/// Counts words of a strided block that are poison, another NaN, or infinite.
///
/// # Errors
/// [`CpuError::Short`] when `words` is shorter than the binding that `call` was checked for.
pub fn scan(call: &Scan, words: &[f32]) -> Result<Counts, CpuError> {
    let p = call.params();
    let last =
        (u64::from(p.planes) - 1) * u64::from(p.plane_stride) + (u64::from(p.rows) - 1) * u64::from(p.row_stride);
    long_enough("scan@1", "words", words, u64::from(p.offset) + last + u64::from(p.cols))?;
    let rows = p.planes as usize * p.rows as usize;
    let counts = (0..rows).into_par_iter().with_min_len(64).map(|index| {
        let (plane, row) = (index / p.rows as usize, index % p.rows as usize);
        let from = p.offset as usize + plane * p.plane_stride as usize + row * p.row_stride as usize;
        count(p, &words[from..][..p.cols as usize])
    });
    Ok(counts.reduce(Counts::default, Counts::add))
}

fn count(p: &ScanParams, row: &[f32]) -> Counts {
    // The usual case, nothing found, is one branch-free pass: an exponent of all ones is NaN, poison or infinite.
    let suspicious = |bits: u32| (bits & 0x7f80_0000 == 0x7f80_0000) | (bits == p.poison);
    let clean = widest(
        #[inline(always)]
        || !row.iter().fold(false, |found, x| found | suspicious(x.to_bits())),
    );
    let mut counts = Counts::default();
    if clean {
        return counts;
    }
    for x in row {
        if x.to_bits() == p.poison {
            counts.poison += 1;
        } else if x.is_nan() {
            counts.nan += 1;
        } else if x.is_infinite() {
            counts.infinite += 1;
        }
    }
    counts
}
