//! Parameters and binding sizes in, proof out: a [`Checked`] kernel call touches nothing outside its bindings, and says
//! what it writes and what it costs.
//!
//! Arithmetic is in u128, so that no product of u32 fields overflows; what passes has indices that fit the u32 arithmetic
//! of the shaders.

mod affine;
mod footprint;
mod gather;
mod scan;
mod slices;

pub use affine::Affine;
pub use footprint::Footprint;
pub use gather::Gather;
pub use scan::Scan;
pub use slices::{MAX_WORKGROUPS, Slice};

use crate::{Element, Kernel};

/// A binding as the caller gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Its length in bytes. (GPU bindings are multiples of 4: the host pads a tensor with an odd number of f16.)
    pub bytes: u64,
    /// What it holds: f32 for views, tables and panels, f32 or f16 for weights, u32 words for `scan@1`.
    pub element: Element,
}

impl Bound {
    /// A binding of `bytes` bytes of f32.
    pub fn f32(bytes: u64) -> Self {
        Self { bytes, element: Element::F32 }
    }
}

/// A kernel call that isn't sound.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParamError {
    /// The parameter block has another length.
    #[error("{kernel}: parameter block of {found} bytes; expected {expected}{}", hint(.kernel))]
    Length {
        /// The kernel.
        kernel: &'static str,
        /// Bytes expected.
        expected: u64,
        /// Bytes found.
        found: u64,
    },
    /// Another number of bindings.
    #[error("{kernel}: {found} bindings; expected {expected}")]
    Bindings {
        /// The kernel.
        kernel: &'static str,
        /// Bindings expected.
        expected: usize,
        /// Bindings found.
        found: usize,
    },
    /// A binding holds something else.
    #[error("{kernel}: binding {index} ({binding}) holds {found:?}; expected {expected}")]
    Element {
        /// The kernel.
        kernel: &'static str,
        /// Index of the binding.
        index: u32,
        /// Name of the binding.
        binding: &'static str,
        /// What it may hold.
        expected: &'static str,
        /// What it holds.
        found: Element,
    },
    /// A field of the parameter block is out of its range.
    #[error("{kernel}: {field} is {found}; expected {expected}")]
    Field {
        /// The kernel.
        kernel: &'static str,
        /// The field.
        field: &'static str,
        /// Its value.
        found: u64,
        /// What it may be.
        expected: String,
    },
    /// The call would reach beyond a binding.
    #[error("{kernel}: binding {index} ({binding}) has {found} bytes; these parameters reach {needed}")]
    OutOfBounds {
        /// The kernel.
        kernel: &'static str,
        /// Index of the binding.
        index: u32,
        /// Name of the binding.
        binding: &'static str,
        /// Bytes that the parameters reach.
        needed: u128,
        /// Bytes of the binding.
        found: u64,
    },
    /// Two outputs would be written to the same place.
    #[error("{kernel}: the strides of binding {index} ({binding}) make rows or heads overlap")]
    Overlap {
        /// The kernel.
        kernel: &'static str,
        /// Index of the binding.
        index: u32,
        /// Name of the binding.
        binding: &'static str,
    },
}

fn hint(kernel: &str) -> &'static str {
    if kernel == Kernel::Affine.name() { " (32, and 12 for each block)" } else { "" }
}

/// A kernel call that was proved sound, with its typed parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checked {
    /// `gather@1`.
    Gather(Gather),
    /// `affine@1`.
    Affine(Affine),
    /// `scan@1`.
    Scan(Scan),
}

impl Kernel {
    /// Checks a call: the parameter block as bytes (little endian) and the caller's bindings, in the order of
    /// [`Kernel::slots`].
    ///
    /// # Errors
    /// [`ParamError`], which names the field or binding, what was found and what was expected.
    pub fn check(self, params: &[u8], bindings: &[Bound]) -> Result<Checked, ParamError> {
        let expected = self.slots().len();
        if bindings.len() != expected {
            return Err(ParamError::Bindings { kernel: self.name(), expected, found: bindings.len() });
        }
        Ok(match self {
            Self::Gather => Checked::Gather(Gather::check(params, bindings)?),
            Self::Affine => Checked::Affine(Affine::check(params, bindings)?),
            Self::Scan => Checked::Scan(Scan::check(params, bindings)?),
        })
    }
}

impl Checked {
    /// The kernel.
    pub fn kernel(&self) -> Kernel {
        match self {
            Self::Gather(_) => Kernel::Gather,
            Self::Affine(_) => Kernel::Affine,
            Self::Scan(_) => Kernel::Scan,
        }
    }

    /// Exactly the elements that the call writes.
    pub fn writes(&self) -> Footprint {
        match self {
            Self::Gather(call) => call.writes(),
            Self::Affine(call) => call.writes(),
            Self::Scan(call) => call.writes(),
        }
    }

    /// The elements that the call reads, binding by binding (a panel: block by block).
    pub fn reads(&self) -> Vec<Footprint> {
        match self {
            Self::Gather(call) => call.reads(),
            Self::Affine(call) => call.reads(),
            Self::Scan(call) => call.reads(),
        }
    }

    /// Floating-point operations, a multiplication and an addition counted as two; for `scan@1`, words.
    pub fn flops(&self) -> u64 {
        match self {
            Self::Gather(call) => call.flops(),
            Self::Affine(call) => call.flops(),
            Self::Scan(call) => call.flops(),
        }
    }

    /// Invocations of the whole call, in all its slices.
    pub fn invocations(&self) -> u64 {
        let per_workgroup: u64 = self.workgroup_size().iter().map(|&n| u64::from(n)).product();
        self.slices(u64::MAX).iter().map(Slice::workgroup_count).sum::<u64>() * per_workgroup
    }

    /// Cuts the call into dispatches of at most about `max_flops` each (one tile of rows at the least), in order of rows.
    /// Together they write what the call writes, each element once.
    pub fn slices(&self, max_flops: u64) -> Vec<Slice> {
        let (rows, tile, across) = match self {
            Self::Gather(call) => call.grid(),
            Self::Affine(call) => call.grid(),
            Self::Scan(call) => call.grid(),
        };
        slices::cut(rows, tile, across, self.flops(), max_flops)
    }

    /// The parameter block of the GPU for the slice that begins at `first_row`: bind it after the caller's bindings.
    pub fn gpu_params(&self, first_row: u32) -> Vec<u8> {
        match self {
            Self::Gather(call) => call.gpu_params(first_row),
            Self::Affine(call) => call.gpu_params(first_row),
            Self::Scan(call) => call.gpu_params(first_row),
        }
    }

    fn workgroup_size(&self) -> [u32; 3] {
        self.kernel().shader(crate::WeightFormat::F32).workgroup_size
    }
}

/// Checks that are the same for every kernel.
struct Checker<'a> {
    kernel: Kernel,
    bindings: &'a [Bound],
}

impl Checker<'_> {
    /// Rows of a call. The shaders add up to a tile to the last row.
    const MAX_ROWS: u64 = 1 << 30;

    fn field(&self, field: &'static str, found: u64, ok: bool, expected: impl Into<String>) -> Result<(), ParamError> {
        if ok {
            return Ok(());
        }
        Err(ParamError::Field { kernel: self.kernel.name(), field, found, expected: expected.into() })
    }

    fn rows(&self, field: &'static str, rows: u32) -> Result<(), ParamError> {
        let rows = u64::from(rows);
        self.field(field, rows, (1..=Self::MAX_ROWS).contains(&rows), "1 to 2^30")
    }

    fn positive(&self, field: &'static str, value: u32) -> Result<(), ParamError> {
        self.field(field, value.into(), value > 0, "at least 1")
    }

    fn rope(&self, rope_dims: u32, head_dim: u32) -> Result<(), ParamError> {
        let ok = rope_dims.is_multiple_of(2) && rope_dims <= head_dim;
        self.field("rope_dims", rope_dims.into(), ok, format!("an even number up to head_dim = {head_dim}"))
    }

    /// Workgroups in a dimension that isn't sliced.
    fn workgroups(&self, field: &'static str, found: u64, items: u64, per_workgroup: u32) -> Result<u32, ParamError> {
        let groups = items.div_ceil(per_workgroup.into());
        self.field(field, found, groups <= MAX_WORKGROUPS.into(), format!("at most {MAX_WORKGROUPS} workgroups"))?;
        Ok(groups as u32)
    }

    /// That the binding holds one of `elements`.
    fn holds(&self, index: usize, elements: &[Element], expected: &'static str) -> Result<(), ParamError> {
        let slot = self.kernel.slots()[index];
        let found = self.bindings[index].element;
        if elements.contains(&found) {
            return Ok(());
        }
        Err(ParamError::Element { kernel: self.kernel.name(), index: slot.index, binding: slot.name, expected, found })
    }

    /// That the binding has `elements` elements, and that their indices fit u32.
    fn reach(&self, index: usize, elements: u128) -> Result<(), ParamError> {
        let slot = self.kernel.slots()[index];
        let bound = self.bindings[index];
        let needed = elements * if bound.element == Element::F16 { 2 } else { 4 };
        let needed = needed.max(slot.min_bytes.into());
        if needed <= bound.bytes.into() && elements <= u32::MAX.into() {
            return Ok(());
        }
        Err(ParamError::OutOfBounds {
            kernel: self.kernel.name(),
            index: slot.index,
            binding: slot.name,
            needed,
            found: bound.bytes,
        })
    }

    /// That what is written lies in its binding and nothing is written twice.
    fn written(&self, footprint: Footprint) -> Result<(), ParamError> {
        self.reach(footprint.binding as usize, footprint.end())?;
        if footprint.is_disjoint() {
            return Ok(());
        }
        let slot = self.kernel.slots()[footprint.binding as usize];
        Err(ParamError::Overlap { kernel: self.kernel.name(), index: slot.index, binding: slot.name })
    }
}

/// The parameter block's fixed part, and whether the length is `expected`.
fn parse<T: bytemuck::AnyBitPattern>(kernel: Kernel, params: &[u8]) -> Result<T, ParamError> {
    let size = size_of::<T>();
    params.get(..size).map(bytemuck::pod_read_unaligned).ok_or(ParamError::Length {
        kernel: kernel.name(),
        expected: size as u64,
        found: params.len() as u64,
    })
}

fn length(kernel: Kernel, params: &[u8], expected: u64) -> Result<(), ParamError> {
    let found = params.len() as u64;
    if found == expected { Ok(()) } else { Err(ParamError::Length { kernel: kernel.name(), expected, found }) }
}
