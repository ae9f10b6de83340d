//! What a guest asked for: plain data, checked before anything runs.
//!
//! A recording is made once for a chunk of `tokens` tokens and replayed chunk by chunk: the buffers it names stay the
//! same, the source and target views they stand for move on.

/// A buffer that a recording names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BufferId {
    /// Keys (`value == false`) or values of a source layer, this chunk's tokens. Read only.
    Source {
        /// Layer of the source model.
        layer: u32,
        /// Values rather than keys.
        value: bool,
    },
    /// Keys or values of a target layer, this chunk's tokens. Written, never read before it was written.
    Target {
        /// Layer of the target model.
        layer: u32,
        /// Values rather than keys.
        value: bool,
    },
    /// The source's RoPE table of this chunk's positions, `[C, rope_dims / 2, 2]` f32 (cosine, sine). Read only.
    SourceRope,
    /// The target's RoPE table, likewise.
    TargetRope,
    /// The target's residual stream of this chunk's tokens, `[C, hidden]` f32, as it enters the last of its native layers.
    /// Read only.
    Hidden,
    /// A weight tensor: index into [`Recording::weights`]. Read only.
    Weights(u32),
    /// Scratch: index into [`Recording::scratch`]. Poisoned before every chunk.
    Scratch(u32),
    /// Constant bytes the guest passed: index into [`Recording::params`]. Read only.
    Params(u32),
}

/// A range of a buffer bound to a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Binding {
    /// Index in bind group 0.
    pub index: u32,
    /// The buffer.
    pub buffer: BufferId,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub size: u64,
}

/// One step of a recording.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// One of the host's own kernels, by its versioned name (`affine@1`); its params were parsed and checked.
    Kernel {
        /// The kernel.
        kernel: kvmig_shaders::Kernel,
        /// Its parameter block, as the guest gave it.
        params: Vec<u8>,
        /// Its storage bindings, in the order of the kernel's declaration.
        bindings: Vec<Binding>,
    },
    /// A dispatch of the module's own WGSL (GPU adapters only).
    Dispatch {
        /// Index into [`Recording::pipelines`].
        pipeline: u32,
        /// Bindings of group 0.
        bindings: Vec<Binding>,
        /// Workgroups in x, y, z.
        workgroups: [u32; 3],
    },
}

/// A compute pipeline of the module's own WGSL.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineSpec {
    /// Name of the shader in the module's metadata.
    pub shader: String,
    /// Entry point.
    pub entry: String,
    /// Override constants.
    pub constants: Vec<(String, f64)>,
}

/// A checked recording of one chunk.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    /// Tokens of the chunk.
    pub tokens: u32,
    /// Names of the weight tensors that [`BufferId::Weights`] indexes.
    pub weights: Vec<String>,
    /// Scratch sizes in bytes.
    pub scratch: Vec<u64>,
    /// Constant blocks.
    pub params: Vec<Vec<u8>>,
    /// Pipelines of the module's own shaders.
    pub pipelines: Vec<PipelineSpec>,
    /// The steps, in order; each sees all writes of those before it.
    pub steps: Vec<Step>,
}
