//! Mirror of `affine@1`.

use std::ops::Range;

use kvmig_gemm::{MatMut, MatRef, Threads, matmul, widest};
use rayon::prelude::*;

use super::{CpuError, long_enough};
use crate::check::Affine;

/// Matrix product over the panel's blocks, bias and the target's rotation, into `target`. Weights
/// `[Σ width, kv_heads * head_dim]` in f32, whatever their file holds.
///
/// # Errors
/// [`CpuError::Short`] when a slice is shorter than the bindings that `call` was checked for.
pub fn affine(
    call: &Affine,
    panel: &[f32],
    weights: &[f32],
    bias: &[f32],
    rope: &[f32],
    target: &mut [f32],
) -> Result<(), CpuError> {
    let p = call.params();
    let (tokens, heads, dim) = (p.tokens as usize, p.kv_heads as usize, p.head_dim as usize);
    let (width, rope_dims) = (heads * dim, p.rope_dims as usize);
    long_enough("affine@1", "bias", bias, width as u64)?;
    long_enough("affine@1", "rope", rope, (tokens * rope_dims) as u64)?;

    for block in call.blocks() {
        let last = block.offset as usize + (tokens - 1) * block.row_stride as usize;
        long_enough("affine@1", "panel", panel, (last + block.width as usize) as u64)?;
    }
    long_enough("affine@1", "weights", weights, u64::from(call.depth()) * width as u64)?;
    let target = MatMut::planes(target, heads, p.head_stride as usize, tokens, dim, p.row_stride as usize, 1)?;

    // Blocks of rows are independent; a single one lets the product spread instead.
    let threads = if tokens <= TASK_ROWS { Threads::All } else { Threads::One };
    by_rows(target, TASK_ROWS, tokens).into_par_iter().try_for_each_init(Vec::new, |product, (rows, mut heads)| {
        // `[rows, width]`, before the rotation.
        product.clear();
        for _ in rows.clone() {
            product.extend_from_slice(&bias[..width]);
        }
        let mut rest = weights;
        for block in call.blocks() {
            let (offset, stride, columns) = (block.offset as usize, block.row_stride as usize, block.width as usize);
            let (w, below) = rest.split_at(columns * width);
            rest = below;
            let x = MatRef::new(&panel[offset + rows.start * stride..], rows.len(), columns, stride, 1)?;
            let w = MatRef::row_major(w, columns, width)?;
            matmul(MatMut::row_major(product, rows.len(), width)?, 1.0, 1.0, x, w, threads)?;
        }
        for (head, to) in heads.iter_mut().enumerate() {
            for (i, token) in rows.clone().enumerate() {
                let from = &product[i * width + head * dim..][..dim];
                if let Some(to) = to.row_mut(i) {
                    let turns = &rope[token * rope_dims..][..rope_dims];
                    widest(
                        #[inline(always)]
                        || rotate(from, turns, to),
                    );
                }
            }
        }
        Ok(())
    })
}

/// Rows of a task: a whole chunk of the mappers at hand, since every task packs the weights anew.
const TASK_ROWS: usize = 256;

/// Rows of a task, and those rows of every head.
type Task<'a> = (Range<usize>, Vec<MatMut<'a, f32>>);

fn by_rows(heads: Vec<MatMut<'_, f32>>, block: usize, tokens: usize) -> Vec<Task<'_>> {
    let ranges = (0..tokens).step_by(block).map(|start| start..(start + block).min(tokens));
    let mut tasks: Vec<Task<'_>> = ranges.map(|rows| (rows, Vec::with_capacity(heads.len()))).collect();
    for head in heads {
        for (task, rows) in tasks.iter_mut().zip(head.row_blocks(block)) {
            task.1.push(rows);
        }
    }
    tasks
}

/// Turns the pairs (i, i + n/2) of the first n = `turns.len()` dimensions; copies the rest.
#[inline(always)]
fn rotate(from: &[f32], turns: &[f32], to: &mut [f32]) {
    let (rotated, rest) = from.split_at(turns.len());
    let (to_rotated, to_rest) = to.split_at_mut(turns.len());
    to_rest.copy_from_slice(rest);
    let (a, b) = rotated.split_at(turns.len() / 2);
    let (to_a, to_b) = to_rotated.split_at_mut(turns.len() / 2);
    for ((((turn, a), b), to_a), to_b) in turns.as_chunks::<2>().0.iter().zip(a).zip(b).zip(to_a).zip(to_b) {
        let [cos, sin] = *turn;
        *to_a = a * cos - b * sin;
        *to_b = b * cos + a * sin;
    }
}
