// affine@1: matrix product over a panel's blocks, bias and the target's rotation in one.
//
//   out[h, t, :] = rotate(bias[h] + sum over blocks b and columns j of panel[b.offset + t * b.row_stride + j] * W[row, h])
//
// where the rows of W are the blocks' columns, one block after the other.
//
// The declaration of the weights and `weight(i)` come from affine_f32.wgsl, affine_f16.wgsl or affine_packed.wgsl, which
// the build puts in front of this file.
//
// An invocation owns 4 tokens by 4 pairs of columns in registers; a pair (i, i + rope_dims / 2) is rotated together, and
// of the columns that aren't rotated the second half is paired with the first. Pairs are counted across heads, so that
// narrow heads leave no lane idle. A workgroup covers 32 tokens by 32 pairs, interleaved so that neighbours read
// neighbours. k is summed in order, bias first. Rows and pairs beyond the end read the last one and are not stored.

struct Params {
    tokens: u32,
    blocks: u32,
    kv_heads: u32,
    head_dim: u32,
    rope_dims: u32,
    head_stride: u32,
    row_stride: u32,
    first_row: u32,
}

struct Features {
    offset: u32,
    row_stride: u32,
    width: u32,
}

struct Block {
    params: Params,
    features: array<Features>,
}

@group(0) @binding(0) var<storage, read> panel: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read> rope: array<vec2<f32>>;
@group(0) @binding(4) var<storage, read_write> mapped: array<f32>;
@group(0) @binding(5) var<storage, read> block: Block;

// Columns (first, second) of pair `pair` of a head, counted within the head; equal where the last one stands alone.
fn columns(pair: u32) -> vec2<u32> {
    let rotated = block.params.rope_dims / 2u;
    if pair < rotated {
        return vec2<u32>(pair, pair + rotated);
    }
    let rest = (block.params.head_dim - block.params.rope_dims + 1u) / 2u;
    let first = block.params.rope_dims + pair - rotated;
    let second = first + rest;
    return vec2<u32>(first, select(first, second, second < block.params.head_dim));
}

fn store(row: u32, pair: u32, pairs: u32, a: f32, b: f32) {
    let p = block.params;
    if row >= p.tokens || pair >= pairs * p.kv_heads {
        return;
    }
    let within = pair % pairs;
    let dest = (pair / pairs) * p.head_stride + row * p.row_stride;
    let column = columns(within);
    let rotated = p.rope_dims / 2u;
    if within < rotated {
        let turn = rope[row * rotated + within];
        mapped[dest + column.x] = a * turn.x - b * turn.y;
        mapped[dest + column.y] = b * turn.x + a * turn.y;
    } else {
        mapped[dest + column.x] = a;
        if column.y != column.x {
            mapped[dest + column.y] = b;
        }
    }
}

fn store_row(row: u32, pair: u32, pairs: u32, a: vec4<f32>, b: vec4<f32>) {
    store(row, pair, pairs, a.x, b.x);
    store(row, pair + 8u, pairs, a.y, b.y);
    store(row, pair + 16u, pairs, a.z, b.z);
    store(row, pair + 24u, pairs, a.w, b.w);
}

@compute @workgroup_size(8, 8)
fn affine(@builtin(workgroup_id) tile: vec3<u32>, @builtin(local_invocation_id) lane: vec3<u32>) {
    let p = block.params;
    let pairs = p.rope_dims / 2u + (p.head_dim - p.rope_dims + 1u) / 2u;
    let width = p.kv_heads * p.head_dim;
    let pair = tile.x * 32u + lane.x;
    let row = p.first_row + tile.y * 32u + lane.y;

    let held = min(vec4<u32>(pair, pair + 8u, pair + 16u, pair + 24u), vec4<u32>(pairs * p.kv_heads - 1u));
    let heads = held / pairs;
    let within = held - heads * pairs;
    let c0 = columns(within.x);
    let c1 = columns(within.y);
    let c2 = columns(within.z);
    let c3 = columns(within.w);
    let first = heads * p.head_dim + vec4<u32>(c0.x, c1.x, c2.x, c3.x);
    let second = heads * p.head_dim + vec4<u32>(c0.y, c1.y, c2.y, c3.y);
    let rows = min(vec4<u32>(row, row + 8u, row + 16u, row + 24u), vec4<u32>(p.tokens - 1u));

    var a0 = vec4<f32>(bias[first.x], bias[first.y], bias[first.z], bias[first.w]);
    var b0 = vec4<f32>(bias[second.x], bias[second.y], bias[second.z], bias[second.w]);
    var a1 = a0;
    var b1 = b0;
    var a2 = a0;
    var b2 = b0;
    var a3 = a0;
    var b3 = b0;

    var k = 0u;
    for (var b = 0u; b < p.blocks; b++) {
        let features = block.features[b];
        let x = rows * features.row_stride + features.offset;
        for (var j = 0u; j < features.width; j++) {
            let u = k + first;
            let v = k + second;
            let wa = vec4<f32>(weight(u.x), weight(u.y), weight(u.z), weight(u.w));
            let wb = vec4<f32>(weight(v.x), weight(v.y), weight(v.z), weight(v.w));
            let x0 = panel[x.x + j];
            let x1 = panel[x.y + j];
            let x2 = panel[x.z + j];
            let x3 = panel[x.w + j];
            a0 += x0 * wa;
            b0 += x0 * wb;
            a1 += x1 * wa;
            b1 += x1 * wb;
            a2 += x2 * wa;
            b2 += x2 * wb;
            a3 += x3 * wa;
            b3 += x3 * wb;
            k += width;
        }
    }

    store_row(row, pair, pairs, a0, b0);
    store_row(row + 8u, pair, pairs, a1, b1);
    store_row(row + 16u, pair, pairs, a2, b2);
    store_row(row + 24u, pair, pairs, a3, b3);
}
