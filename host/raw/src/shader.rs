//! Shader modules without forced loop bounding.

/// The text of one of the host's own shaders.
///
/// `'static`, because they are compiled into the program: a module's text is read at run time and goes through
/// `Device::create_shader_module`, all checks on.
#[derive(Clone, Copy, Debug)]
pub struct HostShader {
    /// Label for error messages and captures.
    pub label: &'static str,
    /// WGSL.
    pub wgsl: &'static str,
}

/// Creates a shader module of the host's own text, whose loops are left as they are: the iteration counter that is
/// otherwise woven into every loop costs a matrix product dearly. Bounds checks stay on.
pub fn create_host_shader(device: &wgpu::Device, shader: HostShader) -> wgpu::ShaderModule {
    let checks = wgpu::ShaderRuntimeChecks { force_loop_bounding: false, ..wgpu::ShaderRuntimeChecks::checked() };
    let descriptor =
        wgpu::ShaderModuleDescriptor { label: Some(shader.label), source: wgpu::ShaderSource::Wgsl(shader.wgsl.into()) };
    // SAFETY: waiving loop bounding asks that the shader has no infinite loop. The text is compiled into the program, and
    // each loop of kvmig's kernels counts up to a bound that comes from its parameter block (tokens, blocks, columns);
    // blocks are checked before they reach a device. A lint of kvmig-shaders over the naga modules holds the loops to that
    // form. All other checks, bounds checks among them, stay on.
    unsafe { device.create_shader_module_trusted(descriptor, checks) }
}
