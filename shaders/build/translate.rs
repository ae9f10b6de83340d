//! Every backend that wgpu may hand a kernel to has to accept it, whatever machine it is built on: a kernel that Metal or
//! Direct3D would refuse doesn't build on Linux either.
//!
//! This is done in the build script, whose dependencies are resolved apart, so that the library and wgpu share a naga
//! without the backends that this platform has no use for.

use naga::{
    Module, ShaderStage,
    back::{glsl, hlsl, msl, spv},
    proc::BoundsCheckPolicies,
    valid::ModuleInfo,
};

use crate::reflect::Features;

/// Translates to SPIR-V, MSL, HLSL and, without f16 (which GLSL hasn't), GLSL ES 3.10; gives the names of those done.
pub(crate) fn all(
    name: &str,
    module: &Module,
    info: &ModuleInfo,
    features: Features,
) -> Result<Vec<&'static str>, String> {
    let failed = |backend: &str, error: &dyn std::error::Error| format!("shader {name}: {backend}: {error}");

    spv::write_vec(module, info, &spv::Options::default(), None).map_err(|e| failed("spirv", &e))?;

    let options = msl::Options { lang_version: (2, 4), fake_missing_bindings: true, ..Default::default() };
    let pipeline = msl::PipelineOptions::default();
    msl::write_string(module, info, &options, &pipeline).map_err(|e| failed("msl", &e))?;

    let options = hlsl::Options {
        shader_model: if features.f16 { hlsl::ShaderModel::V6_2 } else { hlsl::ShaderModel::V5_1 },
        fake_missing_bindings: true,
        ..Default::default()
    };
    let pipeline = hlsl::PipelineOptions::default();
    let mut text = String::new();
    hlsl::Writer::new(&mut text, &options, &pipeline).write(module, info, None).map_err(|e| failed("hlsl", &e))?;

    let mut done = vec!["spirv", "msl", "hlsl"];
    if !features.f16 {
        let options = glsl::Options { version: glsl::Version::new_gles(310), ..Default::default() };
        let pipeline = glsl::PipelineOptions {
            shader_stage: ShaderStage::Compute,
            entry_point: module.entry_points[0].name.clone(),
            multiview: None,
        };
        let mut text = String::new();
        glsl::Writer::new(&mut text, module, info, &options, &pipeline, BoundsCheckPolicies::default())
            .and_then(|mut writer| writer.write())
            .map_err(|e| failed("glsl", &e))?;
        done.push("glsl");
    }
    Ok(done)
}
