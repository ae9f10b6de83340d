//! The executor: takes a permit by value, gives a mapped cache and a receipt.

use std::{ops::Range, time::Instant};

use kvmig_gate::{LedgerError, Purpose, Receipt, RedeemError};

use crate::{
    cache::{Hop, KvCache, KvPlanes, MappedCache, Provenance},
    device::{Device, DeviceError, Job as DeviceJob, Lower, Pacing, ViewStrides},
    engine::{EngineError, Model},
    sandbox::{self, RecordRequest, Recording, SandboxError},
};

use super::{
    Mapper, MapperError,
    handoff::{facts, millis},
    record::Stages,
};

/// What to map. Which slots, the permit says.
#[derive(Debug)]
pub struct Job<'a> {
    /// The source's cache of the whole prompt.
    pub cache: &'a KvCache,
    /// The model whose cache this becomes.
    pub target: &'a Model,
    /// Memory for it, from the target's [`Model::reserve`]: the prompt, and what shall be decoded behind it.
    pub planes: KvPlanes,
}

/// A permitted migration that made no cache; its ticket is written down as failed.
#[derive(Debug, thiserror::Error)]
pub enum ExecuteError {
    /// What is about to run is not what was decided on.
    #[error(transparent)]
    Redeem(#[from] RedeemError),
    /// The weights can't be brought onto the device, or are not those that were decided on.
    #[error(transparent)]
    Weights(Box<MapperError>),
    /// The module failed, declined, or asked for what it may not.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The device failed, or left outputs unwritten or not finite.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The target's native layers could not be computed.
    #[error(transparent)]
    NativeLayers(EngineError),
    /// The mapped cache could not be resumed.
    #[error(transparent)]
    Resume(EngineError),
    /// The ledger could not be written.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

impl ExecuteError {
    /// Stable name for records.
    pub fn name(&self) -> &'static str {
        match self {
            ExecuteError::Redeem(_) => "redeem_failed",
            ExecuteError::Weights(_) => "weights_failed",
            ExecuteError::Sandbox(_) => "module_failed",
            ExecuteError::Device(_) => "device_failed",
            ExecuteError::NativeLayers(_) => "native_layers_failed",
            ExecuteError::Resume(_) => "resume_failed",
            ExecuteError::Ledger(_) => "ledger_failed",
        }
    }
}

/// Maps the middle of a cache under `permit`, whose purpose decides what comes out: a
/// [`Migrated`](kvmig_gate::Migrated) that a decoder takes, or a [`Trialled`](kvmig_gate::Trialled) that is only measured.
///
/// Stage times are added to `ms`.
///
/// # Errors
/// [`ExecuteError`]; the ticket has ended as failed.
pub fn execute<P: Purpose>(
    permit: kvmig_gate::Permit<P>,
    mapper: &Mapper,
    device: &Device,
    job: Job<'_>,
    ms: &mut Stages,
) -> Result<(P::Outcome<MappedCache>, Receipt), ExecuteError> {
    let redeemed = permit.redeem(&mapper.loaded, facts(job.cache), job.target.digest())?;
    let slots = redeemed.slots();
    let Job { cache, target, mut planes } = job;
    match map(mapper, device, (cache, target), &mut planes, slots.clone(), ms) {
        Ok(()) => {
            let clock = Instant::now();
            let hop = Hop {
                source: cache.model(),
                pair: redeemed.loaded().pair(),
                module: redeemed.loaded().module(),
                ticket: redeemed.ticket().to_string(),
            };
            let mapped = MappedCache {
                planes,
                tokens: cache.tokens().to_vec(),
                positions: cache.positions().to_vec(),
                slots,
                provenance: Provenance { model: redeemed.target(), hops: vec![hop] },
            };
            let done = redeemed.complete(mapped);
            ms.install += millis(clock);
            Ok(done)
        }
        Err(error) => {
            redeemed.fail(&error.to_string())?;
            Err(error)
        }
    }
}

/// Maps `slots`. That the mapper's module and resident weights are those of the redeemed artifact needs no check here: they
/// were made from it, and nobody outside this room can put a mapper together.
fn map(
    mapper: &Mapper,
    device: &Device,
    (cache, target): (&KvCache, &Model),
    planes: &mut KvPlanes,
    slots: Range<usize>,
    ms: &mut Stages,
) -> Result<(), ExecuteError> {
    let layers = mapper.shape.native_layers() as usize;
    let clock = Instant::now();
    let hidden = match layers {
        0 => Vec::new(),
        _ => target.lower_layers(cache.tokens(), planes, layers).map_err(ExecuteError::NativeLayers)?,
    };
    ms.native_layers += millis(clock);
    let width = target.config().hidden;
    let lower = (layers > 0).then(|| Lower { layers, hidden: &hidden[slots.start * width..slots.end * width], width });
    let clock = Instant::now();
    let chunk = mapper.plan.chunk_tokens().min(slots.len() as u32);
    let rest = slots.len() as u32 % chunk;
    let full = record(mapper, device, cache, planes, chunk)?;
    let rest = (rest > 0).then(|| record(mapper, device, cache, planes, rest)).transpose()?;
    ms.module += millis(clock);

    let report = device.execute(DeviceJob {
        full: &full,
        rest: rest.as_deref(),
        weights: &mapper.resident,
        source: cache.planes(),
        target: planes,
        lower,
        positions: &cache.positions()[slots.clone()],
        slots,
        pacing: Pacing::default(),
    })?;
    ms.upload += report.upload_ms;
    ms.map += report.map_ms;
    ms.readback += report.readback_ms;
    Ok(())
}

fn record(
    mapper: &Mapper,
    device: &Device,
    cache: &KvCache,
    target: &KvPlanes,
    tokens: u32,
) -> Result<std::sync::Arc<Recording>, ExecuteError> {
    let guest = |strides: ViewStrides| sandbox::ViewStrides { head: strides.head, row: strides.row };
    Ok(mapper.module.record(&RecordRequest {
        pair: &mapper.shape,
        settings: &mapper.settings,
        plan: &mapper.plan,
        weights: &mapper.weights,
        tokens,
        source: guest(device.view_strides(cache.planes(), tokens)?),
        target: guest(device.view_strides(target, tokens)?),
        device: &mapper.limits,
    })?)
}
