//! The product of rows with a weight. The tensor library's own also makes the gradient of the rows, which is a quarter of all
//! work and for nobody.

use candle_core::{CpuStorage, CustomOp1, Error, Layout, Result, Shape, Storage, Tensor};

use crate::fit::product::{View, multiply};

/// `rows · weight`: `[n, in]` times `[in, out]`, differentiable by the weight.
pub(super) fn product(rows: &Tensor, weight: &Tensor) -> Result<Tensor> {
    weight.apply_op1(Rows(rows.clone()))
}

struct Rows(Tensor);

impl CustomOp1 for Rows {
    fn name(&self) -> &'static str {
        "rows-product"
    }

    fn cpu_fwd(&self, weight: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let ((count, inputs), (_, outputs)) = (self.0.dims2()?, layout.shape().dims2()?);
        let (storage, own) = self.0.storage_and_layout();
        let Storage::Cpu(rows) = &*storage else { return Err(Error::msg("rows-product: expected rows in memory")) };
        let (rows, weight) = (dense(rows, own)?, dense(weight, layout)?);
        let mut product = vec![0.0; count * outputs];
        let (left, right) = (View::rows(rows, count, inputs, inputs), View::rows(weight, inputs, outputs, outputs));
        multiply(&mut product, outputs, 0.0, 1.0, left, right);
        Ok((CpuStorage::F32(product), Shape::from((count, outputs))))
    }

    fn bwd(&self, _weight: &Tensor, _product: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.0.t()?.matmul(&gradient.contiguous()?).map(Some)
    }
}

/// The numbers of a tensor that lie in its order.
pub(super) fn dense<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(numbers), Some((start, end))) => Ok(&numbers[start..end]),
        _ => Err(Error::msg("expected contiguous f32 numbers")),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    #[test]
    fn product_and_gradient_are_the_librarys() {
        let rows = Tensor::from_vec(vec![1.0f32, -2.0, 3.0, 0.5, 4.0, -1.0], (2, 3), &Device::Cpu).unwrap();
        let weight =
            Tensor::from_vec((0..12).map(|i| i as f32 / 7.0).collect::<Vec<_>>(), (3, 4), &Device::Cpu).unwrap();
        let gradient = |own: bool| {
            let weight = Var::from_tensor(&weight.copy().unwrap()).unwrap();
            let out = if own { product(&rows, &weight).unwrap() } else { rows.matmul(&weight).unwrap() };
            let loss = out.sqr().unwrap().sum_all().unwrap();
            let gradients = loss.backward().unwrap();
            let numbers = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            (numbers(&out), numbers(gradients.get(&weight).unwrap()))
        };
        let (own, other) = (gradient(true), gradient(false));
        for (own, other) in own.0.iter().zip(&other.0).chain(own.1.iter().zip(&other.1)) {
            assert!((own - other).abs() < 1e-4, "{own} against {other}");
        }
    }
}
