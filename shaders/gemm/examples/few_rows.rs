//! A few rows times a large matrix, both ways: `cargo run -p kvmig-gemm --example few_rows [ROWS] [INPUTS] [OUTPUTS]`.
#![expect(clippy::print_stdout, reason = "a measurement prints its result")]

use kvmig_gemm::{MatMut, MatRef, Threads, matmul, rows_times_transposed};

fn main() -> Result<(), kvmig_gemm::GemmError> {
    let mut args = std::env::args().skip(1).filter_map(|arg| arg.parse::<usize>().ok());
    let (rows, inputs, outputs) = (args.next().unwrap_or(36), args.next().unwrap_or(1536), args.next().unwrap_or(8960));
    // Several matrices, so that weights come from memory as they do in a model.
    let weights: Vec<Vec<f32>> =
        (0..16).map(|m| (0..inputs * outputs).map(|i| ((i + m) % 13) as f32).collect()).collect();
    let x: Vec<f32> = (0..rows * inputs).map(|i| (i % 7) as f32).collect();
    let mut out = vec![0.0; rows * outputs];
    let flops = (2 * rows * inputs * outputs * weights.len()) as f64;
    for threads in [Threads::One] {
        let (mut packed, mut tiles) = (Vec::new(), Vec::new());
        for _ in 0..7 {
            let clock = cpu();
            for weight in &weights {
                let (x, w) = (MatRef::row_major(&x, rows, inputs)?, MatRef::row_major(weight, outputs, inputs)?);
                matmul(MatMut::row_major(&mut out, rows, outputs)?, 0.0, 1.0, x, w.transposed(), threads)?;
            }
            packed.push(cpu() - clock);
            let clock = cpu();
            for weight in &weights {
                rows_times_transposed(&mut out, &x, weight, [rows, inputs, outputs], threads)?;
            }
            tiles.push(cpu() - clock);
        }
        for (name, times) in [("packed", &mut packed), ("tiles", &mut tiles)] {
            times.sort_by(f64::total_cmp);
            let (best, median) = (times[0], times[times.len() / 2]);
            println!(
                "{threads:?} {name:<7} median {:.1} GFLOP/s, best {:.1}; {:.1} GB/s of weights",
                flops / median / 1e9,
                flops / best / 1e9,
                (4 * inputs * outputs * weights.len()) as f64 / best / 1e9
            );
        }
    }
    Ok(())
}

/// Seconds this thread has run.
fn cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    stat.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(f64::NAN) / 1e9
}
