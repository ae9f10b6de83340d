//! Steps that don't depend on each other, run side by side.
//!
//! A guest records its steps in one order. Steps in a row that write different places and read nothing that another of
//! them writes form a batch: each runs on one thread, which suits a mapper's many equal products better than all threads
//! on one product after the other. A step alone in its batch may use every thread.

use std::{collections::BTreeMap, ops::Range};

use kvmig_gate::WeightElem;
use kvmig_shaders::{check::Checked, cpu};
use rayon::prelude::*;

use super::{
    super::{DeviceError, Job, check::CheckedRecording},
    views::{Buffers, view_index},
};
use crate::sandbox::recording::{Binding, BufferId, Recording, Step};

/// A recording made ready for the CPU.
pub(super) struct Plan<'a> {
    recording: &'a Recording,
    steps: Vec<CpuStep<'a>>,
    batches: Vec<Batch>,
    /// The recording's constant blocks as f32 elements.
    params: Vec<Vec<f32>>,
    flops: u64,
}

/// One kernel call.
struct CpuStep<'a> {
    call: Checked,
    /// What it reads, in the order of the kernel's declaration.
    inputs: Vec<Place<'a>>,
    /// What it writes: a buffer of [`Buffers::mutable`], and the elements from the first to the last that is written.
    output: (usize, Range<usize>),
}

/// A range of elements.
struct Place<'a> {
    room: Room<'a>,
    range: Range<usize>,
}

/// The buffer a range lies in.
#[derive(Clone, Copy)]
enum Room<'a> {
    Source(usize),
    SourceRope,
    TargetRope,
    Hidden,
    Weights(&'a [f32]),
    Params(usize),
    /// Index into [`Buffers::mutable`].
    Mutable(usize),
}

/// Steps side by side, and the ranges that each buffer is cut into for them: (range, step), in order.
#[derive(Default)]
struct Batch {
    steps: Range<usize>,
    writes: BTreeMap<usize, Vec<(Range<usize>, usize)>>,
    reads: Vec<usize>,
}

impl<'a> Plan<'a> {
    /// Orders the steps of a recording that was checked against the job.
    pub(super) fn new(job: &Job<'a>, checked: CheckedRecording<'a>) -> Result<Plan<'a>, DeviceError> {
        let recording = checked.recording;
        let mut steps = Vec::with_capacity(recording.steps.len());
        for (index, (step, call)) in recording.steps.iter().zip(checked.calls).enumerate() {
            match (step, call) {
                (Step::Kernel { bindings, .. }, Some(call)) => {
                    steps.push(CpuStep::new(job, recording, bindings, call)?)
                }
                // Every kernel's step has its call: `check` made them together.
                (Step::Kernel { .. }, None) => {}
                (Step::Dispatch { pipeline, .. }, _) => {
                    let shader = recording.pipelines.get(*pipeline as usize).map(|spec| spec.shader.clone());
                    return Err(DeviceError::NeedsGpu { step: index, shader: shader.unwrap_or_default() });
                }
            }
        }
        let batches = batches(&steps);
        let params = recording.params.iter().map(|bytes| {
            let whole = &bytes[..bytes.len() / 4 * 4];
            bytemuck::pod_collect_to_vec::<u8, f32>(whole)
        });
        let params = params.collect();
        let flops = steps.iter().map(|step| step.call.flops()).sum();
        Ok(Plan { recording, steps, batches, params, flops })
    }

    /// What it was made from.
    pub(super) fn recording(&self) -> &'a Recording {
        self.recording
    }

    /// Kernel calls of one replay.
    pub(super) fn steps(&self) -> usize {
        self.steps.len()
    }

    /// Multiplications and additions of one replay.
    pub(super) fn flops(&self) -> u64 {
        self.flops
    }

    /// Replays the recording on one chunk.
    pub(super) fn run(&self, mut buffers: Buffers<'_>) -> Result<(), DeviceError> {
        for batch in &self.batches {
            self.run_batch(batch, &mut buffers)?;
        }
        Ok(())
    }

    fn run_batch(&self, batch: &Batch, buffers: &mut Buffers<'_>) -> Result<(), DeviceError> {
        let mut outputs: Vec<(usize, &mut [f32])> = Vec::with_capacity(batch.steps.len());
        let mut shared: Vec<Option<&[f32]>> = Vec::with_capacity(buffers.mutable.len());
        for (room, buffer) in buffers.mutable.iter_mut().enumerate() {
            match batch.writes.get(&room) {
                Some(cuts) => {
                    shared.push(None);
                    cut(buffer, cuts, &mut outputs);
                }
                None => shared.push(Some(&**buffer)),
            }
        }
        let rooms = Rooms {
            source: &buffers.source,
            source_rope: buffers.source_rope,
            target_rope: buffers.target_rope,
            hidden: buffers.hidden,
            params: &self.params,
            shared: &shared,
        };
        outputs.into_par_iter().with_max_len(1).try_for_each(|(index, output)| {
            let step = &self.steps[index];
            let input = |i: usize| rooms.read(&step.inputs[i]);
            let done = match &step.call {
                Checked::Gather(call) => cpu::gather(call, input(0), input(1), output),
                Checked::Affine(call) => cpu::affine(call, input(0), input(1), input(2), input(3), output),
                // Not offered to modules: `check` refused it.
                Checked::Scan(_) => Ok(()),
            };
            done.map_err(|error| DeviceError::Mirror { step: index, error })
        })
    }
}

/// What a batch reads.
#[derive(Clone, Copy)]
struct Rooms<'r> {
    source: &'r [&'r [f32]],
    source_rope: &'r [f32],
    target_rope: &'r [f32],
    hidden: &'r [f32],
    params: &'r [Vec<f32>],
    /// The mutable buffers that the batch does not write.
    shared: &'r [Option<&'r [f32]>],
}

impl<'r> Rooms<'r> {
    fn read(self, place: &'r Place<'_>) -> &'r [f32] {
        let room = match place.room {
            Room::Source(view) => self.source[view],
            Room::SourceRope => self.source_rope,
            Room::TargetRope => self.target_rope,
            Room::Hidden => self.hidden,
            Room::Weights(weights) => weights,
            Room::Params(index) => &self.params[index],
            // A batch reads nothing that it writes.
            Room::Mutable(room) => self.shared[room].unwrap_or_default(),
        };
        &room[place.range.clone()]
    }
}

/// Cuts a buffer into the ranges that steps write.
fn cut<'b>(buffer: &'b mut [f32], cuts: &[(Range<usize>, usize)], outputs: &mut Vec<(usize, &'b mut [f32])>) {
    let mut rest = buffer;
    let mut at = 0;
    for (range, step) in cuts {
        let (_, tail) = rest.split_at_mut(range.start - at);
        let (piece, tail) = tail.split_at_mut(range.len());
        outputs.push((*step, piece));
        rest = tail;
        at = range.end;
    }
}

/// Groups steps in a row that are independent of each other.
fn batches(steps: &[CpuStep<'_>]) -> Vec<Batch> {
    let mut batches: Vec<Batch> = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let fits = batches.last().is_some_and(|batch| batch.admits(step));
        if !fits {
            batches.push(Batch { steps: index..index, ..Batch::default() });
        }
        if let Some(batch) = batches.last_mut() {
            batch.add(index, step);
        }
    }
    for batch in &mut batches {
        for cuts in batch.writes.values_mut() {
            cuts.sort_by_key(|(range, _)| range.start);
        }
    }
    batches
}

impl Batch {
    fn admits(&self, step: &CpuStep<'_>) -> bool {
        let (room, output) = &step.output;
        let overlaps = |range: &Range<usize>| range.start < output.end && output.start < range.end;
        let clashes = self.writes.get(room).is_some_and(|cuts| cuts.iter().any(|(range, _)| overlaps(range)));
        !clashes && !self.reads.contains(room) && !step.reads().any(|room| self.writes.contains_key(&room))
    }

    fn add(&mut self, index: usize, step: &CpuStep<'_>) {
        let (room, range) = step.output.clone();
        self.writes.entry(room).or_default().push((range, index));
        self.reads.extend(step.reads());
        self.steps.end = index + 1;
    }
}

impl<'a> CpuStep<'a> {
    fn new(
        job: &Job<'a>,
        recording: &'a Recording,
        bindings: &[Binding],
        call: Checked,
    ) -> Result<CpuStep<'a>, DeviceError> {
        let writes = call.writes();
        let mut inputs = Vec::with_capacity(bindings.len());
        let mut output = (usize::MAX, 0..0);
        for (i, binding) in bindings.iter().enumerate() {
            let place = place(job, recording, binding)?;
            match place.room {
                Room::Mutable(room) if i == writes.binding as usize => {
                    let span = writes.span();
                    let first = place.range.start;
                    // From the binding's first element, which the call counts from, to the last that is written.
                    output = (room, first..first + span.end as usize);
                }
                _ => inputs.push(place),
            }
        }
        Ok(CpuStep { call, inputs, output })
    }

    /// The mutable rooms it reads.
    fn reads(&self) -> impl Iterator<Item = usize> + '_ {
        self.inputs.iter().filter_map(|place| match place.room {
            Room::Mutable(room) => Some(room),
            _ => None,
        })
    }
}

/// Where a binding lies on the CPU.
fn place<'a>(job: &Job<'a>, recording: &'a Recording, binding: &Binding) -> Result<Place<'a>, DeviceError> {
    let outputs = 2 * job.target.layout().layers;
    let mut scale = 4;
    let room = match binding.buffer {
        BufferId::Source { layer, value } => Room::Source(view_index(layer, value)),
        BufferId::Target { layer, value } => Room::Mutable(view_index(layer, value)),
        BufferId::SourceRope => Room::SourceRope,
        BufferId::TargetRope => Room::TargetRope,
        BufferId::Hidden => Room::Hidden,
        BufferId::Scratch(index) => Room::Mutable(outputs + index as usize),
        BufferId::Params(index) => Room::Params(index as usize),
        BufferId::Weights(index) => {
            let name = &recording.weights[index as usize];
            let weights = job.weights.on_cpu(name).ok_or_else(|| DeviceError::Job {
                field: "weights",
                found: "on another device".into(),
                expected: "loaded by the device that executes the job".into(),
            })?;
            // The guest counts the bytes of the artifact's own type.
            let tensor = job.weights.loaded().weights().get(name);
            if tensor.is_some_and(|tensor| tensor.elem() == WeightElem::F16) {
                scale = 2;
            }
            Room::Weights(weights)
        }
    };
    let (first, len) = (binding.offset / scale, binding.size / scale);
    Ok(Place { room, range: first as usize..(first + len) as usize })
}
