//! Speed of the CPU mirror of `affine@1`: `cargo run -p kvmig-shaders --example affine_gflops [TOKENS]`.
//!
//! Prints the best and the median of repeated calls at the size of a real pair's layer, 8 blocks of 128 columns into 2
//! heads of 128, with the rotation.

use std::time::Instant;

use kvmig_shaders::{
    Bound, Checked, Kernel, cpu,
    params::{AffineBlock, AffineParams},
};

#[expect(clippy::print_stdout, reason = "an example that reports")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let tokens: u32 = std::env::args().nth(1).map_or(Ok(256), |n| n.parse())?;
    let p = AffineParams {
        tokens,
        blocks: 8,
        kv_heads: 2,
        head_dim: 128,
        rope_dims: 128,
        head_stride: tokens * 128,
        row_stride: 128,
        first_row: 0,
    };
    // Every third layer is selected, so that no two blocks are adjacent.
    let row_stride = 24 * 128;
    let blocks: Vec<AffineBlock> =
        (0..p.blocks).map(|b| AffineBlock { offset: 3 * b * 128, row_stride, width: 128 }).collect();
    let filled = |count: u32| (0..count).map(|i| (i % 13) as f32 / 13.0 - 0.5).collect::<Vec<f32>>();
    let panel = filled(tokens * row_stride);
    let (weights, bias, rope) = (filled(8 * 128 * 256), filled(256), filled(tokens * 128));
    let mut target = vec![0f32; tokens as usize * 256];
    let bytes = [bytemuck::bytes_of(&p), bytemuck::cast_slice(&blocks)].concat();
    let bindings = [&panel[..], &weights, &bias, &rope, &target].map(|slice| Bound::f32(4 * slice.len() as u64));
    let Checked::Affine(call) = Kernel::Affine.check(&bytes, &bindings)? else {
        unreachable!("affine@1 was asked for")
    };

    let flops = Checked::Affine(call.clone()).flops() as f64;
    let mut seconds: Vec<f64> = (0..200)
        .map(|_| {
            let start = Instant::now();
            cpu::affine(&call, &panel, &weights, &bias, &rope, &mut target).map(|()| start.elapsed().as_secs_f64())
        })
        .collect::<Result<_, _>>()?;
    seconds.sort_by(f64::total_cmp);
    println!(
        "affine@1 [{tokens} x 1024] x [1024 x 256], {} threads: best {:.1}, median {:.1} GFLOP/s",
        rayon::current_num_threads(),
        flops / seconds[0] / 1e9,
        flops / seconds[seconds.len() / 2] / 1e9
    );
    Ok(())
}
