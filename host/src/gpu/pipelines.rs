//! Compute pipelines, made once per device and kept.

use std::collections::HashMap;

use kvmig_gate::Digest;
use kvmig_shaders::{Kernel, WeightFormat};

use super::{Context, context::lock};
use crate::{device::DeviceError, sandbox::recording::PipelineSpec};

/// Pipelines of modules' own shaders kept at a time; a process that goes through more modules than that compiles again.
const KEPT: usize = 64;

/// The pipelines of one device.
#[derive(Debug, Default)]
pub(super) struct Pipelines {
    kernels: HashMap<(Kernel, WeightFormat), wgpu::ComputePipeline>,
    own: HashMap<OwnKey, wgpu::ComputePipeline>,
}

/// A module's pipeline: the module (its digest covers its shaders), the shader, the entry point, the constants.
type OwnKey = (Digest, String, String, Vec<(String, u64)>);

/// The pipeline of one of the host's kernels.
pub(super) fn kernel(
    context: &Context,
    kernel: Kernel,
    format: WeightFormat,
) -> Result<wgpu::ComputePipeline, DeviceError> {
    let key = (kernel, format);
    if let Some(pipeline) = lock(&context.pipelines).kernels.get(&key) {
        return Ok(pipeline.clone());
    }
    let pipeline = context.scoped("compiling a kernel of the host", || {
        let shader = kernel.shader(format);
        // With every run-time check: waiving them gained nothing measurable on the adapters at hand.
        let module = context.device.create_shader_module(descriptor(shader.name, shader.source));
        Ok(compile(context, shader.name, &module, Some(shader.entry), &[]))
    })?;
    lock(&context.pipelines).kernels.insert(key, pipeline.clone());
    Ok(pipeline)
}

/// The pipeline of a module's own shader. Always with bounds checks and loop bounding, for nobody vouches for it.
pub(super) fn own(
    context: &Context,
    module: Digest,
    spec: &PipelineSpec,
    wgsl: &str,
) -> Result<wgpu::ComputePipeline, DeviceError> {
    let constants = spec.constants.iter().map(|(name, value)| (name.clone(), value.to_bits())).collect();
    let key = (module, spec.shader.clone(), spec.entry.clone(), constants);
    if let Some(pipeline) = lock(&context.pipelines).own.get(&key) {
        return Ok(pipeline.clone());
    }
    let compiled = context.scoped("compiling the module's shader", || {
        // `create_shader_module` validates with naga and keeps every run-time check on.
        let module = context.device.create_shader_module(descriptor(&spec.shader, wgsl));
        let constants: Vec<(&str, f64)> = spec.constants.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        Ok(compile(context, &spec.shader, &module, Some(&spec.entry), &constants))
    });
    let pipeline = compiled.map_err(|error| match error {
        DeviceError::Gpu { reason, .. } => DeviceError::Shader { shader: spec.shader.clone(), reason },
        other => other,
    })?;
    let own = &mut lock(&context.pipelines).own;
    if own.len() >= KEPT {
        own.clear();
    }
    own.insert(key, pipeline.clone());
    Ok(pipeline)
}

fn descriptor<'a>(label: &'a str, wgsl: &'a str) -> wgpu::ShaderModuleDescriptor<'a> {
    wgpu::ShaderModuleDescriptor { label: Some(label), source: wgpu::ShaderSource::Wgsl(wgsl.into()) }
}

fn compile(
    context: &Context,
    label: &str,
    module: &wgpu::ShaderModule,
    entry: Option<&str>,
    constants: &[(&str, f64)],
) -> wgpu::ComputePipeline {
    context.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some(label),
        // Bindings come from the shader itself, so that they are not typed twice.
        layout: None,
        module,
        entry_point: entry,
        compilation_options: wgpu::PipelineCompilationOptions {
            constants,
            // No kernel of the host has workgroup memory; a module's must not read what another program left there.
            zero_initialize_workgroup_memory: true,
        },
        cache: None,
    })
}
