//! Checks of `affine@1`.

use super::{Bound, Checker, Footprint, ParamError, length, parse};
use crate::{
    Element, Kernel,
    params::{AffineBlock, AffineParams},
};

/// Index of the panel.
const PANEL: usize = 0;
/// Index of the weights.
const WEIGHTS: usize = 1;
/// Index of the bias.
const BIAS: usize = 2;
/// Index of the RoPE table.
const ROPE: usize = 3;
/// Index of the target view.
const TARGET: usize = 4;
/// Tokens and pairs of columns of a workgroup: 8 x 8 invocations, 4 x 4 each.
const TILE: [u32; 2] = [32, 32];

/// A sound call of `affine@1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Affine {
    params: AffineParams,
    blocks: Vec<AffineBlock>,
    depth: u32,
    groups_across: u32,
}

impl Affine {
    pub(super) fn check(params: &[u8], bindings: &[Bound]) -> Result<Self, ParamError> {
        let kernel = Kernel::Affine;
        let p: AffineParams = parse(kernel, params)?;
        let fixed = size_of::<AffineParams>();
        length(kernel, params, fixed as u64 + size_of::<AffineBlock>() as u64 * u64::from(p.blocks))?;
        let check = Checker { kernel, bindings };
        check.field("first_row", p.first_row.into(), p.first_row == 0, "0: the host's own")?;
        check.rows("tokens", p.tokens)?;
        for (field, value) in [("blocks", p.blocks), ("kv_heads", p.kv_heads), ("head_dim", p.head_dim)] {
            check.positive(field, value)?;
        }
        check.rope(p.rope_dims, p.head_dim)?;
        let blocks: Vec<AffineBlock> =
            params[fixed..].chunks_exact(size_of::<AffineBlock>()).map(bytemuck::pod_read_unaligned).collect();
        for block in &blocks {
            check.positive("width of a block", block.width)?;
            let apart = p.tokens == 1 || block.row_stride >= block.width;
            let expected = format!("at least its width = {}", block.width);
            check.field("row_stride of a block", block.row_stride.into(), apart, expected)?;
        }
        let depth: u64 = blocks.iter().map(|block| u64::from(block.width)).sum();
        check.field("columns of all blocks", depth, depth <= u32::MAX.into(), "less than 2^32")?;
        for index in [PANEL, BIAS, ROPE, TARGET] {
            check.holds(index, &[Element::F32], "f32")?;
        }
        check.holds(WEIGHTS, &[Element::F32, Element::F16], "f32 or f16")?;

        let width = u128::from(p.kv_heads) * u128::from(p.head_dim);
        check.reach(WEIGHTS, u128::from(depth) * width)?;
        check.reach(BIAS, width)?;
        check.reach(ROPE, u128::from(p.tokens) * u128::from(p.rope_dims))?;
        let mut call = Self { params: p, blocks, depth: depth as u32, groups_across: 0 };
        for block in call.panel_blocks() {
            check.reach(PANEL, block.end())?;
        }
        check.written(call.writes())?;
        let pairs = u64::from(p.head_dim.div_ceil(2)) * u64::from(p.kv_heads);
        call.groups_across = check.workgroups("kv_heads * head_dim", width as u64, pairs, TILE[1])?;
        Ok(call)
    }

    /// The parameters.
    pub fn params(&self) -> &AffineParams {
        &self.params
    }

    /// The blocks, in the order of the weights' rows.
    pub fn blocks(&self) -> &[AffineBlock] {
        &self.blocks
    }

    /// Columns of the product, `kv_heads * head_dim`.
    pub fn width(&self) -> u32 {
        self.params.kv_heads * self.params.head_dim
    }

    /// Rows of the weights, the sum of the blocks' widths.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    fn panel_blocks(&self) -> impl Iterator<Item = Footprint> {
        let p = self.params;
        self.blocks.iter().map(move |block| Footprint {
            first: block.offset,
            rows: p.tokens,
            row_stride: block.row_stride,
            ..Footprint::run(PANEL as u32, block.width)
        })
    }

    pub(super) fn writes(&self) -> Footprint {
        let p = &self.params;
        Footprint {
            binding: TARGET as u32,
            first: 0,
            planes: p.kv_heads,
            plane_stride: p.head_stride,
            rows: p.tokens,
            row_stride: p.row_stride,
            cols: p.head_dim,
        }
    }

    pub(super) fn reads(&self) -> Vec<Footprint> {
        let mut reads: Vec<Footprint> = self.panel_blocks().collect();
        reads.push(Footprint::run(WEIGHTS as u32, self.depth() * self.width()));
        reads.push(Footprint::run(BIAS as u32, self.width()));
        reads.push(Footprint::run(ROPE as u32, self.params.tokens * self.params.rope_dims));
        reads
    }

    pub(super) fn flops(&self) -> u64 {
        let p = &self.params;
        let product = 2 * u64::from(self.depth()) * u64::from(self.width());
        let rotation = 3 * u64::from(p.kv_heads) * u64::from(p.rope_dims);
        // depth * width < 2^32 and tokens <= 2^30, but with the rotation the product may pass u64.
        u64::from(p.tokens).saturating_mul(product + rotation)
    }

    pub(super) fn grid(&self) -> (u32, u32, [u32; 2]) {
        (self.params.tokens, TILE[0], [self.groups_across, 1])
    }

    pub(super) fn gpu_params(&self, first_row: u32) -> Vec<u8> {
        let mut bytes = bytemuck::bytes_of(&AffineParams { first_row, ..self.params }).to_vec();
        bytes.extend_from_slice(bytemuck::cast_slice(&self.blocks));
        bytes
    }
}
