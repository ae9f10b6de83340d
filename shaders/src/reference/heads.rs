//! `heads@1` in f64.

use super::Element;
use crate::{
    params::HeadsParams,
    tolerance::{Expected, Tolerance},
};

/// Every element that the call writes. Slices as in [`HeadsParams`]; `weights` are the values that the kernel reads, so
/// already rounded to f16 where they are stored so.
pub fn heads(
    p: &HeadsParams,
    offsets: &[u32],
    panel: &[f32],
    weights: &[f32],
    bias: &[f32],
    rope: &[f32],
    tolerance: Tolerance,
) -> Vec<Element> {
    let half = p.rope_dims as usize / 2;
    let (dim, block, stride) = (p.head_dim as usize, p.block_width as usize, p.panel_row_stride as usize);
    let depth = offsets.len() * block;
    let mut elements = Vec::new();
    for head in 0..p.heads as usize {
        let panel_head = head * p.panel_heads as usize / p.heads as usize;
        for token in 0..p.tokens as usize {
            let plain: Vec<Expected> = (0..dim)
                .map(|i| {
                    let terms = offsets.iter().enumerate().flat_map(|(b, &offset)| {
                        let first = offset as usize + panel_head * p.head_step as usize + token * stride;
                        (0..block).map(move |j| {
                            let w = weights[(head * depth + b * block + j) * dim + i];
                            (f64::from(panel[first + j]), f64::from(w))
                        })
                    });
                    let sum = tolerance.sum_of_products(f64::from(bias[head * dim + i]), terms);
                    if p.relu == 1 { sum.rectified() } else { sum }
                })
                .collect();
            for i in 0..dim {
                let expected = if i < p.rope_dims as usize {
                    let pair = i % half;
                    let cos = f64::from(rope[2 * (token * half + pair)]);
                    let sin = f64::from(rope[2 * (token * half + pair) + 1]);
                    let (first, second) = tolerance.rotated(plain[pair], plain[pair + half], cos, sin);
                    if i < half { first } else { second }
                } else {
                    plain[i]
                };
                let first = p.out_offset as usize + head * p.head_stride as usize + token * p.row_stride as usize;
                elements.push(Element { index: first + i, expected });
            }
        }
    }
    elements
}
