//! The ridge fit against NumPy and SciPy (`golden/ridge/make.py`): the same formulas, solved by someone else's code.

use std::{fs, path::Path, str::FromStr as _};

use kvmig::{
    cache::{CacheLayout, Elem, Pairing, Rope, RopeScaling},
    fit::{
        linalg::Matrix,
        moments::{MomentShape, Moments, Rows},
        ridge::{self, AffineMap, Lambda, LambdaConvention},
        select::Scores,
    },
};
use safetensors::{Dtype, SafeTensors};

const CONVENTIONS: [&str; 4] = ["per-token", "per-token-relative", "sum", "standardised"];
const SHAPE: MomentShape =
    MomentShape { source_layers: 3, source_width: 8, target_layers: 2, target_width: 12, hidden: 0 };

/// The stored answers.
struct Answers(Vec<u8>);

impl Answers {
    fn read() -> Answers {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/ridge/answers.safetensors");
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

    fn matrix(&self, name: &str) -> Matrix {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let shape = file.tensor(name).unwrap().shape().to_vec();
        Matrix::from_vec(shape[0], shape[1], self.f64s(name))
    }
}

fn lambda(convention: &str) -> Lambda {
    Lambda { value: 0.01, convention: LambdaConvention::from_str(convention).unwrap() }
}

/// From the same f64 moments, the weights agree to 1e-8 of their largest.
#[test]
fn same_moments_same_weights() {
    let answers = Answers::read();
    let c = answers.matrix("solve.c");
    for convention in CONVENTIONS {
        let mut w = [answers.matrix("solve.b")];
        let jitter = ridge::solve(&c, &mut w, lambda(convention), 1_000.0).unwrap();
        assert_eq!(jitter, 0.0);
        let expected = answers.f64s(&format!("solve.w.{convention}"));
        let largest = expected.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let worst = w[0].as_slice().iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst <= 1e-8 * largest, "{convention}: off by {worst:e} of {largest:e}");
    }
}

fn moments(answers: &Answers) -> Moments {
    let (xk, yk) = (answers.f32s("keys.x"), answers.f32s("keys.y"));
    let (xv, yv) = (answers.f32s("values.x"), answers.f32s("values.y"));
    let mut moments = Moments::new(SHAPE);
    // Chunks of 70 rows, the last one shorter; all four arrays are 24 columns wide.
    let rows = 70 * SHAPE.source_columns();
    for ((xk, yk), (xv, yv)) in xk.chunks(rows).zip(yk.chunks(rows)).zip(xv.chunks(rows).zip(yv.chunks(rows))) {
        moments.add(Rows { source: xk, target: yk }, Rows { source: xv, target: yv });
    }
    moments
}

/// From f32 rows through streamed moments: the objective within 1e-6 of NumPy's minimum, the predictions within 1e-5 RMS of
/// the target's spread.
#[test]
fn end_to_end() {
    let answers = Answers::read();
    let moments = moments(&answers);
    let selection = [vec![0, 2], vec![0, 1, 2]];
    for convention in CONVENTIONS {
        let maps = ridge::fit(&moments, &selection, lambda(convention)).unwrap();
        for (layer, map) in maps.iter().enumerate() {
            for (side, affine) in [("keys", &map.keys), ("values", &map.values)] {
                let name = format!("{side}.{layer}.{convention}");
                check(&answers, &name, side, layer, &map.sources, affine);
            }
        }
    }
}

fn check(answers: &Answers, name: &str, side: &str, layer: usize, sources: &[usize], map: &AffineMap) {
    let (x, y) = (answers.f32s(&format!("{side}.x")), answers.f32s(&format!("{side}.y")));
    let expected = answers.f64s(&format!("{name}.prediction"));
    let (optimum, penalty) = (answers.f64s(&format!("{name}.objective"))[0], answers.f64s(&format!("{name}.penalty")));
    let (width, target) = (SHAPE.source_width, SHAPE.target_width);
    let count = x.len() / SHAPE.source_columns();
    let (mut difference, mut squares, mut spread) = (0.0, 0.0, 0.0);
    for row in 0..count {
        let x = &x[row * SHAPE.source_columns()..];
        let y = &y[row * SHAPE.target_columns() + layer * target..];
        let inputs: Vec<f64> =
            sources.iter().flat_map(|s| &x[s * width..(s + 1) * width]).map(|&x| f64::from(x)).collect();
        for j in 0..target {
            let products = inputs.iter().enumerate().map(|(i, x)| x * map.weight.row(i)[j]);
            let predicted = map.bias[j] + products.sum::<f64>();
            difference += (predicted - expected[row * target + j]).powi(2);
            squares += (f64::from(y[j]) - predicted).powi(2);
            spread += (f64::from(y[j]) - map.target_mean[j]).powi(2);
        }
    }
    let row = |(i, penalty): (usize, &f64)| penalty * map.weight.row(i).iter().map(|w| w * w).sum::<f64>();
    let objective = squares / count as f64 + penalty.iter().enumerate().map(row).sum::<f64>();
    assert!((objective / optimum - 1.0).abs() <= 1e-6, "{name}: objective {objective} against {optimum}");
    let rms = (difference / spread).sqrt();
    assert!(rms <= 1e-5, "{name}: predictions differ by {rms:e} of the target's spread");
}

/// R² of every (source layer, target layer), head by head through the group map, against least squares.
#[test]
fn selection_scores() {
    let answers = Answers::read();
    let layout = |layers, head_dim| CacheLayout {
        layers,
        kv_heads: 2,
        head_dim,
        rope: Rope { theta: 1e4, dims: head_dim, pairing: Pairing::HalfSplit, scaling: RopeScaling::None },
        elem: Elem::F32,
    };
    let scores = Scores::new(&moments(&answers), &layout(3, 4), &layout(2, 6)).unwrap();
    for (name, found) in [("keys", &scores.keys), ("values", &scores.values)] {
        let expected = answers.f64s(&format!("{name}.r2"));
        for (found, expected) in found.concat().iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-5, "{name}: R² {found}, expected {expected}");
        }
    }
}
