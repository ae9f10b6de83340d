// scan@1: counts words of a strided block that are the poison pattern, another NaN, or infinite.
//
// On bit patterns, not on floats: a shader compiler may assume that there is no NaN and fold `x != x` away. An invocation
// walks one row in steps of 32; where nothing is wrong no atomic is touched.

struct Params {
    rows: u32,
    cols: u32,
    planes: u32,
    row_stride: u32,
    plane_stride: u32,
    offset: u32,
    poison: u32,
    first_row: u32,
}

struct Counts {
    poison: atomic<u32>,
    nan: atomic<u32>,
    infinite: atomic<u32>,
}

@group(0) @binding(0) var<storage, read> words: array<u32>;
@group(0) @binding(1) var<storage, read_write> counts: Counts;
@group(0) @binding(2) var<storage, read> params: Params;

@compute @workgroup_size(32, 4)
fn scan(@builtin(global_invocation_id) id: vec3<u32>) {
    let row = params.first_row + id.y;
    if row >= params.rows || id.z >= params.planes {
        return;
    }
    let base = params.offset + id.z * params.plane_stride + row * params.row_stride;
    var poison = 0u;
    var nan = 0u;
    var infinite = 0u;
    for (var col = id.x; col < params.cols; col += 32u) {
        let word = words[base + col];
        let magnitude = word & 0x7fffffffu;
        if word == params.poison {
            poison += 1u;
        } else if magnitude > 0x7f800000u {
            nan += 1u;
        } else if magnitude == 0x7f800000u {
            infinite += 1u;
        }
    }
    if poison > 0u {
        atomicAdd(&counts.poison, poison);
    }
    if nan > 0u {
        atomicAdd(&counts.nan, nan);
    }
    if infinite > 0u {
        atomicAdd(&counts.infinite, infinite);
    }
}
