//! The bundled pair's handoff beside the re-prefill it replaces, and the map's share of it: `cargo bench -p kvmig-benches`.
//!
//! Read the ratios: both sides run in one process, one after the other. FLOP limits are in the output of `kvmig run`.

use std::hint::black_box;

use criterion::{BatchSize, BenchmarkId, Criterion, criterion_group, criterion_main};
use kvmig::{
    bundled::{self, default_pair},
    cache::KvPlanes,
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
        let job = Job { cache: &cache, target: &target, room: 1 };
        let map = || {
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
                        loaded: pair.loaded(),
                        evidence: None,
                        latency: None,
                    }],
                })
                .expect("trial");
            let (mapped, receipt) = execute(permit, &mapper, &device, &job, &mut Stages::default()).expect("migration");
            gate.unaudited(receipt).expect("settled");
            mapped
        };
        group.bench_function(BenchmarkId::new("reprefill", tokens), |b| {
            b.iter(|| black_box(target.prefill(ids, PrefillOptions::default()).expect("prefill").logits));
        });
        group.bench_function(BenchmarkId::new("handoff", tokens), |b| {
            b.iter(|| target.resume_trial(map(), ids).expect("resumed").logits()[0]);
        });
        group.bench_function(BenchmarkId::new("map", tokens), |b| b.iter(|| black_box(map())));
        group.bench_function(BenchmarkId::new("install", tokens), |b| {
            b.iter_batched(|| (), |()| KvPlanes::zeros(target.layout().clone(), tokens + 1), BatchSize::PerIteration);
        });
    }
    group.finish();
}

criterion_group!(benches, handoff);
criterion_main!(benches);
