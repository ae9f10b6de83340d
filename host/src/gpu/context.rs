//! An open device: its queue, its faults, and waits that end.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::{Adapter, AdapterKind, pipelines::Pipelines, slices::Rate};
use crate::device::DeviceError;

/// A device and everything that is kept on it between jobs.
#[derive(Debug)]
pub(crate) struct Context {
    pub(super) device: wgpu::Device,
    pub(super) queue: wgpu::Queue,
    pub(super) limits: wgpu::Limits,
    pub(super) half: bool,
    pub(super) pipelines: Mutex<Pipelines>,
    pub(super) rate: Mutex<Rate>,
    title: String,
    faults: Arc<Mutex<Faults>>,
}

/// What the driver reported out of turn.
#[derive(Debug, Default)]
struct Faults {
    lost: Option<String>,
    error: Option<Fault>,
    /// A wait ran out: the device may still be busy, and dropping it would wait for that.
    hung: bool,
}

#[derive(Debug)]
struct Fault {
    memory: bool,
    reason: String,
}

impl From<&wgpu::Error> for Fault {
    fn from(error: &wgpu::Error) -> Fault {
        Fault { memory: matches!(error, wgpu::Error::OutOfMemory { .. }), reason: error.to_string() }
    }
}

/// A lock whose holder panicked still guards plain data: take it.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Context {
    /// Opens `adapter` with its own limits (the defaults would allow bindings of 128 MiB only).
    ///
    /// # Errors
    /// [`DeviceError::Open`] if the driver refuses.
    pub(crate) fn open(adapter: &Adapter) -> Result<Context, DeviceError> {
        let refused = |reason: String| DeviceError::Open { device: adapter.title(), reason };
        if !adapter.computes() {
            return Err(refused("it runs no compute shaders".into()));
        }
        let limits = adapter.limits();
        let half = adapter.half();
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("kvmig"),
            required_features: if half { wgpu::Features::SHADER_F16 } else { wgpu::Features::empty() },
            required_limits: limits.clone(),
            memory_hints: wgpu::MemoryHints::MemoryUsage,
            ..wgpu::DeviceDescriptor::default()
        };
        let (device, queue) = pollster::block_on(adapter.inner.request_device(&descriptor))
            .map_err(|error| refused(error.to_string()))?;
        let faults = Arc::new(Mutex::new(Faults::default()));
        let sink = Arc::clone(&faults);
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            lock(&sink).error.get_or_insert_with(|| Fault::from(&error));
        }));
        let sink = Arc::clone(&faults);
        device.set_device_lost_callback(move |reason, message| {
            // `Destroyed` is what our own drop causes.
            if !matches!(reason, wgpu::DeviceLostReason::Destroyed) {
                lock(&sink).lost.get_or_insert_with(|| format!("{reason:?} {message}").trim().to_owned());
            }
        });
        Ok(Context {
            device,
            queue,
            limits,
            half,
            pipelines: Mutex::new(Pipelines::default()),
            rate: Mutex::new(Rate::guess(adapter.kind == AdapterKind::Hardware)),
            title: adapter.title(),
            faults,
        })
    }

    /// Name for messages.
    pub(crate) fn title(&self) -> &str {
        &self.title
    }

    /// The limits it was opened with.
    pub(crate) fn limits(&self) -> &wgpu::Limits {
        &self.limits
    }

    /// Whether it was opened with half precision.
    pub(crate) fn half(&self) -> bool {
        self.half
    }

    /// Runs `work` and turns whatever the interface reports in it into an error.
    ///
    /// # Errors
    /// What `work` returns, [`DeviceError::OutOfMemory`], [`DeviceError::Gpu`], [`DeviceError::Lost`].
    pub(super) fn scoped<T>(
        &self,
        stage: &'static str,
        work: impl FnOnce() -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let filters = [wgpu::ErrorFilter::Internal, wgpu::ErrorFilter::OutOfMemory, wgpu::ErrorFilter::Validation];
        let scopes = filters.map(|filter| self.device.push_error_scope(filter));
        let result = work();
        // Scopes are a stack: popped last to first. All are popped before any error leaves, so that none stays behind.
        let mut errors = Vec::new();
        for scope in scopes.into_iter().rev() {
            errors.extend(pollster::block_on(scope.pop()));
        }
        if matches!(result, Err(DeviceError::Deadline { .. })) {
            // The first of its kind; what follows would only say that the device was given up.
            return result;
        }
        self.check(stage)?;
        match errors.first() {
            Some(error) => Err(self.fault(stage, &Fault::from(error))),
            None => result,
        }
    }

    /// Reports a device that was lost, or that complained outside of a scope.
    ///
    /// # Errors
    /// [`DeviceError::Lost`], [`DeviceError::OutOfMemory`], [`DeviceError::Gpu`].
    pub(super) fn check(&self, stage: &'static str) -> Result<(), DeviceError> {
        let mut faults = lock(&self.faults);
        if let Some(reason) = &faults.lost {
            return Err(DeviceError::Lost { device: self.title.clone(), reason: reason.clone() });
        }
        if faults.hung {
            let reason = "it missed a deadline before; open it again".to_owned();
            return Err(DeviceError::Lost { device: self.title.clone(), reason });
        }
        match faults.error.take() {
            Some(fault) => Err(self.fault(stage, &fault)),
            None => Ok(()),
        }
    }

    fn fault(&self, stage: &'static str, fault: &Fault) -> DeviceError {
        let device = self.title.clone();
        if fault.memory {
            DeviceError::OutOfMemory { device, stage }
        } else {
            DeviceError::Gpu { device, stage, reason: fault.reason.clone() }
        }
    }

    /// Waits until `submission` and the callbacks behind it are done.
    ///
    /// # Errors
    /// [`DeviceError::Deadline`] after `deadline`; whatever the driver reported meanwhile.
    pub(super) fn wait(
        &self,
        stage: &'static str,
        submission: &wgpu::SubmissionIndex,
        deadline: Duration,
    ) -> Result<(), DeviceError> {
        let start = Instant::now();
        let poll = wgpu::PollType::Wait { submission_index: Some(submission.clone()), timeout: Some(deadline) };
        match self.device.poll(poll) {
            Ok(_) => self.check(stage),
            Err(wgpu::PollError::Timeout) => {
                // A lost device times out too; say the cause rather than the symptom.
                self.check(stage)?;
                lock(&self.faults).hung = true;
                Err(DeviceError::Deadline { device: self.title.clone(), stage, waited: start.elapsed() })
            }
            Err(error) => {
                self.check(stage)?;
                Err(DeviceError::Gpu { device: self.title.clone(), stage, reason: error.to_string() })
            }
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if lock(&self.faults).hung {
            // Dropping the last handle waits for the work that did not end. A device given up is leaked instead.
            std::mem::forget((self.device.clone(), self.queue.clone()));
        }
    }
}
