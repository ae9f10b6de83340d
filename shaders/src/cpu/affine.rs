//! Mirror of `affine@1`.

use std::ops::Range;

use kvmig_gemm::{MatMut, MatRef, Threads, matmul, widest};
use rayon::prelude::*;

use super::{CpuError, long_enough, rows_per_task};
use crate::check::Affine;

/// Matrix product over the panel's blocks, bias and the target's rotation, into `target`. Weights
/// `[blocks * block_width, kv_heads * head_dim]` in f32, whatever their file holds.
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

    let stride = p.panel_row_stride as usize;
    let block_width = p.block_width as usize;
    for &offset in call.offsets() {
        long_enough("affine@1", "panel", panel, (offset as usize + (tokens - 1) * stride + block_width) as u64)?;
    }
    long_enough("affine@1", "weights", weights, u64::from(call.depth()) * width as u64)?;
    let target = MatMut::planes(target, heads, p.head_stride as usize, tokens, dim, p.row_stride as usize, 1)?;

    // Blocks of rows are independent; a single one lets the product spread instead.
    let rows = rows_per_task(tokens, rayon::current_num_threads());
    let threads = if tokens <= rows { Threads::All } else { Threads::One };
    by_rows(target, rows, tokens).into_par_iter().try_for_each_init(Scratch::default, |scratch, (rows, mut heads)| {
        let Scratch { packed, product } = scratch;
        product.clear();
        for _ in rows.clone() {
            product.extend_from_slice(&bias[..width]);
        }
        let mut depth_done = 0;
        for offsets in call.offsets().chunks((PACKED_DEPTH / block_width).max(1)) {
            packed.clear();
            for row in rows.clone() {
                for &offset in offsets {
                    packed.extend_from_slice(&panel[offset as usize + row * stride..][..block_width]);
                }
            }
            let depth = offsets.len() * block_width;
            let x = MatRef::row_major(packed, rows.len(), depth)?;
            let w = MatRef::row_major(&weights[depth_done * width..], depth, width)?;
            matmul(MatMut::row_major(product, rows.len(), width)?, 1.0, 1.0, x, w, threads)?;
            depth_done += depth;
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

/// Columns of the panel that a task packs at a time. The blocks lie far apart, on another page for every row: copied side by
/// side first, they are fetched ahead and stay in cache, and several make one deep product.
const PACKED_DEPTH: usize = 512;

/// What a thread keeps from task to task.
#[derive(Default)]
struct Scratch {
    /// Rows of the panel `[rows, depth]`.
    packed: Vec<f32>,
    /// Rows of the result `[rows, width]`, before the rotation.
    product: Vec<f32>,
}

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
