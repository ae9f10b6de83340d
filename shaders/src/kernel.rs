//! The host's kernels by versioned name, and the WGSL module that serves each.

use crate::table::{SHADERS, Shader, Slot};

/// The host's kernels, by versioned name. A module asks for one with `kernel("affine@1", …)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// `gather@1`: strips the rotation of one source layer's keys (or copies its values) into a panel.
    Gather,
    /// `affine@1`: matrix product over a panel's blocks, bias and the target's rotation in one.
    Affine,
    /// `heads@1`: a product of its own for every head, with bias, optional ReLU and the target's rotation.
    Heads,
    /// `scan@1`: counts words that are poison, infinite or NaN. The host's own; not offered to modules.
    Scan,
}

/// How a kernel's weights lie in their buffer. A choice of the host's that a module doesn't see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// 32-bit floats.
    F32,
    /// 16-bit floats, on adapters that have them.
    F16,
    /// 16-bit floats, read two at a time from u32 words, on adapters that don't.
    PackedF16,
}

/// A module asked for a kernel that the host doesn't offer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no kernel `{asked}`; this host offers {}", offered_list())]
pub struct UnknownKernel {
    /// What was asked for.
    pub asked: String,
}

fn offered_list() -> String {
    Kernel::OFFERED.map(Kernel::name).join(", ")
}

impl Kernel {
    /// All kernels.
    pub const ALL: [Self; 4] = [Self::Gather, Self::Affine, Self::Heads, Self::Scan];
    /// Those that modules may ask for.
    pub const OFFERED: [Self; 3] = [Self::Gather, Self::Affine, Self::Heads];

    /// The kernel of that name, version included, among those offered to modules.
    ///
    /// # Errors
    /// [`UnknownKernel`], which lists what is offered.
    pub fn from_name(name: &str) -> Result<Self, UnknownKernel> {
        Self::OFFERED
            .into_iter()
            .find(|kernel| kernel.name() == name)
            .ok_or_else(|| UnknownKernel { asked: name.to_owned() })
    }

    /// Name and version, `affine@1`. The version counts up when the meaning of parameters or bindings changes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gather => "gather@1",
            Self::Affine => "affine@1",
            Self::Heads => "heads@1",
            Self::Scan => "scan@1",
        }
    }

    /// The WGSL module that serves the kernel. Kernels with weights have several, by the format of those.
    pub fn shader(self, weights: WeightFormat) -> &'static Shader {
        let name = match (self, weights) {
            (Self::Gather, _) => "gather",
            (Self::Affine, WeightFormat::F32) => "affine_f32",
            (Self::Affine, WeightFormat::F16) => "affine_f16",
            (Self::Affine, WeightFormat::PackedF16) => "affine_packed",
            (Self::Heads, WeightFormat::F32) => "heads_f32",
            (Self::Heads, WeightFormat::F16) => "heads_f16",
            (Self::Heads, WeightFormat::PackedF16) => "heads_packed",
            (Self::Scan, _) => "scan",
        };
        SHADERS.iter().find(|shader| shader.name == name).expect("the build script's table holds every module")
    }

    /// The storage bindings that a caller gives, in order: the shader's, without the parameter block at the end.
    pub fn slots(self) -> &'static [Slot] {
        let slots = self.shader(WeightFormat::F32).bindings;
        &slots[..slots.len() - 1]
    }
}
