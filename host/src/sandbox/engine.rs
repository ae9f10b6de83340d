//! The Wasm engine and what its modules share.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use kvmig_raw::CompiledStore;
use wasmtime::{
    Config, Engine,
    component::{HasSelf, Linker},
};

use super::{HostError, SandboxError, SandboxLimits, bindings, guest::Guest, kept::Kept, module::Module};

/// Where modules are loaded: one engine, one set of limits, one folder of compiled modules. Cheap to clone.
#[derive(Clone)]
pub struct Sandbox {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub(super) engine: Engine,
    pub(super) linker: Linker<Guest>,
    pub(super) limits: SandboxLimits,
    pub(super) store: Option<CompiledStore>,
    pub(super) kept: Kept,
}

/// How often the clock of the deadlines ticks.
const TICK: Duration = Duration::from_millis(20);

impl Sandbox {
    /// Starts an engine. `compiled`: a folder for compiled modules (see [`Sandbox::user_folder`]); none compiles each
    /// module anew, tens of milliseconds for one of ours.
    ///
    /// # Errors
    /// If the engine doesn't run on this machine, or the folder can't be used.
    pub fn new(limits: SandboxLimits, compiled: Option<&Path>) -> Result<Sandbox, HostError> {
        let engine = Engine::new(&config(&limits)).map_err(|why| HostError::Engine(format!("{why:#}")))?;
        let mut linker = Linker::new(&engine);
        bindings::Module::add_to_linker::<_, HasSelf<Guest>>(&mut linker, |guest| guest)
            .map_err(|why| HostError::Engine(format!("{why:#}")))?;
        let store = compiled.map(CompiledStore::open).transpose()?;
        start_clock(&engine)?;
        Ok(Sandbox { shared: Arc::new(Shared { engine, linker, limits, store, kept: Kept::default() }) })
    }

    /// The folder for compiled modules in the user's cache folder, where the platform has one.
    pub fn user_folder() -> Option<PathBuf> {
        directories::ProjectDirs::from("", "", "kvmig").map(|dirs| dirs.cache_dir().join("modules"))
    }

    /// The limits that every call of a guest is under.
    pub fn limits(&self) -> &SandboxLimits {
        &self.shared.limits
    }

    /// Compiles a component, or loads what was compiled before, checks its imports, and asks it for its description.
    ///
    /// # Errors
    /// [`SandboxError::Load`] for bytes that can't run here; [`SandboxError::Trap`] if `describe` was stopped.
    pub fn load(&self, component: &[u8]) -> Result<Module, SandboxError> {
        Module::load(self, component)
    }
}

impl std::fmt::Debug for Sandbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sandbox").field("limits", &self.shared.limits).finish_non_exhaustive()
    }
}

fn config(limits: &SandboxLimits) -> Config {
    let mut config = Config::new();
    config
        .wasm_component_model(true)
        .consume_fuel(true)
        .epoch_interruption(true)
        .max_wasm_stack(limits.stack_bytes)
        // The same guest computes the same on every machine.
        .cranelift_nan_canonicalization(true);
    config
}

/// Ticks for as long as the engine lives.
fn start_clock(engine: &Engine) -> Result<(), HostError> {
    let engine = engine.weak();
    let tick = move || {
        while let Some(engine) = engine.upgrade() {
            engine.increment_epoch();
            drop(engine);
            std::thread::sleep(TICK);
        }
    };
    let thread = std::thread::Builder::new().name("kvmig-sandbox-clock".into()).spawn(tick);
    thread.map(drop).map_err(|why| HostError::Engine(format!("its clock's thread can't start: {why}")))
}

/// The deadline in ticks of the clock, one more for the tick under way.
pub(super) fn deadline_ticks(deadline: Duration) -> u64 {
    u64::try_from(deadline.as_millis().div_ceil(TICK.as_millis())).unwrap_or(u64::MAX - 1) + 1
}
