// heads@1: a product of its own for every head, with bias, optional ReLU and optional rotation.
//
//   out[h, t, :] = rotate(act(bias[h] + sum over b, j of
//                                 panel[offsets[b] + a(h) * head_step + t * panel_row_stride + j] * W[h, b * block_width + j]))
//
// a(h) = floor(h * panel_heads / heads). The declaration of the weights and `weight(i)` come from weights_f32.wgsl,
// weights_f16.wgsl or weights_packed.wgsl, `columns` and `store_pair` from pairs.wgsl: the build puts them in front of
// this file.
//
// An invocation owns 4 tokens by 4 pairs of columns of one head in registers. A head takes as many lanes as its pairs need,
// and narrow heads share a workgroup; its pairs are interleaved over its lanes, so that neighbours read neighbours. k is
// summed in order, bias first. Rows, pairs and heads beyond the end read the last one and are not stored.

struct Params {
    tokens: u32,
    blocks: u32,
    block_width: u32,
    panel_row_stride: u32,
    panel_heads: u32,
    head_step: u32,
    heads: u32,
    head_dim: u32,
    rope_dims: u32,
    relu: u32,
    out_offset: u32,
    head_stride: u32,
    row_stride: u32,
    first_row: u32,
}

struct Block {
    params: Params,
    offsets: array<u32>,
}

@group(0) @binding(0) var<storage, read> panel: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read> rope: array<vec2<f32>>;
@group(0) @binding(4) var<storage, read_write> mapped: array<f32>;
@group(0) @binding(5) var<storage, read> block: Block;

// Written out, for `max` may turn NaN into 0, and poison has to stay visible.
fn act(x: vec4<f32>) -> vec4<f32> {
    return select(x, vec4<f32>(), (x < vec4<f32>()) & vec4<bool>(block.params.relu == 1u));
}

fn store(dest: u32, row: u32, pair: u32, pairs: u32, a: f32, b: f32) {
    if pair < pairs {
        store_pair(dest, row, pair, a, b);
    }
}

fn store_row(head: u32, row: u32, pair: vec4<u32>, pairs: u32, sum_a: vec4<f32>, sum_b: vec4<f32>) {
    let p = block.params;
    if row >= p.tokens || head >= p.heads {
        return;
    }
    let dest = p.out_offset + head * p.head_stride + row * p.row_stride;
    let a = act(sum_a);
    let b = act(sum_b);
    store(dest, row, pair.x, pairs, a.x, b.x);
    store(dest, row, pair.y, pairs, a.y, b.y);
    store(dest, row, pair.z, pairs, a.z, b.z);
    store(dest, row, pair.w, pairs, a.w, b.w);
}

@compute @workgroup_size(8, 8)
fn heads(@builtin(workgroup_id) tile: vec3<u32>, @builtin(local_invocation_id) lane: vec3<u32>) {
    let p = block.params;
    let pairs = p.rope_dims / 2u + (p.head_dim - p.rope_dims + 1u) / 2u;
    let lanes = (pairs + 3u) / 4u;
    let across = tile.x * 8u + lane.x;
    let head = across / lanes;
    let pair = across % lanes + lanes * vec4<u32>(0u, 1u, 2u, 3u);
    let row = p.first_row + tile.y * 32u + lane.y;

    let held = min(head, p.heads - 1u);
    let within = min(pair, vec4<u32>(pairs - 1u));
    let c0 = columns(within.x);
    let c1 = columns(within.y);
    let c2 = columns(within.z);
    let c3 = columns(within.w);
    let first = vec4<u32>(c0.x, c1.x, c2.x, c3.x);
    let second = vec4<u32>(c0.y, c1.y, c2.y, c3.y);
    let rows = min(vec4<u32>(row, row + 8u, row + 16u, row + 24u), vec4<u32>(p.tokens - 1u)) * p.panel_row_stride;
    let source = held * p.panel_heads / p.heads * p.head_step;

    let bias_at = held * p.head_dim;
    var a0 = vec4<f32>(bias[bias_at + c0.x], bias[bias_at + c1.x], bias[bias_at + c2.x], bias[bias_at + c3.x]);
    var b0 = vec4<f32>(bias[bias_at + c0.y], bias[bias_at + c1.y], bias[bias_at + c2.y], bias[bias_at + c3.y]);
    var a1 = a0;
    var b1 = b0;
    var a2 = a0;
    var b2 = b0;
    var a3 = a0;
    var b3 = b0;

    var k = held * p.blocks * p.block_width * p.head_dim;
    for (var b = 0u; b < p.blocks; b++) {
        let x = rows + block.offsets[b] + source;
        for (var j = 0u; j < p.block_width; j++) {
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
            k += p.head_dim;
        }
    }

    store_row(head, row, pair, pairs, a0, b0);
    store_row(head, row + 8u, pair, pairs, a1, b1);
    store_row(head, row + 16u, pair, pairs, a2, b2);
    store_row(head, row + 24u, pair, pairs, a3, b3);
}
