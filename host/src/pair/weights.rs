//! `weights.safetensors`: named tensors as a mapper module asks for them.

use half::f16;
use kvmig_gate::{Loader, WeightElem};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use super::PairError;
use crate::cache::Elem;

/// One tensor to be written. What its numbers are rounded to, they were rounded to already ([`rounded`]), so that whoever
/// fits can make up for the rounding.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its name in the module's work plan.
    pub name: String,
    /// How it is stored.
    pub elem: Elem,
    /// Row-major.
    pub shape: Vec<usize>,
    /// As many as the shape holds.
    pub numbers: Vec<f32>,
}

impl Tensor {
    /// Bytes it takes when it is stored.
    pub fn bytes(&self) -> u64 {
        let width = match self.elem {
            Elem::F32 => 4,
            Elem::F16 => 2,
        };
        width * self.numbers.len() as u64
    }
}

/// What numbers become when they are stored as `elem`.
pub fn rounded(numbers: impl IntoIterator<Item = f64>, elem: Elem) -> Vec<f32> {
    match elem {
        Elem::F32 => numbers.into_iter().map(|x| x as f32).collect(),
        Elem::F16 => numbers.into_iter().map(|x| f16::from_f64(x).to_f32()).collect(),
    }
}

/// Encodes the file.
///
/// # Errors
/// [`PairError::NotFinite`] where a number is not finite, be it because it was too large for its type.
pub fn encode(tensors: &[Tensor]) -> Result<Vec<u8>, PairError> {
    let bytes = tensors.iter().map(bytes).collect::<Result<Vec<_>, _>>()?;
    let views = tensors.iter().zip(&bytes).map(|(tensor, bytes)| {
        let dtype = match tensor.elem {
            Elem::F32 => Dtype::F32,
            Elem::F16 => Dtype::F16,
        };
        TensorView::new(dtype, tensor.shape.clone(), bytes).map(|view| (&tensor.name, view))
    });
    let views = views.collect::<Result<Vec<_>, _>>().map_err(damaged)?;
    safetensors::serialize(views, None).map_err(damaged)
}

/// Little endian.
fn bytes(tensor: &Tensor) -> Result<Vec<u8>, PairError> {
    if let Some(index) = tensor.numbers.iter().position(|x| !x.is_finite()) {
        let (file, tensor) = (super::WEIGHTS.to_owned(), tensor.name.clone());
        return Err(PairError::NotFinite { file, tensor, index });
    }
    Ok(match tensor.elem {
        Elem::F32 => tensor.numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Elem::F16 => tensor.numbers.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
    })
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
