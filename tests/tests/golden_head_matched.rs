//! The head-matched fit against NumPy and SciPy (`golden/head_matched/make.py`), and against our own unweighted one.

use std::{fs, ops::ControlFlow, path::Path, str::FromStr as _};

use kvmig::{
    cache::Elem,
    fit::{
        attention::Mass,
        head_matched::{self, HeadMap, HeadMatched, Weighting},
        moments::{MomentShape, Moments, Rows},
        ridge::{self, Lambda, LambdaConvention},
        rows::{Extent, Part, RowChunk, RowFile, RowShape},
    },
};
use kvmig_gate::Digest;
use safetensors::{Dtype, SafeTensors};

const CONVENTIONS: [&str; 4] = ["per-token", "per-token-relative", "sum", "standardised"];
const SHAPE: RowShape = RowShape {
    source: Extent { layers: 3, kv_heads: 2, head_dim: 4 },
    target: Extent { layers: 2, kv_heads: 4, head_dim: 3 },
};
const ROWS: usize = 200;

/// The stored answers.
struct Answers(Vec<u8>);

impl Answers {
    fn read() -> Answers {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/head_matched/answers.safetensors");
        Answers(fs::read(path).unwrap())
    }

    fn f64s(&self, name: &str) -> Vec<f64> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let view = file.tensor(name).unwrap();
        assert_eq!(view.dtype(), Dtype::F64, "{name}");
        view.data().chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn f32s(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let view = file.tensor(name).unwrap();
        assert_eq!(view.dtype(), Dtype::F32, "{name}");
        view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }
}

/// The stored rows on disk, in sequences of 70 rows.
fn rows(answers: &Answers, folder: &Path, shape: RowShape) -> RowFile {
    let parts = ["keys", "values"].map(|name| {
        let [x, y, mass] = ["x", "y", "mass"].map(|part| answers.f32s(&format!("{name}.{part}")));
        assert_eq!(x.len(), ROWS * 24);
        (x, y, mass)
    });
    let mut rows = RowFile::resume(&folder.join("rows"), Digest::of(b"golden"), shape, &[]).unwrap();
    for start in (0..ROWS).step_by(70) {
        let end = ROWS.min(start + 70);
        let mass = |part: usize| parts[part].2.chunks_exact(ROWS).flat_map(|head| &head[start..end]).copied().collect();
        let mass = Mass { keys: mass(0), values: mass(1) };
        let cut = |numbers: &'static str, part: usize| match numbers {
            "x" => &parts[part].0[start * 24..end * 24],
            _ => &parts[part].1[start * 24..end * 24],
        };
        let sequence = Digest::of(&[start as u8]);
        let (source, target) = ([cut("x", 0), cut("x", 1)], [cut("y", 0), cut("y", 1)]);
        rows.append(&RowChunk { sequence, source, target, mass: &mass }).unwrap();
    }
    rows
}

fn lambda(convention: &str) -> Lambda {
    Lambda { value: 0.01, convention: LambdaConvention::from_str(convention).unwrap() }
}

fn fit(rows: &RowFile, selection: &[Vec<usize>], lambda: Lambda, weighting: Weighting) -> HeadMatched {
    head_matched::fit(rows, selection, lambda, weighting, &mut |_| ControlFlow::Continue(())).unwrap()
}

/// From f32 rows through the spilled file: the objective within 1e-6 of NumPy's minimum, the predictions within 1e-5 RMS of the
/// target's spread.
#[test]
fn weighted_and_unweighted() {
    let (answers, folder) = (Answers::read(), tempfile::tempdir().unwrap());
    let rows = rows(&answers, folder.path(), SHAPE);
    let selection = [vec![0, 2], vec![0, 1, 2]];
    for (name, weighting) in [("attention", Weighting::Attention), ("uniform", Weighting::Uniform)] {
        for convention in CONVENTIONS {
            let fitted = fit(&rows, &selection, lambda(convention), weighting);
            assert_eq!(fitted.settings(), "{\"layers\":[[0,2],[0,1,2]]}");
            assert_eq!(fitted.jitter(), 0.0);
            for (layer, maps) in fitted.layers.iter().enumerate() {
                for (part, side) in [(Part::Keys, "keys"), (Part::Values, "values")] {
                    for (head, map) in maps.part(part).iter().enumerate() {
                        check(&answers, side, (layer, head), &maps.sources, map, &format!("{name}.{convention}"));
                    }
                }
            }
        }
    }
}

fn check(answers: &Answers, side: &str, (layer, head): (usize, usize), sources: &[usize], found: &HeadMap, arm: &str) {
    let name = format!("{side}.{layer}.{head}");
    let uniform = arm.starts_with("uniform");
    let (alpha, weights) = (answers.f64s(&format!("{name}.alpha")), answers.f64s(&format!("{name}.weights")));
    let weights = if uniform { vec![1.0; ROWS] } else { weights };
    let (expected_alpha, expected_rows) = if uniform { (0.0, ROWS as f64) } else { (alpha[0], alpha[1]) };
    assert!((found.alpha - expected_alpha).abs() < 1e-9, "{name}: α {} against {expected_alpha}", found.alpha);
    assert!((found.effective_rows / expected_rows - 1.0).abs() < 1e-9, "{name}: {} rows", found.effective_rows);

    let map = &found.map;
    let (x, y) = (answers.f32s(&format!("{side}.x")), answers.f32s(&format!("{side}.y")));
    let expected = answers.f64s(&format!("{name}.{arm}.solution"));
    let [optimum, r2] = answers.f64s(&format!("{name}.{arm}.figures")).try_into().unwrap();
    let penalty = answers.f64s(&format!("{name}.{arm}.penalty"));
    let (mut difference, mut squares, mut spread) = (0.0, 0.0, 0.0);
    for row in 0..ROWS {
        let columns = sources.iter().flat_map(|s| row * 24 + s * 8 + head / 2 * 4..row * 24 + s * 8 + head / 2 * 4 + 4);
        let inputs: Vec<f64> = columns.map(|i| f64::from(x[i])).collect();
        for j in 0..3 {
            let products = inputs.iter().enumerate().map(|(i, x)| x * map.weight.row(i)[j]);
            let (predicted, y) =
                (map.bias[j] + products.sum::<f64>(), f64::from(y[row * 24 + layer * 12 + head * 3 + j]));
            let known = inputs.iter().chain(&[1.0]).enumerate().map(|(i, x)| x * expected[i * 3 + j]).sum::<f64>();
            difference += weights[row] * (predicted - known).powi(2);
            squares += weights[row] * (y - predicted).powi(2);
            spread += weights[row] * (y - map.target_mean[j]).powi(2);
        }
    }
    let row = |(i, penalty): (usize, &f64)| penalty * map.weight.row(i).iter().map(|w| w * w).sum::<f64>();
    let objective = squares / weights.iter().sum::<f64>() + penalty.iter().enumerate().map(row).sum::<f64>();
    assert!((objective / optimum - 1.0).abs() <= 1e-6, "{name}.{arm}: objective {objective} against {optimum}");
    let rms = (difference / spread).sqrt();
    assert!(rms <= 1e-5, "{name}.{arm}: predictions differ by {rms:e} of the target's spread");
    assert!((map.r2 - r2).abs() < 1e-5, "{name}.{arm}: R² {} against {r2}", map.r2);
}

/// With one head of the whole width and uniform weights it is the full-head ridge, which is solved from moments.
#[test]
fn uniform_weights_are_the_unweighted_solve() {
    let (answers, folder) = (Answers::read(), tempfile::tempdir().unwrap());
    let shape = RowShape {
        source: Extent { layers: 3, kv_heads: 1, head_dim: 8 },
        target: Extent { layers: 2, kv_heads: 4, head_dim: 3 },
    };
    let rows = rows(&answers, folder.path(), shape);
    let moment_shape = MomentShape { source_layers: 3, source_width: 8, target_layers: 2, target_width: 12, hidden: 0 };
    let mut moments = Moments::new(moment_shape);
    let [keys, values] = ["keys", "values"].map(|n| ["x", "y"].map(|part| answers.f32s(&format!("{n}.{part}"))));
    let side = |side: &'static str| match side {
        "keys" => Rows { source: &keys[0], target: &keys[1] },
        _ => Rows { source: &values[0], target: &values[1] },
    };
    moments.add(side("keys"), side("values"));
    let selection = [vec![1], vec![0, 2]];
    for convention in CONVENTIONS {
        let expected = ridge::fit(&moments, &selection, lambda(convention)).unwrap();
        let found = fit(&rows, &selection, lambda(convention), Weighting::Uniform);
        for (expected, found) in expected.iter().zip(&found.layers) {
            for (expected, part) in [(&expected.keys, Part::Keys), (&expected.values, Part::Values)] {
                for (head, HeadMap { map, .. }) in found.part(part).iter().enumerate() {
                    for i in 0..map.weight.rows() {
                        let scale = expected.weight.row(i).iter().fold(0.0f64, |m, w| m.max(w.abs()));
                        for (j, w) in map.weight.row(i).iter().enumerate() {
                            let error = (w - expected.weight.row(i)[head * 3 + j]).abs();
                            assert!(error <= 1e-4 * scale, "{convention} {part:?} {i},{j}: {error:e} of {scale:e}");
                        }
                    }
                }
            }
            assert!((expected.keys.r2 - found.r2(Part::Keys)).abs() < 1e-5);
        }
    }
}

/// The layers before the last ones are the target's own; matrices are rounded, and their biases make up for it.
#[test]
fn tensors_of_the_last_layers() {
    let (answers, folder) = (Answers::read(), tempfile::tempdir().unwrap());
    let rows = rows(&answers, folder.path(), SHAPE);
    let fitted = fit(&rows, &[vec![0, 2]], lambda("per-token-relative"), Weighting::Attention);
    let tensors = fitted.tensors(Elem::F16);
    let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["layers.1.k.weight", "layers.1.k.bias", "layers.1.v.weight", "layers.1.v.bias"]);
    assert_eq!((&tensors[0].shape, &tensors[1].shape), (&vec![4, 8, 3], &vec![12]));
    assert_eq!((tensors[0].elem, tensors[1].elem), (Elem::F16, Elem::F32));
    for (head, HeadMap { map, .. }) in fitted.layers[0].keys.iter().enumerate() {
        let weight = &tensors[0].numbers[head * 24..(head + 1) * 24];
        for j in 0..3 {
            let mapped = (0..8).map(|i| map.source_mean[i] * f64::from(weight[i * 3 + j])).sum::<f64>();
            let found = mapped + f64::from(tensors[1].numbers[head * 3 + j]);
            assert!((found - map.target_mean[j]).abs() < 1e-3, "{found} against {}", map.target_mean[j]);
        }
    }
}
