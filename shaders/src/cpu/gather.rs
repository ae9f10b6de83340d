//! Mirror of `gather@1`.

use kvmig_gemm::{MatMut, widest};
use rayon::prelude::*;

use super::{CpuError, long_enough, rows_per_task};
use crate::check::Gather;

/// Strips the rotation of one source layer's keys, or copies its values, into `panel`.
///
/// # Errors
/// [`CpuError::Short`] when a slice is shorter than the bindings that `call` was checked for.
pub fn gather(call: &Gather, source: &[f32], rope: &[f32], panel: &mut [f32]) -> Result<(), CpuError> {
    let p = call.params();
    let (tokens, heads, dim) = (p.tokens as usize, p.kv_heads as usize, p.head_dim as usize);
    let (rope_dims, head_stride, row_stride) = (p.rope_dims as usize, p.head_stride as usize, p.row_stride as usize);
    long_enough("gather@1", "source", source, ((heads - 1) * head_stride + (tokens - 1) * row_stride + dim) as u64)?;
    long_enough("gather@1", "rope", rope, (tokens * rope_dims) as u64)?;

    let block = rows_per_task(tokens, rayon::current_num_threads());
    let panel = MatMut::new(panel, tokens, heads * dim, p.panel_row_stride as usize, 1)?;
    panel.row_blocks(block).into_par_iter().enumerate().for_each(|(index, mut rows)| {
        for i in 0..rows.rows() {
            let token = index * block + i;
            let turns = &rope[token * rope_dims..][..rope_dims];
            let Some(row) = rows.row_mut(i) else { continue };
            widest(
                #[inline(always)]
                || {
                    for (head, to) in row.chunks_exact_mut(dim).enumerate() {
                        let from = &source[head * head_stride + token * row_stride..][..dim];
                        unrotate(from, turns, to);
                    }
                },
            );
        }
    });
    Ok(())
}

/// Turns the pairs (i, i + n/2) of the first n = `turns.len()` dimensions back; copies the rest.
#[inline(always)]
fn unrotate(from: &[f32], turns: &[f32], to: &mut [f32]) {
    let (rotated, rest) = from.split_at(turns.len());
    let (to_rotated, to_rest) = to.split_at_mut(turns.len());
    to_rest.copy_from_slice(rest);
    let (a, b) = rotated.split_at(turns.len() / 2);
    let (to_a, to_b) = to_rotated.split_at_mut(turns.len() / 2);
    for ((((turn, a), b), to_a), to_b) in turns.as_chunks::<2>().0.iter().zip(a).zip(b).zip(to_a).zip(to_b) {
        let [cos, sin] = *turn;
        *to_a = a * cos + b * sin;
        *to_b = b * cos - a * sin;
    }
}
