use std::collections::BTreeMap;

use kvmig_gate::Digest;

use super::*;
use crate::fit::{
    attention::Mass,
    head_matched::{self, Weighting},
    ridge::{Lambda, LambdaConvention},
    rows::{Extent, RowChunk, RowShape},
};

/// One source head as wide as a layer, so that the head-matched ridge is the full one.
const SHAPE: RowShape = RowShape {
    source: Extent { layers: 2, kv_heads: 1, head_dim: 4 },
    target: Extent { layers: 2, kv_heads: 3, head_dim: 2 },
};
const ROWS: usize = 48;

/// Rows `x [rows, 8]` and `y [rows, 12]`: magnitudes and a product of the source's coordinates, which no linear map knows, in
/// units and at offsets of all sizes.
fn planted(seed: u64) -> (Vec<f32>, Vec<f32>) {
    let mut random = Random::new(seed);
    let (mut x, mut y) = (Vec::new(), Vec::new());
    for _ in 0..ROWS {
        let row: Vec<f64> = (0..8).map(|_| random.normal()).collect();
        y.extend((0..12).map(|j| {
            let (a, b) = (row[j % 8], row[(j + 3) % 8]);
            let bent = a.abs() + 0.5 * b + 0.3 * a * b;
            (20.0 * (j % 5) as f64 + 10f64.powi(j as i32 % 4 - 2) * bent) as f32
        }));
        x.extend(row.iter().enumerate().map(|(i, x)| (10.0 * i as f64 + 10f64.powi(i as i32 % 3 - 1) * x) as f32));
    }
    (x, y)
}

fn rows(folder: &Path, sequences: u64) -> RowFile {
    let mut rows = RowFile::resume(&folder.join("rows"), Digest::of(b"planted"), SHAPE, &[]).unwrap();
    for seed in 0..sequences {
        let (x, y) = planted(seed);
        let mass = Mass { keys: vec![1.0; 6 * ROWS], values: vec![1.0; 6 * ROWS] };
        let sequence = Digest::of(&seed.to_le_bytes());
        rows.append(&RowChunk { sequence, source: [&x, &x], target: [&y, &y], mass: &mass }).unwrap();
    }
    rows
}

fn settings() -> Settings {
    Settings { width: 24, epochs: 60, batch: 128, seed: 7 }
}

fn go(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// What a module does with the tensors of the keys of one layer.
fn forward(tensors: &[Tensor], layer: usize, x: &[f32]) -> Vec<f64> {
    let by_name: BTreeMap<&str, &Tensor> = tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let mut out = Vec::new();
    for g in 0.. {
        let name = |part: &str| format!("layers.{layer}.k.{g}.{part}");
        let Some(first) = by_name.get(name("in.weight").as_str()) else { break };
        for head in 0..first.shape[0] {
            let mut here: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
            for product in ["in", "mid", "out"] {
                let weight = by_name[name(&format!("{product}.weight")).as_str()];
                let bias = by_name[name(&format!("{product}.bias")).as_str()];
                let [_, inputs, outputs] = weight.shape[..] else { panic!("{:?}", weight.shape) };
                assert_eq!((here.len(), bias.shape[0]), (inputs, weight.shape[0] * outputs));
                let column = |j: usize| {
                    let at = |i: usize| f64::from(weight.numbers[(head * inputs + i) * outputs + j]);
                    let sum = here.iter().enumerate().map(|(i, x)| x * at(i)).sum::<f64>();
                    sum + f64::from(bias.numbers[head * outputs + j])
                };
                let next: Vec<f64> = (0..outputs).map(column).collect();
                here = if product == "out" { next } else { next.iter().map(|x| x.max(0.0)).collect() };
            }
            out.extend(here);
        }
    }
    out
}

/// R² on rows that nobody has seen, in units of each coordinate's own.
fn r2(predict: impl Fn(&[f32]) -> Vec<f64>, layer: usize) -> f64 {
    let (x, y) = planted(1_000);
    let y: Vec<&[f32]> = y.chunks_exact(12).map(|row| &row[layer * 6..(layer + 1) * 6]).collect();
    let found: Vec<Vec<f64>> = x.chunks_exact(8).map(predict).collect();
    let column = |j: usize| {
        let mean = y.iter().map(|row| f64::from(row[j])).sum::<f64>() / ROWS as f64;
        let wrong: f64 = y.iter().zip(&found).map(|(y, found)| (f64::from(y[j]) - found[j]).powi(2)).sum();
        1.0 - wrong / y.iter().map(|y| (f64::from(y[j]) - mean).powi(2)).sum::<f64>()
    };
    (0..6).map(column).sum::<f64>() / 6.0
}

#[test]
fn learns_what_no_linear_map_can() {
    let folder = tempfile::tempdir().unwrap();
    let rows = rows(folder.path(), 40);
    let selection = [vec![0, 1], vec![0, 1]];
    let networks = fit(&rows, &selection, &settings(), &folder.path().join("kept"), &mut go).unwrap();
    assert_eq!(networks.settings(), "{\"layers\":[[0,1],[0,1]],\"width\":24}");
    let lambda = Lambda { value: 1e-6, convention: LambdaConvention::Standardised };
    let linear = head_matched::fit(&rows, &selection, lambda, Weighting::Uniform, &mut go).unwrap();
    for (elem, layer) in [(Elem::F32, 0), (Elem::F32, 1), (Elem::F16, 0)] {
        let tensors = networks.tensors(elem);
        let learnt = r2(|x| forward(&tensors, layer, x), layer);
        let solved = r2(
            |x| {
                let heads = linear.layers[layer].keys.iter();
                heads
                    .flat_map(|head| {
                        let map = &head.map;
                        let column = |j: usize| {
                            map.bias[j]
                                + x.iter().enumerate().map(|(i, x)| f64::from(*x) * map.weight.row(i)[j]).sum::<f64>()
                        };
                        (0..2).map(column).collect::<Vec<_>>()
                    })
                    .collect()
            },
            layer,
        );
        assert!(learnt > 0.9 && solved < 0.5, "layer {layer}, {elem:?}: R² {learnt} learnt, {solved} solved");
        assert!((networks.layers[layer].keys.r2 - learnt).abs() < 0.1, "{:?} held out", networks.layers[layer].keys.r2);
    }
}

#[test]
fn the_same_seed_gives_the_same_bytes_interrupted_or_not() {
    let folder = tempfile::tempdir().unwrap();
    let rows = rows(folder.path(), 6);
    let (selection, settings) = ([vec![1], vec![0, 1]], Settings { epochs: 3, ..settings() });
    let train = |kept: &str, settings: &Settings, watch: &mut dyn FnMut(Progress) -> ControlFlow<()>| {
        fit(&rows, &selection, settings, &folder.path().join(kept), watch)
    };
    let whole = train("whole", &settings, &mut go).unwrap();
    assert_eq!(train("again", &settings, &mut go).unwrap(), whole);
    let other = Settings { seed: 8, ..settings.clone() };
    assert_ne!(train("again", &other, &mut go).unwrap(), whole, "another seed, and what is kept is not of it");

    let mut stop_in_the_second = |progress: Progress| match progress.done {
        0..4 => ControlFlow::Continue(()),
        _ => ControlFlow::Break(()),
    };
    let error = train("parts", &settings, &mut stop_in_the_second).unwrap_err();
    assert!(matches!(error, FitError::Interrupted { stage: "training", .. }), "{error}");
    let mut steps = Vec::new();
    let resumed = train("parts", &settings, &mut |progress| {
        steps.push(progress.done);
        ControlFlow::Continue(())
    });
    assert_eq!(resumed.unwrap(), whole);
    assert_eq!(steps, [0, 3, 4, 5, 6], "the first layer is not trained again");

    // What is damaged is neither used nor overwritten.
    let file = folder.path().join("parts/layer-001.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let error = train("parts", &settings, &mut go).unwrap_err().to_string();
    assert!(error.contains("layer-001") && error.contains("remove it"), "{error}");
    kept::remove(&folder.path().join("parts")).unwrap();
    assert!(!folder.path().join("parts").exists());
}

#[test]
fn heads_are_grouped_below_the_largest_tensor() {
    assert_eq!(group(8, 1024, 256, 128), 8);
    // 8,192 inputs and 1,024 units are 32 MiB a head.
    assert_eq!(group(8, 8_192, 1_024, 128), 4);
    assert_eq!(group(6, 8_192, 1_024, 128), 4);
    let folder = tempfile::tempdir().unwrap();
    let rows = rows(folder.path(), 2);
    let wide = Settings { width: 1 << 13, ..settings() };
    let error = fit(&rows, &[vec![0]], &wide, folder.path(), &mut go).unwrap_err().to_string();
    assert!(error.contains("width") && error.contains("8192") && error.contains("128 MiB"), "{error}");
}

#[test]
fn one_sequence_is_too_few() {
    let folder = tempfile::tempdir().unwrap();
    let rows = rows(folder.path(), 1);
    let error = fit(&rows, &[vec![0]], &settings(), folder.path(), &mut go).unwrap_err().to_string();
    assert!(error.contains("1 calibration sequences") && error.contains("--tokens"), "{error}");
}
