//! The buffers of one job: what is uploaded for a chunk, what kernels write, what is read back.

use std::collections::BTreeMap;

use kvmig_shaders::params::POISON;

use super::Context;
use crate::{
    cache::{KvPlanes, LayerKv, Plane},
    device::{DeviceError, Job, check},
    sandbox::recording::{BufferId, Recording},
};

/// Largest offset alignment of any adapter, in bytes.
const ALIGN: u64 = 256;

/// The word that fills outputs and scratch before every chunk, as bytes of a buffer to copy from.
const POISON_BYTES: u64 = 1 << 20;

/// A storage buffer that can be copied into and from.
///
/// # Errors
/// [`DeviceError::TooLarge`] beyond the adapter's limits.
pub(super) fn storage(context: &Context, label: &str, bytes: u64) -> Result<wgpu::Buffer, DeviceError> {
    use wgpu::BufferUsages as Usage;
    create(context, label, bytes, Usage::STORAGE | Usage::COPY_DST | Usage::COPY_SRC)
}

/// A buffer of at least `bytes`, rounded up to 16 (bindings of uniforms and vectors want that).
pub(super) fn create(
    context: &Context,
    label: &str,
    bytes: u64,
    usage: wgpu::BufferUsages,
) -> Result<wgpu::Buffer, DeviceError> {
    let size = bytes.max(16).next_multiple_of(16);
    let limit = context.limits.max_buffer_size;
    if size > limit {
        return Err(DeviceError::TooLarge {
            device: context.title().to_owned(),
            what: format!("buffer `{label}`"),
            bytes: size,
            limit,
            mend: "Let the module ask for fewer tokens per chunk",
        });
    }
    Ok(context.device.create_buffer(&wgpu::BufferDescriptor {
        label: Some(label),
        size,
        usage,
        mapped_at_creation: false,
    }))
}

/// Bytes of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Region {
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// Where a recording's inputs lie in the upload buffer: the source views it reads and the RoPE tables.
#[derive(Debug)]
pub(super) struct Inputs {
    pub(super) regions: BTreeMap<BufferId, Region>,
    pub(super) bytes: u64,
}

impl Inputs {
    /// Lays out what `recording` reads of the job.
    pub(super) fn of(recording: &Recording, job: &Job<'_>) -> Inputs {
        let (source, target) = (job.source.layout(), job.target.layout());
        let tokens = u64::from(recording.tokens);
        let mut inputs = Inputs { regions: BTreeMap::new(), bytes: 0 };
        for binding in recording.steps.iter().flat_map(check::bindings) {
            let bytes = match binding.buffer {
                BufferId::Source { .. } => 4 * tokens * source.width() as u64,
                BufferId::SourceRope => check::rope_bytes(recording.tokens, source.rope.dims),
                BufferId::TargetRope => check::rope_bytes(recording.tokens, target.rope.dims),
                BufferId::Hidden => 4 * tokens * job.hidden_width() as u64,
                _ => continue,
            };
            let offset = inputs.bytes;
            if let std::collections::btree_map::Entry::Vacant(entry) = inputs.regions.entry(binding.buffer) {
                entry.insert(Region { offset, bytes });
                inputs.bytes = (offset + bytes).next_multiple_of(ALIGN);
            }
        }
        inputs
    }
}

/// One of a target layer's two planes, staged.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) layer: u32,
    pub(super) value: bool,
    pub(super) buffer: wgpu::Buffer,
}

/// Everything one job allocates; the chunks share it.
#[derive(Debug)]
pub(super) struct JobBuffers {
    /// Source views and RoPE tables of the chunk.
    pub(super) upload: wgpu::Buffer,
    pub(super) outputs: Vec<Output>,
    pub(super) scratch: Vec<wgpu::Buffer>,
    /// Filled with poison, once.
    pub(super) poison: wgpu::Buffer,
}

impl JobBuffers {
    /// Allocates for the largest of the job's chunks.
    pub(super) fn allocate(
        context: &Context,
        job: &Job<'_>,
        recordings: &[&Recording],
        upload_bytes: u64,
    ) -> Result<JobBuffers, DeviceError> {
        let layout = job.target.layout();
        let tokens = recordings.iter().map(|recording| u64::from(recording.tokens)).max().unwrap_or(0);
        let bytes = 4 * tokens * layout.width() as u64;
        let mut outputs = Vec::with_capacity(2 * layout.layers);
        for layer in job.mapped_layers() {
            for value in [false, true] {
                let label = format!("target {} {layer}", if value { "v" } else { "k" });
                outputs.push(Output { layer: layer as u32, value, buffer: storage(context, &label, bytes)? });
            }
        }
        let count = recordings.iter().map(|recording| recording.scratch.len()).max().unwrap_or(0);
        let scratch = (0..count)
            .map(|i| {
                let bytes =
                    recordings.iter().filter_map(|recording| recording.scratch.get(i)).max().copied().unwrap_or(0);
                storage(context, &format!("scratch {i}"), bytes)
            })
            .collect::<Result<_, _>>()?;
        let poison = storage(context, "poison", POISON_BYTES)?;
        context.queue.write_buffer(&poison, 0, bytemuck::cast_slice(&vec![POISON; POISON_BYTES as usize / 4]));
        Ok(JobBuffers { upload: storage(context, "upload", upload_bytes)?, outputs, scratch, poison })
    }

    /// Encodes the poisoning of the first `bytes` of `buffer`.
    pub(super) fn encode_poison(&self, encoder: &mut wgpu::CommandEncoder, buffer: &wgpu::Buffer, bytes: u64) {
        let mut at = 0;
        while at < bytes {
            let piece = (bytes - at).min(POISON_BYTES);
            encoder.copy_buffer_to_buffer(&self.poison, 0, buffer, at, piece);
            at += piece;
        }
    }
}

/// The plane that a view stands for.
pub(super) fn plane(layer: &LayerKv, value: bool) -> &Plane {
    if value { &layer.v } else { &layer.k }
}

/// Calls `write(byte offset, bytes)` for the rows `slots` of one plane, head by head, as f32.
pub(super) fn stage_plane(
    planes: &KvPlanes,
    plane: &Plane,
    slots: &std::ops::Range<usize>,
    widened: &mut Vec<f32>,
    mut write: impl FnMut(usize, &[u8]),
) {
    let layout = planes.layout();
    let elements = slots.len() * layout.head_dim;
    for head in 0..layout.kv_heads {
        let from = planes.offset(head, slots.start);
        let to = 4 * head * elements;
        match plane.as_f32() {
            Some(values) => write(to, bytemuck::cast_slice(&values[from..from + elements])),
            None => {
                widened.resize(elements, 0.0);
                plane.read(from, widened);
                write(to, bytemuck::cast_slice(widened));
            }
        }
    }
}
