//! A pair's mapper, loaded and resident: everything about a migration that does not depend on the request.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use kvmig_gate::Loaded;

use crate::{
    device::{Device, DeviceError, ResidentWeights},
    pair::Pair,
    sandbox::{DeviceLimits, Module, PairShape, SandboxError, ShapeError, WeightShape, WorkPlan, weight_shapes},
};

use super::handoff::millis;

/// A module with its plan for one pair and device, and the pair's weights in the device's memory.
#[derive(Debug)]
pub struct Mapper {
    pub(super) loaded: Arc<Loaded>,
    pub(super) module: Module,
    pub(super) plan: WorkPlan,
    pub(super) shape: PairShape,
    pub(super) settings: String,
    pub(super) weights: BTreeMap<String, WeightShape>,
    pub(super) resident: ResidentWeights,
    pub(super) limits: DeviceLimits,
    weights_ms: f64,
}

/// A mapper that can't be made ready.
#[derive(Debug, thiserror::Error)]
pub enum MapperError {
    /// The module can't be loaded, or declines the pair.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The pair's caches have a shape no mapper can be asked about.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The weights don't fit the device.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl Mapper {
    /// Asks the pair's module for its plan, and makes the weights resident.
    ///
    /// # Errors
    /// [`MapperError`].
    pub fn load(pair: &Pair, device: &Device) -> Result<Mapper, MapperError> {
        let (loaded, module) = (Arc::clone(pair.loaded()), pair.module().clone());
        let identity = pair.identity();
        let shape = PairShape::new(&identity.source.layout, &identity.target.layout)?
            .with_native_layers(identity.native_layers, identity.target.hidden)?;
        let limits = limits(device);
        let settings = pair.settings().to_owned();
        let plan = module.plan(&shape, &settings, &limits)?;
        let clock = Instant::now();
        let resident = device.load_weights(&loaded)?;
        let weights_ms = millis(clock);
        let weights = weight_shapes(&loaded);
        Ok(Mapper { loaded, module, plan, shape, settings, weights, resident, limits, weights_ms })
    }

    /// The artifact that a permit has to be for.
    pub fn loaded(&self) -> &Arc<Loaded> {
        &self.loaded
    }

    /// Milliseconds that making the weights resident took, once.
    pub fn weights_ms(&self) -> f64 {
        self.weights_ms
    }

    /// Multiplications and additions a mapped token costs: two for each element of a weight matrix, of every head where
    /// heads have matrices of their own.
    pub fn flops_per_token(&self) -> f64 {
        let matrices = self.weights.values().filter(|weight| weight.shape.len() > 1);
        matrices.map(|weight| 2.0 * weight.shape.iter().product::<usize>() as f64).sum()
    }
}

fn limits(device: &Device) -> DeviceLimits {
    let crate::device::Limits { max_binding_bytes, offset_align, max_bindings, half, own_shaders } = device.limits();
    DeviceLimits { max_binding_bytes, offset_align, max_bindings, half, own_shaders }
}
