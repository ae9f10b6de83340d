//! Turns requests into a recording, and refuses what isn't allowed. Knows nothing of wasmtime.

mod intervals;
mod memory;
mod own;
mod ranges;

use std::{collections::BTreeMap, sync::Arc};

use kvmig_gate::WeightElem;
use kvmig_shaders::{Bound, Element, Kernel};

use super::{
    DeviceLimits, Fault, PairShape, Recording, SandboxLimits, ViewStrides, WeightShape, WorkPlan,
    recording::{BufferId, PipelineSpec, Step},
};
use memory::Memory;
pub(super) use memory::check_view;
#[expect(unreachable_pub, reason = "the generated bindings re-export it, which asks for `pub`")]
pub use own::PipelineHandle;
pub(super) use ranges::Range;

/// A buffer as a guest holds it.
#[expect(unreachable_pub, reason = "the generated bindings re-export it, which asks for `pub`")]
#[derive(Clone, Copy, Debug)]
pub struct BufferHandle {
    pub(super) id: BufferId,
    pub(super) bytes: u64,
    element: Element,
}

impl BufferHandle {
    pub(super) fn may_read(&self) -> bool {
        !matches!(self.id, BufferId::Target { .. })
    }

    pub(super) fn may_write(&self) -> bool {
        matches!(self.id, BufferId::Target { .. } | BufferId::Scratch(_))
    }
}

/// What a recording is made for and within.
pub(super) struct Terms {
    pub(super) pair: PairShape,
    pub(super) plan: WorkPlan,
    pub(super) weights: BTreeMap<String, WeightShape>,
    pub(super) tokens: u32,
    pub(super) source: ViewStrides,
    pub(super) target: ViewStrides,
    pub(super) device: DeviceLimits,
    pub(super) limits: SandboxLimits,
    /// The module's own shaders: (name, WGSL).
    pub(super) shaders: Arc<[(String, String)]>,
}

/// A recording in the making.
pub(super) struct Recorder {
    terms: Terms,
    recording: Recording,
    memory: Memory,
    own: own::Shaders,
    invocations: u64,
    scratch_bytes: u64,
    params_bytes: u64,
}

impl Recorder {
    pub(super) fn new(terms: Terms) -> Recorder {
        let recording = Recording {
            tokens: terms.tokens,
            weights: Vec::new(),
            scratch: Vec::new(),
            params: Vec::new(),
            pipelines: Vec::new(),
            steps: Vec::new(),
        };
        let memory = Memory::new(&terms);
        let own = own::Shaders::default();
        Recorder { terms, recording, memory, own, invocations: 0, scratch_bytes: 0, params_bytes: 0 }
    }

    /// A view of a layer's keys or values.
    pub(super) fn view(&self, id: BufferId) -> BufferHandle {
        let (shape, strides) = match id {
            BufferId::Target { .. } => (self.terms.pair.target(), self.terms.target),
            _ => (self.terms.pair.source(), self.terms.source),
        };
        let bytes = 4 * memory::view(shape, strides, self.terms.tokens).span().end;
        BufferHandle { id, bytes, element: Element::F32 }
    }

    /// A rotation table, `[tokens, rope_dims / 2, 2]`.
    pub(super) fn table(&self, id: BufferId) -> BufferHandle {
        let shape = if id == BufferId::TargetRope { self.terms.pair.target() } else { self.terms.pair.source() };
        let bytes = 4 * u64::from(self.terms.tokens) * u64::from(shape.rope_dims);
        BufferHandle { id, bytes, element: Element::F32 }
    }

    /// The target's residual stream, `[tokens, hidden]`; `None` where the mapper is given none.
    pub(super) fn hidden(&self) -> Option<BufferHandle> {
        let bytes = 4 * u64::from(self.terms.tokens) * u64::from(self.terms.pair.hidden());
        (bytes > 0).then_some(BufferHandle { id: BufferId::Hidden, bytes, element: Element::F32 })
    }

    pub(super) fn scratch(&mut self, bytes: u64) -> Result<BufferHandle, Fault> {
        whole_words("scratch", bytes)?;
        let most = self.terms.plan.scratch_bytes();
        self.scratch_bytes = budget("bytes of scratch", self.scratch_bytes, bytes, most, "the plan's scratch-bytes")?;
        // Each is a buffer on the device, however small.
        let count = self.recording.scratch.len() as u64;
        budget("scratch buffers", count, 1, self.terms.limits.steps.into(), HOST)?;
        let id = BufferId::Scratch(self.recording.scratch.len() as u32);
        self.recording.scratch.push(bytes);
        Ok(BufferHandle { id, bytes, element: Element::F32 })
    }

    pub(super) fn params(&mut self, data: Vec<u8>) -> Result<BufferHandle, Fault> {
        let bytes = data.len() as u64;
        whole_words("params", bytes)?;
        self.spend_params(bytes)?;
        let count = self.recording.params.len() as u64;
        budget("params buffers", count, 1, self.terms.limits.steps.into(), HOST)?;
        let id = BufferId::Params(self.recording.params.len() as u32);
        self.recording.params.push(data);
        Ok(BufferHandle { id, bytes, element: Element::F32 })
    }

    pub(super) fn weights(&mut self, name: &str) -> Result<BufferHandle, Fault> {
        let planned = self.terms.plan.weights().iter().any(|spec| spec.name == name);
        let Some(shape) = self.terms.weights.get(name).filter(|_| planned) else {
            return Err(Fault::UnknownWeights { name: super::words::one_line(name) });
        };
        let known = self.recording.weights.iter().position(|weight| weight == name);
        let index = known.unwrap_or_else(|| {
            self.recording.weights.push(name.to_owned());
            self.recording.weights.len() - 1
        });
        let (element, width) = match shape.elem {
            WeightElem::F32 => (Element::F32, 4),
            WeightElem::F16 => (Element::F16, 2),
        };
        let bytes = shape.shape.iter().map(|&extent| extent as u64).product::<u64>() * width;
        // Halves of an odd number are padded to a word, as they are in memory.
        Ok(BufferHandle { id: BufferId::Weights(index as u32), bytes: bytes.next_multiple_of(4), element })
    }

    pub(super) fn kernel(&mut self, name: &str, params: Vec<u8>, mut ranges: Vec<Range>) -> Result<(), Fault> {
        let step = self.next_step()?;
        let kernel = Kernel::from_name(name).map_err(|mut unknown| {
            unknown.asked = super::words::one_line(&unknown.asked);
            unknown
        })?;
        self.spend_params(params.len() as u64)?;
        let slots = kernel.slots();
        ranges::check_indices(step, &mut ranges, slots.iter().map(|slot| slot.index))?;
        for (range, slot) in ranges.iter().zip(slots) {
            range.check(step, &self.terms.device)?;
            range.check_access(step, slot.access)?;
        }
        ranges::check_aliasing(step, &ranges, |at| slots[at].access)?;
        let bounds: Vec<Bound> =
            ranges.iter().map(|range| Bound { bytes: range.size, element: range.buffer.element }).collect();
        let checked = kernel.check(&params, &bounds).map_err(|error| Fault::Kernel { step, error })?;
        self.spend_invocations(checked.invocations())?;
        // A kernel's slots are numbered in order, so that a footprint's binding is an index into `ranges` as well.
        for read in checked.reads() {
            self.memory.read(step, &ranges[read.binding as usize], read)?;
        }
        let write = checked.writes();
        self.memory.write(step, &ranges[write.binding as usize], write)?;
        let bindings = ranges.iter().map(Range::binding).collect();
        self.recording.steps.push(Step::Kernel { kernel, params, bindings });
        Ok(())
    }

    pub(super) fn pipeline(
        &mut self,
        shader: &str,
        entry: &str,
        constants: Vec<(String, f64)>,
    ) -> Result<PipelineHandle, Fault> {
        let count = self.recording.pipelines.len() as u64;
        budget("pipelines", count, 1, own::MOST_PIPELINES, HOST)?;
        let info = self.own.entry(&self.terms, shader, entry, &constants)?;
        self.recording.pipelines.push(PipelineSpec { shader: shader.into(), entry: entry.into(), constants });
        Ok(PipelineHandle::new(count as u32, info))
    }

    pub(super) fn dispatch(
        &mut self,
        pipeline: &PipelineHandle,
        mut ranges: Vec<Range>,
        workgroups: [u32; 3],
    ) -> Result<(), Fault> {
        let step = self.next_step()?;
        let slots = pipeline.bindings();
        ranges::check_indices(step, &mut ranges, slots.iter().map(|slot| slot.index))?;
        for (range, slot) in ranges.iter().zip(slots) {
            range.check(step, &self.terms.device)?;
            range.check_access(step, slot.access)?;
            range.check_length(step, slot.min_bytes)?;
        }
        // By declaration: what is declared `read_write` is bound as such, whatever the code does.
        ranges::check_aliasing(step, &ranges, |at| own::declared(&slots[at]))?;
        self.spend_invocations(pipeline.invocations(workgroups)?)?;
        for (range, slot) in ranges.iter().zip(slots) {
            self.memory.use_whole(step, range, slot.access)?;
        }
        let bindings = ranges.iter().map(Range::binding).collect();
        self.recording.steps.push(Step::Dispatch { pipeline: pipeline.index(), bindings, workgroups });
        Ok(())
    }

    /// Closes the recording.
    ///
    /// # Errors
    /// [`Fault::Uncovered`] if part of the target was not written.
    pub(super) fn finish(self) -> Result<Recording, Fault> {
        self.memory.check_covered(&self.terms)?;
        Ok(self.recording)
    }

    fn next_step(&self) -> Result<u32, Fault> {
        let (steps, most) = (self.recording.steps.len() as u64, self.terms.plan.max_steps());
        budget("steps", steps, 1, most.into(), "the plan's max-dispatches")?;
        Ok(steps as u32)
    }

    fn spend_params(&mut self, bytes: u64) -> Result<(), Fault> {
        let most = self.terms.limits.params_bytes;
        self.params_bytes = budget("bytes of parameters", self.params_bytes, bytes, most, HOST)?;
        Ok(())
    }

    fn spend_invocations(&mut self, invocations: u64) -> Result<(), Fault> {
        let most = self.terms.limits.invocations;
        self.invocations = budget("invocations", self.invocations, invocations, most, HOST)?;
        Ok(())
    }
}

/// Who set a budget.
const HOST: &str = "the host's limit";

/// What a budget's use comes to.
fn budget(what: &'static str, used: u64, more: u64, most: u64, whose: &'static str) -> Result<u64, Fault> {
    let found = used.saturating_add(more);
    if found > most { Err(Fault::Budget { what, found, most, whose }) } else { Ok(found) }
}

fn whole_words(what: &'static str, bytes: u64) -> Result<(), Fault> {
    if bytes == 0 || !bytes.is_multiple_of(4) { Err(Fault::BufferLength { what, bytes }) } else { Ok(()) }
}
