//! The kernels' WGSL with what reflection found in it, as the build script wrote it.

pub use crate::reflect::{Access, Element};

/// A validated WGSL module of the host's, with one entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shader {
    /// Name of the module: the kernel's, with the format of the weights where there are several.
    pub name: &'static str,
    /// WGSL.
    pub source: &'static str,
    /// Entry point.
    pub entry: &'static str,
    /// Invocations of a workgroup in x, y, z.
    pub workgroup_size: [u32; 3],
    /// Whether the adapter must have 16-bit floats.
    pub f16: bool,
    /// The backends that the module was translated for when it was built.
    pub backends: &'static [&'static str],
    /// Storage bindings of group 0, by index; the last is the parameter block.
    pub bindings: &'static [Slot],
    /// Layouts of the module's structs.
    pub structs: &'static [Layout],
}

/// A storage binding of group 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Index in the group.
    pub index: u32,
    /// Name of the variable.
    pub name: &'static str,
    /// What the kernel does with it.
    pub access: Access,
    /// Whether it is declared `read_write`, as a bind group layout has to say.
    pub declared_writable: bool,
    /// What it holds.
    pub element: Element,
    /// The fewest bytes a binding must have.
    pub min_bytes: u64,
}

/// Layout of a WGSL struct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Its name.
    pub name: &'static str,
    /// Bytes.
    pub span: u32,
    /// Members with their byte offsets.
    pub members: &'static [(&'static str, u32)],
}

/// All of the host's modules.
pub const SHADERS: &[Shader] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
