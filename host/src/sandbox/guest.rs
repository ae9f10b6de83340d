//! The `gpu` interface as a guest meets it: handles, budgets of the call, and the recorder behind them.

use wasmtime::{
    Result,
    component::{Resource, ResourceTable},
};

use super::{
    DeviceLimits, Fault, SandboxLimits,
    bindings::{gpu, types},
    recorder::{Range, Recorder},
    words::one_line,
};

#[expect(unreachable_pub, reason = "the generated bindings re-export it, which asks for `pub`")]
pub use super::recorder::{BufferHandle, PipelineHandle};

/// What a store holds during one call.
pub(super) struct Guest {
    table: ResourceTable,
    pub(super) memory: MemoryCap,
    device: DeviceLimits,
    calls: Budget,
    log_calls: Budget,
    log_lines: usize,
    pub(super) log: Vec<String>,
    /// During `run` only.
    pub(super) recorder: Option<Recorder>,
    /// The first request that wasn't allowed.
    pub(super) fault: Option<Fault>,
}

/// Why the host stopped a guest; travels through wasmtime as the error of a host function.
#[derive(Debug, thiserror::Error)]
pub(super) enum Stop {
    #[error("more than {limit} {what}")]
    Calls { what: &'static str, limit: u32 },
    #[error("asked for {wanted} bytes of memory, the limit is {limit}")]
    Memory { wanted: usize, limit: usize },
    #[error("requested work after a fault")]
    AfterFault,
}

impl Guest {
    pub(super) fn new(limits: &SandboxLimits, device: DeviceLimits) -> Guest {
        let mut table = ResourceTable::new();
        table.set_max_capacity(limits.handles as usize);
        Guest {
            table,
            memory: MemoryCap { limit: limits.memory_bytes },
            device,
            calls: Budget { what: "calls of the host", limit: limits.host_calls, used: 0 },
            log_calls: Budget { what: "log lines", limit: limits.log_lines.saturating_mul(4), used: 0 },
            log_lines: limits.log_lines as usize,
            log: Vec::new(),
            recorder: None,
            fault: None,
        }
    }

    /// Hands the guest a buffer of its job, on top of those it may hold.
    pub(super) fn lend_free(&mut self, buffer: BufferHandle) -> Result<Resource<BufferHandle>> {
        self.table.set_max_capacity(self.table.max_capacity() + 1);
        self.lend(buffer)
    }

    /// Hands the guest a handle of its own.
    fn lend<T: Send + 'static>(&mut self, entry: T) -> Result<Resource<T>> {
        let limit = u32::try_from(self.table.max_capacity()).unwrap_or(u32::MAX);
        self.table
            .push(entry)
            .map_err(|_| wasmtime::Error::new(Stop::Calls { what: "buffers and pipelines held", limit }))
    }

    /// A request for work: allowed in `run`, until the first fault.
    fn work<R>(
        &mut self,
        request: &'static str,
        act: impl FnOnce(&mut Recorder) -> std::result::Result<R, Fault>,
    ) -> Result<std::result::Result<R, types::Fault>> {
        self.calls.spend()?;
        if self.fault.is_some() {
            return Err(wasmtime::Error::new(Stop::AfterFault));
        }
        let outcome = match &mut self.recorder {
            Some(recorder) => act(recorder),
            None => Err(Fault::NotRunning { request }),
        };
        Ok(outcome.map_err(|fault| {
            let told = fault.to_guest();
            self.fault = Some(fault);
            told
        }))
    }

    fn buffer(
        &mut self,
        request: &'static str,
        act: impl FnOnce(&mut Recorder) -> std::result::Result<BufferHandle, Fault>,
    ) -> Result<std::result::Result<Resource<BufferHandle>, types::Fault>> {
        Ok(match self.work(request, act)? {
            Ok(buffer) => Ok(self.lend(buffer)?),
            Err(fault) => Err(fault),
        })
    }

    fn ranges(&self, bindings: &[gpu::Binding]) -> Result<Vec<Range>> {
        let range = |binding: &gpu::Binding| {
            let buffer = *self.table.get(&binding.buffer)?;
            Ok(Range { index: binding.index, buffer, offset: binding.offset, size: binding.size })
        };
        bindings.iter().map(range).collect()
    }
}

impl types::Host for Guest {}

impl gpu::Host for Guest {
    fn limits(&mut self) -> Result<gpu::DeviceLimits> {
        self.calls.spend()?;
        let DeviceLimits { max_binding_bytes, offset_align, max_bindings, half, own_shaders } = self.device;
        Ok(gpu::DeviceLimits { max_binding_bytes, offset_align, max_bindings, half, own_shaders })
    }

    fn scratch(&mut self, bytes: u64) -> Result<std::result::Result<Resource<BufferHandle>, types::Fault>> {
        self.buffer("scratch", |recorder| recorder.scratch(bytes))
    }

    fn params(&mut self, data: Vec<u8>) -> Result<std::result::Result<Resource<BufferHandle>, types::Fault>> {
        self.buffer("params", |recorder| recorder.params(data))
    }

    fn weights(&mut self, name: String) -> Result<std::result::Result<Resource<BufferHandle>, types::Fault>> {
        self.buffer("weights", |recorder| recorder.weights(&name))
    }

    fn kernel(
        &mut self,
        name: String,
        params: Vec<u8>,
        bindings: Vec<gpu::Binding>,
    ) -> Result<std::result::Result<(), types::Fault>> {
        let ranges = self.ranges(&bindings)?;
        self.work("kernel", |recorder| recorder.kernel(&name, params, ranges))
    }

    fn dispatch(
        &mut self,
        pipeline: Resource<PipelineHandle>,
        bindings: Vec<gpu::Binding>,
        workgroups: gpu::Dim3,
    ) -> Result<std::result::Result<(), types::Fault>> {
        let ranges = self.ranges(&bindings)?;
        let pipeline = self.table.get(&pipeline)?.clone();
        let workgroups = [workgroups.x, workgroups.y, workgroups.z];
        self.work("dispatch", |recorder| recorder.dispatch(&pipeline, ranges, workgroups))
    }

    fn log(&mut self, message: String) -> Result<()> {
        self.calls.spend()?;
        self.log_calls.spend()?;
        if self.log.len() < self.log_lines {
            self.log.push(one_line(&message));
        }
        Ok(())
    }
}

impl gpu::HostBuffer for Guest {
    fn size(&mut self, buffer: Resource<BufferHandle>) -> Result<u64> {
        self.calls.spend()?;
        Ok(self.table.get(&buffer)?.bytes)
    }

    fn access(&mut self, buffer: Resource<BufferHandle>) -> Result<gpu::Access> {
        self.calls.spend()?;
        let buffer = self.table.get(&buffer)?;
        Ok(match (buffer.may_read(), buffer.may_write()) {
            (true, true) => gpu::Access::ReadWrite,
            (false, true) => gpu::Access::Write,
            _ => gpu::Access::Read,
        })
    }

    fn drop(&mut self, buffer: Resource<BufferHandle>) -> Result<()> {
        self.table.delete(buffer)?;
        Ok(())
    }
}

impl gpu::HostPipeline for Guest {
    fn create(
        &mut self,
        shader: String,
        entry: String,
        constants: Vec<(String, f64)>,
    ) -> Result<std::result::Result<Resource<PipelineHandle>, types::Fault>> {
        Ok(match self.work("pipeline.create", |recorder| recorder.pipeline(&shader, &entry, constants))? {
            Ok(pipeline) => Ok(self.lend(pipeline)?),
            Err(fault) => Err(fault),
        })
    }

    fn workgroup_size(&mut self, pipeline: Resource<PipelineHandle>) -> Result<gpu::Dim3> {
        self.calls.spend()?;
        let [x, y, z] = self.table.get(&pipeline)?.workgroup_size();
        Ok(gpu::Dim3 { x, y, z })
    }

    fn drop(&mut self, pipeline: Resource<PipelineHandle>) -> Result<()> {
        self.table.delete(pipeline)?;
        Ok(())
    }
}

/// Something that runs out.
struct Budget {
    what: &'static str,
    limit: u32,
    used: u32,
}

impl Budget {
    fn spend(&mut self) -> Result<()> {
        if self.used >= self.limit {
            return Err(wasmtime::Error::new(Stop::Calls { what: self.what, limit: self.limit }));
        }
        self.used += 1;
        Ok(())
    }
}

/// Stops a guest that grows beyond its memory, rather than letting it carry on with a failed allocation.
pub(super) struct MemoryCap {
    limit: usize,
}

impl wasmtime::ResourceLimiter for MemoryCap {
    fn memory_growing(&mut self, _current: usize, wanted: usize, _maximum: Option<usize>) -> Result<bool> {
        if wanted > self.limit {
            return Err(wasmtime::Error::new(Stop::Memory { wanted, limit: self.limit }));
        }
        Ok(true)
    }

    fn table_growing(&mut self, _current: usize, wanted: usize, _maximum: Option<usize>) -> Result<bool> {
        // An element of a table is a pointer or two.
        let limit = self.limit / 16;
        if wanted > limit {
            return Err(wasmtime::Error::new(Stop::Memory { wanted: wanted.saturating_mul(16), limit: self.limit }));
        }
        Ok(true)
    }

    fn instances(&self) -> usize {
        16
    }

    fn tables(&self) -> usize {
        16
    }

    fn memories(&self) -> usize {
        1
    }
}
