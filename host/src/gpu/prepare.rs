//! A recording made ready for an adapter: pipelines, bind groups and slices, once; the chunks then only run it.

use kvmig_gate::WeightElem;
use kvmig_shaders::{WeightFormat, check::Checked};

use super::{
    Context,
    buffers::{self, Inputs, JobBuffers, Region},
    context::lock,
    pipelines,
};
use crate::{
    device::{
        DeviceError, Job, ViewStrides,
        check::{self, CheckedRecording, weight_elem},
    },
    sandbox::recording::{Binding, BufferId, Recording, Step},
};

/// Constant blocks begin at multiples of this, the largest offset alignment of any adapter, in bytes.
const ALIGN: usize = 256;

/// One dispatch.
#[derive(Debug)]
pub(super) struct Dispatch {
    pub(super) pipeline: wgpu::ComputePipeline,
    pub(super) group: wgpu::BindGroup,
    pub(super) workgroups: [u32; 3],
    /// Multiplications and additions; `None` for a module's own shader, of which nobody knows.
    pub(super) flops: Option<u64>,
}

/// A recording on an adapter.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) inputs: Inputs,
    pub(super) dispatches: Vec<Dispatch>,
}

/// A dispatch whose constants are not uploaded yet.
struct Draft<'r> {
    pipeline: wgpu::ComputePipeline,
    bindings: &'r [Binding],
    /// The kernel's parameter block and its binding.
    block: Option<(u32, Region)>,
    workgroups: [u32; 3],
    flops: Option<u64>,
}

/// Constant bytes of a recording, to be one buffer.
#[derive(Default)]
struct Constants(Vec<u8>);

impl Constants {
    fn add(&mut self, bytes: &[u8]) -> Region {
        let offset = self.0.len().next_multiple_of(ALIGN);
        self.0.resize(offset, 0);
        self.0.extend(bytes);
        Region { offset: offset as u64, bytes: bytes.len() as u64 }
    }
}

impl Prepared {
    /// Prepares a recording that was checked against the job.
    pub(super) fn new(
        context: &Context,
        job: &Job<'_>,
        checked: &CheckedRecording<'_>,
        inputs: Inputs,
        held: &JobBuffers,
    ) -> Result<Prepared, DeviceError> {
        let recording = checked.recording;
        let mut constants = Constants::default();
        let params: Vec<Region> = recording.params.iter().map(|bytes| constants.add(bytes)).collect();
        let mut drafts = Vec::new();
        for (index, call) in checked.calls.iter().enumerate() {
            draft(context, job, recording, index, call.as_ref(), &mut constants, &mut drafts)?;
        }
        let buffer = buffers::storage(context, "constants", constants.0.len() as u64)?;
        constants.0.resize(constants.0.len().next_multiple_of(4), 0);
        context.queue.write_buffer(&buffer, 0, &constants.0);
        let places = Places { job, recording, inputs: &inputs, held, constants: &buffer, params: &params };
        let dispatches =
            drafts.into_iter().map(|draft| places.bind(context, draft)).collect::<Result<Vec<_>, DeviceError>>()?;
        Ok(Prepared { inputs, dispatches })
    }
}

fn draft<'r>(
    context: &Context,
    job: &Job<'_>,
    recording: &'r Recording,
    index: usize,
    call: Option<&Checked>,
    constants: &mut Constants,
    drafts: &mut Vec<Draft<'r>>,
) -> Result<(), DeviceError> {
    match (&recording.steps[index], call) {
        (Step::Kernel { kernel, bindings, .. }, Some(call)) => {
            let format = weight_format(context, job, recording, bindings);
            let pipeline = pipelines::kernel(context, *kernel, format)?;
            let slices = call.slices(lock(&context.rate).work(job.pacing.dispatch));
            let flops = call.flops() / slices.len().max(1) as u64;
            for slice in slices {
                let block = constants.add(&call.gpu_params(slice.rows.start));
                drafts.push(Draft {
                    pipeline: pipeline.clone(),
                    bindings,
                    block: Some((bindings.len() as u32, block)),
                    workgroups: slice.workgroups,
                    flops: Some(flops),
                });
            }
        }
        (Step::Dispatch { pipeline, bindings, workgroups }, _) => {
            let missing = |field: &str, found: String, expected: String| DeviceError::Recording {
                step: index,
                field: field.into(),
                found,
                expected,
            };
            let spec = recording.pipelines.get(*pipeline as usize).ok_or_else(|| {
                missing("pipeline", pipeline.to_string(), format!("an index below {}", recording.pipelines.len()))
            })?;
            let loaded = job.weights.loaded();
            let (_, wgsl) = loaded
                .shaders()
                .iter()
                .find(|(name, _)| *name == spec.shader)
                .ok_or_else(|| missing("shader", spec.shader.clone(), "one of the module's shaders".into()))?;
            let pipeline = pipelines::own(context, loaded.module(), spec, wgsl)?;
            drafts.push(Draft { pipeline, bindings, block: None, workgroups: *workgroups, flops: None });
        }
        // Every kernel's step has its call: `check` made them together.
        (Step::Kernel { .. }, None) => {}
    }
    Ok(())
}

/// How the weights that a kernel reads are stored on this adapter.
fn weight_format(context: &Context, job: &Job<'_>, recording: &Recording, bindings: &[Binding]) -> WeightFormat {
    let half = bindings.iter().any(|binding| weight_elem(job, recording, binding) == Some(WeightElem::F16));
    match half {
        false => WeightFormat::F32,
        true if context.half => WeightFormat::F16,
        true => WeightFormat::PackedF16,
    }
}

/// Where everything that a binding can name lies.
struct Places<'p> {
    job: &'p Job<'p>,
    recording: &'p Recording,
    inputs: &'p Inputs,
    held: &'p JobBuffers,
    constants: &'p wgpu::Buffer,
    params: &'p [Region],
}

impl Places<'_> {
    fn bind(&self, context: &Context, draft: Draft<'_>) -> Result<Dispatch, DeviceError> {
        let mut entries = Vec::with_capacity(draft.bindings.len() + 1);
        for binding in draft.bindings {
            let (buffer, base) = self.place(binding).ok_or_else(|| DeviceError::Job {
                field: "weights",
                found: "on another device".into(),
                expected: "loaded by the device that executes the job".into(),
            })?;
            entries.push(entry(binding.index, buffer, base + binding.offset, binding.size));
        }
        if let Some((index, region)) = draft.block {
            entries.push(entry(index, self.constants, region.offset, region.bytes));
        }
        let group = context.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &draft.pipeline.get_bind_group_layout(0),
            entries: &entries,
        });
        Ok(Dispatch { pipeline: draft.pipeline, group, workgroups: draft.workgroups, flops: draft.flops })
    }

    /// Buffer and first byte; `None` only for weights, for all else was checked.
    fn place(&self, binding: &Binding) -> Option<(&wgpu::Buffer, u64)> {
        match binding.buffer {
            BufferId::Source { .. } | BufferId::SourceRope | BufferId::TargetRope | BufferId::Hidden => {
                self.inputs.regions.get(&binding.buffer).map(|region| (&self.held.upload, region.offset))
            }
            BufferId::Target { layer, value } => {
                let mut outputs = self.held.outputs.iter();
                let output = outputs.find(|output| output.layer == layer && output.value == value)?;
                Some((&output.buffer, 0))
            }
            BufferId::Weights(index) => {
                let name = self.recording.weights.get(index as usize)?;
                self.job.weights.on_gpu()?.get(name).map(|buffer| (buffer, 0))
            }
            BufferId::Scratch(index) => self.held.scratch.get(index as usize).map(|buffer| (buffer, 0)),
            BufferId::Params(index) => self.params.get(index as usize).map(|region| (self.constants, region.offset)),
        }
    }
}

pub(super) fn entry(binding: u32, buffer: &wgpu::Buffer, offset: u64, bytes: u64) -> wgpu::BindGroupEntry<'_> {
    // A binding of nothing was refused before; `new` of 0 means the rest of the buffer.
    let size = wgpu::BufferSize::new(bytes);
    wgpu::BindGroupEntry {
        binding,
        resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding { buffer, offset, size }),
    }
}

/// The check of a recording against what this adapter binds.
pub(super) fn check<'r>(job: &Job<'_>, recording: &'r Recording) -> Result<CheckedRecording<'r>, DeviceError> {
    let (source, target) = (job.source.layout(), job.target.layout());
    let dense = |head_dim: usize| recording.tokens as usize * head_dim;
    let source = ViewStrides::new(source, dense(source.head_dim), recording.tokens)?;
    let target = ViewStrides::new(target, dense(target.head_dim), recording.tokens)?;
    check::check(job, recording, &check::Extents::new(job, recording, source, target))
}
