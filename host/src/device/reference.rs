//! What a ridge mapping should give, in f64 from the definition, with a bound on the error of each element.

use kvmig_shaders::tolerance::{Expected, Tolerance};

/// One target plane's mapping: selected source planes, weights, bias, rotations.
#[derive(Debug)]
pub(crate) struct Plane<'a> {
    /// Tokens.
    pub(crate) tokens: usize,
    /// Selected source planes, each `[heads, tokens, d]`.
    pub(crate) sources: Vec<&'a [f32]>,
    /// Heads and width of a source plane.
    pub(crate) source_heads: [usize; 2],
    /// Heads and width of the target plane.
    pub(crate) target_heads: [usize; 2],
    /// `[rows, heads * d]`, the values that the kernel reads.
    pub(crate) weights: &'a [f32],
    /// `[heads * d]`.
    pub(crate) bias: &'a [f32],
    /// Table that the source's rotation is stripped by, `[tokens, dims / 2, 2]`; empty where nothing is rotated.
    pub(crate) source_rope: &'a [f32],
    /// Table that the target is rotated by.
    pub(crate) target_rope: &'a [f32],
}

impl Plane<'_> {
    /// Every element, `[heads, tokens, d]`.
    pub(crate) fn expected(&self, tolerance: Tolerance) -> Vec<Expected> {
        let [heads, d] = self.target_heads;
        let width = heads * d;
        let mut elements = vec![Expected { value: 0.0, bound: 0.0 }; self.tokens * width];
        for token in 0..self.tokens {
            let row = self.row(token, tolerance);
            let plain: Vec<Expected> = (0..width).map(|column| self.product(&row, column, tolerance)).collect();
            for head in 0..heads {
                let turned = rotate(
                    &plain[head * d..(head + 1) * d],
                    table_row(self.target_rope, self.tokens, token),
                    1.0,
                    tolerance,
                );
                let at = (head * self.tokens + token) * d;
                elements[at..at + d].copy_from_slice(&turned);
            }
        }
        elements
    }

    /// One row of the panel: every selected plane's heads, stripped.
    fn row(&self, token: usize, tolerance: Tolerance) -> Vec<Expected> {
        let [heads, d] = self.source_heads;
        let mut row = Vec::with_capacity(self.sources.len() * heads * d);
        for source in &self.sources {
            for head in 0..heads {
                let at = (head * self.tokens + token) * d;
                let exact: Vec<Expected> = source[at..at + d].iter().map(|&x| tolerance.copied(f64::from(x))).collect();
                row.extend(rotate(&exact, table_row(self.source_rope, self.tokens, token), -1.0, tolerance));
            }
        }
        row
    }

    /// The sum of products over a row whose elements carry errors of their own: those enter through the weights.
    fn product(&self, row: &[Expected], column: usize, tolerance: Tolerance) -> Expected {
        let width = self.bias.len();
        let weight = |j: usize| f64::from(self.weights[j * width + column]);
        let terms = row.iter().enumerate().map(|(j, x)| (x.value, weight(j)));
        let exact = tolerance.sum_of_products(f64::from(self.bias[column]), terms);
        let carried: f64 = row.iter().enumerate().map(|(j, x)| x.bound * weight(j).abs()).sum();
        Expected { value: exact.value, bound: exact.bound + (1.0 + tolerance.gamma(row.len() + 1)) * carried }
    }
}

/// One token's (cosine, sine) pairs.
fn table_row(table: &[f32], tokens: usize, token: usize) -> &[f32] {
    let dims = table.len() / tokens;
    &table[token * dims..(token + 1) * dims]
}

/// Turns the half-split pairs of a head by `sign` times the table's angles; the rest is kept.
fn rotate(head: &[Expected], turns: &[f32], sign: f64, tolerance: Tolerance) -> Vec<Expected> {
    let half = turns.len() / 2;
    let mut turned = head.to_vec();
    for pair in 0..half {
        let (cos, sin) = (f64::from(turns[2 * pair]), sign * f64::from(turns[2 * pair + 1]));
        (turned[pair], turned[pair + half]) = tolerance.rotated(head[pair], head[pair + half], cos, sin);
    }
    turned
}
