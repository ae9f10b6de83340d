//! The kernels' parameter blocks: what a guest passes as bytes, little endian.
//!
//! The same bytes follow the storage bindings as one more read-only storage binding on the GPU. There the host, which
//! cuts a long dispatch into slices of rows, sets `first_row`; a guest leaves it 0.
//!
//! A RoPE table holds (cosine, sine) of each position and pair. Of a scaled rotation (an attention factor m) the target's
//! table holds m times, the source's, which strips, 1/m times both.

use bytemuck::{Pod, Zeroable};

/// What outputs are filled with before a kernel runs: a quiet NaN whose payload no arithmetic makes. It survives copies
/// through float registers, and whatever is computed from it is NaN.
pub const POISON: u32 = 0x7fd1_5ea5;

/// Parameters of `gather@1`. Strides and offsets are in elements.
///
/// Storage bindings: 0 source view (read, f32), 1 the source's RoPE table `[tokens, rope_dims / 2, 2]` (read; at least 8
/// bytes, even if `rope_dims` is 0 and nothing of it is read), 2 panel (write, f32) `[tokens, panel_row_stride]`, of which columns `0 .. kv_heads * head_dim` are written:
/// `panel[t, h * head_dim + i] = unrotate(source[h * head_stride + t * row_stride + ..])[i]`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct GatherParams {
    /// Tokens of the chunk.
    pub tokens: u32,
    /// KV heads of the source.
    pub kv_heads: u32,
    /// Width of a source head.
    pub head_dim: u32,
    /// Rotated dimensions to strip, half-split; 0 copies (values).
    pub rope_dims: u32,
    /// Elements from one source head to the next.
    pub head_stride: u32,
    /// Elements from one source token to the next.
    pub row_stride: u32,
    /// Elements from one panel row to the next.
    pub panel_row_stride: u32,
    /// First token of the slice that the host dispatches; a guest leaves it 0.
    pub first_row: u32,
}

/// Parameters of `affine@1`; followed in the same byte string by `blocks` [`AffineBlock`]s.
///
/// Storage bindings: 0 panel (read, f32), 1 weights `[Σ width, kv_heads * head_dim]` (read; f32, or f16 two to a u32: the
/// host knows which), 2 bias `[kv_heads * head_dim]` (read, f32), 3 the target's RoPE table `[tokens, rope_dims / 2, 2]`
/// (read; at least 8 bytes, even if `rope_dims` is 0), 4 target view or scratch (write, f32).
/// `out[h, t, :] = rotate(bias[h] + Σ_b Σ_j panel[offset_b + t * row_stride_b + j] * weights[first_b + j, h])`, `first_b`
/// being the sum of the widths of the blocks before.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct AffineParams {
    /// Tokens of the chunk.
    pub tokens: u32,
    /// Blocks: selected source layers, or other features.
    pub blocks: u32,
    /// KV heads of the target.
    pub kv_heads: u32,
    /// Width of a target head.
    pub head_dim: u32,
    /// Rotated dimensions of the target, half-split; 0 for values.
    pub rope_dims: u32,
    /// Elements from one target head to the next.
    pub head_stride: u32,
    /// Elements from one target token to the next.
    pub row_stride: u32,
    /// First token of the slice that the host dispatches; a guest leaves it 0.
    pub first_row: u32,
}

/// One block of the panel that `affine@1` reads: `[tokens, width]`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct AffineBlock {
    /// Element of the panel at which its first row begins.
    pub offset: u32,
    /// Elements from one row to the next.
    pub row_stride: u32,
    /// Columns.
    pub width: u32,
}

/// Parameters of `scan@1`, the host's own: a block `[planes, rows, cols]` of 32-bit words. Strides and offsets in words.
///
/// Storage bindings: 0 the words (read), 1 counts `[3]` of u32 (read and written; the host zeroes them): poison, other NaN,
/// infinite.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ScanParams {
    /// Rows of a plane (tokens).
    pub rows: u32,
    /// Words of a row.
    pub cols: u32,
    /// Planes (KV heads).
    pub planes: u32,
    /// Words from one row to the next.
    pub row_stride: u32,
    /// Words from one plane to the next.
    pub plane_stride: u32,
    /// First word.
    pub offset: u32,
    /// The pattern counted as poison: [`POISON`].
    pub poison: u32,
    /// First row of the slice that the host dispatches.
    pub first_row: u32,
}
