//! The record of a run: what `--json` prints and the ledger keeps. `schema` counts up with every change of meaning.

use kvmig_gate::{Digest, Quality};
use serde::Serialize;

use crate::device::DeviceInfo;

/// Version of the record's form. A draft until three mappers and a third party's module run on it.
pub const SCHEMA: u32 = 2;

/// One run, from the request to the answer.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// Version of this form.
    pub schema: u32,
    /// The decision's name in the ledger.
    pub ticket: String,
    /// `migrate`, `reprefill` or `stay`.
    pub decision: &'static str,
    /// Stable name of the reason.
    pub reason: String,
    /// The reason in a sentence, with its numbers.
    pub reason_text: String,
    /// Name of the pair.
    pub pair: String,
    /// Kind of the mapper that ran, or whose refusal gave the reason.
    pub mapper: String,
    /// Mappings the resumed cache has gone through; 0 after an ordinary prefill.
    pub hops: u32,
    /// Digest of its module.
    pub module_digest: Digest,
    /// Digest of the policy that decided.
    pub policy_digest: Digest,
    /// Domain the request was judged as, where one was named.
    pub domain: Option<String>,
    /// Distance of the source cache to the calibration data; measured from a later version on.
    pub leverage: Option<Leverage>,
    /// What the gate expected.
    pub predicted: Option<kvmig_gate::Prediction>,
    /// What an audit found: of the migration, or of the trial of a refused one.
    pub realised: Option<Quality>,
    /// Ticket of the trial that an audited request got instead of the migration it was refused.
    pub trial: Option<String>,
    /// Whether it fell short of the bound.
    pub miss: Option<bool>,
    /// Tokens by how they were computed.
    pub tokens: Tokens,
    /// Milliseconds by stage.
    pub ms: Stages,
    /// What it took to bring the mapper's weights onto the device, where they were not there when the request came: hidden
    /// behind the source's prefill but for `ms.weights`.
    pub page_in: Option<super::PageIn>,
    /// What a handoff could win at most, by counting operations.
    pub flops: Flops,
    /// The device that ran or would have.
    pub device: DeviceInfo,
    /// The answer.
    pub text: String,
}

/// Summary of the leverage over the mapped tokens.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Leverage {
    /// Mean over tokens.
    pub mean: f64,
    /// 95th percentile.
    pub p95: f64,
}

/// Token counts of a run.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Tokens {
    /// The whole prompt.
    pub prompt: usize,
    /// Mapped from the source's cache.
    pub mapped: usize,
    /// The target's own at the start: computed, but for what every text begins with, which was computed before.
    pub native_head: usize,
    /// Computed by the target at the end.
    pub native_tail: usize,
    /// Layers that the target computed itself for every token.
    pub native_layers: usize,
    /// Answer tokens.
    pub generated: usize,
}

/// Milliseconds. `handoff` runs from the source's cache being ready to the target's first token and leaves nothing out; it is
/// what `reprefill`, the target's ordinary prefill to its first token, is compared with. It is the sum of the stages from `gate`
/// to `other`, and of `reprefill` where that ran instead.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Stages {
    /// Reading models, and the pair but its weights, once a process.
    pub load: f64,
    /// Reserving memory for the target's cache, before the source prefills, and once a process the keys and values of what every
    /// text begins with. A map and an ordinary prefill fill it alike; a
    /// serving engine has it before a request comes.
    pub reserve: f64,
    /// The source's prefill.
    pub source_prefill: f64,
    /// The decision.
    pub gate: f64,
    /// Waiting for the mapper's weights, where they were not on the device by then.
    pub weights: f64,
    /// Planning and recording in the sandbox, and checking what was recorded.
    pub module: f64,
    /// The target's first layers over the whole prompt, where the pair has such.
    pub native_layers: f64,
    /// Bringing the source cache to the device.
    pub upload: f64,
    /// The kernels.
    pub map: f64,
    /// Checking the outputs and bringing them back.
    pub readback: f64,
    /// Handing the target's cache to the decoder.
    pub install: f64,
    /// The target's batch of native ends, and the first token.
    pub native_ends: f64,
    /// What no stage accounts for: the permit's entries in the ledger, memory given back, a map that failed.
    pub other: f64,
    /// The whole, by a clock of its own.
    pub handoff: f64,
    /// The target's ordinary prefill, where it ran (refused or audited).
    pub reprefill: Option<f64>,
}

impl Stages {
    /// Takes the time of the whole, and names what the stages leave of it.
    pub(super) fn close(&mut self, handoff: f64) {
        let Stages { gate, weights, module, native_layers, upload, map, readback, install, native_ends, .. } = *self;
        let natively = native_layers + native_ends + self.reprefill.unwrap_or(0.0);
        let stages = gate + weights + module + upload + map + readback + install + natively;
        self.handoff = handoff;
        // The device's own clocks may add up to a little more than ours.
        self.other = (handoff - stages).max(0.0);
    }
}

/// Floating-point operations, multiplications and additions counted singly.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Flops {
    /// The target's ordinary prefill of the prompt.
    pub reprefill: f64,
    /// Mapping and native ends.
    pub handoff: f64,
    /// `reprefill / handoff`: no handoff in this setting can be faster by more at equal efficiency.
    pub limit: f64,
}
