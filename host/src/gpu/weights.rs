//! An artifact's weights in an adapter's memory.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kvmig_gate::Loaded;

use super::{Context, buffers};
use crate::device::DeviceError;

/// Bytes written between two waits: what the driver holds of the upload beside the weights themselves.
const PIECE: usize = 32 << 20;

/// Longest wait for one piece.
const DEADLINE: Duration = Duration::from_secs(60);

/// Weights by name.
#[derive(Debug)]
pub(crate) struct GpuWeights {
    context: Arc<Context>,
    /// In the artifact's own bytes.
    tensors: BTreeMap<String, wgpu::Buffer>,
}

impl GpuWeights {
    /// Copies every tensor.
    pub(crate) fn upload(context: &Arc<Context>, loaded: &Loaded) -> Result<GpuWeights, DeviceError> {
        let stage = "uploading the weights";
        let tensors = context.scoped(stage, || {
            let mut tensors = BTreeMap::new();
            let mut pending = 0;
            for (name, tensor) in loaded.weights() {
                let bytes: &[u8] = bytemuck::cast_slice(tensor.words());
                let buffer = buffers::storage(context, name, bytes.len() as u64)?;
                for (i, piece) in bytes.chunks(PIECE).enumerate() {
                    context.queue.write_buffer(&buffer, (i * PIECE) as u64, piece);
                    pending += piece.len();
                    if pending >= PIECE {
                        context.wait(stage, &context.queue.submit([]), DEADLINE)?;
                        pending = 0;
                    }
                }
                tensors.insert(name.clone(), buffer);
            }
            context.wait(stage, &context.queue.submit([]), DEADLINE)?;
            Ok(tensors)
        })?;
        Ok(GpuWeights { context: Arc::clone(context), tensors })
    }

    /// Whether they lie on this device.
    pub(super) fn belongs_to(&self, context: &Context) -> bool {
        std::ptr::eq(Arc::as_ptr(&self.context), context)
    }

    /// One tensor.
    pub(super) fn get(&self, name: &str) -> Option<&wgpu::Buffer> {
        self.tensors.get(name)
    }
}
