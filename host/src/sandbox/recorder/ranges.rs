//! Ranges of buffers that a step binds.

use kvmig_shaders::Access;

use super::BufferHandle;
use crate::sandbox::{DeviceLimits, Fault, recording::Binding};

/// A binding as a guest asks for it.
#[derive(Clone, Copy, Debug)]
pub(in crate::sandbox) struct Range {
    pub(in crate::sandbox) index: u32,
    pub(in crate::sandbox) buffer: BufferHandle,
    pub(in crate::sandbox) offset: u64,
    pub(in crate::sandbox) size: u64,
}

impl Range {
    pub(super) fn binding(&self) -> Binding {
        Binding { index: self.index, buffer: self.buffer.id, offset: self.offset, size: self.size }
    }

    /// That the range lies in its buffer, and that the device can bind it.
    pub(super) fn check(&self, step: u32, device: &DeviceLimits) -> Result<(), Fault> {
        let Range { index, offset, size, .. } = *self;
        let buffer_size = self.buffer.bytes;
        if size == 0 || offset.checked_add(size).is_none_or(|end| end > buffer_size) {
            return Err(Fault::Range { step, index, offset, size, buffer_size });
        }
        for (what, found, align) in [("offset", offset, device.offset_align.max(4)), ("size", size, 4)] {
            if found % u64::from(align) != 0 {
                return Err(Fault::Alignment { step, index, what, found, align });
            }
        }
        let most = device.max_binding_bytes;
        if size > most {
            return Err(Fault::BindingLength { step, index, found: size, most });
        }
        Ok(())
    }

    /// That the buffer may be used so.
    pub(super) fn check_access(&self, step: u32, access: Access) -> Result<(), Fault> {
        let (reads, writes) = (access != Access::Write, access != Access::Read);
        let (does, may) = match (reads && !self.buffer.may_read(), writes && !self.buffer.may_write()) {
            (false, false) => return Ok(()),
            (true, _) => ("reads", "written"),
            (false, true) => ("writes", "read"),
        };
        Err(Fault::Access { step, index: self.index, buffer: self.buffer.id, does, may })
    }

    /// That the range is as long as a shader's variable.
    pub(super) fn check_length(&self, step: u32, least: u64) -> Result<(), Fault> {
        let Range { index, offset, size, .. } = *self;
        if size >= least {
            return Ok(());
        }
        Err(Fault::Range { step, index, offset, size: least, buffer_size: offset + size })
    }
}

/// Sorts the bindings by index, and checks that they are the expected ones.
pub(super) fn check_indices(
    step: u32,
    ranges: &mut [Range],
    expected: impl Iterator<Item = u32> + Clone,
) -> Result<(), Fault> {
    ranges.sort_by_key(|range| range.index);
    if ranges.iter().map(|range| range.index).eq(expected.clone()) {
        return Ok(());
    }
    // A flood of bindings is no reason for a message of megabytes.
    let found = ranges.iter().take(32).map(|range| range.index).collect();
    Err(Fault::Indices { step, found, expected: expected.collect() })
}

/// That no buffer which the step writes is bound a second time.
///
/// Whole buffers are compared, not ranges: an adapter tracks the use of whole buffers, and refuses one that is both read
/// and written in one dispatch.
pub(super) fn check_aliasing(step: u32, ranges: &[Range], access: impl Fn(usize) -> Access) -> Result<(), Fault> {
    for (at, range) in ranges.iter().enumerate() {
        let other = ranges[..at].iter().enumerate().find(|(before, other)| {
            other.buffer.id == range.buffer.id && (access(at) != Access::Read || access(*before) != Access::Read)
        });
        if let Some((_, other)) = other {
            return Err(Fault::Aliased { step, first: other.index, second: range.index, buffer: range.buffer.id });
        }
    }
    Ok(())
}
