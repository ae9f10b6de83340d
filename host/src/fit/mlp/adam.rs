//! Adam (Kingma and Ba 2015) in one pass over a parameter. candle-nn's makes a dozen tensors a step, and took as long as the
//! products of a batch.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, Error, InplaceOp2, Layout, Result, Var, backprop::GradStore};

use super::product::dense;

/// As published, for networks and for Adam itself.
const LEARNING_RATE: f32 = 1e-3;
const BETA1: f32 = 0.9;
const BETA2: f32 = 0.999;
const EPSILON: f32 = 1e-8;

/// Parameters and the running moments of their gradients.
pub(super) struct Adam {
    parameters: Vec<(Var, Moments)>,
    steps: i32,
}

impl Adam {
    pub(super) fn new(parameters: &[Var]) -> Adam {
        let moments = |var: &Var| Moments {
            of: Mutex::new((vec![0.0; var.elem_count()], vec![0.0; var.elem_count()])),
            scale: [0.0; 2],
        };
        Adam { parameters: parameters.iter().map(|var| (var.clone(), moments(var))).collect(), steps: 0 }
    }

    /// One step against the gradients.
    pub(super) fn step(&mut self, gradients: &GradStore) -> Result<()> {
        self.steps += 1;
        let scale = [BETA1, BETA2].map(|beta| (1.0 / (1.0 - f64::from(beta).powi(self.steps))) as f32);
        for (var, moments) in &mut self.parameters {
            moments.scale = scale;
            if let Some(gradient) = gradients.get(var) {
                var.inplace_op2(&gradient.contiguous()?, moments)?;
            }
        }
        Ok(())
    }
}

/// First and second moment of a parameter's gradient.
struct Moments {
    of: Mutex<(Vec<f32>, Vec<f32>)>,
    /// What makes up for their beginning at 0.
    scale: [f32; 2],
}

impl InplaceOp2 for Moments {
    fn name(&self) -> &'static str {
        "adam"
    }

    fn cpu_fwd(&self, weights: &mut CpuStorage, at: &Layout, gradient: &CpuStorage, from: &Layout) -> Result<()> {
        let (CpuStorage::F32(weights), Some((start, end))) = (weights, at.contiguous_offsets()) else {
            return Err(Error::msg("adam: expected contiguous f32 parameters"));
        };
        let gradient = dense(gradient, from)?;
        let mut moments = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        let (mean, square) = &mut *moments;
        let [scale_mean, scale_square] = self.scale;
        let moments = mean.iter_mut().zip(square);
        for ((w, g), (m, v)) in weights[start..end].iter_mut().zip(gradient).zip(moments) {
            *m = BETA1 * *m + (1.0 - BETA1) * g;
            *v = BETA2 * *v + (1.0 - BETA2) * g * g;
            *w -= LEARNING_RATE * (*m * scale_mean) / ((*v * scale_square).sqrt() + EPSILON);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};
    use candle_nn::{AdamW, Optimizer as _, ParamsAdamW};

    use super::*;

    /// Against candle-nn's, over some steps on a bowl.
    #[test]
    fn steps_as_the_reference_does() {
        let start = Tensor::from_vec(vec![3.0f32, -2.0, 0.5, 1e-3], (2, 2), &Device::Cpu).unwrap();
        let (own, other) = (Var::from_tensor(&start.copy().unwrap()).unwrap(), Var::from_tensor(&start).unwrap());
        let mut adam = Adam::new(std::slice::from_ref(&own));
        let params = ParamsAdamW { lr: 1e-3, weight_decay: 0.0, ..ParamsAdamW::default() };
        let mut reference = AdamW::new(vec![other.clone()], params).unwrap();
        let loss = |var: &Var| var.powf(4.0).unwrap().sum_all().unwrap();
        for _ in 0..50 {
            adam.step(&loss(&own).backward().unwrap()).unwrap();
            reference.backward_step(&loss(&other)).unwrap();
        }
        let read = |var: &Var| var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (own, other) in read(&own).iter().zip(read(&other)) {
            assert!((own - other).abs() < 1e-6, "{own} against {other}");
        }
        assert!((read(&own)[0] - 2.95).abs() < 1e-2, "{:?}", read(&own));
    }
}
