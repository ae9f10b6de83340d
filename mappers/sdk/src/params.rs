//! Parameter blocks of the host's kernels: little-endian u32s in the order of their fields. The kernels' own documentation
//! is in the host's `shaders/src/params.rs`; a test of the host holds the two together.

use alloc::vec::Vec;

/// Parameters of `gather@1`: strips the rotation of one source layer's keys (or copies its values) into a panel.
///
/// Bindings: 0 source view, 1 the source's rotation table, 2 panel `[tokens, panel_row_stride]`, of which columns
/// `0 .. kv_heads * head_dim` are written. Strides in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatherParams {
    /// Tokens of the chunk.
    pub tokens: u32,
    /// KV heads of the source.
    pub kv_heads: u32,
    /// Width of a source head.
    pub head_dim: u32,
    /// Rotated dimensions to strip; 0 copies.
    pub rope_dims: u32,
    /// From one source head to the next.
    pub head_stride: u32,
    /// From one source token to the next.
    pub row_stride: u32,
    /// From one panel row to the next.
    pub panel_row_stride: u32,
}

impl GatherParams {
    /// As the host reads them.
    pub fn to_bytes(self) -> Vec<u8> {
        let first_row = 0;
        words(&[
            self.tokens,
            self.kv_heads,
            self.head_dim,
            self.rope_dims,
            self.head_stride,
            self.row_stride,
            self.panel_row_stride,
            first_row,
        ])
    }
}

/// Parameters of `affine@1`: `rotate(bias + Σ_b block_b · W_b)` for every token, where the weights' rows are the blocks'
/// columns, one block after the other.
///
/// Bindings: 0 panel, 1 weights `[Σ width, kv_heads * head_dim]`, 2 bias `[kv_heads * head_dim]`, 3 the target's rotation
/// table, 4 target view or scratch. Strides in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AffineParams {
    /// Tokens of the chunk.
    pub tokens: u32,
    /// KV heads of the target.
    pub kv_heads: u32,
    /// Width of a target head.
    pub head_dim: u32,
    /// Rotated dimensions of the target; 0 for values.
    pub rope_dims: u32,
    /// From one target head to the next.
    pub head_stride: u32,
    /// From one target token to the next.
    pub row_stride: u32,
    /// What is read of the panel.
    pub blocks: Vec<AffineBlock>,
}

/// A block of the panel, `[tokens, width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AffineBlock {
    /// Element of the panel binding at which its first row begins.
    pub offset: u32,
    /// From one row to the next.
    pub row_stride: u32,
    /// Columns.
    pub width: u32,
}

impl AffineParams {
    /// As the host reads them.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (blocks, first_row) = (self.blocks.len() as u32, 0);
        let mut bytes = words(&[
            self.tokens,
            blocks,
            self.kv_heads,
            self.head_dim,
            self.rope_dims,
            self.head_stride,
            self.row_stride,
            first_row,
        ]);
        for block in &self.blocks {
            bytes.extend(words(&[block.offset, block.row_stride, block.width]));
        }
        bytes
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
