// A kernel's weights in f16, two to a u32 (the even element in the low half); for adapters without 16-bit floats.
@group(0) @binding(1) var<storage, read> weights: array<u32>;

fn weight(i: u32) -> f32 {
    let both = unpack2x16float(weights[i / 2u]);
    return select(both.x, both.y, (i & 1u) == 1u);
}
