//! Speed of one device on the map of Qwen2.5-Coder 0.5B to 1.5B (k = 8), random weights:
//! `cargo run --example map_speed -- DEVICE TOKENS CHUNK RUNS [KIND]`, with KIND `ridge`, `head-matched` or the width of an MLP.
#![expect(clippy::print_stdout, reason = "an example prints what it measured")]

use kvmig::device::{
    Device, Pacing,
    conform::{Case, Fixture, Side},
};
use kvmig_gate::WeightElem;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [device, tokens, chunk, runs, kind @ ..] = arguments.as_slice() else {
        return Err("usage: map_speed DEVICE TOKENS CHUNK RUNS [ridge | head-matched | WIDTH]".into());
    };
    let (tokens, chunk, runs) = (tokens.parse()?, chunk.parse()?, runs.parse::<usize>()?);
    let (source, target) = (Side::new(24, 2, 64, 64), Side::new(28, 2, 128, 128));
    let ridge = Case::ridge("qwen", source, target, 8, tokens, chunk);
    let case = match kind.first().map(String::as_str) {
        None | Some("ridge") => ridge,
        Some("head-matched") => ridge.head_matched(),
        Some(width) => ridge.mlp(width.parse()?),
    };
    let device = Device::open(&device.parse()?)?;
    println!("{} on {}, {tokens} tokens, {chunk} per chunk", device.info().name, device.info().backend);
    for elem in [WeightElem::F32, WeightElem::F16] {
        let fixture = Fixture::new(&case, elem);
        let weights = device.load_weights(fixture.loaded())?;
        let mut planes = fixture.target();
        for _ in 0..runs {
            let report = fixture.execute(&device, &weights, &mut planes, Pacing::default(), |recording| recording)?;
            let total = report.upload_ms + report.map_ms + report.readback_ms;
            println!(
                "{elem:?}: {total:7.1} ms (upload {:.1}, map {:.1}, readback {:.1}), {:.1} GFLOP/s over all, {:.1} in the map",
                report.upload_ms,
                report.map_ms,
                report.readback_ms,
                report.flops as f64 / total / 1e6,
                report.flops as f64 / report.map_ms / 1e6,
            );
        }
    }
    Ok(())
}
