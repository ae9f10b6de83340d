//! What a guest may use up, and what a device can take.

use std::time::Duration;

/// Bounds on one call of a guest. Only a module that misbehaves meets them: the ridge module stays below a hundredth of
/// each on a model of 80 layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxLimits {
    /// Bytes of a component.
    pub component_bytes: usize,
    /// Wasm instructions, about; counted by the guest itself, so that the same call meets it at the same place everywhere.
    pub fuel: u64,
    /// Time on the clock, for what instructions don't bound (copying memory, calls of the host).
    pub deadline: Duration,
    /// Bytes of linear memory.
    pub memory_bytes: usize,
    /// Bytes of stack.
    pub stack_bytes: usize,
    /// Calls of the host.
    pub host_calls: u32,
    /// Buffers and pipelines held at the same time.
    pub handles: u32,
    /// Lines of log that are kept; a module that goes on talking is stopped at four times as many.
    pub log_lines: u32,
    /// Calls of `kernel` and `dispatch` in a recording.
    pub steps: u32,
    /// Shader invocations of a recording, all steps together.
    pub invocations: u64,
    /// Bytes of scratch in a recording.
    pub scratch_bytes: u64,
    /// Bytes of constants in a recording, kernels' parameters included.
    pub params_bytes: u64,
    /// Weight tensors in a plan.
    pub weights: u32,
    /// Bytes of weights in a plan, as f32.
    pub weight_bytes: u64,
    /// Adjacent pieces that the strided ranges of a recording may come to: what checking them costs the host.
    pub runs: u64,
}

impl Default for SandboxLimits {
    fn default() -> SandboxLimits {
        const MIB: u64 = 1 << 20;
        SandboxLimits {
            component_bytes: 64 << 20,
            fuel: 500_000_000,
            deadline: Duration::from_secs(10),
            memory_bytes: 64 << 20,
            stack_bytes: 512 << 10,
            host_calls: 100_000,
            handles: 4_096,
            log_lines: 64,
            steps: 4_096,
            invocations: 1 << 36,
            scratch_bytes: 1024 * MIB,
            params_bytes: 4 * MIB,
            weights: 4_096,
            weight_bytes: 256 * 1024 * MIB,
            runs: 8_000_000,
        }
    }
}

/// What a device can take; part of what a recording depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceLimits {
    /// Longest range of a binding, in bytes.
    pub max_binding_bytes: u64,
    /// What a binding's offset is a multiple of, in bytes.
    pub offset_align: u32,
    /// Storage bindings of one dispatch.
    pub max_bindings: u32,
    /// Whether shaders may use f16.
    pub half: bool,
    /// Whether a module's own shaders run here.
    pub own_shaders: bool,
}

impl DeviceLimits {
    /// What every adapter that kvmig supports can take (WebGPU's guaranteed limits); the CPU device uses it too, so that
    /// one plan serves both.
    pub const FLOOR: DeviceLimits = DeviceLimits {
        max_binding_bytes: 128 << 20,
        offset_align: 256,
        max_bindings: 8,
        half: false,
        own_shaders: false,
    };
}

impl Default for DeviceLimits {
    fn default() -> DeviceLimits {
        DeviceLimits::FLOOR
    }
}
