//! Buffers in, checked work, buffers out: on the CPU or through a GPU.
//!
//! A [`Device`] is opened by name and has passed its self-test when it exists. It keeps an artifact's weights
//! ([`Device::load_weights`]) and executes jobs on them ([`Device::execute`]): recordings replayed chunk by chunk over a
//! source cache. Outputs are poisoned before and scanned after; what the caller gets back is either written in full and
//! finite, or an error.

pub(crate) mod check;
mod choice;
pub mod conform;
mod cpu;
mod error;
mod job;
mod list;
mod open;
mod reference;
mod selftest;
mod weights;

use serde::Serialize;

pub use choice::{DeviceChoice, ParseDeviceChoiceError};
pub use error::DeviceError;
pub use job::{BufferName, Job, Lower, Pacing, Report, ViewStrides};
pub use list::{DeviceEntry, DeviceList, Missing, SelfTestStatus, devices};
pub use selftest::SelfTest;
pub use weights::ResidentWeights;

use crate::{
    cache::{Elem, KvPlanes},
    gpu,
};

/// The smallest binding limit kvmig supports, in bytes; weight tensors beyond it are refused on every device, so that a
/// pair that runs on one runs on all.
pub const SMALLEST_BINDING_LIMIT: u64 = 128 << 20;

/// A device that is open and has passed its self-test.
#[derive(Debug)]
pub enum Device {
    /// The kernels' mirrors on this machine's cores.
    Cpu(CpuDevice),
    /// A GPU adapter.
    Gpu(GpuDevice),
}

/// The CPU. There is nothing to open; the type stands for the choice.
#[derive(Debug, Default)]
pub struct CpuDevice(());

/// An open GPU adapter.
#[derive(Debug)]
pub struct GpuDevice {
    pub(crate) context: std::sync::Arc<gpu::Context>,
    info: DeviceInfo,
}

/// What a device is, as run records name it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceInfo {
    /// `cpu` or `gpu`.
    pub kind: DeviceKind,
    /// The processor's or adapter's name.
    pub name: String,
    /// `cpu`, `vulkan`, `gl`, `metal` or `dx12`.
    pub backend: String,
    /// Driver and version; for the CPU the vector instructions that the kernels use.
    pub driver: String,
}

/// The two kinds of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The CPU.
    Cpu,
    /// A GPU adapter, hardware or software.
    Gpu,
}

/// What a module may count on; the WIT record `device-limits`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Limits {
    /// Bytes that one binding may span.
    pub max_binding_bytes: u64,
    /// What the offset of a binding must be a multiple of, in bytes.
    pub offset_align: u32,
    /// Storage bindings of one dispatch.
    pub max_bindings: u32,
    /// Whether the module's own shaders may compute in half precision.
    pub half: bool,
    /// Whether the module's own shaders run at all.
    pub own_shaders: bool,
}

impl Device {
    /// Opens a device by name and runs its self-test, once per adapter and process.
    ///
    /// # Errors
    /// [`DeviceError::NotFound`] where an explicit choice is missing, [`DeviceError::Open`], [`DeviceError::SelfTest`].
    /// `auto` passes over GPUs that fail, and ends at the CPU.
    pub fn open(choice: &DeviceChoice) -> Result<Device, DeviceError> {
        open::open(choice)
    }

    /// What it is.
    pub fn info(&self) -> DeviceInfo {
        match self {
            Device::Cpu(_) => list::cpu_info(),
            Device::Gpu(gpu) => gpu.info.clone(),
        }
    }

    /// What a module may count on.
    pub fn limits(&self) -> Limits {
        match self {
            // Alignment: a cache line, so that panels that a guest places itself start on one. The number of bindings is
            // that of the weakest adapter in the field, so that a recording is not made for the CPU alone.
            Device::Cpu(_) => Limits {
                max_binding_bytes: u64::from(u32::MAX),
                offset_align: 64,
                max_bindings: 8,
                half: false,
                own_shaders: false,
            },
            Device::Gpu(gpu) => {
                let limits = gpu.context.limits();
                Limits {
                    max_binding_bytes: limits.max_storage_buffer_binding_size,
                    offset_align: limits.min_storage_buffer_offset_alignment,
                    max_bindings: limits.max_storage_buffers_per_shader_stage,
                    half: gpu.context.half(),
                    own_shaders: true,
                }
            }
        }
    }

    /// How a guest sees one layer of `planes` in a chunk of `tokens` tokens. Recordings hold for one such answer of the
    /// source and one of the target.
    ///
    /// The CPU uses f32 planes in place, so that heads lie the cache's capacity apart; elsewhere a chunk is staged densely.
    ///
    /// # Errors
    /// [`DeviceError::Job`] if the view is beyond the kernels' 32-bit indices.
    pub fn view_strides(&self, planes: &KvPlanes, tokens: u32) -> Result<ViewStrides, DeviceError> {
        let layout = planes.layout();
        let dense = tokens as usize * layout.head_dim;
        let head = match self {
            Device::Cpu(_) if layout.elem == Elem::F32 => planes.head_stride(),
            _ => dense,
        };
        ViewStrides::new(layout, head, tokens)
    }

    /// Makes an artifact's weights resident. On the CPU halves are widened once and f32 tensors used where they lie; a
    /// GPU gets a copy of the bytes as they are.
    ///
    /// # Errors
    /// [`DeviceError::TooLarge`] for a tensor beyond [`SMALLEST_BINDING_LIMIT`] or the adapter's limit, and what an upload
    /// can fail with.
    pub fn load_weights(&self, loaded: &std::sync::Arc<kvmig_gate::Loaded>) -> Result<ResidentWeights, DeviceError> {
        weights::load(self, loaded)
    }

    /// Bytes that an artifact's weights will take there.
    pub fn weight_bytes(&self, loaded: &kvmig_gate::Loaded) -> u64 {
        weights::bytes(self, loaded)
    }

    /// Replays the job's recordings and writes the target's slots.
    ///
    /// # Errors
    /// Any [`DeviceError`]; the target's slots are then undefined and must be discarded.
    pub fn execute(&self, job: Job<'_>) -> Result<Report, DeviceError> {
        match self {
            Device::Cpu(_) => cpu::execute(job),
            Device::Gpu(gpu) => gpu::execute(&gpu.context, job),
        }
    }
}
