//! Buffers in, checked work, buffers out: on the CPU or through wgpu.
