//! `gather@1` in f64.

use super::Element;
use crate::{params::GatherParams, tolerance::Tolerance};

/// Every element that the call writes. `source` and `rope` as in [`GatherParams`].
pub fn gather(p: &GatherParams, source: &[f32], rope: &[f32], tolerance: Tolerance) -> Vec<Element> {
    let half = p.rope_dims as usize / 2;
    let mut elements = Vec::new();
    for token in 0..p.tokens as usize {
        for head in 0..p.kv_heads as usize {
            let at = |i: usize| f64::from(source[head * p.head_stride as usize + token * p.row_stride as usize + i]);
            for i in 0..p.head_dim as usize {
                let expected = if i < p.rope_dims as usize {
                    let pair = i % half;
                    let cos = f64::from(rope[2 * (token * half + pair)]);
                    let sin = f64::from(rope[2 * (token * half + pair) + 1]);
                    // Turned back: by the negative angle. The operands are read exactly, or flushed.
                    let (a, b) = (tolerance.copied(at(pair)), tolerance.copied(at(pair + half)));
                    let (first, second) = tolerance.rotated(a, b, cos, -sin);
                    if i < half { first } else { second }
                } else {
                    tolerance.copied(at(i))
                };
                let index = token * p.panel_row_stride as usize + head * p.head_dim as usize + i;
                elements.push(Element { index, expected });
            }
        }
    }
    elements
}
