//! A pair's mapper, loaded and resident: everything about a migration that does not depend on the request.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use kvmig_gate::Loaded;

use crate::{
    device::{Device, DeviceError, ResidentWeights},
    pair::Pair,
    sandbox::{
        DeviceLimits, HostError, Module, PairShape, Sandbox, SandboxError, SandboxLimits, ShapeError, WeightShape,
        WorkPlan, weight_shapes,
    },
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
    /// The sandbox itself can't be set up.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The pair's caches have a shape no mapper can be asked about.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The weights don't fit the device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The module carries other shaders than those the artifact was made of.
    #[error("module {module}: its description names other shaders than the artifact holds; load the pair again")]
    Shaders {
        /// The module.
        module: String,
    },
}

impl Mapper {
    /// Compiles the pair's module (or loads what was compiled before), asks for its plan, and makes the weights resident.
    ///
    /// # Errors
    /// [`MapperError`].
    pub fn load(pair: &Pair, device: &Device) -> Result<Mapper, MapperError> {
        let sandbox = Sandbox::new(SandboxLimits::default(), Sandbox::user_folder().as_deref())?;
        let loaded = Arc::clone(pair.loaded());
        let module = sandbox.load(loaded.component())?;
        if *module.metadata().shaders != *loaded.shaders() {
            return Err(MapperError::Shaders { module: module.metadata().name.clone() });
        }
        let shape = PairShape::new(&pair.identity().source.layout, &pair.identity().target.layout)?;
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

    /// Multiplications and additions a mapped token costs: two for each element of a weight matrix.
    pub fn flops_per_token(&self) -> f64 {
        let matrices = self.weights.values().filter(|weight| weight.shape.len() == 2);
        matrices.map(|weight| 2.0 * weight.shape.iter().product::<usize>() as f64).sum()
    }
}

fn limits(device: &Device) -> DeviceLimits {
    let crate::device::Limits { max_binding_bytes, offset_align, max_bindings, half, own_shaders } = device.limits();
    DeviceLimits { max_binding_bytes, offset_align, max_bindings, half, own_shaders }
}
