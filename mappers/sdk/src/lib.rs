//! What a mapper module for kvmig is written against.
//!
//! Implement [`Mapper`] for a type, name it in [`export!`](crate::export), build a `cdylib` for
//! `wasm32-unknown-unknown`, and turn the core module into a component (`mappers/build` shows how). The contract itself,
//! with shapes and units, is `mappers/wit/mapper.wit`; `mappers/head-matched` is a whole module in about a hundred lines.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

use alloc::{format, string::String};

mod bind;
mod panel;
mod params;
mod selection;
mod settings;

#[expect(missing_docs, reason = "generated from mapper.wit, which is where the documentation is")]
pub mod bindings {
    wit_bindgen::generate!({
        path: "../wit",
        world: "module",
        export_macro_name: "export_component",
        pub_export_macro: true,
        default_bindings_module: "kvmig_mapper::bindings",
        generate_all,
    });
}

pub use bind::{kernel, range, whole};
pub use bindings::exports::kvmig::mapper::mapper::{Job, Kv, View};
pub use bindings::kvmig::mapper::gpu::{self, Access, Binding, Buffer, DeviceLimits, Dim3, Pipeline};
pub use bindings::kvmig::mapper::types::{
    CacheShape, Dtype, Fault, Metadata, ModelPair, Refusal, Shader, WeightSpec, WorkPlan,
};
pub use panel::{Panels, longest_chunk};
pub use params::{AffineBlock, AffineParams, GatherParams, HeadsParams};
pub use selection::Selection;
pub use settings::parse_settings;

/// A mapper module.
///
/// The three functions are called on fresh instances: nothing is carried from one call to the next.
pub trait Mapper {
    /// Name, version, the kinds of mapper it implements, its own shaders.
    fn describe() -> Metadata;

    /// What a run for this pair will need: weights, tokens per chunk, scratch.
    ///
    /// # Errors
    /// A refusal, when the pair, the settings or the device (see [`gpu::limits`]) rule the mapping out.
    fn plan(pair: &ModelPair, settings: &str) -> Result<WorkPlan, Refusal>;

    /// Requests the work of one chunk of `job.tokens` tokens.
    ///
    /// # Errors
    /// A refusal, as for [`Mapper::plan`]; a [`Fault`] turns into one by `?`.
    fn run(pair: &ModelPair, settings: &str, job: Job) -> Result<(), Refusal>;
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Refusal {
        match fault {
            Fault::Limit(why) => Refusal::Limit(why),
            Fault::Denied(why) => Refusal::Unsupported(format!("the host denied a request: {why}")),
            Fault::OutOfBounds(why) => Refusal::Unsupported(format!("a request was out of bounds: {why}")),
            Fault::Shader(why) => Refusal::Unsupported(format!("the host refused a shader: {why}")),
        }
    }
}

/// The tensor called `name`, `shape` row-major, in whichever element type the pair stores.
pub fn weight(name: String, shape: &[u32]) -> WeightSpec {
    WeightSpec { name, elem: None, shape: shape.into() }
}

/// A bias: `columns` float32 elements, whatever type the pair stores its matrices in.
pub fn bias(name: String, columns: u32) -> WeightSpec {
    WeightSpec { elem: Some(Dtype::Float32), ..weight(name, &[columns]) }
}

/// Exports a [`Mapper`] as the component's `mapper` interface. Once per module.
#[macro_export]
macro_rules! export {
    ($mapper:ty) => {
        const _: () = {
            struct Exported;

            impl $crate::bindings::exports::kvmig::mapper::mapper::Guest for Exported {
                fn describe() -> $crate::Metadata {
                    <$mapper as $crate::Mapper>::describe()
                }

                fn plan(
                    pair: $crate::ModelPair,
                    settings: $crate::__private::String,
                ) -> Result<$crate::WorkPlan, $crate::Refusal> {
                    <$mapper as $crate::Mapper>::plan(&pair, &settings)
                }

                fn run(
                    pair: $crate::ModelPair,
                    settings: $crate::__private::String,
                    job: $crate::Job,
                ) -> Result<(), $crate::Refusal> {
                    <$mapper as $crate::Mapper>::run(&pair, &settings, job)
                }
            }

    $crate::bindings::export_component!(Exported with_types_in $crate::bindings);
        };
    };
}

/// For the macro alone.
#[doc(hidden)]
pub mod __private {
    pub use alloc::string::String;
}
