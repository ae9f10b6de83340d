//! Checks of `gather@1`.

use super::{Bound, Checker, Footprint, ParamError, length, parse};
use crate::{Element, Kernel, params::GatherParams};

/// Index of the source view.
const SOURCE: usize = 0;
/// Index of the RoPE table.
const ROPE: usize = 1;
/// Index of the panel.
const PANEL: usize = 2;
/// Tokens and pairs of columns of a workgroup, one of each an invocation.
const TILE: [u32; 2] = [4, 32];

/// A sound call of `gather@1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gather {
    params: GatherParams,
    groups_across: u32,
}

impl Gather {
    pub(super) fn check(params: &[u8], bindings: &[Bound]) -> Result<Self, ParamError> {
        let kernel = Kernel::Gather;
        let p: GatherParams = parse(kernel, params)?;
        length(kernel, params, size_of::<GatherParams>() as u64)?;
        let check = Checker { kernel, bindings };
        check.field("first_row", p.first_row.into(), p.first_row == 0, "0: the host's own")?;
        check.rows("tokens", p.tokens)?;
        check.positive("kv_heads", p.kv_heads)?;
        check.positive("head_dim", p.head_dim)?;
        check.rope(p.rope_dims, p.head_dim)?;
        for index in [SOURCE, ROPE, PANEL] {
            check.holds(index, &[Element::F32], "f32")?;
        }
        // The panel first: it bounds kv_heads * head_dim, which the rest builds on.
        let width = u64::from(p.kv_heads) * u64::from(p.head_dim);
        check.field("kv_heads * head_dim", width, width <= u32::MAX.into(), "less than 2^32")?;
        let mut call = Self { params: p, groups_across: 0 };
        check.written(call.writes())?;
        check.reach(SOURCE, call.source().end())?;
        check.reach(ROPE, u128::from(p.tokens) * u128::from(p.rope_dims))?;
        let pairs = u64::from(p.head_dim.div_ceil(2)) * u64::from(p.kv_heads);
        call.groups_across = check.workgroups("kv_heads * head_dim", width, pairs, TILE[1])?;
        Ok(call)
    }

    /// The parameters.
    pub fn params(&self) -> &GatherParams {
        &self.params
    }

    fn source(&self) -> Footprint {
        let p = &self.params;
        Footprint {
            binding: SOURCE as u32,
            first: 0,
            planes: p.kv_heads,
            plane_stride: p.head_stride,
            rows: p.tokens,
            row_stride: p.row_stride,
            cols: p.head_dim,
        }
    }

    pub(super) fn writes(&self) -> Footprint {
        let p = &self.params;
        Footprint {
            rows: p.tokens,
            row_stride: p.panel_row_stride,
            ..Footprint::run(PANEL as u32, p.kv_heads * p.head_dim)
        }
    }

    pub(super) fn reads(&self) -> Vec<Footprint> {
        vec![self.source(), Footprint::run(ROPE as u32, self.params.tokens * self.params.rope_dims)]
    }

    pub(super) fn flops(&self) -> u64 {
        // Of a pair, four products and two sums; what is only copied counts as one each.
        let p = &self.params;
        u64::from(p.tokens) * u64::from(p.kv_heads) * (3 * u64::from(p.rope_dims) + u64::from(p.head_dim - p.rope_dims))
    }

    pub(super) fn grid(&self) -> (u32, u32, [u32; 2]) {
        (self.params.tokens, TILE[0], [self.groups_across, 1])
    }

    pub(super) fn gpu_params(&self, first_row: u32) -> Vec<u8> {
        bytemuck::bytes_of(&GatherParams { first_row, ..self.params }).to_vec()
    }
}
