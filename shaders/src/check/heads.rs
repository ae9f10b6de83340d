//! Checks of `heads@1`.

use super::{Bound, Checker, Footprint, ParamError, length, parse};
use crate::{Element, Kernel, params::HeadsParams};

/// Index of the panel.
const PANEL: usize = 0;
/// Index of the weights.
const WEIGHTS: usize = 1;
/// Index of the bias.
const BIAS: usize = 2;
/// Index of the RoPE table.
const ROPE: usize = 3;
/// Index of the output.
const OUTPUT: usize = 4;
/// Tokens and lanes of a workgroup: 8 x 8 invocations, 4 tokens each.
const TILE: [u32; 2] = [32, 8];
/// Pairs of columns of an invocation.
const PAIRS: u32 = 4;

/// A sound call of `heads@1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heads {
    params: HeadsParams,
    offsets: Vec<u32>,
    groups_across: u32,
}

impl Heads {
    pub(super) fn check(params: &[u8], bindings: &[Bound]) -> Result<Self, ParamError> {
        let kernel = Kernel::Heads;
        let p: HeadsParams = parse(kernel, params)?;
        let fixed = size_of::<HeadsParams>();
        length(kernel, params, fixed as u64 + 4 * u64::from(p.blocks))?;
        let check = Checker { kernel, bindings };
        check.field("first_row", p.first_row.into(), p.first_row == 0, "0: the host's own")?;
        check.rows("tokens", p.tokens)?;
        for (field, value) in [
            ("blocks", p.blocks),
            ("block_width", p.block_width),
            ("panel_heads", p.panel_heads),
            ("heads", p.heads),
            ("head_dim", p.head_dim),
        ] {
            check.positive(field, value)?;
        }
        check.rope(p.rope_dims, p.head_dim)?;
        check.field("relu", p.relu.into(), p.relu <= 1, "0 or 1")?;
        let rotated = p.relu == 1 && p.rope_dims > 0;
        check.field("rope_dims", p.rope_dims.into(), !rotated, "0: what a ReLU is applied to is not rotated")?;
        let apart = p.tokens == 1 || p.panel_row_stride >= p.block_width;
        check.field(
            "panel_row_stride",
            p.panel_row_stride.into(),
            apart,
            format!("at least block_width = {}", p.block_width),
        )?;
        for index in [PANEL, BIAS, ROPE, OUTPUT] {
            check.holds(index, &[Element::F32], "f32")?;
        }
        check.holds(WEIGHTS, &[Element::F32, Element::F16], "f32 or f16")?;

        let width = u128::from(p.heads) * u128::from(p.head_dim);
        check.reach(WEIGHTS, u128::from(p.blocks) * u128::from(p.block_width) * width)?;
        check.reach(BIAS, width)?;
        check.reach(ROPE, u128::from(p.tokens) * u128::from(p.rope_dims))?;
        // What the shader divides to find a head's panel head.
        let product = u64::from(p.heads - 1) * u64::from(p.panel_heads);
        check.field("heads * panel_heads", product, product <= u32::MAX.into(), "less than 2^32")?;
        let offsets = params[fixed..].chunks_exact(4);
        let offsets = offsets.map(|bytes| u32::from_le_bytes(bytes.try_into().expect("chunks of 4 bytes"))).collect();
        let mut call = Self { params: p, offsets, groups_across: 0 };
        let last = call.panel_head(p.heads - 1);
        for &offset in &call.offsets {
            let first = u128::from(offset) + u128::from(last) * u128::from(p.head_step);
            check.reach(PANEL, first + call.rows_of(0, p.block_width).end())?;
        }
        check.written(call.writes())?;
        let lanes = u64::from(p.head_dim.div_ceil(2).div_ceil(PAIRS)) * u64::from(p.heads);
        call.groups_across = check.workgroups("heads * head_dim", width as u64, lanes, TILE[1])?;
        Ok(call)
    }

    /// The parameters.
    pub fn params(&self) -> &HeadsParams {
        &self.params
    }

    /// Element offset in the panel of each block's first row, of its first head.
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// Rows of a head's weights, `blocks * block_width`.
    pub fn depth(&self) -> u32 {
        self.params.blocks * self.params.block_width
    }

    /// The head of the panel that head `head` reads.
    pub fn panel_head(&self, head: u32) -> u32 {
        (u64::from(head) * u64::from(self.params.panel_heads) / u64::from(self.params.heads)) as u32
    }

    /// `cols` columns of every panel row from element `first` on.
    fn rows_of(&self, first: u32, cols: u32) -> Footprint {
        let p = &self.params;
        Footprint { first, rows: p.tokens, row_stride: p.panel_row_stride, ..Footprint::run(PANEL as u32, cols) }
    }

    /// What the heads read of each block, each panel head once. Heads whose columns adjoin are one run of each row, so that a
    /// panel that is read in full is one run.
    fn panel_reads(&self) -> impl Iterator<Item = Footprint> + '_ {
        let p = &self.params;
        // Of consecutive panel heads, the first and their number.
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for head in (0..p.heads).map(|head| self.panel_head(head)) {
            match runs.last_mut() {
                Some((first, count)) if (*first..*first + *count).contains(&head) => {}
                Some((first, count)) if head == *first + *count => *count += 1,
                _ => runs.push((head, 1)),
            }
        }
        self.offsets.iter().flat_map(move |&offset| {
            let of_block = runs.iter().map(move |&(head, count)| {
                let first = offset + head * p.head_step;
                if p.head_step == p.block_width {
                    self.rows_of(first, count * p.block_width)
                } else {
                    Footprint { planes: count, plane_stride: p.head_step, ..self.rows_of(first, p.block_width) }
                }
            });
            of_block.collect::<Vec<_>>()
        })
    }

    pub(super) fn writes(&self) -> Footprint {
        let p = &self.params;
        Footprint {
            binding: OUTPUT as u32,
            first: p.out_offset,
            planes: p.heads,
            plane_stride: p.head_stride,
            rows: p.tokens,
            row_stride: p.row_stride,
            cols: p.head_dim,
        }
    }

    pub(super) fn reads(&self) -> impl Iterator<Item = Footprint> + '_ {
        let p = &self.params;
        self.panel_reads().chain([
            Footprint::run(WEIGHTS as u32, self.depth() * p.heads * p.head_dim),
            Footprint::run(BIAS as u32, p.heads * p.head_dim),
            Footprint::run(ROPE as u32, p.tokens * p.rope_dims),
        ])
    }

    pub(super) fn flops(&self) -> u64 {
        let p = &self.params;
        let product = 2 * u64::from(self.depth()) * u64::from(p.heads * p.head_dim);
        let rotation = 3 * u64::from(p.heads) * u64::from(p.rope_dims);
        // As of `affine@1`: a comparison is no operation, and with the rotation the product may pass u64.
        u64::from(p.tokens).saturating_mul(product + rotation)
    }

    pub(super) fn grid(&self) -> (u32, u32, [u32; 2]) {
        (self.params.tokens, TILE[0], [self.groups_across, 1])
    }

    pub(super) fn gpu_params(&self, first_row: u32) -> Vec<u8> {
        let mut bytes = bytemuck::bytes_of(&HeadsParams { first_row, ..self.params }).to_vec();
        bytes.extend(self.offsets.iter().flat_map(|offset| offset.to_le_bytes()));
        bytes
    }
}
