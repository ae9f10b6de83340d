//! What a mapping should give, in f64 from the definition, with a bound on the error of each element.

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
    /// What the panel's rows are multiplied with.
    pub(crate) products: Products<'a>,
    /// Table that the source's rotation is stripped by, `[tokens, dims / 2, 2]`; empty where nothing is rotated.
    pub(crate) source_rope: &'a [f32],
    /// Table that the target is rotated by.
    pub(crate) target_rope: &'a [f32],
}

/// A plane's products.
#[derive(Debug)]
pub(crate) enum Products<'a> {
    /// One for all heads: weights `[rows, heads * d]`, bias `[heads * d]`.
    Full(Product<'a>),
    /// For each head a chain of its own, a ReLU between one product and the next: weights `[heads, rows, columns]`, bias
    /// `[heads * columns]`.
    ByHead {
        /// Whether a head reads head ⌊h · n_s / n_t⌋ of each source plane, rather than all of them.
        matched: bool,
        /// The chain.
        chain: Vec<Product<'a>>,
    },
}

/// A product: the values that the kernel reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product<'a> {
    /// Row-major.
    pub(crate) weights: &'a [f32],
    /// One for each column.
    pub(crate) bias: &'a [f32],
}

impl Plane<'_> {
    /// Every element, `[heads, tokens, d]`.
    pub(crate) fn expected(&self, tolerance: Tolerance) -> Vec<Expected> {
        let [heads, d] = self.target_heads;
        let width = heads * d;
        let mut elements = vec![Expected { value: 0.0, bound: 0.0 }; self.tokens * width];
        for token in 0..self.tokens {
            let row = self.row(token, tolerance);
            let plain = match &self.products {
                Products::Full(product) => product.of(&row, tolerance),
                Products::ByHead { matched, chain } => {
                    (0..heads).flat_map(|head| self.head(head, &row, *matched, chain, tolerance)).collect()
                }
            };
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

    /// One head's chain.
    fn head(
        &self,
        head: usize,
        row: &[Expected],
        matched: bool,
        chain: &[Product<'_>],
        tolerance: Tolerance,
    ) -> Vec<Expected> {
        let [sources, d] = self.source_heads;
        let heads = self.target_heads[0];
        let mut values: Vec<Expected> = if matched {
            row.chunks_exact(sources * d)
                .flat_map(|block| block.chunks_exact(d).nth(head * sources / heads))
                .flatten()
                .copied()
                .collect()
        } else {
            row.to_vec()
        };
        for (i, product) in chain.iter().enumerate() {
            if i > 0 {
                values = values.into_iter().map(Expected::rectified).collect();
            }
            let (weights, bias) = (product.weights.len() / heads, product.bias.len() / heads);
            let own = Product {
                weights: &product.weights[head * weights..][..weights],
                bias: &product.bias[head * bias..][..bias],
            };
            values = own.of(&values, tolerance);
        }
        values
    }
}

impl Product<'_> {
    /// The sums of products over a row whose elements carry errors of their own: those enter through the weights.
    fn of(&self, row: &[Expected], tolerance: Tolerance) -> Vec<Expected> {
        let width = self.bias.len();
        let column = |column: usize| {
            let weight = |j: usize| f64::from(self.weights[j * width + column]);
            let terms = row.iter().enumerate().map(|(j, x)| (x.value, weight(j)));
            let exact = tolerance.sum_of_products(f64::from(self.bias[column]), terms);
            let carried: f64 = row.iter().enumerate().map(|(j, x)| x.bound * weight(j).abs()).sum();
            Expected { value: exact.value, bound: exact.bound + (1.0 + tolerance.gamma(row.len() + 1)) * carried }
        };
        (0..width).map(column).collect()
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
