//! Checks of `scan@1`.

use super::{Bound, Checker, Footprint, ParamError, length, parse};
use crate::{Element, Kernel, params::ScanParams};

/// Index of the words.
const WORDS: usize = 0;
/// Index of the counts.
const COUNTS: usize = 1;
/// Rows of a workgroup; its 32 invocations in x walk a row together.
const TILE_ROWS: u32 = 4;

/// A sound call of `scan@1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scan {
    params: ScanParams,
}

impl Scan {
    pub(super) fn check(params: &[u8], bindings: &[Bound]) -> Result<Self, ParamError> {
        let kernel = Kernel::Scan;
        let p: ScanParams = parse(kernel, params)?;
        length(kernel, params, size_of::<ScanParams>() as u64)?;
        let check = Checker { kernel, bindings };
        check.field("first_row", p.first_row.into(), p.first_row == 0, "0: set for each slice")?;
        check.rows("rows", p.rows)?;
        check.rows("cols", p.cols)?;
        check.positive("planes", p.planes)?;
        check.workgroups("planes", p.planes.into(), p.planes.into(), 1)?;
        check.holds(WORDS, &[Element::F32, Element::U32], "f32 or u32")?;
        check.holds(COUNTS, &[Element::U32, Element::Block], "u32")?;
        let call = Self { params: p };
        check.reach(WORDS, call.words().end())?;
        check.reach(COUNTS, 3)?;
        Ok(call)
    }

    /// The parameters.
    pub fn params(&self) -> &ScanParams {
        &self.params
    }

    fn words(&self) -> Footprint {
        let p = &self.params;
        Footprint {
            binding: WORDS as u32,
            first: p.offset,
            planes: p.planes,
            plane_stride: p.plane_stride,
            rows: p.rows,
            row_stride: p.row_stride,
            cols: p.cols,
        }
    }

    pub(super) fn writes(&self) -> Footprint {
        Footprint::run(COUNTS as u32, 3)
    }

    pub(super) fn reads(&self) -> Vec<Footprint> {
        vec![self.words()]
    }

    pub(super) fn flops(&self) -> u64 {
        self.words().elements()
    }

    pub(super) fn grid(&self) -> (u32, u32, [u32; 2]) {
        (self.params.rows, TILE_ROWS, [1, self.params.planes])
    }

    pub(super) fn gpu_params(&self, first_row: u32) -> Vec<u8> {
        bytemuck::bytes_of(&ScanParams { first_row, ..self.params }).to_vec()
    }
}
