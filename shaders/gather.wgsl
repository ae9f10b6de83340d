// gather@1: one source layer's keys without their rotation (or its values as they are) into a panel of adjacent heads.
//
//   panel[t, h * head_dim + i] = unrotate(source[h * head_stride + t * row_stride + ..])[i]
//
// An invocation owns one token's pair of columns: (i, i + rope_dims / 2) are rotated together; of the rest, which is
// copied, the second half is paired with the first, so that neighbours read neighbours.

struct Params {
    tokens: u32,
    kv_heads: u32,
    head_dim: u32,
    rope_dims: u32,
    head_stride: u32,
    row_stride: u32,
    panel_row_stride: u32,
    first_row: u32,
}

@group(0) @binding(0) var<storage, read> source: array<f32>;
@group(0) @binding(1) var<storage, read> rope: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read_write> panel: array<f32>;
@group(0) @binding(3) var<storage, read> params: Params;

@compute @workgroup_size(32, 4)
fn gather(@builtin(global_invocation_id) id: vec3<u32>) {
    let rotated = params.rope_dims / 2u;
    let rest = (params.head_dim - params.rope_dims + 1u) / 2u;
    let pairs = rotated + rest;
    let row = params.first_row + id.y;
    if id.x >= pairs * params.kv_heads || row >= params.tokens {
        return;
    }
    let head = id.x / pairs;
    let pair = id.x % pairs;
    let base = head * params.head_stride + row * params.row_stride;
    let dest = row * params.panel_row_stride + head * params.head_dim;
    if pair < rotated {
        let turn = rope[row * rotated + pair];
        let a = source[base + pair];
        let b = source[base + pair + rotated];
        panel[dest + pair] = a * turn.x + b * turn.y;
        panel[dest + pair + rotated] = b * turn.x - a * turn.y;
    } else {
        let first = params.rope_dims + pair - rotated;
        panel[dest + first] = source[base + first];
        let second = first + rest;
        if second < params.head_dim {
            panel[dest + second] = source[base + second];
        }
    }
}
