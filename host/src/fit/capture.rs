//! Both models over the calibration sequences: rows into moments, resumable.

use std::{
    ops::ControlFlow,
    path::Path,
    time::{Duration, Instant},
};

use super::{
    FitError, FitOptions, Progress, Stage,
    content::{Content, Slots},
    moments::{MomentShape, Rows},
    plan::Plan,
    state::State,
};
use crate::engine::{Model, PrefillOptions};

/// Captured sequences are kept this often: a state may be a gigabyte, and an interrupt keeps it anyway.
const KEEP_EVERY: Duration = Duration::from_secs(120);

/// Captures what is not captured yet and returns the complete state.
pub(super) fn capture(
    options: &FitOptions,
    plan: &Plan,
    source: &Model,
    target: &Model,
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<State, FitError> {
    let file = options.state_file();
    let shape = shape(source, target);
    let mut state = match State::load(&file, plan.basis, shape, &plan.digests)? {
        Some(state) => state,
        None => State::new(plan.basis, shape),
    };
    let lengths: Vec<usize> = plan.sequences.iter().map(Vec::len).collect();
    let total = lengths.iter().sum();
    let (mut kept, mut clock) = (state.log.len(), Instant::now());
    while let Some(tokens) = plan.sequences.get(state.log.len()) {
        let done = lengths[..state.log.len()].iter().sum();
        if watch(Progress { stage: Stage::Capture, done, total }).is_break() {
            return Err(interrupted(&state, kept, &file)?);
        }
        let slots = Slots { start: options.head, end: tokens.len(), stride: options.stride };
        let read = |model: &Model| -> Result<Content, FitError> {
            let prefilled = model.prefill(tokens, PrefillOptions { room: 0, ..PrefillOptions::default() })?;
            Ok(Content::read(prefilled.cache.planes(), prefilled.cache.positions(), slots))
        };
        let (x, y) = (read(source)?, read(target)?);
        let keys = Rows { source: &x.keys, target: &y.keys };
        state.moments.add(keys, Rows { source: &x.values, target: &y.values });
        state.log.push(plan.digests[state.log.len()]);
        if clock.elapsed() >= KEEP_EVERY {
            state.save(&file)?;
            (kept, clock) = (state.log.len(), Instant::now());
        }
    }
    if kept < state.log.len() {
        state.save(&file)?;
    }
    let _ = watch(Progress { stage: Stage::Capture, done: total, total });
    Ok(state)
}

fn interrupted(state: &State, kept: usize, file: &Path) -> Result<FitError, FitError> {
    if kept < state.log.len() {
        state.save(file)?;
    }
    Ok(FitError::Interrupted { stage: Stage::Capture.name(), file: file.to_owned() })
}

/// Layers and widths of the two models' caches.
fn shape(source: &Model, target: &Model) -> MomentShape {
    MomentShape {
        source_layers: source.layout().layers,
        source_width: source.layout().width(),
        target_layers: target.layout().layers,
        target_width: target.layout().width(),
        hidden: 0,
    }
}
