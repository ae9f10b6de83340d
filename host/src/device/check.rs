//! A recording against the job it is replayed in. The sandbox has checked it against what the guest was shown; this holds
//! it against what is really bound, on every device alike.

use kvmig_gate::WeightElem;
use kvmig_shaders::{
    Element, Kernel,
    check::{Bound, Checked},
    params::{POISON, ScanParams},
};

use super::{BufferName, DeviceError, Job, ViewStrides};
use crate::sandbox::recording::{Binding, BufferId, Recording, Step};

/// Sizes in bytes of everything a recording can name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extents {
    /// A source layer's view.
    pub(crate) source: u64,
    /// A target layer's view.
    pub(crate) target: u64,
    /// The source's RoPE table.
    pub(crate) source_rope: u64,
    /// The target's RoPE table.
    pub(crate) target_rope: u64,
    /// The target's hidden state.
    pub(crate) hidden: u64,
}

/// Bytes of a RoPE table of `tokens` positions, `[tokens, dims / 2, 2]` f32; a table of nothing is kept bindable.
pub(crate) fn rope_bytes(tokens: u32, dims: usize) -> u64 {
    (4 * u64::from(tokens) * dims as u64).max(8)
}

impl Extents {
    /// Of one recording's chunk.
    pub(crate) fn new(job: &Job<'_>, recording: &Recording, source: ViewStrides, target: ViewStrides) -> Extents {
        Extents {
            source: source.bytes,
            target: target.bytes,
            source_rope: rope_bytes(recording.tokens, job.source.layout().rope.dims),
            target_rope: rope_bytes(recording.tokens, job.target.layout().rope.dims),
            hidden: 4 * u64::from(recording.tokens) * job.hidden_width() as u64,
        }
    }
}

/// The storage bindings of a step.
pub(crate) fn bindings(step: &Step) -> &[Binding] {
    match step {
        Step::Kernel { bindings, .. } | Step::Dispatch { bindings, .. } => bindings,
    }
}

/// A recording that was checked against its job, with its host kernels' typed parameters.
#[derive(Debug)]
pub(crate) struct CheckedRecording<'r> {
    /// The recording.
    pub(crate) recording: &'r Recording,
    /// The call of each step; `None` where the step is a dispatch of the module's own shader.
    pub(crate) calls: Vec<Option<Checked>>,
}

/// Checks every step of a recording.
///
/// # Errors
/// [`DeviceError::Recording`] names the step and the field.
pub(crate) fn check<'r>(
    job: &Job<'_>,
    recording: &'r Recording,
    extents: &Extents,
) -> Result<CheckedRecording<'r>, DeviceError> {
    let mut calls = Vec::with_capacity(recording.steps.len());
    for (index, step) in recording.steps.iter().enumerate() {
        for binding in bindings(step) {
            let size = extent(index, job, recording, extents, binding)?;
            let end = binding.offset.checked_add(binding.size);
            if binding.size == 0
                || !binding.offset.is_multiple_of(4)
                || !binding.size.is_multiple_of(4)
                || end.is_none_or(|end| end > size)
            {
                return Err(DeviceError::Recording {
                    step: index,
                    field: format!("binding {} ({})", binding.index, BufferName(binding.buffer)),
                    found: format!("bytes {}..+{}", binding.offset, binding.size),
                    expected: format!("multiples of 4 within its {size} bytes"),
                });
            }
        }
        calls.push(match step {
            Step::Kernel { kernel, params, bindings } => {
                Some(check_call(index, job, recording, *kernel, params, bindings)?)
            }
            Step::Dispatch { .. } => None,
        });
    }
    Ok(CheckedRecording { recording, calls })
}

fn check_call(
    index: usize,
    job: &Job<'_>,
    recording: &Recording,
    kernel: Kernel,
    params: &[u8],
    bindings: &[Binding],
) -> Result<Checked, DeviceError> {
    let wrong = |field: String, found: String, expected: &str| DeviceError::Recording {
        step: index,
        field,
        found,
        expected: expected.to_owned(),
    };
    if !Kernel::OFFERED.contains(&kernel) {
        return Err(wrong("kernel".into(), kernel.name().into(), "a kernel that is offered to modules"));
    }
    let bound: Vec<Bound> = bindings
        .iter()
        .map(|binding| match weight_elem(job, recording, binding) {
            Some(WeightElem::F16) => Bound { bytes: binding.size, element: Element::F16 },
            Some(WeightElem::F32) | None => Bound::f32(binding.size),
        })
        .collect();
    let call = kernel.check(params, &bound).map_err(|error| DeviceError::Kernel { step: index, error })?;
    let out = call.writes().binding as usize;
    for (i, binding) in bindings.iter().enumerate() {
        if binding.index as usize != i {
            return Err(wrong(format!("binding {}", binding.index), format!("at place {i}"), "the kernel's own order"));
        }
        let mutable = matches!(binding.buffer, BufferId::Target { .. } | BufferId::Scratch(_));
        if i == out && !mutable {
            let expected = "scratch or a target view, for it is written";
            return Err(wrong(format!("binding {i}"), BufferName(binding.buffer).to_string(), expected));
        }
        // A GPU tracks whole buffers, so that reading one part and writing another in one dispatch is refused there.
        if i != out && binding.buffer == bindings[out].buffer {
            let found = format!("{} twice", BufferName(binding.buffer));
            return Err(wrong(format!("bindings {i} and {out}"), found, "different buffers to be read and written"));
        }
    }
    Ok(call)
}

/// Element type of the weight tensor that a binding names.
pub(crate) fn weight_elem(job: &Job<'_>, recording: &Recording, binding: &Binding) -> Option<WeightElem> {
    let BufferId::Weights(index) = binding.buffer else { return None };
    let name = recording.weights.get(index as usize)?;
    job.weights.loaded().weights().get(name).map(|tensor| tensor.elem())
}

/// Size in bytes of the buffer that a binding names.
fn extent(
    step: usize,
    job: &Job<'_>,
    recording: &Recording,
    extents: &Extents,
    binding: &Binding,
) -> Result<u64, DeviceError> {
    let absent = |expected: String| DeviceError::Recording {
        step,
        field: format!("binding {}", binding.index),
        found: BufferName(binding.buffer).to_string(),
        expected,
    };
    let layer_of = |layer: u32, layers: std::ops::Range<usize>, bytes| {
        let std::ops::Range { start, end } = layers;
        let there = (start..end).contains(&(layer as usize));
        if there { Ok(bytes) } else { Err(absent(format!("a layer from {start} to {}", end - 1))) }
    };
    match binding.buffer {
        BufferId::Source { layer, .. } => layer_of(layer, 0..job.source.layout().layers, extents.source),
        BufferId::Target { layer, .. } => layer_of(layer, job.mapped_layers(), extents.target),
        BufferId::SourceRope => Ok(extents.source_rope),
        BufferId::TargetRope => Ok(extents.target_rope),
        BufferId::Hidden if extents.hidden == 0 => Err(absent("a job with native layers of the target".to_owned())),
        BufferId::Hidden => Ok(extents.hidden),
        BufferId::Weights(index) => {
            let name = recording.weights.get(index as usize);
            let tensor = name.and_then(|name| job.weights.loaded().weights().get(name));
            tensor.map(|tensor| tensor.byte_len() as u64).ok_or_else(|| {
                absent(match name {
                    Some(name) => format!("tensor `{name}` among the artifact's weights"),
                    None => format!("an index below {}", recording.weights.len()),
                })
            })
        }
        BufferId::Scratch(index) => recording
            .scratch
            .get(index as usize)
            .copied()
            .ok_or_else(|| absent(format!("an index below {}", recording.scratch.len()))),
        BufferId::Params(index) => recording
            .params
            .get(index as usize)
            .map(|bytes| bytes.len() as u64)
            .ok_or_else(|| absent(format!("an index below {}", recording.params.len()))),
    }
}

/// The scan of a block `[heads, tokens, d]` whose heads lie `head_stride` words apart.
///
/// # Errors
/// [`DeviceError::Job`] if that is more than the kernel counts.
pub(crate) fn scan_call(heads: usize, tokens: usize, d: usize, head_stride: usize) -> Result<Checked, DeviceError> {
    let words = (heads - 1) * head_stride + tokens * d;
    let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let params = ScanParams {
        rows: narrow(tokens),
        cols: narrow(d),
        planes: narrow(heads),
        row_stride: narrow(d),
        plane_stride: narrow(head_stride),
        offset: 0,
        poison: POISON,
        first_row: 0,
    };
    let bindings = [
        Bound { bytes: 4 * words as u64, element: Element::U32 },
        Bound { bytes: SCAN_COUNTS_BYTES, element: Element::U32 },
    ];
    Kernel::Scan.check(bytemuck::bytes_of(&params), &bindings).map_err(|error| DeviceError::Job {
        field: "an output",
        found: format!("[{heads}, {tokens}, {d}], heads {head_stride} elements apart"),
        expected: format!("what scan@1 takes: {error}"),
    })
}

/// Bytes of the scan's three counts.
pub(crate) const SCAN_COUNTS_BYTES: u64 = 12;
