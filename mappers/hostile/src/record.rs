//! Modes that ask for work, some of it wrong. The right way here: the source's layer l is copied to the target's layer l
//! through scratch, by `gather@1` and an `affine@1` with the identity in weight `w` and zeroes in bias `b`.

use kvmig_mapper::{
    AffineBlock, AffineParams, Buffer, Dim3, GatherParams, Job, ModelPair, Pipeline, Refusal, View, WorkPlan, gpu,
    kernel, range, weight, whole,
};

pub(crate) fn plan(pair: &ModelPair, settings: &str) -> Result<WorkPlan, Refusal> {
    if settings == "plan-works" {
        gpu::scratch(4)?;
    }
    let width = pair.source.kv_heads * pair.source.head_dim;
    let huge = if settings == "plan-huge-weights" { u32::MAX } else { width };
    Ok(WorkPlan {
        kind: settings.into(),
        weights: vec![weight("w".into(), &[huge, huge]), weight("b".into(), &[width])],
        chunk_tokens: if settings == "plan-without-chunk" { 0 } else { 16 },
        scratch_bytes: if settings == "plan-huge-scratch" { u64::MAX } else { 1 << 20 },
        max_dispatches: 100,
    })
}

pub(crate) fn good(pair: &ModelPair, job: &Job) -> Result<(), Refusal> {
    (0..pair.target.layers as usize).try_for_each(|layer| copy_layer(pair, job, layer))
}

pub(crate) fn refuses(_: &ModelPair, _: &Job) -> Result<(), Refusal> {
    Err(Refusal::Unsupported("this\npair, on a Monday".into()))
}

/// Copies one layer's keys and values.
pub(crate) fn copy_layer(pair: &ModelPair, job: &Job, layer: usize) -> Result<(), Refusal> {
    copy(pair, job, &job.source[layer].k, &job.target[layer].k)?;
    copy(pair, job, &job.source[layer].v, &job.target[layer].v)
}

fn copy(pair: &ModelPair, job: &Job, from: &View, to: &View) -> Result<(), Refusal> {
    let panel = gpu::scratch(panel_bytes(pair, job))?;
    kernel("gather@1", &gather_params(pair, job, from).to_bytes(), [&from.buffer, &job.source_rope, &panel])?;
    multiply(pair, job, &panel, to)
}

fn multiply(pair: &ModelPair, job: &Job, panel: &Buffer, to: &View) -> Result<(), Refusal> {
    let (w, b) = (gpu::weights("w")?, gpu::weights("b")?);
    Ok(kernel("affine@1", &affine_params(pair, job, to).to_bytes(), [panel, &w, &b, &job.target_rope, &to.buffer])?)
}

fn panel_bytes(pair: &ModelPair, job: &Job) -> u64 {
    u64::from(job.tokens * pair.source.kv_heads * pair.source.head_dim) * 4
}

fn gather_params(pair: &ModelPair, job: &Job, view: &View) -> GatherParams {
    GatherParams {
        tokens: job.tokens,
        kv_heads: pair.source.kv_heads,
        head_dim: pair.source.head_dim,
        rope_dims: 0,
        head_stride: view.head_stride,
        row_stride: view.row_stride,
        panel_row_stride: pair.source.kv_heads * pair.source.head_dim,
    }
}

fn affine_params(pair: &ModelPair, job: &Job, view: &View) -> AffineParams {
    let width = pair.source.kv_heads * pair.source.head_dim;
    AffineParams {
        tokens: job.tokens,
        kv_heads: pair.target.kv_heads,
        head_dim: pair.target.head_dim,
        rope_dims: 0,
        head_stride: view.head_stride,
        row_stride: view.row_stride,
        blocks: vec![AffineBlock { offset: 0, row_stride: width, width }],
    }
}

pub(crate) fn out_of_range(pair: &ModelPair, job: &Job) -> Result<(), Refusal> {
    gather_into(pair, job, 0, panel_bytes(pair, job) + 4)
}

pub(crate) fn offset_overflow(pair: &ModelPair, job: &Job) -> Result<(), Refusal> {
    gather_into(pair, job, u64::MAX - 255, 512)
}

pub(crate) fn misaligned(pair: &ModelPair, job: &Job) -> Result<(), Refusal> {
    gather_into(pair, job, 4, panel_bytes(pair, job) - 4)
}

/// Gathers layer 0's keys into bytes `offset .. offset + size` of a panel of the right size.
fn gather_into(pair: &ModelPair, job: &Job, offset: u64, size: u64) -> Result<(), Refusal> {
    let (view, panel) = (&job.source[0].k, gpu::scratch(panel_bytes(pair, job))?);
    let bindings = [whole(0, &view.buffer), whole(1, &job.source_rope), range(2, &panel, offset, size)];
    Ok(gpu::kernel("gather@1", &gather_params(pair, job, view).to_bytes(), &bindings)?)
}

/// The panel that is read is the panel that is written.
pub(crate) fn aliased(pair: &ModelPair, job: &Job) -> Result<(), Refusal> {
    let (view, panel) = (&job.source[0].k, gpu::scratch(panel_bytes(pair, job))?);
    let params = gather_params(pair, job, view).to_bytes();
    kernel("gather@1", &params, [&view.buffer, &job.source_rope, &panel])?;
    Ok(kernel("gather@1", &params, [&panel, &job.source_rope, &panel])?)
}

pub(crate) fn writes_source(pair: &ModelPair, job: &Job) -> Result<(), Refusal> {
    let (from, to) = (&job.source[0].k, &job.source[1].k);
    Ok(kernel("gather@1", &gather_params(pair, job, from).to_bytes(), [&from.buffer, &job.source_rope, &to.buffer])?)
}

/// All layers but the last one's values.
pub(crate) fn uncovered(pair: &ModelPair, job: &Job) -> Result<(), Refusal> {
    let last = pair.target.layers as usize - 1;
    (0..last).try_for_each(|layer| copy_layer(pair, job, layer))?;
    copy(pair, job, &job.source[last].k, &job.target[last].k)
}

pub(crate) fn reads_unwritten(pair: &ModelPair, job: &Job) -> Result<(), Refusal> {
    multiply(pair, job, &gpu::scratch(panel_bytes(pair, job))?, &job.target[0].k)
}

/// The binding is right, the strides in the parameters lead out of it.
pub(crate) fn stride_escape(pair: &ModelPair, job: &Job) -> Result<(), Refusal> {
    let (view, panel) = (&job.source[0].k, gpu::scratch(panel_bytes(pair, job))?);
    let params = GatherParams { head_stride: u32::MAX, row_stride: u32::MAX, ..gather_params(pair, job, view) };
    Ok(kernel("gather@1", &params.to_bytes(), [&view.buffer, &job.source_rope, &panel])?)
}

pub(crate) fn wrong_params(pair: &ModelPair, job: &Job) -> Result<(), Refusal> {
    let (view, panel) = (&job.source[0].k, gpu::scratch(panel_bytes(pair, job))?);
    Ok(kernel("gather@1", &[1, 2, 3], [&view.buffer, &job.source_rope, &panel])?)
}

/// `scan@1` is the host's own, not offered to modules.
pub(crate) fn unknown_kernel(_: &ModelPair, job: &Job) -> Result<(), Refusal> {
    Ok(kernel("scan@1", &[], [&job.source[0].k.buffer])?)
}

pub(crate) fn unknown_weights(_: &ModelPair, _: &Job) -> Result<(), Refusal> {
    gpu::weights("somebody.else's")?;
    Ok(())
}

pub(crate) fn too_few_bindings(pair: &ModelPair, job: &Job) -> Result<(), Refusal> {
    let view = &job.source[0].k;
    Ok(kernel("gather@1", &gather_params(pair, job, view).to_bytes(), [&view.buffer])?)
}

/// Swallows a fault and does all the right things afterwards.
pub(crate) fn goes_on_after_fault(pair: &ModelPair, job: &Job) -> Result<(), Refusal> {
    let _swallowed = gpu::weights("somebody.else's");
    good(pair, job)
}

/// Fills every target view by a shader of its own.
pub(crate) fn own_shader(_: &ModelPair, job: &Job) -> Result<(), Refusal> {
    let fill = Pipeline::create("fill", "main", &[])?;
    let group = fill.workgroup_size().x;
    for view in job.target.iter().flat_map(|kv| [&kv.k, &kv.v]) {
        let elements = (view.buffer.size() / 4) as u32;
        let workgroups = Dim3 { x: elements.div_ceil(group), y: 1, z: 1 };
        gpu::dispatch(&fill, &[whole(0, &view.buffer)], workgroups)?;
    }
    Ok(())
}

pub(crate) fn own_shader_unknown(_: &ModelPair, _: &Job) -> Result<(), Refusal> {
    Pipeline::create("nothing", "main", &[])?;
    Ok(())
}
