//! `affine@1` in f64.

use super::Element;
use crate::{
    params::{AffineBlock, AffineParams},
    tolerance::{Expected, Tolerance},
};

/// Every element that the call writes. Slices as in [`AffineParams`]; `weights` are the values that the kernel reads, so
/// already rounded to f16 where they are stored so.
pub fn affine(
    p: &AffineParams,
    blocks: &[AffineBlock],
    panel: &[f32],
    weights: &[f32],
    bias: &[f32],
    rope: &[f32],
    tolerance: Tolerance,
) -> Vec<Element> {
    let half = p.rope_dims as usize / 2;
    let dim = p.head_dim as usize;
    let width = p.kv_heads as usize * dim;
    let mut elements = Vec::new();
    for token in 0..p.tokens as usize {
        for head in 0..p.kv_heads as usize {
            let plain: Vec<Expected> = (0..dim)
                .map(|i| {
                    let column = head * dim + i;
                    let features = blocks.iter().flat_map(|block| {
                        let first = block.offset as usize + token * block.row_stride as usize;
                        panel[first..first + block.width as usize].iter()
                    });
                    let terms = features.enumerate().map(|(row, &x)| {
                        let w = weights[row * width + column];
                        (f64::from(x), f64::from(w))
                    });
                    tolerance.sum_of_products(f64::from(bias[column]), terms)
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
                let index = head * p.head_stride as usize + token * p.row_stride as usize + i;
                elements.push(Element { index, expected });
            }
        }
    }
    elements
}
