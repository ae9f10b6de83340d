//! Mirror of `heads@1`.

use kvmig_gemm::{MatMut, MatRef, Threads, matmul, widest};
use rayon::prelude::*;

use super::{CpuError, long_enough};
use crate::check::Heads;

/// A product of its own for every head over the panel's blocks, bias, ReLU and the target's rotation, into `output`.
/// Weights `[heads, blocks * block_width, head_dim]` in f32, whatever their file holds.
///
/// # Errors
/// [`CpuError::Short`] when a slice is shorter than the bindings that `call` was checked for.
pub fn heads(
    call: &Heads,
    panel: &[f32],
    weights: &[f32],
    bias: &[f32],
    rope: &[f32],
    output: &mut [f32],
) -> Result<(), CpuError> {
    const KERNEL: &str = "heads@1";
    let p = call.params();
    let (tokens, heads, dim) = (p.tokens as usize, p.heads as usize, p.head_dim as usize);
    let (rope_dims, depth) = (p.rope_dims as usize, call.depth() as usize);
    let (stride, block_width) = (p.panel_row_stride as usize, p.block_width as usize);
    long_enough(KERNEL, "weights", weights, (heads * depth * dim) as u64)?;
    long_enough(KERNEL, "bias", bias, (heads * dim) as u64)?;
    long_enough(KERNEL, "rope", rope, (tokens * rope_dims) as u64)?;
    let first_of = |offset: u32, head: u32| offset as usize + call.panel_head(head) as usize * p.head_step as usize;
    for &offset in call.offsets() {
        let last = first_of(offset, p.heads - 1) + (tokens - 1) * stride + block_width;
        long_enough(KERNEL, "panel", panel, last as u64)?;
    }
    let output = output.get_mut(p.out_offset as usize..).unwrap_or_default();
    let planes = MatMut::planes(output, heads, p.head_stride as usize, tokens, dim, p.row_stride as usize, 1)?;

    // A task is some rows of one head: where they go in the output, the product is summed up.
    let tasks: Vec<(u32, usize, MatMut<'_, f32>)> = (0..p.heads)
        .zip(planes)
        .flat_map(|(head, plane)| {
            let rows = plane.row_blocks(TASK_ROWS).into_iter().enumerate();
            rows.map(move |(i, rows)| (head, i * TASK_ROWS, rows))
        })
        .collect();
    // With fewer tasks than threads, the products spread instead.
    let threads = if tasks.len() < rayon::current_num_threads() { Threads::All } else { Threads::One };
    tasks.into_par_iter().try_for_each(|(head, start, mut out)| {
        let at = head as usize;
        let bias = &bias[at * dim..][..dim];
        for i in 0..out.rows() {
            if let Some(row) = out.row_mut(i) {
                row.copy_from_slice(bias);
            }
        }
        let weights = weights[at * depth * dim..][..depth * dim].chunks_exact(block_width * dim);
        for (&offset, w) in call.offsets().iter().zip(weights) {
            let x = &panel[first_of(offset, head) + start * stride..];
            let x = MatRef::new(x, out.rows(), block_width, stride, 1)?;
            let w = MatRef::row_major(w, block_width, dim)?;
            matmul(out.reborrow(), 1.0, 1.0, x, w, threads)?;
        }
        for i in 0..out.rows() {
            let turns = &rope[(start + i) * rope_dims..][..rope_dims];
            let Some(row) = out.row_mut(i) else { continue };
            widest(
                #[inline(always)]
                || match p.relu {
                    1 => rectify(row),
                    _ => rotate(row, turns),
                },
            );
        }
        Ok(())
    })
}

/// Rows of a task: a whole chunk of the mappers at hand, since every task packs the weights anew.
const TASK_ROWS: usize = 256;

/// Not `f32::max`, which turns NaN into 0: poison has to stay visible.
#[inline(always)]
fn rectify(row: &mut [f32]) {
    for x in row {
        *x = if *x < 0.0 { 0.0 } else { *x };
    }
}

/// Turns the pairs (i, i + n/2) of the first n = `turns.len()` dimensions.
#[inline(always)]
fn rotate(row: &mut [f32], turns: &[f32]) {
    let (a, b) = row[..turns.len()].split_at_mut(turns.len() / 2);
    for ((turn, a), b) in turns.as_chunks::<2>().0.iter().zip(a).zip(b) {
        let [cos, sin] = *turn;
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}
