//! The CPU device: recordings replayed through the kernels' mirrors, in place where the cache is f32.

mod batch;
mod views;

use std::time::Instant;

use self::{batch::Plan, views::Views};
use super::{DeviceError, Job, Report, check::check};

/// Executes a job whose weights lie on the CPU.
pub(super) fn execute(mut job: Job<'_>) -> Result<Report, DeviceError> {
    let mut report = Report::default();
    let begin = Instant::now();
    let chunks = job.chunks()?;
    if chunks.is_empty() {
        return Ok(report);
    }
    let mut views = Views::new(&job);
    let mut plans = Vec::with_capacity(2);
    for rest in [false, true] {
        let used = chunks.iter().find(|chunk| chunk.rest == rest).map(|chunk| job.recording(chunk));
        plans.push(match used {
            Some(recording) => {
                let checked = check(&job, recording, &views.extents(&job, recording)?)?;
                Some(Plan::new(&job, checked)?)
            }
            None => None,
        });
    }
    report.upload_ms += ms(begin);
    for chunk in &chunks {
        let Some(plan) = &plans[usize::from(chunk.rest)] else { continue };
        let first = chunk.slots.start - job.slots.start;

        let begin = Instant::now();
        report.uploaded_bytes += views.stage(&job, plan.recording(), &chunk.slots);
        views.poison(&mut job, plan.recording(), &chunk.slots);
        report.upload_ms += ms(begin);

        let begin = Instant::now();
        views.with(&mut job, &chunk.slots, first, |buffers| plan.run(buffers))?;
        report.map_ms += ms(begin);

        let begin = Instant::now();
        views.scan(&job, plan.recording(), &chunk.slots)?;
        report.readback_bytes += views.install(&mut job, &chunk.slots);
        report.readback_ms += ms(begin);

        report.chunks += 1;
        report.dispatches += plan.steps() as u64;
        report.flops += plan.flops();
    }
    Ok(report)
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}
