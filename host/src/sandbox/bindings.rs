//! What wasmtime generates from `mapper.wit`.

wasmtime::component::bindgen!({
    path: "../mappers/wit",
    world: "module",
    imports: { default: trappable },
    with: {
        "kvmig:mapper/gpu.buffer": super::guest::BufferHandle,
        "kvmig:mapper/gpu.pipeline": super::guest::PipelineHandle,
    },
});

pub(super) use self::kvmig::mapper::{gpu, types};
