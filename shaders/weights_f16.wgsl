// A kernel's weights in f16, widened on load; for adapters with 16-bit floats.
enable f16;

@group(0) @binding(1) var<storage, read> weights: array<f16>;

fn weight(i: u32) -> f32 {
    return f32(weights[i]);
}
