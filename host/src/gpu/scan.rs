//! The host's scan of every output, on the device and on bit patterns, with a planted fault as its own control.

use kvmig_shaders::{Kernel, WeightFormat, params::POISON};

use super::{
    Context,
    buffers::{self, JobBuffers},
    pipelines,
    prepare::{Dispatch, entry},
};
use crate::{
    cache::CacheLayout,
    device::{
        BufferName, DeviceError,
        check::{SCAN_COUNTS_BYTES, scan_call},
    },
    sandbox::recording::BufferId,
};

/// Distance of two outputs' counts, in bytes: the largest offset alignment of any adapter.
const STEP: u64 = 256;

/// The planted words: poison, another NaN and an infinity of either sign among good ones.
const PLANTED: [u32; 8] = [POISON, 0x7fc0_0001, 0x3f80_0000, POISON, 0xff80_0000, 0, POISON, 0x0000_0001];
/// What the scan must report of them: poison, other NaN, infinite.
const EXPECTED: [u32; 3] = [3, 1, 1];

/// Counts of all outputs; the last place is the control's.
#[derive(Debug)]
pub(super) struct Scan {
    pub(super) counts: wgpu::Buffer,
    planted: wgpu::Buffer,
    outputs: usize,
}

impl Scan {
    pub(super) fn allocate(context: &Context, outputs: usize) -> Result<Scan, DeviceError> {
        let planted = buffers::storage(context, "planted", 4 * PLANTED.len() as u64)?;
        context.queue.write_buffer(&planted, 0, bytemuck::cast_slice(&PLANTED));
        let counts = buffers::storage(context, "counts", STEP * (outputs as u64 + 1))?;
        Ok(Scan { counts, planted, outputs })
    }

    /// Bytes of the counts.
    pub(super) fn bytes(&self) -> u64 {
        STEP * (self.outputs as u64 + 1)
    }

    /// The dispatches that scan outputs of `tokens` tokens, the control last.
    pub(super) fn dispatches(
        &self,
        context: &Context,
        held: &JobBuffers,
        layout: &CacheLayout,
        tokens: u32,
    ) -> Result<Vec<Dispatch>, DeviceError> {
        let pipeline = pipelines::kernel(context, Kernel::Scan, WeightFormat::F32)?;
        let (heads, tokens, d) = (layout.kv_heads, tokens as usize, layout.head_dim);
        let output = (scan_call(heads, tokens, d, tokens * d)?, 4 * (heads * tokens * d) as u64);
        let control = (scan_call(1, 1, PLANTED.len(), PLANTED.len())?, 4 * PLANTED.len() as u64);
        let (block, control_block) = (output.0.gpu_params(0), control.0.gpu_params(0));
        let blocks = buffers::storage(context, "scan constants", 2 * STEP)?;
        context.queue.write_buffer(&blocks, 0, &block);
        context.queue.write_buffer(&blocks, STEP, &control_block);
        let bytes = block.len() as u64;
        let scans = held.outputs.iter().map(|held| (&held.buffer, &output, 0)).chain([(&self.planted, &control, STEP)]);
        let mut dispatches = Vec::new();
        for (i, (buffer, (call, words), block)) in scans.enumerate() {
            let group = context.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some("scan"),
                layout: &pipeline.get_bind_group_layout(0),
                entries: &[
                    entry(0, buffer, 0, *words),
                    entry(1, &self.counts, STEP * i as u64, SCAN_COUNTS_BYTES),
                    entry(2, &blocks, block, bytes),
                ],
            });
            // A word is read once: a chunk's worth of them is far from running for seconds.
            for slice in call.slices(u64::MAX) {
                let (pipeline, group) = (pipeline.clone(), group.clone());
                dispatches.push(Dispatch { pipeline, group, workgroups: slice.workgroups, flops: Some(0) });
            }
        }
        Ok(dispatches)
    }

    /// Judges the counts that were read back.
    ///
    /// # Errors
    /// [`DeviceError::Scan`] if the control is not what was planted, [`DeviceError::Output`] for the first bad output.
    pub(super) fn judge(
        &self,
        context: &Context,
        held: &JobBuffers,
        counts: &[u8],
        slots: &std::ops::Range<usize>,
    ) -> Result<(), DeviceError> {
        let count = |place: usize, which: usize| {
            let at = place * STEP as usize + 4 * which;
            counts.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(u32::MAX, u32::from_le_bytes)
        };
        let control: [u32; 3] = std::array::from_fn(|which| count(self.outputs, which));
        if control != EXPECTED {
            let sum = |counts: [u32; 3]| counts.into_iter().map(u64::from).sum();
            return Err(DeviceError::Scan {
                device: context.title().to_owned(),
                expected: sum(EXPECTED),
                found: sum(control),
            });
        }
        for (i, output) in held.outputs.iter().enumerate() {
            let poison = u64::from(count(i, 0));
            let non_finite = u64::from(count(i, 1)) + u64::from(count(i, 2));
            if poison + non_finite > 0 {
                return Err(DeviceError::Output {
                    buffer: BufferName(BufferId::Target { layer: output.layer, value: output.value }),
                    first: slots.start,
                    end: slots.end,
                    poison,
                    non_finite,
                });
            }
        }
        Ok(())
    }
}
