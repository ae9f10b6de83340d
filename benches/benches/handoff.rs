//! The bundled pair's handoff beside the re-prefill it replaces, and the map's share of it: `cargo bench -p kvmig-benches`.
//!
//! Read the ratios: both sides run in one process, one after the other. FLOP limits are in the output of `kvmig run`.

use std::hint::black_box;

use criterion::{BatchSize, BenchmarkId, Criterion, criterion_group, criterion_main};
use kvmig::{
    bundled::{self, default_pair},
    device::{Device, DeviceChoice},
    engine::{LoadOptions, Model, PrefillOptions},
    migrate::{Job, Mapper, Stages, execute, facts, precision},
};
use kvmig_gate::{Candidate, Gate, Policy, Request};

fn handoff(criterion: &mut Criterion) {
    let (source, target) = bundled::DEFAULT;
    let load = |member: bundled::Member| Model::load(&member.source(), LoadOptions::default()).expect("bundled model");
    let (source, target) = (load(source), load(target));
    let pair = default_pair().expect("bundled pair");
    let device = Device::open(&DeviceChoice::Cpu).expect("the CPU is always there");
    let mapper = Mapper::load(&pair, &device).expect("bundled mapper");
    let folder = tempfile::tempdir().expect("temporary folder");
    let gate = Gate::open(Policy::default(), &folder.path().join("ledger.sqlite")).expect("ledger");
    let all = source.tokenizer().encode(bundled::PROMPT).expect("prompt");

    let mut group = criterion.benchmark_group("bundled");
    group.sample_size(20);
    for tokens in [256, 512, 1024, 1500] {
        let ids = &all[..tokens];
        let cache = source.prefill(ids, PrefillOptions::default()).expect("prefill").cache;
        let map = |planes| {
            let job = Job { cache: &cache, target: &target, planes };
            let permit = gate
                .trial(&Request {
                    pair: pair.name(),
                    cache: facts(&cache),
                    target: target.digest(),
                    domain: None,
                    backend: "cpu",
                    precision: precision(&source, &target),
                    mismatch: None,
                    candidates: vec![Candidate {
                        mapper: pair.mapper(),
                        claim: pair.loaded().claim(),
                        evidence: None,
                        latency: None,
                    }],
                })
                .expect("trial");
            let (mapped, receipt) = execute(permit, &mapper, &device, job, &mut Stages::default()).expect("migration");
            gate.unaudited(receipt).expect("settled");
            mapped
        };
        // Either way fills memory that was reserved before.
        let reserve = || target.reserve(tokens + 1);
        let prefill = |planes| {
            let options = PrefillOptions { planes: Some(planes), ..PrefillOptions::default() };
            target.prefill(ids, options).expect("prefill").logits
        };
        group.bench_function(BenchmarkId::new("reprefill", tokens), |b| {
            b.iter_batched(reserve, prefill, BatchSize::PerIteration);
        });
        group.bench_function(BenchmarkId::new("handoff", tokens), |b| {
            let handoff = |planes| target.resume_trial(map(planes), ids).expect("resumed").logits()[0];
            b.iter_batched(reserve, handoff, BatchSize::PerIteration);
        });
        group.bench_function(BenchmarkId::new("map", tokens), |b| {
            b.iter_batched(reserve, |planes| black_box(map(planes)), BatchSize::PerIteration);
        });
        group.bench_function(BenchmarkId::new("reserve", tokens), |b| b.iter(reserve));
    }
    group.finish();
}

criterion_group!(benches, handoff);
criterion_main!(benches);
