//! `weights.safetensors`: the affine maps as a mapper module names them.

use half::f16;
use kvmig_gate::{Loader, WeightElem};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use super::PairError;
use crate::{cache::Elem, fit::ridge::LayerMap};

/// One named tensor, little endian.
struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Encodes the maps: `layers.{l}.k.weight` `[k · n_kv_s · d_s, n_kv_t · d_t]` and `layers.{l}.k.bias` `[n_kv_t · d_t]` per
/// target layer l, and the same with `v`. Matrices are of type `elem`, biases f32 and adjusted to the rounded matrices.
///
/// # Errors
/// [`PairError::NotFinite`] where a number has no finite counterpart in `elem`.
pub fn encode(maps: &[LayerMap], elem: Elem) -> Result<Vec<u8>, PairError> {
    let mut tensors = Vec::new();
    for (layer, map) in maps.iter().enumerate() {
        for (side, affine) in [("k", &map.keys), ("v", &map.values)] {
            let numbers = affine.weight.as_slice();
            let (bytes, rounded): (Vec<u8>, Vec<f32>) = match elem {
                Elem::F32 => {
                    let rounded: Vec<f32> = numbers.iter().map(|&w| w as f32).collect();
                    (rounded.iter().flat_map(|w| w.to_le_bytes()).collect(), rounded)
                }
                Elem::F16 => {
                    let halves: Vec<f16> = numbers.iter().map(|&w| f16::from_f64(w)).collect();
                    let bytes = halves.iter().flat_map(|w| w.to_le_bytes()).collect();
                    (bytes, halves.iter().map(|w| w.to_f32()).collect())
                }
            };
            let bias = affine.bias_for(&rounded);
            for (part, numbers) in [("weight", &rounded), ("bias", &bias)] {
                if let Some(index) = numbers.iter().position(|x| !x.is_finite()) {
                    let tensor = format!("layers.{layer}.{side}.{part}");
                    return Err(PairError::NotFinite { file: super::WEIGHTS.to_owned(), tensor, index });
                }
            }
            let dtype = match elem {
                Elem::F32 => Dtype::F32,
                Elem::F16 => Dtype::F16,
            };
            let shape = vec![affine.weight.rows(), affine.weight.cols()];
            tensors.push(Tensor { name: format!("layers.{layer}.{side}.weight"), dtype, shape, bytes });
            tensors.push(Tensor {
                name: format!("layers.{layer}.{side}.bias"),
                dtype: Dtype::F32,
                shape: vec![bias.len()],
                bytes: bias.iter().flat_map(|b| b.to_le_bytes()).collect(),
            });
        }
    }
    let views = tensors.iter().map(|t| TensorView::new(t.dtype, t.shape.clone(), &t.bytes).map(|view| (&t.name, view)));
    let views = views.collect::<Result<Vec<_>, _>>().map_err(damaged)?;
    safetensors::serialize(views, None).map_err(damaged)
}

/// Copies every tensor of a weights file into `loader`, which hashes the copies.
///
/// # Errors
/// [`PairError`] if the file is damaged, or holds another element type or a number that is not finite.
pub(super) fn load(file: &str, bytes: &[u8], loader: &mut Loader) -> Result<(), PairError> {
    let damaged = |source| PairError::Weights { file: file.to_owned(), source };
    for (name, view) in SafeTensors::deserialize(bytes).map_err(damaged)?.tensors() {
        let data = view.data();
        let (elem, fault) = match view.dtype() {
            Dtype::F32 => {
                let numbers = data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                (WeightElem::F32, numbers.into_iter().position(|x| !x.is_finite()))
            }
            Dtype::F16 => {
                let numbers = data.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]));
                (WeightElem::F16, numbers.into_iter().position(|x| !x.is_finite()))
            }
            other => {
                return Err(PairError::Disagreement {
                    file: file.to_owned(),
                    field: format!("{name}.dtype"),
                    found: format!("{other:?}"),
                    expected: "F32 or F16".to_owned(),
                    mend: "convert the weights",
                });
            }
        };
        if let Some(index) = fault {
            return Err(PairError::NotFinite { file: file.to_owned(), tensor: name, index });
        }
        loader.weight(&name, elem, view.shape(), data);
    }
    Ok(())
}

fn damaged(source: safetensors::SafeTensorError) -> PairError {
    PairError::Weights { file: super::WEIGHTS.to_owned(), source }
}
