//! Replays a job's recordings chunk by chunk. While the adapter maps one chunk, the host uploads the next and installs the
//! one before.

use std::{
    borrow::Cow,
    ops::Range,
    sync::mpsc,
    time::{Duration, Instant},
};

use super::{
    Context,
    buffers::{self, Inputs, JobBuffers, plane, stage_plane},
    context::lock,
    prepare::{self, Dispatch, Prepared},
    scan::Scan,
};
use crate::{
    device::{DeviceError, Job, Report},
    sandbox::recording::BufferId,
};

/// Executes a job whose weights lie on this device.
pub(crate) fn execute(context: &Context, mut job: Job<'_>) -> Result<Report, DeviceError> {
    let chunks = job.chunks()?;
    if chunks.is_empty() {
        return Ok(Report::default());
    }
    if !job.weights.on_gpu().is_some_and(|weights| weights.belongs_to(context)) {
        return Err(DeviceError::Job {
            field: "weights",
            found: "on another device".into(),
            expected: format!("loaded by {}", context.title()),
        });
    }
    let mut report = Report::default();
    let begin = Instant::now();
    let mut replay = context.scoped("preparing the recordings", || Replay::new(context, &job))?;
    report.upload_ms += ms(begin);
    let begin = Instant::now();
    context.scoped("mapping", || {
        let mut pending: Option<Pending> = None;
        for chunk in &chunks {
            let next = replay.submit(context, &job, chunk.rest, chunk.slots.clone(), &mut report)?;
            if let Some(previous) = pending.replace(next) {
                replay.finish(context, &mut job, previous, &mut report)?;
            }
        }
        match pending {
            Some(last) => replay.finish(context, &mut job, last, &mut report),
            None => Ok(()),
        }
    })?;
    // Over the whole job, for where one chunk's work ends can't be told: some drivers work inside `submit`. The copies
    // around it make the adapter look slower than it is, which errs to the side of shorter dispatches.
    lock(&context.rate).measured(report.flops, begin.elapsed());
    Ok(report)
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// A recording and the scan of its outputs.
struct Ready {
    prepared: Prepared,
    scan: Vec<Dispatch>,
}

/// A job in progress.
struct Replay {
    full: Option<Ready>,
    rest: Option<Ready>,
    held: JobBuffers,
    scan: Scan,
    /// Two, so that one is read while the other is filled. Outputs first, then the counts.
    readback: [wgpu::Buffer; 2],
    source_rope: Vec<f32>,
    target_rope: Vec<f32>,
    turn: usize,
    widened: Vec<f32>,
}

/// A chunk that the adapter works on.
struct Pending {
    slots: Range<usize>,
    submissions: Vec<wgpu::SubmissionIndex>,
    readback: usize,
    mapped: mpsc::Receiver<Result<(), wgpu::BufferAsyncError>>,
}

impl Replay {
    fn new(context: &Context, job: &Job<'_>) -> Result<Replay, DeviceError> {
        let full = (job.slots.len() >= job.full.tokens as usize).then_some(job.full);
        let rest = job.rest.filter(|rest| job.slots.len() % job.full.tokens as usize == rest.tokens as usize);
        let recordings: Vec<_> = full.into_iter().chain(rest).collect();
        let checked: Vec<_> =
            recordings.iter().map(|recording| prepare::check(job, recording)).collect::<Result<_, _>>()?;
        let inputs: Vec<Inputs> = recordings.iter().map(|recording| Inputs::of(recording, job)).collect();
        let upload = inputs.iter().map(|inputs| inputs.bytes).max().unwrap_or(0);
        let held = JobBuffers::allocate(context, job, &recordings, upload)?;
        let scan = Scan::allocate(context, held.outputs.len())?;
        let layout = job.target.layout();
        let mut ready = Vec::new();
        for (checked, inputs) in checked.iter().zip(inputs) {
            let prepared = Prepared::new(context, job, checked, inputs, &held)?;
            let scan = scan.dispatches(context, &held, layout, checked.recording.tokens)?;
            ready.push(Ready { prepared, scan });
        }
        let tokens = recordings.iter().map(|recording| u64::from(recording.tokens)).max().unwrap_or(0);
        let bytes = held.outputs.len() as u64 * 4 * tokens * layout.width() as u64 + scan.bytes();
        let usage = wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ;
        let mut ready = ready.into_iter();
        Ok(Replay {
            full: full.and_then(|_| ready.next()),
            rest: rest.and_then(|_| ready.next()),
            readback: [
                buffers::create(context, "readback 0", bytes, usage)?,
                buffers::create(context, "readback 1", bytes, usage)?,
            ],
            held,
            scan,
            source_rope: job.source.layout().rope.table(job.positions),
            target_rope: layout.rope.table(job.positions),
            turn: 0,
            widened: Vec::new(),
        })
    }

    /// Uploads a chunk and hands its work to the queue.
    fn submit(
        &mut self,
        context: &Context,
        job: &Job<'_>,
        rest: bool,
        slots: Range<usize>,
        report: &mut Report,
    ) -> Result<Pending, DeviceError> {
        let ready = if rest { &self.rest } else { &self.full };
        let Some(ready) = ready else {
            return Err(DeviceError::Job { field: "recording", found: "absent".into(), expected: "prepared".into() });
        };
        let Ready { prepared, scan } = ready;
        let begin = Instant::now();
        report.uploaded_bytes += prepared.inputs.bytes;
        upload(
            context,
            job,
            &self.held,
            &prepared.inputs,
            &slots,
            [&self.source_rope, &self.target_rope],
            &mut self.widened,
        );
        report.upload_ms += ms(begin);

        // Software adapters work inside `submit`: from here on it is the map that takes time.
        let begin = Instant::now();
        let recording = if rest { job.rest.unwrap_or(job.full) } else { job.full };
        let view = 4 * slots.len() as u64 * job.target.layout().width() as u64;
        let mut stream = Stream::new(context, job.pacing.dispatch);
        for output in &self.held.outputs {
            self.held.encode_poison(&mut stream.encoder, &output.buffer, view);
        }
        for (buffer, bytes) in self.held.scratch.iter().zip(&recording.scratch) {
            self.held.encode_poison(&mut stream.encoder, buffer, bytes.next_multiple_of(4));
        }
        let mut flops = 0;
        for dispatch in &prepared.dispatches {
            stream.dispatch(dispatch);
            flops += dispatch.flops.unwrap_or(0);
        }
        stream.encoder.clear_buffer(&self.scan.counts, 0, None);
        for dispatch in scan {
            stream.dispatch(dispatch);
        }
        let readback = &self.readback[self.turn];
        for (i, output) in self.held.outputs.iter().enumerate() {
            stream.encoder.copy_buffer_to_buffer(&output.buffer, 0, readback, i as u64 * view, view);
        }
        let counts = self.held.outputs.len() as u64 * view;
        stream.encoder.copy_buffer_to_buffer(&self.scan.counts, 0, readback, counts, self.scan.bytes());
        let submissions = stream.finish();

        let (sink, mapped) = mpsc::sync_channel(1);
        readback.map_async(wgpu::MapMode::Read, 0..counts + self.scan.bytes(), move |result| {
            // Nobody listens any more after an error elsewhere in the job.
            let _ = sink.send(result);
        });
        report.map_ms += ms(begin);
        report.chunks += 1;
        report.flops += flops;
        report.dispatches += prepared.dispatches.len() as u64;
        let pending = Pending { slots, submissions, readback: self.turn, mapped };
        self.turn = 1 - self.turn;
        Ok(pending)
    }

    /// Waits for a chunk, judges it and installs it.
    fn finish(
        &mut self,
        context: &Context,
        job: &mut Job<'_>,
        pending: Pending,
        report: &mut Report,
    ) -> Result<(), DeviceError> {
        let begin = Instant::now();
        for submission in &pending.submissions {
            context.wait("mapping a chunk", submission, job.pacing.deadline)?;
        }
        report.map_ms += ms(begin);

        let begin = Instant::now();
        let buffer = &self.readback[pending.readback];
        let unreadable = |reason: String| DeviceError::Gpu {
            device: context.title().to_owned(),
            stage: "reading a chunk back",
            reason,
        };
        // The device calls back on whichever thread polls it: with another job on the same device, our wait can be over
        // before that thread has made the call.
        match pending.mapped.recv_timeout(job.pacing.deadline) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(unreadable(error.to_string())),
            Err(_) => return Err(unreadable("its work is done, but the buffer was not mapped".into())),
        }
        let view = 4 * pending.slots.len() * job.target.layout().width();
        let counts = self.held.outputs.len() * view;
        let total = counts as u64 + self.scan.bytes();
        {
            let bytes = buffer.get_mapped_range(0..total).map_err(|error| unreadable(error.to_string()))?;
            self.scan.judge(context, &self.held, &bytes[counts..], &pending.slots)?;
            for (i, output) in self.held.outputs.iter().enumerate() {
                let bytes = &bytes[i * view..(i + 1) * view];
                // Drivers map at multiples of 8 at least; a copy for the one that does not.
                let values: Cow<'_, [f32]> = bytemuck::try_cast_slice(bytes)
                    .map_or_else(|_| bytemuck::pod_collect_to_vec(bytes).into(), Cow::Borrowed);
                install(job, output.layer as usize, output.value, &pending.slots, &values);
            }
        }
        buffer.unmap();
        report.readback_bytes += total;
        report.readback_ms += ms(begin);
        Ok(())
    }
}

/// Writes the source views and RoPE tables of one chunk.
fn upload(
    context: &Context,
    job: &Job<'_>,
    held: &JobBuffers,
    inputs: &Inputs,
    slots: &Range<usize>,
    [source_rope, target_rope]: [&[f32]; 2],
    widened: &mut Vec<f32>,
) {
    let Some(size) = wgpu::BufferSize::new(inputs.bytes) else { return };
    let Some(mut staged) = context.queue.write_buffer_with(&held.upload, 0, size) else {
        // The interface has reported why; the scope returns it.
        return;
    };
    let first = slots.start - job.slots.start;
    let rows = |dims: usize| first * dims..(first + slots.len()) * dims;
    for (id, region) in &inputs.regions {
        let offset = region.offset as usize;
        let mut write = |at: usize, bytes: &[u8]| {
            staged.slice(offset + at..offset + at + bytes.len()).copy_from_slice(bytes);
        };
        match *id {
            BufferId::Source { layer, value } => {
                let plane = plane(job.source.layer(layer as usize), value);
                stage_plane(job.source, plane, slots, widened, write);
            }
            BufferId::SourceRope => {
                write(0, bytemuck::cast_slice(&source_rope[rows(job.source.layout().rope.dims)]));
            }
            BufferId::Hidden => write(0, bytemuck::cast_slice(job.hidden(slots))),
            BufferId::TargetRope => {
                write(0, bytemuck::cast_slice(&target_rope[rows(job.target.layout().rope.dims)]));
            }
            _ => {}
        }
    }
}

/// Copies one staged output, `[n_kv, T, d]`, into its plane.
fn install(job: &mut Job<'_>, layer: usize, value: bool, slots: &Range<usize>, values: &[f32]) {
    let elements = slots.len() * job.target.layout().head_dim;
    let offsets: Vec<usize> =
        (0..job.target.layout().kv_heads).map(|head| job.target.offset(head, slots.start)).collect();
    let layer = job.target.layer_mut(layer);
    let plane = if value { &mut layer.v } else { &mut layer.k };
    for (offset, rows) in offsets.into_iter().zip(values.chunks_exact(elements)) {
        plane.write(offset, rows);
    }
}

/// Dispatches in order, in submissions that stay below a time limit.
struct Stream<'c> {
    context: &'c Context,
    encoder: wgpu::CommandEncoder,
    limit: f64,
    estimated: f64,
    submissions: Vec<wgpu::SubmissionIndex>,
}

impl<'c> Stream<'c> {
    fn new(context: &'c Context, limit: Duration) -> Stream<'c> {
        let encoder = context.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        Stream { context, encoder, limit: limit.as_secs_f64(), estimated: 0.0, submissions: Vec::new() }
    }

    fn dispatch(&mut self, dispatch: &Dispatch) {
        // A module's own shader may take any time: it gets a submission to itself, so that the deadline is its own.
        let seconds = dispatch.flops.map_or(f64::INFINITY, |flops| lock(&self.context.rate).seconds(flops));
        if self.estimated > 0.0 && self.estimated + seconds > self.limit {
            self.submit();
        }
        self.estimated += seconds;
        let mut pass = self.encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_pipeline(&dispatch.pipeline);
        pass.set_bind_group(0, &dispatch.group, &[]);
        let [x, y, z] = dispatch.workgroups;
        pass.dispatch_workgroups(x, y, z);
    }

    fn submit(&mut self) {
        let next = self.context.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let full = std::mem::replace(&mut self.encoder, next);
        self.submissions.push(self.context.queue.submit([full.finish()]));
        self.estimated = 0.0;
    }

    fn finish(mut self) -> Vec<wgpu::SubmissionIndex> {
        self.submit();
        self.submissions
    }
}
