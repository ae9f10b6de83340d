//! Rotation frequencies and tables against transformers' own functions (`tests/golden/rope`).

use kvmig::cache::{Pairing, Rope, RopeScaling};
use kvmig_tests::golden::{self, RopeCase};

/// Both sides evaluate one formula of a few operations in f64, each rounding by 2^-53 relative; the power amplifies that
/// by the exponent's size, at most ln(theta) = 14.
const FREQUENCY: f64 = 1e-13;

/// A table is f32 (2^-25 at most, for values up to 1) and its answer has nine digits.
const TABLE: f64 = 3.1e-8;

fn ours(case: &RopeCase) -> Rope {
    let scaling = match case.scaling {
        golden::RopeScaling::Default => RopeScaling::None,
        golden::RopeScaling::Linear { factor } => RopeScaling::Linear { factor },
        golden::RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_positions: original_max_position_embeddings,
            }
        }
    };
    Rope { theta: case.theta, dims: case.dims, pairing: Pairing::HalfSplit, scaling }
}

#[test]
fn frequencies_are_those_of_transformers() {
    for case in golden::rope().unwrap() {
        let found = ours(&case).frequencies();
        assert_eq!(found.len(), case.frequencies.len(), "{}", case.name);
        for (i, (found, expected)) in found.iter().zip(&case.frequencies).enumerate() {
            let error = (found / expected - 1.0).abs();
            assert!(error <= FREQUENCY, "{} [{i}]: found {found}, expected {expected}, {error:e} relative", case.name);
        }
    }
}

#[test]
fn tables_hold_cosine_and_sine_of_every_position() {
    for case in golden::rope().unwrap() {
        let found = ours(&case).table(&case.positions);
        assert_eq!(found.len(), 2 * case.cos.len(), "{}", case.name);
        for (i, pair) in found.chunks_exact(2).enumerate() {
            let error = (f64::from(pair[0]) - case.cos[i]).abs().max((f64::from(pair[1]) - case.sin[i]).abs());
            let position = case.positions[i / (case.dims / 2)];
            assert!(error <= TABLE, "{} at position {position}, entry {i}: off by {error:e}", case.name);
        }
    }
}

#[test]
fn every_scaling_has_answers_that_differ_from_the_plain_rotation() {
    let plain = |case: &RopeCase| Rope { scaling: RopeScaling::None, ..ours(case) }.frequencies();
    for case in golden::rope().unwrap() {
        let scaled = !matches!(case.scaling, golden::RopeScaling::Default);
        let differs = plain(&case).iter().zip(&case.frequencies).any(|(a, b)| (a / b - 1.0).abs() > 0.01);
        assert_eq!(differs, scaled, "{}", case.name);
    }
}
