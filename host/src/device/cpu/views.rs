//! What a chunk's buffers are on the CPU: ranges of the caches themselves, or staged copies where those are f16.

use std::ops::Range;

use kvmig_shaders::{check::Checked, cpu, params::POISON};
use rayon::prelude::*;

use super::super::{
    BufferName, DeviceError, Job, ViewStrides,
    check::{Extents, bindings, rope_bytes, scan_call},
};
use crate::{
    cache::{Elem, KvPlanes, LayerKv, Plane},
    sandbox::recording::{BufferId, Recording},
};

/// Memory of one job.
pub(super) struct Views {
    source_rope: Vec<f32>,
    target_rope: Vec<f32>,
    /// Dense copies of the source views a chunk reads, `[2 * layer + value]`; none where the cache is f32.
    source: Option<Vec<Vec<f32>>>,
    /// Dense target views, likewise.
    target: Option<Vec<Vec<f32>>>,
    scratch: Vec<Vec<f32>>,
}

/// One chunk's buffers.
pub(super) struct Buffers<'b> {
    /// Source views, `[2 * layer + value]`.
    pub(super) source: Vec<&'b [f32]>,
    pub(super) source_rope: &'b [f32],
    pub(super) target_rope: &'b [f32],
    /// The target's hidden state.
    pub(super) hidden: &'b [f32],
    /// Target views, `[2 * layer + value]`, then the scratch buffers.
    pub(super) mutable: Vec<&'b mut [f32]>,
}

/// Index of a layer's keys or values among the views.
pub(super) fn view_index(layer: u32, value: bool) -> usize {
    2 * layer as usize + usize::from(value)
}

/// Elements of one staged or direct view.
fn view_elements(planes: &KvPlanes, head_stride: usize, tokens: usize) -> usize {
    (planes.layout().kv_heads - 1) * head_stride + tokens * planes.layout().head_dim
}

fn planes_of(layer: &LayerKv) -> [&Plane; 2] {
    [&layer.k, &layer.v]
}

fn planes_of_mut(layer: &mut LayerKv) -> [&mut Plane; 2] {
    [&mut layer.k, &mut layer.v]
}

impl Views {
    /// Room for the job's largest chunk.
    pub(super) fn new(job: &Job<'_>) -> Views {
        let (source, target) = (job.source.layout(), job.target.layout());
        let staged = |planes: &KvPlanes| {
            let half = planes.layout().elem == Elem::F16;
            half.then(|| vec![Vec::new(); 2 * planes.layout().layers])
        };
        // A table of nothing must still be bindable.
        let table = |mut table: Vec<f32>| {
            table.resize(table.len().max(2), 0.0);
            table
        };
        let (source_rope, target_rope) =
            rayon::join(|| table(source.rope.table(job.positions)), || table(target.rope.table(job.positions)));
        Views {
            source_rope,
            target_rope,
            source: staged(job.source),
            target: staged(&*job.target),
            scratch: Vec::new(),
        }
    }

    /// Sizes of what a recording can name.
    pub(super) fn extents(&self, job: &Job<'_>, recording: &Recording) -> Result<Extents, DeviceError> {
        let view = |planes: &KvPlanes, staged: bool| {
            let tokens = recording.tokens as usize;
            let head = if staged { tokens * planes.layout().head_dim } else { planes.head_stride() };
            ViewStrides::new(planes.layout(), head, recording.tokens)
        };
        let source = view(job.source, self.source.is_some())?;
        let target = view(&*job.target, self.target.is_some())?;
        Ok(Extents::new(job, recording, source, target))
    }

    /// Copies the f16 source views that a recording reads; gives the bytes it wrote.
    pub(super) fn stage(&mut self, job: &Job<'_>, recording: &Recording, slots: &Range<usize>) -> u64 {
        let Some(staged) = &mut self.source else { return 0 };
        let planes = job.source;
        let d = planes.layout().head_dim;
        let rows = slots.len() * d;
        let mut read: Vec<(u32, bool)> = recording
            .steps
            .iter()
            .flat_map(bindings)
            .filter_map(|binding| match binding.buffer {
                BufferId::Source { layer, value } => Some((layer, value)),
                _ => None,
            })
            .collect();
        read.sort_unstable();
        read.dedup();
        let wanted = |i: usize| read.binary_search(&((i / 2) as u32, i % 2 == 1)).is_ok();
        staged.par_iter_mut().enumerate().filter(|(i, _)| wanted(*i)).for_each(|(i, view)| {
            let plane = planes_of(planes.layer(i / 2))[i % 2];
            view.resize(planes.layout().kv_heads * rows, 0.0);
            for (head, into) in view.chunks_exact_mut(rows).enumerate() {
                plane.read(planes.offset(head, slots.start), into);
            }
        });
        (read.len() * planes.layout().kv_heads * rows * 4) as u64
    }

    /// Fills the outputs and the scratch with poison.
    pub(super) fn poison(&mut self, job: &mut Job<'_>, recording: &Recording, slots: &Range<usize>) {
        let poison = f32::from_bits(POISON);
        let rows = slots.len() * job.target.layout().head_dim;
        let heads = job.target.layout().kv_heads;
        let mapped = job.mapped_layers();
        match &mut self.target {
            Some(staged) => staged[2 * mapped.start..].par_iter_mut().for_each(|view| {
                view.clear();
                view.resize(heads * rows, poison);
            }),
            None => {
                let starts = head_starts(job.target, slots.start);
                let layers = &mut job.target.layers_mut()[mapped];
                layers.par_iter_mut().flat_map_iter(planes_of_mut).for_each(|plane| {
                    let Plane::F32(plane) = plane else { return };
                    for &start in &starts {
                        plane[start..start + rows].fill(poison);
                    }
                });
            }
        }
        self.scratch.resize_with(recording.scratch.len(), Vec::new);
        self.scratch.par_iter_mut().zip(&recording.scratch).for_each(|(scratch, bytes)| {
            // In place, so that no chunk but the first allocates.
            scratch.fill(poison);
            scratch.resize(bytes.div_ceil(4) as usize, poison);
        });
    }

    /// Calls `work` with one chunk's buffers. `first` is the chunk's first token within the job.
    pub(super) fn with<T>(
        &mut self,
        job: &mut Job<'_>,
        slots: &Range<usize>,
        first: usize,
        work: impl FnOnce(Buffers<'_>) -> T,
    ) -> T {
        let tokens = slots.len();
        let table = |table: &'_ [f32], dims: usize| {
            let elements = rope_bytes(tokens as u32, dims) as usize / 4;
            first * dims..first * dims + elements.min(table.len())
        };
        let source = match &self.source {
            Some(staged) => staged.iter().map(Vec::as_slice).collect(),
            None => {
                let start = job.source.offset(0, slots.start);
                let elements = view_elements(job.source, job.source.head_stride(), tokens);
                let layers = (0..job.source.layout().layers).flat_map(|layer| planes_of(job.source.layer(layer)));
                layers.filter_map(Plane::as_f32).map(|plane| &plane[start..start + elements]).collect()
            }
        };
        let hidden = job.hidden(slots);
        let source_rope = &self.source_rope[table(&self.source_rope, job.source.layout().rope.dims)];
        let target_rope = &self.target_rope[table(&self.target_rope, job.target.layout().rope.dims)];
        let mut mutable: Vec<&mut [f32]> = match &mut self.target {
            Some(staged) => staged.iter_mut().map(Vec::as_mut_slice).collect(),
            None => {
                let start = job.target.offset(0, slots.start);
                let elements = view_elements(job.target, job.target.head_stride(), tokens);
                let planes = job.target.layers_mut().iter_mut().flat_map(planes_of_mut);
                planes
                    .filter_map(|plane| match plane {
                        Plane::F32(plane) => Some(&mut plane[start..start + elements]),
                        Plane::F16(_) => None,
                    })
                    .collect()
            }
        };
        mutable.extend(self.scratch.iter_mut().map(Vec::as_mut_slice));
        work(Buffers { source, source_rope, target_rope, hidden, mutable })
    }

    /// Looks for poison, NaN and infinities in every element of the outputs.
    ///
    /// # Errors
    /// [`DeviceError::Output`] for an output that has any.
    pub(super) fn scan(&self, job: &Job<'_>, recording: &Recording, slots: &Range<usize>) -> Result<(), DeviceError> {
        let rows = slots.len() * job.target.layout().head_dim;
        let layout = job.target.layout();
        let head_stride = if self.target.is_some() { rows } else { job.target.head_stride() };
        let Checked::Scan(call) = scan_call(layout.kv_heads, slots.len(), layout.head_dim, head_stride)? else {
            return Ok(());
        };
        let start = job.target.offset(0, slots.start);
        let faults = |i: usize| match (&self.target, planes_of(job.target.layer(i / 2))[i % 2]) {
            (Some(staged), _) => cpu::scan(&call, &staged[i]),
            (None, Plane::F32(plane)) => cpu::scan(&call, &plane[start..]),
            // An f16 target is always staged.
            (None, Plane::F16(_)) => Ok(cpu::Counts::default()),
        };
        let Range { start: first, end } = job.mapped_layers();
        (2 * first..2 * end).into_par_iter().try_for_each(|i| {
            let found = faults(i).map_err(|error| DeviceError::Mirror { step: recording.steps.len(), error })?;
            if found.is_clean() {
                return Ok(());
            }
            Err(DeviceError::Output {
                buffer: BufferName(BufferId::Target { layer: (i / 2) as u32, value: i % 2 == 1 }),
                first: slots.start,
                end: slots.end,
                poison: found.poison,
                non_finite: found.nan + found.infinite,
            })
        })
    }

    /// Narrows staged outputs into an f16 cache; gives the bytes it wrote.
    pub(super) fn install(&self, job: &mut Job<'_>, slots: &Range<usize>) -> u64 {
        let Some(staged) = &self.target else { return 0 };
        let rows = slots.len() * job.target.layout().head_dim;
        let starts = head_starts(job.target, slots.start);
        let mapped = job.mapped_layers();
        let staged = &staged[2 * mapped.start..];
        let planes: Vec<&mut Plane> = job.target.layers_mut()[mapped].iter_mut().flat_map(planes_of_mut).collect();
        planes.into_par_iter().zip(staged).for_each(|(plane, view)| {
            for (&start, values) in starts.iter().zip(view.chunks_exact(rows)) {
                plane.write(start, values);
            }
        });
        staged.iter().map(|view| 2 * view.len() as u64).sum()
    }
}

/// Offset of each head's row of `slot`.
fn head_starts(planes: &KvPlanes, slot: usize) -> Vec<usize> {
    (0..planes.layout().kv_heads).map(|head| planes.offset(head, slot)).collect()
}
