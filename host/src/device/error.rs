//! What can go wrong between a job and its checked result.

use std::time::Duration;

use super::BufferName;

/// A device that can't be had, or work on it that can't be trusted. One variant for each thing a caller could do about it.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The device that was asked for is not there.
    #[error("--device {asked}: no such device; found {found}. {mend}")]
    NotFound {
        /// What was asked for.
        asked: String,
        /// What is there, as `--device` would name it.
        found: String,
        /// What would make it appear.
        mend: String,
    },
    /// The adapter is there, but gives no device.
    #[error(
        "{device}: the driver refused to open the adapter: {reason}. Update the driver, or choose another --device"
    )]
    Open {
        /// The adapter.
        device: String,
        /// The driver's words.
        reason: String,
    },
    /// The adapter computes wrong numbers.
    #[error(
        "{device}: refused, because its self-test is wrong: {case} has an error of {error:.3e} where at most {bound:.3e} \
         is explained by rounding. Update the driver, or choose another --device"
    )]
    SelfTest {
        /// The adapter.
        device: String,
        /// The case that failed.
        case: String,
        /// Largest error found.
        error: f64,
        /// Bound it was held against.
        bound: f64,
    },
    /// Something does not fit the device.
    #[error("{device}: {what} takes {bytes} bytes, the limit is {limit}. {mend}")]
    TooLarge {
        /// The device.
        device: String,
        /// The thing.
        what: String,
        /// Its size in bytes.
        bytes: u64,
        /// The device's limit in bytes.
        limit: u64,
        /// How to stay below it.
        mend: &'static str,
    },
    /// A module dispatches its own WGSL, and the device runs none.
    #[error(
        "step {step}: the module dispatches its own shader `{shader}`, which needs a GPU adapter and the device is the \
         CPU. Choose one of `kvmig devices` with --device, or a mapper that uses only the host's kernels"
    )]
    NeedsGpu {
        /// Index of the step in the recording.
        step: usize,
        /// The shader's name.
        shader: String,
    },
    /// A job whose parts disagree.
    #[error("job: {field} is {found}, expected {expected}")]
    Job {
        /// The part.
        field: &'static str,
        /// What it is.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// A recording that can't be replayed with this job.
    #[error("step {step}: {field} is {found}, expected {expected}")]
    Recording {
        /// Index of the step.
        step: usize,
        /// The part of the step.
        field: String,
        /// What it is.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// A kernel of the host refused its parameters.
    #[error("step {step}: {error}")]
    Kernel {
        /// Index of the step.
        step: usize,
        /// The kernel's reason.
        error: kvmig_shaders::check::ParamError,
    },
    /// A kernel's mirror refused its slices.
    #[error("step {step}: {error}")]
    Mirror {
        /// Index of the step.
        step: usize,
        /// The mirror's reason.
        error: kvmig_shaders::cpu::CpuError,
    },
    /// The module's own shader is refused.
    #[error("shader `{shader}`: {reason}")]
    Shader {
        /// Name in the module's metadata.
        shader: String,
        /// Why.
        reason: String,
    },
    /// A part of the output was never written, or is not finite.
    #[error(
        "{buffer}, slots {first}..{end}: {poison} of its elements were never written and {non_finite} are infinite or \
         NaN; the mapped cache is discarded"
    )]
    Output {
        /// The view that failed the scan.
        buffer: BufferName,
        /// First slot of the chunk.
        first: usize,
        /// Slot after the chunk's last.
        end: usize,
        /// Elements still poisoned.
        poison: u64,
        /// Elements that are infinite or NaN, the poisoned ones left out.
        non_finite: u64,
    },
    /// The device's scan does not find what was planted for it.
    #[error(
        "{device}: the scan of a planted fault reports {found} bad elements instead of {expected}: its verdict on the \
         mapped cache means nothing. Work was dropped without an error, probably by a watchdog; choose another --device"
    )]
    Scan {
        /// The device.
        device: String,
        /// Bad elements that were planted.
        expected: u64,
        /// Bad elements that were reported.
        found: u64,
    },
    /// The device did not answer in time.
    #[error("{device}: {stage} is not done after {} ms; the device is given up", waited.as_millis())]
    Deadline {
        /// The device.
        device: String,
        /// What was waited for.
        stage: &'static str,
        /// For how long.
        waited: Duration,
    },
    /// The driver lost the device.
    #[error("{device}: device lost: {reason}")]
    Lost {
        /// The device.
        device: String,
        /// The driver's words.
        reason: String,
    },
    /// The device has no memory left.
    #[error("{device}: out of memory in {stage}. Close other programs that use it, or choose --device cpu")]
    OutOfMemory {
        /// The device.
        device: String,
        /// What was being done.
        stage: &'static str,
    },
    /// The graphics interface reported an error.
    #[error("{device}: error in {stage}: {reason}")]
    Gpu {
        /// The device.
        device: String,
        /// What was being done.
        stage: &'static str,
        /// The interface's words.
        reason: String,
    },
}
