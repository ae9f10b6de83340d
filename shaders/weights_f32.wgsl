// A kernel's weights in f32.
@group(0) @binding(1) var<storage, read> weights: array<f32>;

fn weight(i: u32) -> f32 {
    return weights[i];
}
