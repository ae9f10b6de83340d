//! A loaded module, and its three functions.

use std::{collections::BTreeMap, sync::Arc};

use kvmig_gate::{Digest, DigestBuilder, WeightElem};
use kvmig_raw::compiled::Origin;
use wasmtime::{
    Store, Trap,
    component::{Component, types::ComponentItem},
};

use super::{
    Call, DeviceLimits, Fault, HostError, LoadError, PairShape, PlanError, Recording, Sandbox, SandboxError, TrapKind,
    ViewStrides, WeightShape, WorkPlan,
    bindings::{self, exports::kvmig::mapper::mapper, types},
    engine::deadline_ticks,
    guest::{Guest, Stop},
    plan::within,
    recorder::{Recorder, Terms, check_view},
    recording::BufferId,
    words::one_line,
};
use crate::cache::Elem;

/// The contract's import and export, of the version this host speaks.
const GPU: &str = "kvmig:mapper/gpu@0.1.0";
/// Types that the interfaces share; nothing is called through it.
const TYPES: &str = "kvmig:mapper/types@0.1.0";
const MAPPER: &str = "kvmig:mapper/mapper@0.1.0";

/// A component whose imports were checked, with its description. Cheap to clone; a fresh instance is made for every call.
#[derive(Clone)]
pub struct Module {
    sandbox: Sandbox,
    instance: Arc<bindings::ModulePre<Guest>>,
    metadata: Arc<Metadata>,
    digest: Digest,
    origin: Origin,
}

/// How a module describes itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Kinds of mapper it implements.
    pub kinds: Vec<String>,
    /// Its own shaders: (name, WGSL).
    pub shaders: Arc<[(String, String)]>,
}

/// What to record.
#[derive(Clone, Copy, Debug)]
pub struct RecordRequest<'a> {
    /// Shapes of the two caches.
    pub pair: &'a PairShape,
    /// The pair's settings for the module, JSON.
    pub settings: &'a str,
    /// The module's plan for this pair, settings and device.
    pub plan: &'a WorkPlan,
    /// The pair's weights.
    pub weights: &'a BTreeMap<String, WeightShape>,
    /// Tokens of the chunk, 1 to the plan's.
    pub tokens: u32,
    /// How source views lie.
    pub source: ViewStrides,
    /// How target views lie.
    pub target: ViewStrides,
    /// What the device can take.
    pub device: &'a DeviceLimits,
}

impl Module {
    pub(super) fn load(sandbox: &Sandbox, component: &[u8]) -> Result<Module, SandboxError> {
        let digest = Digest::of(component);
        let (instance, origin) =
            compile(sandbox, component).map_err(|error| SandboxError::Load { module: digest.short(), error })?;
        let unnamed = Metadata { name: String::new(), version: String::new(), kinds: vec![], shaders: Arc::new([]) };
        let mut module = Module {
            sandbox: sandbox.clone(),
            instance: Arc::new(instance),
            metadata: Arc::new(unnamed),
            digest,
            origin,
        };
        let metadata = module.describe()?;
        module.metadata = Arc::new(metadata);
        Ok(module)
    }

    /// Digest of the component's bytes, what `sha256sum` prints for its file.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Whether its machine code was compiled now or loaded.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// How it describes itself.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// What the module needs for a pair, within the host's limits.
    ///
    /// # Errors
    /// [`SandboxError::Refused`] if the module declines the pair, its settings or the device; [`SandboxError::Plan`] if
    /// its plan is beyond the host's limits; [`SandboxError::Trap`] and [`SandboxError::Fault`] if it misbehaves.
    pub fn plan(&self, pair: &PairShape, settings: &str, device: &DeviceLimits) -> Result<WorkPlan, SandboxError> {
        let call = Call::Plan;
        let answer = self.call(call, device, |instance, store| {
            instance.kvmig_mapper_mapper().call_plan(store, to_guest(pair), settings)
        })?;
        let plan = answer.map_err(|why| SandboxError::Refused { module: self.name(), call, refusal: why.into() })?;
        WorkPlan::check(plan, &self.metadata.kinds, self.sandbox.limits()).map_err(|error| self.bad_plan(error))
    }

    /// Lets the module request the work of one chunk. Equal requests get the recording that was made before.
    ///
    /// # Errors
    /// As for [`Module::plan`]; [`SandboxError::Plan`] if the pair lacks weights that the plan names;
    /// [`HostError::Views`] and [`HostError::Chunk`] if the request contradicts itself.
    pub fn record(&self, request: &RecordRequest) -> Result<Arc<Recording>, SandboxError> {
        check_request(request)?;
        request.plan.check_weights(request.weights).map_err(|error| self.bad_plan(error))?;
        let key = self.key(request);
        let kept = &self.sandbox.shared.kept;
        if let Some(recording) = kept.get(key) {
            return Ok(recording);
        }
        let recording = Arc::new(self.run(request)?);
        kept.put(key, &recording);
        Ok(recording)
    }

    /// Records without looking for an earlier recording, nor keeping this one.
    ///
    /// # Errors
    /// As for [`Module::record`].
    pub fn record_anew(&self, request: &RecordRequest) -> Result<Recording, SandboxError> {
        check_request(request)?;
        request.plan.check_weights(request.weights).map_err(|error| self.bad_plan(error))?;
        self.run(request)
    }

    fn describe(&self) -> Result<Metadata, SandboxError> {
        let described = self.call(Call::Describe, &DeviceLimits::FLOOR, |instance, store| {
            instance.kvmig_mapper_mapper().call_describe(store)
        })?;
        Metadata::check(described)
            .map_err(|error| SandboxError::Load { module: self.name(), error: LoadError::Metadata(error) })
    }

    fn run(&self, request: &RecordRequest) -> Result<Recording, SandboxError> {
        let call = Call::Run;
        let mut guest = Guest::new(self.sandbox.limits(), *request.device);
        let recorder = Recorder::new(Terms {
            pair: *request.pair,
            plan: request.plan.clone(),
            weights: request.weights.clone(),
            tokens: request.tokens,
            source: request.source,
            target: request.target,
            device: *request.device,
            limits: self.sandbox.limits().clone(),
            shaders: Arc::clone(&self.metadata.shaders),
        });
        let job = lend_job(&mut guest, &recorder, request).map_err(|error| self.stopped(call, &error, Vec::new()))?;
        guest.recorder = Some(recorder);
        let (answer, guest) = self.call_with(guest, call, |instance, store| {
            instance.kvmig_mapper_mapper().call_run(store, to_guest(request.pair), request.settings, &job)
        })?;
        answer.map_err(|why| SandboxError::Refused { module: self.name(), call, refusal: why.into() })?;
        let recorder = guest.recorder.expect("it was put there above, and nobody takes it out");
        recorder.finish().map_err(|fault| self.faulted(call, fault, guest.log))
    }

    fn call<R>(
        &self,
        call: Call,
        device: &DeviceLimits,
        act: impl FnOnce(&bindings::Module, &mut Store<Guest>) -> wasmtime::Result<R>,
    ) -> Result<R, SandboxError> {
        self.call_with(Guest::new(self.sandbox.limits(), *device), call, act).map(|(answer, _)| answer)
    }

    /// Calls a fresh instance. A request that wasn't allowed comes first, whatever the guest made of it afterwards.
    fn call_with<R>(
        &self,
        guest: Guest,
        call: Call,
        act: impl FnOnce(&bindings::Module, &mut Store<Guest>) -> wasmtime::Result<R>,
    ) -> Result<(R, Guest), SandboxError> {
        let limits = self.sandbox.limits();
        let mut store = Store::new(&self.sandbox.shared.engine, guest);
        store.limiter(|guest| &mut guest.memory);
        store.set_epoch_deadline(deadline_ticks(limits.deadline));
        store.epoch_deadline_trap();
        let outcome = store
            .set_fuel(limits.fuel)
            .and_then(|()| self.instance.instantiate(&mut store))
            .and_then(|instance| act(&instance, &mut store));
        let mut guest = store.into_data();
        if let Some(fault) = guest.fault.take() {
            return Err(self.faulted(call, fault, guest.log));
        }
        match outcome {
            Ok(answer) => Ok((answer, guest)),
            Err(error) => Err(self.stopped(call, &error, guest.log)),
        }
    }

    fn stopped(&self, call: Call, error: &wasmtime::Error, log: Vec<String>) -> SandboxError {
        SandboxError::Trap { module: self.name(), call, trap: self.trap(error), log }
    }

    fn faulted(&self, call: Call, fault: Fault, log: Vec<String>) -> SandboxError {
        SandboxError::Fault { module: self.name(), call, fault: Box::new(fault), log }
    }

    fn bad_plan(&self, error: PlanError) -> SandboxError {
        SandboxError::Plan { module: self.name(), error }
    }

    /// Its name, and the start of its digest: the name is only what it says of itself.
    fn name(&self) -> String {
        let digest = self.digest.short();
        if self.metadata.name.is_empty() { digest } else { format!("{} ({digest})", one_line(&self.metadata.name)) }
    }

    fn trap(&self, error: &wasmtime::Error) -> TrapKind {
        let limits = self.sandbox.limits();
        if let Some(stop) = error.downcast_ref::<Stop>() {
            return match *stop {
                Stop::Calls { what, limit } => TrapKind::Calls { what, limit },
                Stop::Memory { wanted, limit } => TrapKind::Memory { wanted, limit },
                Stop::AfterFault => TrapKind::Other(stop.to_string()),
            };
        }
        match error.downcast_ref::<Trap>() {
            Some(Trap::OutOfFuel) => TrapKind::Fuel { limit: limits.fuel },
            Some(Trap::Interrupt) => TrapKind::Deadline { ms: limits.deadline.as_millis() },
            Some(Trap::StackOverflow) => TrapKind::Stack { limit: limits.stack_bytes },
            Some(Trap::UnreachableCodeReached) => TrapKind::Panic,
            Some(trap) => TrapKind::Other(one_line(&trap.to_string())),
            None => TrapKind::Other(one_line(&format!("{:#}", error.root_cause()))),
        }
    }

    /// What a recording depends on.
    fn key(&self, request: &RecordRequest) -> Digest {
        let numbers = |numbers: &[u64]| numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
        let shape = |s: &super::CacheShape| {
            let half = u64::from(s.elem == Elem::F16);
            numbers(&[s.layers.into(), s.kv_heads.into(), s.head_dim.into(), s.rope_dims.into(), half])
        };
        let DeviceLimits { max_binding_bytes, offset_align, max_bindings, half, own_shaders } = *request.device;
        let strides = [request.source.head, request.source.row, request.target.head, request.target.row];
        let device = [max_binding_bytes, offset_align.into(), max_bindings.into(), half.into(), own_shaders.into()];
        let plan = [request.plan.chunk_tokens().into(), request.plan.scratch_bytes(), request.plan.max_steps().into()];
        let mut key = DigestBuilder::new("recording")
            .field("module", self.digest.as_bytes())
            .field("settings", request.settings.as_bytes())
            .field("source", &shape(request.pair.source()))
            .field("target", &shape(request.pair.target()))
            .field("target's help", &numbers(&[request.pair.native_layers().into(), request.pair.hidden().into()]))
            .field("tokens", &request.tokens.to_le_bytes())
            .field("strides", &numbers(&strides.map(u64::from)))
            .field("device", &numbers(&device))
            .field("kind", request.plan.kind().as_bytes())
            .field("plan", &numbers(&plan));
        for spec in request.plan.weights() {
            // Its shape is the plan's: that was checked. Its type may be either.
            let half = request.weights.get(&spec.name).is_some_and(|weight| weight.elem == WeightElem::F16);
            let extents: Vec<u64> = spec.shape.iter().map(|&extent| extent.into()).collect();
            key = key
                .field("weight", spec.name.as_bytes())
                .field("half", &[half.into()])
                .field("shape", &numbers(&extents));
        }
        key.finish()
    }
}

impl std::fmt::Debug for Module {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Metadata { name, version, .. } = &*self.metadata;
        f.debug_struct("Module").field("name", name).field("version", version).field("digest", &self.digest).finish()
    }
}

impl Metadata {
    fn check(found: types::Metadata) -> Result<Metadata, PlanError> {
        within("length of name", found.name.len() as u64, 1, 64)?;
        within("length of version", found.version.len() as u64, 1, 32)?;
        within("kinds", found.kinds.len() as u64, 1, 64)?;
        within("shaders", found.shaders.len() as u64, 0, 64)?;
        for (at, kind) in found.kinds.iter().enumerate() {
            within("length of a kind", kind.len() as u64, 1, 64)?;
            if found.kinds[..at].contains(kind) {
                return Err(PlanError::Twice { what: "kind", name: one_line(kind) });
            }
        }
        for (at, shader) in found.shaders.iter().enumerate() {
            within("length of a shader's name", shader.name.len() as u64, 1, 64)?;
            within("length of a shader", shader.wgsl.len() as u64, 1, 256 << 10)?;
            if found.shaders[..at].iter().any(|before| before.name == shader.name) {
                return Err(PlanError::Twice { what: "shader", name: one_line(&shader.name) });
            }
        }
        Ok(Metadata {
            name: one_line(&found.name),
            version: one_line(&found.version),
            kinds: found.kinds,
            shaders: found.shaders.into_iter().map(|shader| (shader.name, shader.wgsl)).collect(),
        })
    }
}

fn compile(sandbox: &Sandbox, bytes: &[u8]) -> Result<(bindings::ModulePre<Guest>, Origin), LoadError> {
    let super::engine::Shared { engine, linker, limits, store, .. } = &*sandbox.shared;
    if bytes.len() > limits.component_bytes {
        return Err(LoadError::TooLong { found: bytes.len(), most: limits.component_bytes });
    }
    let invalid = |why: wasmtime::Error| LoadError::Invalid { why: one_line(&format!("{why:#}")) };
    let contract = |why: wasmtime::Error| LoadError::Contract { expected: MAPPER, why: one_line(&format!("{why:#}")) };
    let (component, origin) = match store {
        Some(store) => store.component(engine, bytes).map_err(invalid)?,
        None => (Component::from_binary(engine, bytes).map_err(invalid)?, Origin::Compiled),
    };
    check_imports(&component, engine)?;
    let instance = linker.instantiate_pre(&component).map_err(contract)?;
    Ok((bindings::ModulePre::new(instance).map_err(contract)?, origin))
}

fn check_imports(component: &Component, engine: &wasmtime::Engine) -> Result<(), LoadError> {
    for (name, item) in component.component_type().imports(engine) {
        let known = match name {
            GPU => true,
            // Types alone: an import that could be called doesn't hide behind this name.
            TYPES => matches!(&item.ty, ComponentItem::ComponentInstance(instance)
                if instance.exports(engine).all(|(_, export)| matches!(export.ty, ComponentItem::Type(_)))),
            _ => false,
        };
        if !known {
            return Err(LoadError::Import { import: one_line(name), expected: GPU });
        }
    }
    Ok(())
}

fn check_request(request: &RecordRequest) -> Result<(), HostError> {
    let (found, most) = (request.tokens, request.plan.chunk_tokens());
    if found == 0 || found > most {
        return Err(HostError::Chunk { found, most });
    }
    check_view("source", request.pair.source(), request.source, found)?;
    check_view("target", request.pair.target(), request.target, found)
}

fn lend_job(guest: &mut Guest, recorder: &Recorder, request: &RecordRequest) -> wasmtime::Result<mapper::Job> {
    let mut views = |strides: ViewStrides, id: fn(u32, bool) -> BufferId, layers: std::ops::Range<u32>| {
        let mut view = |layer, value| {
            let buffer = guest.lend_free(recorder.view(id(layer, value)))?;
            Ok::<_, wasmtime::Error>(mapper::View { buffer, head_stride: strides.head, row_stride: strides.row })
        };
        layers
            .map(|layer| Ok(mapper::Kv { k: view(layer, false)?, v: view(layer, true)? }))
            .collect::<wasmtime::Result<Vec<_>>>()
    };
    Ok(mapper::Job {
        tokens: request.tokens,
        source: views(
            request.source,
            |layer, value| BufferId::Source { layer, value },
            0..request.pair.source().layers,
        )?,
        target: views(request.target, |layer, value| BufferId::Target { layer, value }, request.pair.mapped_layers())?,
        source_rope: guest.lend_free(recorder.table(BufferId::SourceRope))?,
        target_rope: guest.lend_free(recorder.table(BufferId::TargetRope))?,
        hidden: recorder.hidden().map(|hidden| guest.lend_free(hidden)).transpose()?,
    })
}

fn to_guest(pair: &PairShape) -> types::ModelPair {
    let shape = |s: &super::CacheShape| types::CacheShape {
        layers: s.layers,
        kv_heads: s.kv_heads,
        head_dim: s.head_dim,
        rope_dims: s.rope_dims,
        elem: match s.elem {
            Elem::F32 => types::Dtype::Float32,
            Elem::F16 => types::Dtype::Float16,
        },
    };
    types::ModelPair {
        source: shape(pair.source()),
        target: shape(pair.target()),
        native_layers: pair.native_layers(),
        hidden: pair.hidden(),
    }
}
