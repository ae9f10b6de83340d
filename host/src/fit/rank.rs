//! Reduced-rank ridge regression: one projection of all features, which every target layer reads.
//!
//! The layers' maps have much in common: what they read of the features spans far fewer dimensions than there are features. With
//! `C + D = L Lᵀ` (D the penalty) and the fitted part `F = L⁻¹ B` of all outputs, the best maps of rank r are `W = L⁻ᵀ U Uᵀ F`,
//! U being the r leading left singular vectors of F Γ (Izenman 1975; Reinsel & Velu 1998), Γ weighing each output. Each layer's
//! keys, and its values, weigh alike here: their scales say nothing about their worth. A token then costs
//! `r · (features + outputs)` instead of `features · outputs` products.

use super::{
    design::{Design, RidgeMaps, Side},
    linalg::{Cholesky, LinalgError, Matrix},
    moments::{Covariances, Moments},
    product::{View, multiply},
    ridge::{AffineMap, Lambda},
};
use crate::measure::random::Random;

/// Rounds of subspace iteration. The singular values fall off quickly; what two rounds miss of the space, the maps don't feel.
const ROUNDS: usize = 2;

/// Fits a design whose target layers all read the same source layers.
pub(super) fn fit(
    moments: &Moments,
    design: &Design,
    columns: usize,
    lambda: Lambda,
) -> Result<RidgeMaps, LinalgError> {
    let shape = moments.shape();
    let sources = design.layers.first().map(Vec::as_slice).unwrap_or_default();
    let mapped = design.layers.len();
    let outputs = |side: Side| (0..mapped).map(move |layer| design.output(side, layer, &shape));
    let covariances = moments.joint();
    let side = |side: Side, wanted: Vec<usize>| {
        project(covariances, &design.blocks(side, sources, &shape), &wanted, columns, lambda)
    };
    if design.joint {
        let (projection, mut keys) = side(Side::Keys, outputs(Side::Keys).chain(outputs(Side::Values)).collect())?;
        let values = keys.split_off(mapped);
        return Ok(RidgeMaps::new(design, vec![projection], keys, values));
    }
    let (first, keys) = side(Side::Keys, outputs(Side::Keys).collect())?;
    let (second, values) = side(Side::Values, outputs(Side::Values).collect())?;
    Ok(RidgeMaps::new(design, vec![first, second], keys, values))
}

/// The projection of some feature blocks, and the maps of some output blocks from it.
fn project(
    covariances: Covariances<'_>,
    blocks: &[usize],
    outputs: &[usize],
    columns: usize,
    lambda: Lambda,
) -> Result<(AffineMap, Vec<AffineMap>), LinalgError> {
    let mut system = covariances.source(blocks);
    let mut penalty = lambda.diagonal(&system, covariances.rows());
    penalty.iter().enumerate().for_each(|(i, penalty)| system.row_mut(i)[i] += penalty);
    let factor = Cholesky::new(&system)?;
    drop(system);
    penalty.iter_mut().for_each(|penalty| *penalty += factor.jitter());

    let width = covariances.shape().target_width;
    let weighing: Vec<f64> = outputs.iter().map(|&output| weight(&covariances.target_variance(output))).collect();
    let mut fitted = Matrix::zeros(penalty.len(), outputs.len() * width);
    for (i, &output) in outputs.iter().enumerate() {
        let cross = covariances.cross(blocks, output);
        for row in 0..cross.rows() {
            let into = fitted.row_mut(row)[i * width..(i + 1) * width].iter_mut().zip(cross.row(row));
            into.for_each(|(to, from)| *to = weighing[i] * from);
        }
    }
    factor.forward(&mut fitted);
    let basis = leading(&fitted, columns)?;
    // Uᵀ F, [rank, outputs].
    let mut maps = Matrix::zeros(basis.cols(), fitted.cols());
    product(&mut maps, view(&basis).transposed(), view(&fitted));
    drop(fitted);
    let mut weight = basis;
    factor.backward(&mut weight);

    let rank = weight.cols();
    let source_mean = covariances.source_mean(blocks);
    let mut projection = AffineMap {
        bias: negative_product(&source_mean, &weight),
        target_mean: vec![0.0; rank],
        source_mean,
        r2: 1.0,
        jitter: factor.jitter(),
        weight,
    };
    let factor_down = for_half_precision(&projection.weight);
    let maps = outputs.iter().zip(weighing).enumerate().map(|(i, (&output, weighing))| {
        let mut own = Matrix::zeros(rank, width);
        for row in 0..rank {
            let from = &maps.row(row)[i * width..(i + 1) * width];
            own.row_mut(row).iter_mut().zip(from).for_each(|(to, from)| *to = from / weighing);
        }
        let target_mean = covariances.target_mean(output);
        let total: f64 = covariances.target_variance(output).iter().sum();
        let r2 = if total > 0.0 { explained(&own, &projection.weight, &penalty) / total } else { 0.0 };
        let (source_mean, bias) = (vec![0.0; rank], target_mean.clone());
        own.as_mut_slice().iter_mut().for_each(|x| *x /= factor_down);
        AffineMap { weight: own, bias, source_mean, target_mean, r2, jitter: factor.jitter() }
    });
    let maps = maps.collect();
    projection.weight.as_mut_slice().iter_mut().for_each(|x| *x *= factor_down);
    projection.bias.iter_mut().for_each(|x| *x *= factor_down);
    Ok((projection, maps))
}

/// What the columns of an output block are multiplied by, so that every block has the same variance.
fn weight(variance: &[f64]) -> f64 {
    let total: f64 = variance.iter().sum();
    if total > 0.0 { total.sqrt().recip() } else { 1.0 }
}

/// An orthonormal basis of the space of the `columns` leading left singular vectors of `f`, by subspace iteration (Halko,
/// Martinsson & Tropp 2011).
fn leading(f: &Matrix, columns: usize) -> Result<Matrix, LinalgError> {
    let columns = columns.min(f.rows()).min(f.cols());
    let mut random = Random::new(1);
    let start: Vec<f64> = (0..f.cols() * columns).map(|_| random.normal()).collect();
    let mut right = Matrix::from_vec(f.cols(), columns, start);
    let mut left = Matrix::zeros(f.rows(), columns);
    for round in 0..=ROUNDS {
        product(&mut left, view(f), view(&right));
        left = orthonormal(left)?;
        if round < ROUNDS {
            product(&mut right, view(f).transposed(), view(&left));
        }
    }
    Ok(left)
}

/// The columns' space in orthonormal ones: Cholesky QR, twice for accuracy (Yamamoto et al. 2015).
fn orthonormal(mut a: Matrix) -> Result<Matrix, LinalgError> {
    for _ in 0..2 {
        let mut gram = Matrix::zeros(a.cols(), a.cols());
        product(&mut gram, view(&a).transposed(), view(&a));
        let factor = Cholesky::new(&gram)?;
        // A L⁻ᵀ, as the transpose of L⁻¹ Aᵀ.
        let mut transposed = transpose(&a);
        factor.forward(&mut transposed);
        a = transpose(&transposed);
    }
    Ok(a)
}

/// Features of small variance get large weights; beyond half precision's range they would be lost. What the projection is
/// multiplied by here, the maps are divided by.
fn for_half_precision(projection: &Matrix) -> f64 {
    /// Far from half precision's largest, 65,504.
    const LARGEST: f64 = 4_096.0;
    let largest = projection.as_slice().iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    if largest > LARGEST { LARGEST / largest } else { 1.0 }
}

/// What a map from the projection explains of its output's variance: with `A = P W`, `tr(Aᵀ(C + D)A) + tr(AᵀDA)`, the first of
/// which is `‖UᵀF‖²`.
fn explained(own: &Matrix, projection: &Matrix, penalty: &[f64]) -> f64 {
    let mut whole = Matrix::zeros(projection.rows(), own.cols());
    product(&mut whole, view(projection), view(own));
    let penalised: f64 = penalty.iter().enumerate().map(|(i, d)| d * squares(whole.row(i))).sum();
    squares(own.as_slice()) + penalised
}

fn squares(numbers: &[f64]) -> f64 {
    numbers.iter().map(|x| x * x).sum()
}

fn negative_product(mean: &[f64], weight: &Matrix) -> Vec<f64> {
    let mut bias = vec![0.0; weight.cols()];
    for (i, mean) in mean.iter().enumerate() {
        bias.iter_mut().zip(weight.row(i)).for_each(|(b, w)| *b -= mean * w);
    }
    bias
}

fn view(matrix: &Matrix) -> View<'_, f64> {
    View::rows(matrix.as_slice(), matrix.rows(), matrix.cols(), matrix.cols())
}

fn product(into: &mut Matrix, left: View<'_, f64>, right: View<'_, f64>) {
    let columns = into.cols();
    multiply(into.as_mut_slice(), columns, 0.0, 1.0, left, right);
}

fn transpose(a: &Matrix) -> Matrix {
    let mut transposed = Matrix::zeros(a.cols(), a.rows());
    for i in 0..a.rows() {
        for (j, x) in a.row(i).iter().enumerate() {
            transposed.row_mut(j)[i] = *x;
        }
    }
    transposed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fit::moments::{MomentShape, Rows};

    const SHAPE: MomentShape =
        MomentShape { source_layers: 3, source_width: 5, target_layers: 3, target_width: 4, hidden: 6 };

    /// Outputs of layers 1 and 2 that depend on three directions of the features alone, with noise.
    fn planted(noise: f64) -> Moments {
        let mut random = Random::new(3);
        let mut normal = |n: usize| -> Vec<f64> { (0..n).map(|_| random.normal()).collect() };
        let (directions, mixing) = (normal(36 * 3), normal(3 * 24));
        let mut moments = Moments::new(SHAPE);
        let (mut keys, mut values, mut hidden) = (Vec::new(), Vec::new(), Vec::new());
        let (mut target_keys, mut target_values) = (Vec::new(), Vec::new());
        for _ in 0..2_000 {
            let x = normal(36);
            let z: Vec<f64> = (0..3).map(|j| (0..36).map(|i| x[i] * directions[i * 3 + j]).sum()).collect();
            let y: Vec<f32> = (0..24)
                .map(|j| (5.0 + (0..3).map(|i| z[i] * mixing[i * 24 + j]).sum::<f64>() + noise * normal(1)[0]) as f32)
                .collect();
            let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<f32>>();
            keys.extend(narrow(&x[..15]));
            values.extend(narrow(&x[15..30]));
            hidden.extend(narrow(&x[30..]));
            target_keys.extend(&y[..12]);
            target_values.extend(&y[12..]);
        }
        let keys = Rows { source: &keys, target: &target_keys };
        moments.add_with(keys, Rows { source: &values, target: &target_values }, &hidden);
        moments
    }

    fn design(rank: Option<usize>) -> Design {
        Design { native_layers: 1, layers: vec![vec![0, 1, 2]; 2], joint: true, hidden: true, rank, heads: None }
    }

    /// The map of a target layer's keys as one matrix.
    fn whole(maps: &RidgeMaps, mapped: usize) -> Matrix {
        let own = &maps.layers[mapped].keys.weight;
        let Some(projection) = maps.projection(Side::Keys) else { return own.clone() };
        let mut whole = Matrix::zeros(projection.weight.rows(), own.cols());
        product(&mut whole, view(&projection.weight), view(own));
        whole
    }

    fn worst(a: &Matrix, b: &Matrix) -> f64 {
        a.as_slice().iter().zip(b.as_slice()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    }

    #[test]
    fn three_directions_are_found_by_three_columns_and_not_by_two() {
        let moments = planted(0.01);
        let lambda = Lambda { value: 1e-4, ..Lambda::default() };
        let full = RidgeMaps::fit(&moments, &design(None), lambda).unwrap();
        let three = RidgeMaps::fit(&moments, &design(Some(3)), lambda).unwrap();
        let two = RidgeMaps::fit(&moments, &design(Some(2)), lambda).unwrap();
        for layer in 0..2 {
            let largest = whole(&full, layer).as_slice().iter().fold(0.0f64, |m, x| m.max(x.abs()));
            assert!(worst(&whole(&full, layer), &whole(&three, layer)) < 1e-2 * largest);
            let (full, three, two) = (&full.layers[layer].keys, &three.layers[layer].keys, &two.layers[layer].keys);
            assert!(full.r2 - three.r2 < 1e-4, "R² {} of three columns, {} of all", three.r2, full.r2);
            assert!(full.r2 - two.r2 > 0.05, "R² {} of two columns, {} of all", two.r2, full.r2);
        }
        assert!(three.flops() < full.flops());
    }

    /// With as many columns as features, nothing is lost but rounding, whatever the penalty.
    #[test]
    fn full_rank_is_the_plain_ridge() {
        let moments = planted(1.0);
        let lambda = Lambda { value: 0.3, ..Lambda::default() };
        // The outputs span 16 dimensions.
        let full = RidgeMaps::fit(&moments, &design(None), lambda).unwrap();
        let projected = RidgeMaps::fit(&moments, &design(Some(16)), lambda).unwrap();
        for layer in 0..2 {
            assert!(worst(&whole(&full, layer), &whole(&projected, layer)) < 1e-9);
            let difference = full.layers[layer].keys.r2 - projected.layers[layer].keys.r2;
            assert!(difference.abs() < 1e-9, "R² differs by {difference:e}");
        }
    }

    #[test]
    fn the_projection_is_centred_and_fits_half_precision() {
        let moments = planted(0.1);
        let maps = RidgeMaps::fit(&moments, &design(Some(3)), Lambda::default()).unwrap();
        let tensors = maps.tensors(crate::cache::Elem::F16);
        let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names[..4], ["projection.kv.weight", "projection.kv.bias", "layers.1.k.weight", "layers.1.k.bias"]);
        assert_eq!(names.last(), Some(&"layers.2.v.bias"));
        assert_eq!((tensors[0].shape.as_slice(), tensors[2].shape.as_slice()), (&[36, 3][..], &[3, 4][..]));
        assert!(tensors.iter().flat_map(|tensor| &tensor.numbers).all(|x| x.is_finite()));
        let projection = &maps.projections[0];
        for (bias, column) in projection.bias.iter().zip(0..) {
            let rows = projection.source_mean.iter().enumerate();
            let mean: f64 = rows.map(|(i, mean)| mean * projection.weight.row(i)[column]).sum();
            assert!((mean + bias).abs() < 1e-9);
        }
    }
}
