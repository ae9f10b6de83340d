//! Modes that exhaust something.

use std::hint::black_box;

use kvmig_mapper::{Job, ModelPair, Refusal, gpu};

use crate::record;

pub(crate) fn endless_loop(_: &ModelPair, _: &Job) -> Result<(), Refusal> {
    let mut turns = 0u64;
    loop {
        turns = black_box(turns.wrapping_add(1));
    }
}

pub(crate) fn endless_recursion(_: &ModelPair, _: &Job) -> Result<(), Refusal> {
    #[expect(unconditional_recursion, reason = "on purpose")]
    fn deeper(depth: u64) -> u64 {
        black_box(depth).wrapping_add(deeper(depth.wrapping_add(1)))
    }
    black_box(deeper(0));
    Ok(())
}

pub(crate) fn memory_hog(_: &ModelPair, _: &Job) -> Result<(), Refusal> {
    let mut held = Vec::new();
    loop {
        held.push(black_box(vec![0xa5u8; 1 << 20]));
    }
}

pub(crate) fn panic(_: &ModelPair, _: &Job) -> Result<(), Refusal> {
    panic!("as asked");
}

pub(crate) fn log_flood(_: &ModelPair, _: &Job) -> Result<(), Refusal> {
    let line = "a line of the flood ".repeat(1000);
    loop {
        gpu::log(&line);
    }
}

pub(crate) fn kernel_flood(pair: &ModelPair, job: &Job) -> Result<(), Refusal> {
    for _ in 0..1_000_000 {
        record::copy_layer(pair, job, 0)?;
    }
    Ok(())
}

pub(crate) fn call_flood(_: &ModelPair, _: &Job) -> Result<(), Refusal> {
    loop {
        black_box(gpu::limits());
    }
}

pub(crate) fn params_flood(_: &ModelPair, _: &Job) -> Result<(), Refusal> {
    let block = vec![0; 1 << 20];
    loop {
        drop(gpu::params(&block)?);
    }
}

pub(crate) fn handle_flood(_: &ModelPair, _: &Job) -> Result<(), Refusal> {
    let mut held = Vec::new();
    loop {
        held.push(gpu::weights("w")?);
    }
}

pub(crate) fn scratch_beyond_plan(_: &ModelPair, _: &Job) -> Result<(), Refusal> {
    gpu::scratch(1 << 30)?;
    Ok(())
}
