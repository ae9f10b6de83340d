//! Shorthands for bindings and kernel calls.

use crate::{Binding, Buffer, Fault, gpu};

/// The whole of a buffer as storage binding `index`.
pub fn whole(index: u32, buffer: &Buffer) -> Binding<'_> {
    Binding { index, buffer, offset: 0, size: buffer.size() }
}

/// Bytes `offset .. offset + size` of a buffer as storage binding `index`.
pub fn range(index: u32, buffer: &Buffer, offset: u64, size: u64) -> Binding<'_> {
    Binding { index, buffer, offset, size }
}

/// Requests one of the host's kernels with `buffers` as its bindings 0, 1, 2 …, each whole.
///
/// # Errors
/// The host's fault: it ends the recording.
pub fn kernel<const N: usize>(name: &str, params: &[u8], buffers: [&Buffer; N]) -> Result<(), Fault> {
    let mut index = 0;
    let bindings = buffers.map(|buffer| {
        let binding = whole(index, buffer);
        index += 1;
        binding
    });
    gpu::kernel(name, params, &bindings)
}
