//! Requests that aren't allowed.

use kvmig_shaders::{ParamError, UnknownKernel, reflect::ShaderError};

use super::{bindings::types, recording::BufferId};

/// A request that isn't allowed. `step` counts the recording's `kernel` and `dispatch` calls from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Work requested outside `run`.
    #[error("`{request}` was called outside `run`; only `limits` and `log` work there")]
    NotRunning {
        /// The request.
        request: &'static str,
    },
    /// A kernel this host doesn't have, or doesn't offer.
    #[error(transparent)]
    UnknownKernel(#[from] UnknownKernel),
    /// A kernel call whose parameters and bindings don't go together.
    #[error("step {step}: {error}")]
    Kernel {
        /// The step.
        step: u32,
        /// What the kernel's check found.
        error: ParamError,
    },
    /// A weight tensor that the plan didn't name.
    #[error("found weights `{name}`, expected a name from the plan")]
    UnknownWeights {
        /// The name.
        name: String,
    },
    /// More than the plan or the host's limits allow.
    #[error("found {found} {what}, expected at most {most} ({whose})")]
    Budget {
        /// Of what, and in which unit.
        what: &'static str,
        /// What the request brings it to.
        found: u64,
        /// The budget.
        most: u64,
        /// Who set it: the plan or the host.
        whose: &'static str,
    },
    /// A buffer of no bytes, or of a length that isn't a multiple of 4.
    #[error("found a {what} buffer of {bytes} bytes, expected a multiple of 4, not 0")]
    BufferLength {
        /// Scratch or params.
        what: &'static str,
        /// Its length.
        bytes: u64,
    },
    /// Bindings that aren't the kernel's or shader's, each once.
    #[error("step {step}: found bindings {found:?}, expected {expected:?}, each once")]
    Indices {
        /// The step.
        step: u32,
        /// Indices given.
        found: Vec<u32>,
        /// Indices expected.
        expected: Vec<u32>,
    },
    /// A range that isn't in its buffer.
    #[error(
        "step {step}, binding {index}: found bytes {offset} .. {offset} + {size}, expected a range in 0 .. {buffer_size}"
    )]
    Range {
        /// The step.
        step: u32,
        /// The binding.
        index: u32,
        /// First byte.
        offset: u64,
        /// Length.
        size: u64,
        /// Length of the buffer.
        buffer_size: u64,
    },
    /// An offset or size that isn't aligned.
    #[error("step {step}, binding {index}: found {what} {found}, expected a multiple of {align}")]
    Alignment {
        /// The step.
        step: u32,
        /// The binding.
        index: u32,
        /// Offset or size.
        what: &'static str,
        /// Its value in bytes.
        found: u64,
        /// What it must be a multiple of.
        align: u32,
    },
    /// A binding that the device can't take.
    #[error("step {step}, binding {index}: found {found} bytes, this device binds at most {most}")]
    BindingLength {
        /// The step.
        step: u32,
        /// The binding.
        index: u32,
        /// Its length.
        found: u64,
        /// The device's limit.
        most: u64,
    },
    /// A buffer bound for what it may not be used for.
    #[error("step {step}, binding {index} ({}): the kernel {does} it, but it may only be {may}", name(.buffer))]
    Access {
        /// The step.
        step: u32,
        /// The binding.
        index: u32,
        /// The buffer.
        buffer: BufferId,
        /// What the kernel does with it.
        does: &'static str,
        /// What may be done with it.
        may: &'static str,
    },
    /// A buffer that a step writes is bound twice in it.
    #[error("step {step}: bindings {first} and {second} are both {}, which the step writes", name(.buffer))]
    Aliased {
        /// The step.
        step: u32,
        /// One binding.
        first: u32,
        /// The other.
        second: u32,
        /// The buffer.
        buffer: BufferId,
    },
    /// A step reads what no step before it wrote, or what isn't its chunk's.
    #[error("step {step}, binding {index} ({}): reads element {element}, which nothing wrote before", name(.buffer))]
    Unwritten {
        /// The step.
        step: u32,
        /// The binding.
        index: u32,
        /// The buffer.
        buffer: BufferId,
        /// Element of the buffer.
        element: u64,
    },
    /// A step writes an element of a target's plane that isn't the chunk's.
    #[error("step {step}, binding {index} ({}): writes element {element}, which is another token's", name(.buffer))]
    Foreign {
        /// The step.
        step: u32,
        /// The binding.
        index: u32,
        /// The buffer.
        buffer: BufferId,
        /// Element of the buffer.
        element: u64,
    },
    /// `run` returned, and part of the target was never written.
    #[error("{} was not written at head {head}, token {token}, element {element}", name(.buffer))]
    Uncovered {
        /// The target view.
        buffer: BufferId,
        /// The head.
        head: u32,
        /// Token of the chunk.
        token: u32,
        /// Element of the head.
        element: u32,
    },
    /// Own shaders on a device that doesn't run them.
    #[error("this device runs the host's kernels only; a module's own shaders need a GPU adapter (--device gpu)")]
    OwnShaders,
    /// A shader or entry point that the module's metadata doesn't have.
    #[error("found {what} `{name}`, expected one of {known:?}")]
    UnknownShader {
        /// Shader, entry point or override constant.
        what: &'static str,
        /// The name.
        name: String,
        /// Those there are.
        known: Vec<String>,
    },
    /// A shader that isn't valid.
    #[error(transparent)]
    Shader(#[from] ShaderError),
    /// A shader that uses what a module's shader can't.
    #[error("shader `{shader}`, entry point `{entry}`: {why}")]
    ShaderUse {
        /// The shader.
        shader: String,
        /// The entry point.
        entry: String,
        /// What it uses, and what it could instead.
        why: String,
    },
}

impl Fault {
    /// The fault in the contract's terms: its class, and one line of text.
    pub(super) fn to_guest(&self) -> types::Fault {
        let why = super::words::one_line(&self.to_string());
        match self {
            Fault::Kernel { error: ParamError::OutOfBounds { .. }, .. } | Fault::Range { .. } => {
                types::Fault::OutOfBounds(why)
            }
            Fault::Budget { .. } | Fault::BindingLength { .. } => types::Fault::Limit(why),
            Fault::Shader(_) | Fault::UnknownShader { .. } | Fault::ShaderUse { .. } => types::Fault::Shader(why),
            _ => types::Fault::Denied(why),
        }
    }
}

/// A buffer in a person's words.
fn name(buffer: &BufferId) -> String {
    let part = |value: &bool| if *value { "values" } else { "keys" };
    match buffer {
        BufferId::Source { layer, value } => format!("source layer {layer}'s {}", part(value)),
        BufferId::Target { layer, value } => format!("target layer {layer}'s {}", part(value)),
        BufferId::SourceRope => "the source's rotation table".into(),
        BufferId::Hidden => "the target's hidden state".into(),
        BufferId::TargetRope => "the target's rotation table".into(),
        BufferId::Weights(i) => format!("weights {i}"),
        BufferId::Scratch(i) => format!("scratch {i}"),
        BufferId::Params(i) => format!("params {i}"),
    }
}
