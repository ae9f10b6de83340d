//! Shader modules without forced loop bounding.

use kvmig_shaders::{Kernel, WeightFormat};
use wgpu::{Device, ShaderModule, ShaderModuleDescriptor, ShaderRuntimeChecks, ShaderSource};

/// Creates the shader module of one of the host's own kernels, whose loops are left as they are: the iteration counter
/// that is otherwise woven into every loop costs a matrix product dearly. Bounds checks stay on.
///
/// It takes a kernel and no text, because a module's text must never come this way: that goes through
/// `Device::create_shader_module`, with all checks.
pub fn create_kernel_module(device: &Device, kernel: Kernel, weights: WeightFormat) -> ShaderModule {
    let shader = kernel.shader(weights);
    let checks = ShaderRuntimeChecks { force_loop_bounding: false, ..ShaderRuntimeChecks::checked() };
    let source = ShaderSource::Wgsl(shader.source.into());
    // SAFETY: waiving loop bounding asks that no loop is infinite. The text is compiled into kvmig-shaders, and each loop
    // there counts up, by a positive constant, to a bound from the parameter block (blocks, columns) that doesn't change;
    // its lints, run by the tests over the naga modules, hold the kernels to that form, and `Kernel::check` bounds the
    // parameters so that counting up doesn't wrap. All other checks, bounds checks among them, stay on.
    unsafe { device.create_shader_module_trusted(ShaderModuleDescriptor { label: Some(shader.name), source }, checks) }
}
