//! A module's own shaders: what they declare is read off the validated naga module.

use std::{collections::HashMap, sync::Arc};

use kvmig_shaders::reflect::{Access, BindingInfo, EntryInfo, Features, Parsed, Space};

use super::{Terms, budget};
use crate::sandbox::{Fault, words::one_line};

/// Pipelines of a recording: each costs its device a compilation.
pub(super) const MOST_PIPELINES: u64 = 64;
/// Invocations of a workgroup that every adapter allows.
const MOST_INVOCATIONS: u64 = 256;
/// Workgroups in each dimension that every adapter allows.
const MOST_WORKGROUPS: u32 = 65_535;

/// A pipeline as a guest holds it.
#[expect(unreachable_pub, reason = "the generated bindings re-export it, which asks for `pub`")]
#[derive(Clone, Debug)]
pub struct PipelineHandle {
    index: u32,
    entry: Arc<EntryInfo>,
}

impl PipelineHandle {
    pub(super) fn new(index: u32, entry: Arc<EntryInfo>) -> PipelineHandle {
        PipelineHandle { index, entry }
    }

    pub(super) fn index(&self) -> u32 {
        self.index
    }

    pub(super) fn bindings(&self) -> &[BindingInfo] {
        &self.entry.bindings
    }

    pub(in crate::sandbox) fn workgroup_size(&self) -> [u32; 3] {
        self.entry.workgroup_size
    }

    /// Invocations of a dispatch of so many workgroups.
    pub(super) fn invocations(&self, workgroups: [u32; 3]) -> Result<u64, Fault> {
        for count in workgroups {
            budget("workgroups in a dimension", 0, count.into(), MOST_WORKGROUPS.into(), "WebGPU's limit")?;
        }
        // Three factors below 2^16 and one below 2^9: no overflow.
        let groups: u64 = workgroups.into_iter().map(u64::from).product();
        Ok(groups * self.workgroup_size().into_iter().map(u64::from).product::<u64>())
    }
}

/// What a binding is bound as: what is declared `read_write`, as writable.
pub(super) fn declared(binding: &BindingInfo) -> Access {
    if binding.declared_writable { Access::ReadWrite } else { Access::Read }
}

/// The module's shaders, parsed when they are first asked for.
#[derive(Default)]
pub(super) struct Shaders {
    parsed: HashMap<String, Parsed>,
}

impl Shaders {
    /// What an entry point declares, checked: a compute shader of at most 256 invocations that uses storage buffers of
    /// group 0 alone, no more of them than the device binds.
    pub(super) fn entry(
        &mut self,
        terms: &Terms,
        shader: &str,
        entry: &str,
        constants: &[(String, f64)],
    ) -> Result<Arc<EntryInfo>, Fault> {
        if !terms.device.own_shaders {
            return Err(Fault::OwnShaders);
        }
        let unknown = |what, name: &str, known: Vec<String>| {
            let known = known.iter().map(|name| one_line(name)).collect();
            Fault::UnknownShader { what, name: one_line(name), known }
        };
        let Some((_, wgsl)) = terms.shaders.iter().find(|(name, _)| name == shader) else {
            return Err(unknown("shader", shader, terms.shaders.iter().map(|(name, _)| name.clone()).collect()));
        };
        if !self.parsed.contains_key(shader) {
            let parsed = Parsed::new(shader, wgsl, Features { f16: terms.device.half })?;
            self.parsed.insert(shader.to_owned(), parsed);
        }
        let parsed = &self.parsed[shader];
        let Some(info) = parsed.entries().iter().find(|info| info.name == entry) else {
            return Err(unknown("entry point", entry, parsed.entries().iter().map(|info| info.name.clone()).collect()));
        };
        let overrides = parsed.overrides();
        for (at, (name, value)) in constants.iter().enumerate() {
            if !overrides.contains(name) || constants[..at].iter().any(|(before, _)| before == name) {
                return Err(unknown("override constant", name, overrides));
            }
            if !value.is_finite() {
                let why = format!("override constant `{}` is {value}; expected a finite number", one_line(name));
                return Err(Fault::ShaderUse { shader: one_line(shader), entry: one_line(entry), why });
            }
        }
        check_use(terms, info).map_err(|why| Fault::ShaderUse {
            shader: one_line(shader),
            entry: one_line(entry),
            why,
        })?;
        Ok(Arc::new(info.clone()))
    }
}

fn check_use(terms: &Terms, info: &EntryInfo) -> Result<(), String> {
    let invocations: u64 = info.workgroup_size.into_iter().map(u64::from).product();
    if invocations == 0 || invocations > MOST_INVOCATIONS {
        return Err(format!("found {invocations} invocations in a workgroup, expected 1 to {MOST_INVOCATIONS}"));
    }
    let most = terms.device.max_bindings as usize;
    if info.bindings.len() > most {
        return Err(format!("found {} bindings, this device has {most}", info.bindings.len()));
    }
    match info.bindings.iter().find(|binding| binding.group != 0 || binding.space != Space::Storage) {
        None => Ok(()),
        Some(BindingInfo { name, group, space, .. }) => {
            let name = one_line(name);
            Err(format!(
                "found `{name}` in group {group}, {space:?}; expected storage buffers in group 0 (constants too)"
            ))
        }
    }
}
