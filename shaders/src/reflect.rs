//! What a WGSL module declares, read off the validated naga module: bindings with access and element, workgroup sizes,
//! struct layouts. The build script reads the host's own kernels through this file too, so that nothing is typed twice.

use naga::{
    AddressSpace, ScalarKind, ShaderStage, TypeInner,
    valid::{Capabilities, FunctionInfo, GlobalUse, ModuleInfo, ValidationFlags, Validator},
};

/// What an adapter lets a module use beyond the common floor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// `enable f16;` and the type.
    pub f16: bool,
}

/// A module that doesn't parse, doesn't validate, or asks for what isn't granted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShaderError {
    /// Not WGSL. The text shows the place in the source.
    #[error("shader {name} is not valid WGSL\n{report}")]
    Parse {
        /// The module's name.
        name: String,
        /// naga's report with line, column and the source around it.
        report: String,
    },
    /// WGSL, but against a rule of the language or beyond the features granted. The text shows the place in the source.
    #[error("shader {name} doesn't validate\n{report}")]
    Validate {
        /// The module's name.
        name: String,
        /// naga's report with line, column and the source around it.
        report: String,
    },
    /// An entry point of another stage than compute.
    #[error("shader {name}: entry point {entry} is not a compute shader")]
    Stage {
        /// The module's name.
        name: String,
        /// The entry point.
        entry: String,
    },
    /// A workgroup size that depends on an override constant can't be checked ahead of a pipeline.
    #[error("shader {name}: the workgroup size of {entry} depends on an override; write it as literals")]
    OverriddenSize {
        /// The module's name.
        name: String,
        /// The entry point.
        entry: String,
    },
    /// A resource that isn't a buffer.
    #[error("shader {name}: `{variable}` is neither a storage nor a uniform buffer; modules may bind buffers only")]
    Resource {
        /// The module's name.
        name: String,
        /// The variable.
        variable: String,
    },
}

/// How an entry point uses a binding, by what its code does rather than by how the variable is declared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Loads only (or nothing at all).
    Read,
    /// Stores only.
    Write,
    /// Loads and stores, or atomics.
    ReadWrite,
}

/// What a binding's array holds; of vectors, their scalars.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// 32-bit floats.
    F32,
    /// 16-bit floats.
    F16,
    /// 32-bit words: integers, or f16 packed in pairs.
    U32,
    /// A struct, or anything else.
    Block,
}

/// Where a binding's bytes live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// A storage buffer.
    Storage,
    /// A uniform buffer.
    Uniform,
}

/// One buffer an entry point uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindingInfo {
    /// Bind group.
    pub group: u32,
    /// Index in the group.
    pub index: u32,
    /// Name of the variable.
    pub name: String,
    /// Storage or uniform.
    pub space: Space,
    /// What the code does with it.
    pub access: Access,
    /// Whether it is declared `read_write` (what a bind group layout must say, whatever the code does).
    pub declared_writable: bool,
    /// What it holds.
    pub element: Element,
    /// The fewest bytes a binding must have (one element of a runtime-sized array).
    pub min_bytes: u64,
}

/// One compute entry point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryInfo {
    /// Its name.
    pub name: String,
    /// Invocations in x, y, z.
    pub workgroup_size: [u32; 3],
    /// The buffers it uses, by group and index.
    pub bindings: Vec<BindingInfo>,
}

/// Layout of a named struct of the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StructLayout {
    /// Its name.
    pub name: String,
    /// Bytes, a trailing runtime-sized array counted as one element.
    pub span: u32,
    /// Members with their byte offsets.
    pub members: Vec<(String, u32)>,
}

/// A parsed and validated module.
#[derive(Debug)]
pub struct Parsed {
    pub(crate) module: naga::Module,
    pub(crate) info: ModuleInfo,
    source: String,
    entries: Vec<EntryInfo>,
}

impl Parsed {
    /// Parses and validates `source` with every flag of naga's on. (Those don't refuse a barrier in non-uniform control
    /// flow; [`lint::uniform_barriers`](crate::lint::uniform_barriers) does.)
    ///
    /// # Errors
    /// [`ShaderError`]; parse and validation errors carry a report with the place in the source.
    pub fn new(name: &str, source: &str, features: Features) -> Result<Self, ShaderError> {
        let module = naga::front::wgsl::parse_str(source).map_err(|error| ShaderError::Parse {
            name: name.to_owned(),
            report: error.emit_to_string_with_path(source, name),
        })?;
        let mut capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
        capabilities.set(Capabilities::SHADER_FLOAT16, features.f16);
        let info = Validator::new(ValidationFlags::all(), capabilities).validate(&module).map_err(|error| {
            ShaderError::Validate { name: name.to_owned(), report: error.emit_to_string_with_path(source, name) }
        })?;
        let entries = entries(name, &module, &info)?;
        Ok(Self { module, info, source: source.to_owned(), entries })
    }

    /// The compute entry points, in the order of the source.
    pub fn entries(&self) -> &[EntryInfo] {
        &self.entries
    }

    /// Layouts of the named structs.
    pub fn structs(&self) -> Vec<StructLayout> {
        let named = self.module.types.iter().filter_map(|(_, ty)| match (&ty.name, &ty.inner) {
            (Some(name), TypeInner::Struct { members, span }) => Some(StructLayout {
                name: name.clone(),
                span: *span,
                members: members.iter().map(|m| (m.name.clone().unwrap_or_default(), m.offset)).collect(),
            }),
            _ => None,
        });
        named.collect()
    }

    /// Names of the override constants.
    pub fn overrides(&self) -> Vec<String> {
        self.module.overrides.iter().filter_map(|(_, o)| o.name.clone()).collect()
    }

    /// All functions, entry points included, with what the validator found out about their expressions.
    pub(crate) fn functions(&self) -> impl Iterator<Item = (&str, &naga::Function, &FunctionInfo)> {
        let helpers = self.module.functions.iter().map(|(handle, function)| {
            (function.name.as_deref().unwrap_or("(unnamed function)"), function, &self.info[handle])
        });
        let entries = self.module.entry_points.iter().enumerate();
        helpers.chain(entries.map(|(i, entry)| (entry.name.as_str(), &entry.function, self.info.get_entry_point(i))))
    }

    /// Line of the source that a span starts in, from 1; `None` for code that naga made up.
    pub(crate) fn line(&self, span: naga::Span) -> Option<u32> {
        span.is_defined().then(|| span.location(&self.source).line_number)
    }
}

fn entries(name: &str, module: &naga::Module, info: &ModuleInfo) -> Result<Vec<EntryInfo>, ShaderError> {
    let mut seen = Vec::with_capacity(module.entry_points.len());
    for (index, entry) in module.entry_points.iter().enumerate() {
        if entry.stage != ShaderStage::Compute {
            return Err(ShaderError::Stage { name: name.to_owned(), entry: entry.name.clone() });
        }
        if entry.workgroup_size_overrides.is_some_and(|sizes| sizes.iter().any(Option::is_some)) {
            return Err(ShaderError::OverriddenSize { name: name.to_owned(), entry: entry.name.clone() });
        }
        let mut bindings = Vec::new();
        for (handle, variable) in module.global_variables.iter() {
            let used = info.get_entry_point(index)[handle];
            let Some(at) = variable.binding.as_ref().filter(|_| !used.is_empty()) else { continue };
            let label =
                variable.name.clone().unwrap_or_else(|| format!("@group({}) @binding({})", at.group, at.binding));
            let (space, declared_writable) = match variable.space {
                AddressSpace::Storage { access } => (Space::Storage, access.contains(naga::StorageAccess::STORE)),
                AddressSpace::Uniform => (Space::Uniform, false),
                _ => return Err(ShaderError::Resource { name: name.to_owned(), variable: label }),
            };
            bindings.push(BindingInfo {
                group: at.group,
                index: at.binding,
                name: label,
                space,
                access: access(used),
                declared_writable,
                element: element(module, variable.ty),
                min_bytes: module.types[variable.ty].inner.try_size(module.to_ctx()).map_or(u64::MAX, u64::from),
            });
        }
        bindings.sort_by_key(|b| (b.group, b.index));
        seen.push(EntryInfo { name: entry.name.clone(), workgroup_size: entry.workgroup_size, bindings });
    }
    Ok(seen)
}

fn access(used: GlobalUse) -> Access {
    if used.contains(GlobalUse::ATOMIC) || used.contains(GlobalUse::READ | GlobalUse::WRITE) {
        Access::ReadWrite
    } else if used.contains(GlobalUse::WRITE) {
        Access::Write
    } else {
        Access::Read
    }
}

fn element(module: &naga::Module, ty: naga::Handle<naga::Type>) -> Element {
    let scalar = match module.types[ty].inner {
        TypeInner::Array { base, .. } => return element(module, base),
        TypeInner::Scalar(scalar) | TypeInner::Atomic(scalar) | TypeInner::Vector { scalar, .. } => scalar,
        _ => return Element::Block,
    };
    match (scalar.kind, scalar.width) {
        (ScalarKind::Float, 4) => Element::F32,
        (ScalarKind::Float, 2) => Element::F16,
        (ScalarKind::Uint | ScalarKind::Sint, 4) => Element::U32,
        _ => Element::Block,
    }
}
