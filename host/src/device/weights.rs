//! An artifact's weights where its device wants them.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use half::f16;
use kvmig_gate::{Digest, Loaded, WeightElem, WeightTensor};

use super::{Device, DeviceError, SMALLEST_BINDING_LIMIT};
use crate::gpu::GpuWeights;

#[cfg(target_endian = "big")]
compile_error!("weights are little-endian words that are used in place; a big-endian host needs a conversion here");

/// Weights resident on one device. Holds the artifact it was made from, so that what was hashed is what runs.
#[derive(Debug)]
pub struct ResidentWeights {
    loaded: Arc<Loaded>,
    place: Place,
}

#[derive(Debug)]
enum Place {
    /// Halves widened to f32, by name; f32 tensors stay in `loaded`.
    Cpu(BTreeMap<String, Vec<f32>>),
    Gpu(GpuWeights),
}

impl ResidentWeights {
    /// Digest of the artifact whose weights these are.
    pub fn artifact(&self) -> Digest {
        self.loaded.artifact()
    }

    /// Bytes they take on the device.
    pub fn bytes(&self) -> u64 {
        match &self.place {
            Place::Cpu(_) => cpu_bytes(&self.loaded),
            Place::Gpu(_) => gpu_bytes(&self.loaded),
        }
    }

    /// The artifact.
    pub(crate) fn loaded(&self) -> &Loaded {
        &self.loaded
    }

    /// The tensor as f32 elements; `None` if there is no such tensor or the weights are on a GPU.
    pub(super) fn on_cpu(&self, name: &str) -> Option<&[f32]> {
        let Place::Cpu(widened) = &self.place else { return None };
        let tensor = self.loaded.weights().get(name)?;
        match tensor.elem() {
            WeightElem::F32 => Some(f32_elements(tensor)),
            WeightElem::F16 => widened.get(name).map(Vec::as_slice),
        }
    }

    /// The weights on a GPU; `None` if they are on the CPU.
    pub(crate) fn on_gpu(&self) -> Option<&GpuWeights> {
        match &self.place {
            Place::Cpu(_) => None,
            Place::Gpu(weights) => Some(weights),
        }
    }
}

fn f32_elements(tensor: &WeightTensor) -> &[f32] {
    &bytemuck::cast_slice::<u64, f32>(tensor.words())[..tensor.byte_len() / 4]
}

/// The tensor's elements, widened where they are halves.
pub(super) fn widen(tensor: &WeightTensor) -> Cow<'_, [f32]> {
    match tensor.elem() {
        WeightElem::F32 => f32_elements(tensor).into(),
        WeightElem::F16 => {
            let halves = &bytemuck::cast_slice::<u64, f16>(tensor.words())[..tensor.byte_len() / 2];
            halves.iter().map(|x| x.to_f32()).collect::<Vec<_>>().into()
        }
    }
}

/// Bytes that an artifact's weights will take on a device.
pub(super) fn bytes(device: &Device, loaded: &Loaded) -> u64 {
    match device {
        Device::Cpu(_) => cpu_bytes(loaded),
        Device::Gpu(_) => gpu_bytes(loaded),
    }
}

/// What was read, which is used where it lies, and what is widened beside it.
fn cpu_bytes(loaded: &Loaded) -> u64 {
    let tensor = |tensor: &WeightTensor| match tensor.elem() {
        WeightElem::F32 => tensor.byte_len(),
        WeightElem::F16 => 3 * tensor.byte_len(),
    };
    loaded.weights().values().map(|weight| tensor(weight) as u64).sum()
}

/// A copy. (The host keeps what was read, to be held against permits; that is no memory of the adapter.)
fn gpu_bytes(loaded: &Loaded) -> u64 {
    loaded.weights().values().map(|tensor| 8 * tensor.words().len() as u64).sum()
}

pub(super) fn load(device: &Device, loaded: &Arc<Loaded>) -> Result<ResidentWeights, DeviceError> {
    let limit = SMALLEST_BINDING_LIMIT.min(device.limits().max_binding_bytes);
    for (name, tensor) in loaded.weights() {
        let bytes = tensor.byte_len() as u64;
        if bytes > limit {
            return Err(DeviceError::TooLarge {
                device: device.info().name,
                what: format!("weight tensor `{name}`"),
                bytes,
                limit,
                mend: "Fit the pair again with a smaller k, or with f16 weights: a tensor must fit one binding of every \
                       supported adapter",
            });
        }
    }
    let place = match device {
        Device::Cpu(_) => Place::Cpu(
            loaded
                .weights()
                .iter()
                .filter(|(_, tensor)| tensor.elem() == WeightElem::F16)
                .map(|(name, tensor)| (name.clone(), widen(tensor).into_owned()))
                .collect(),
        ),
        Device::Gpu(gpu) => Place::Gpu(GpuWeights::upload(&gpu.context, loaded)?),
    };
    Ok(ResidentWeights { loaded: Arc::clone(loaded), place })
}
