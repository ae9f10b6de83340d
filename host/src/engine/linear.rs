//! A weight matrix, and its product with rows of activations.

use candle_core::{Device, Module, Tensor, quantized::QMatMul};
use kvmig_gemm::{Threads, rows_times_transposed};

use super::EngineError;

/// A matrix `[outputs, inputs]`, row-major: one row per output.
#[derive(Debug)]
pub(super) struct Matrix {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) numbers: Numbers,
}

/// The numbers of a matrix.
#[derive(Debug)]
pub(super) enum Numbers {
    /// Single precision.
    Dense(Vec<f32>),
    /// A block format of GGUF, computed in.
    Quantised(QMatMul),
}

/// A matrix and a bias `[outputs]`.
#[derive(Debug)]
pub(super) struct Linear {
    pub(super) matrix: Matrix,
    pub(super) bias: Option<Vec<f32>>,
}

impl Linear {
    /// `out[r] = matrix · x[r] + bias` for `x` of `[rows, inputs]`; `out` becomes `[rows, outputs]`.
    pub(super) fn apply(&self, x: &[f32], out: &mut Vec<f32>) -> Result<(), EngineError> {
        self.matrix.apply(x, out)?;
        if let Some(bias) = &self.bias {
            super::norm::add_bias(out, bias);
        }
        Ok(())
    }
}

impl Matrix {
    /// Whether products compute in a block format.
    pub(super) fn is_quantised(&self) -> bool {
        matches!(self.numbers, Numbers::Quantised(_))
    }

    /// `out[r] = matrix · x[r]` for `x` of `[rows, inputs]`; `out` becomes `[rows, outputs]`.
    pub(super) fn apply(&self, x: &[f32], out: &mut Vec<f32>) -> Result<(), EngineError> {
        let rows = x.len() / self.inputs;
        match &self.numbers {
            Numbers::Dense(weight) => {
                out.resize(rows * self.outputs, 0.0);
                dense(x, weight, [rows, self.inputs, self.outputs], out);
            }
            Numbers::Quantised(weight) => {
                let x = Tensor::from_slice(x, (rows, self.inputs), &Device::Cpu)?;
                *out = weight.forward(&x)?.flatten_all()?.to_vec1()?;
            }
        }
        Ok(())
    }

    /// The rows `ids` one after the other, `[ids.len(), inputs]`: an embedding.
    pub(super) fn rows(&self, ids: &[u32]) -> Result<Vec<f32>, EngineError> {
        match &self.numbers {
            Numbers::Dense(weight) => {
                let row = |&id: &u32| &weight[id as usize * self.inputs..][..self.inputs];
                Ok(ids.iter().flat_map(row).copied().collect())
            }
            Numbers::Quantised(weight) => {
                let ids = Tensor::from_slice(ids, ids.len(), &Device::Cpu)?;
                Ok(weight.embedding(&ids)?.flatten_all()?.to_vec1()?)
            }
        }
    }
}

/// `out [rows, outputs] = x [rows, inputs] · weightᵀ`.
fn dense(x: &[f32], weight: &[f32], shape: [usize; 3], out: &mut [f32]) {
    rows_times_transposed(out, x, weight, shape, Threads::All)
        .expect("x is whole rows, the weight's shape was checked when it was loaded, out was sized for them");
}
