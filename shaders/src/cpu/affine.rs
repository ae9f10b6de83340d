//! Mirror of `affine@1`.

use std::ops::Range;

use kvmig_gemm::{MatMut, MatRef, Threads, matmul};
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

    let terms = terms(call, panel, weights)?;
    let target = MatMut::planes(target, heads, p.head_stride as usize, tokens, dim, p.row_stride as usize, 1)?;

    // Blocks of rows are independent; a single one lets the product spread instead.
    let block = rows_per_task(tokens, rayon::current_num_threads());
    let threads = if tokens <= block { Threads::All } else { Threads::One };
    by_rows(target, block, tokens).into_par_iter().try_for_each_init(Vec::new, |product, (rows, mut heads)| {
        product.clear();
        for _ in rows.clone() {
            product.extend_from_slice(&bias[..width]);
        }
        for &(x, w) in &terms {
            let product = MatMut::row_major(product, rows.len(), width)?;
            matmul(product, 1.0, 1.0, x.row_range(rows.start, rows.end), w, threads)?;
        }
        for (head, to) in heads.iter_mut().enumerate() {
            for (i, token) in rows.clone().enumerate() {
                let from = &product[i * width + head * dim..][..dim];
                if let Some(to) = to.row_mut(i) {
                    rotate(from, &rope[token * rope_dims..][..rope_dims], to);
                }
            }
        }
        Ok(())
    })
}

/// The products to sum: each block's panel and weights, blocks that are adjacent in the panel (and so in the weights, whose
/// blocks always are) taken as one.
fn terms<'a>(
    call: &Affine,
    panel: &'a [f32],
    weights: &'a [f32],
) -> Result<Vec<(MatRef<'a, f32>, MatRef<'a, f32>)>, CpuError> {
    let p = call.params();
    let (tokens, width, block) = (p.tokens as usize, call.width() as usize, p.block_width as usize);
    let stride = p.panel_row_stride as usize;
    let short = |binding, slice: &[f32], needed: usize| long_enough("affine@1", binding, slice, needed as u64);
    short("weights", weights, call.depth() as usize * width)?;

    let offsets = call.offsets();
    let mut terms = Vec::new();
    let mut first = 0;
    while first < offsets.len() {
        let from = offsets[first] as usize;
        let mut count = 1;
        while first + count < offsets.len()
            && offsets[first + count] as usize == from + count * block
            // A run wider than a row would step into the next one.
            && (count + 1) * block <= stride
        {
            count += 1;
        }
        let depth = count * block;
        short("panel", panel, from + (tokens - 1) * stride + depth)?;
        let x = MatRef::new(&panel[from..], tokens, depth, stride, 1)?;
        let w = MatRef::row_major(&weights[first * block * width..], depth, width)?;
        terms.push((x, w));
        first += count;
    }
    Ok(terms)
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
