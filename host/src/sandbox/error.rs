//! What can go wrong with a guest, by who could do something about it.

use super::{Fault, PlanError, Refusal, ShapeError};

/// A function that the host calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `describe`
    Describe,
    /// `plan`
    Plan,
    /// `run`
    Run,
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Call::Describe => "describe",
            Call::Plan => "plan",
            Call::Run => "run",
        })
    }
}

/// A guest that gave no recording. Every message is one line; `module` is the guest's name and the start of its digest.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The bytes are no component that could run here.
    #[error("module {module}: {error}")]
    Load {
        /// The module.
        module: String,
        /// Why.
        #[source]
        error: LoadError,
    },
    /// The guest was stopped: it used something up, or broke.
    #[error("module {module}: `{call}` was stopped: {trap}; report it to the module's author{}", last_words(.log))]
    Trap {
        /// The module.
        module: String,
        /// What it was doing.
        call: Call,
        /// Why it was stopped.
        trap: TrapKind,
        /// What it had logged.
        log: Vec<String>,
    },
    /// The guest declined the job.
    #[error("module {module}: `{call}` declined: {refusal}")]
    Refused {
        /// The module.
        module: String,
        /// What it was asked.
        call: Call,
        /// Its reason.
        refusal: Refusal,
    },
    /// The guest asked for something that isn't allowed.
    #[error("module {module}: `{call}` broke the contract: {fault}; report it to the module's author{}", last_words(.log))]
    Fault {
        /// The module.
        module: String,
        /// What it was doing.
        call: Call,
        /// The first thing that wasn't allowed.
        #[source]
        fault: Box<Fault>,
        /// What it had logged.
        log: Vec<String>,
    },
    /// The guest's plan can't be carried out.
    #[error("module {module}: its plan is unusable: {error}")]
    Plan {
        /// The module.
        module: String,
        /// Why.
        #[source]
        error: PlanError,
    },
    /// The host itself failed.
    #[error(transparent)]
    Host(#[from] HostError),
}

fn last_words(log: &[String]) -> String {
    log.last().map(|line| format!(" (its last log line: {line})")).unwrap_or_default()
}

/// Bytes that are no component that could run here.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Too long.
    #[error("found a component of {found} bytes, expected at most {most}")]
    TooLong {
        /// Bytes found.
        found: usize,
        /// The limit.
        most: usize,
    },
    /// A core module, or no Wasm at all, or Wasm that doesn't validate.
    #[error("not a valid component: {why}; build it with mappers/build, or `kvmig-component CORE.wasm COMPONENT.wasm`")]
    Invalid {
        /// What wasmtime found.
        why: String,
    },
    /// An import beyond `kvmig:mapper/gpu`.
    #[error("found import `{import}`, expected none but {expected}: build for wasm32-unknown-unknown, without WASI")]
    Import {
        /// The import's name.
        import: String,
        /// The one import there is.
        expected: &'static str,
    },
    /// The component doesn't have the contract's functions, or has them with other types.
    #[error("doesn't fulfil {expected}: {why}; build it against this version's mappers/wit")]
    Contract {
        /// The contract's name and version.
        expected: &'static str,
        /// What wasmtime found.
        why: String,
    },
    /// Its description is beyond what the contract allows.
    #[error("describe: {0}")]
    Metadata(PlanError),
}

/// Why a guest was stopped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrapKind {
    /// Too many instructions.
    #[error("more than {limit} instructions")]
    Fuel {
        /// The limit.
        limit: u64,
    },
    /// Too much time.
    #[error("more than {ms} ms")]
    Deadline {
        /// The limit in milliseconds.
        ms: u128,
    },
    /// Too much memory.
    #[error("asked for {wanted} bytes of memory, the limit is {limit}")]
    Memory {
        /// Bytes the memory would have had.
        wanted: usize,
        /// The limit.
        limit: usize,
    },
    /// Too deep a recursion.
    #[error("its stack is full (limit {limit} bytes): endless recursion?")]
    Stack {
        /// The limit.
        limit: usize,
    },
    /// Too many calls of the host, log lines or handles.
    #[error("more than {limit} {what}")]
    Calls {
        /// Of what.
        what: &'static str,
        /// The limit.
        limit: u32,
    },
    /// It panicked, or executed `unreachable` for another reason.
    #[error("it panicked (`unreachable`)")]
    Panic,
    /// Anything else: out-of-bounds memory, division by zero, a handle it doesn't have, text that isn't UTF-8.
    #[error("{0}")]
    Other(String),
}

/// The host failed, not the guest.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The Wasm engine doesn't run on this machine.
    #[error("the Wasm engine can't start on this machine: {0}")]
    Engine(String),
    /// The folder of compiled modules.
    #[error("the folder of compiled modules can't be used: {0}; mend it, or name another with XDG_CACHE_HOME")]
    Store(#[from] std::io::Error),
    /// A shape no mapper can be asked about.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// Views that contradict the pair's shapes.
    #[error("{which} views: head stride {head}, row stride {row} for {tokens} tokens: {why}")]
    Views {
        /// `source` or `target`.
        which: &'static str,
        /// Head stride in elements.
        head: u32,
        /// Row stride in elements.
        row: u32,
        /// Tokens of the chunk.
        tokens: u32,
        /// What is wrong.
        why: &'static str,
    },
    /// A chunk of no tokens, or more than the plan's.
    #[error("found a chunk of {found} tokens, expected 1 to the plan's {most}")]
    Chunk {
        /// Tokens asked for.
        found: u32,
        /// Tokens of the plan's chunk.
        most: u32,
    },
}
