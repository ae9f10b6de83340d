//! Both models over the calibration sequences: rows into moments, and onto disk where a fit needs them again; resumable.

use std::{
    ops::ControlFlow,
    path::Path,
    time::{Duration, Instant},
};

use super::{
    FitError, FitOptions, Progress, Stage,
    attention::Boundaries,
    content::{Content, Slots},
    moments::{MomentShape, Rows},
    plan::Plan,
    rows::{Extent, RowChunk, RowFile, RowShape},
    state::State,
    tap::{All, Hidden},
};
use crate::engine::{EngineError, Model, Observer, PrefillOptions};

/// Captured sequences are kept this often: a state may be a gigabyte, and an interrupt keeps it anyway.
const KEEP_EVERY: Duration = Duration::from_secs(120);

/// What was captured.
pub(super) struct Captured {
    pub(super) state: State,
    /// The rows themselves, where a fit needs them.
    pub(super) rows: Option<RowFile>,
}

impl Captured {
    /// Writes the moments to `file`, once the rows they are of are on disk.
    fn save(&self, file: &Path) -> Result<(), FitError> {
        self.rows.as_ref().map_or(Ok(()), RowFile::sync)?;
        Ok(self.state.save(file)?)
    }
}

/// Captures what is not captured yet and returns the complete state, with the rows where the fit wants them.
pub(super) fn capture(
    options: &FitOptions,
    plan: &Plan,
    source: &Model,
    target: &Model,
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Captured, FitError> {
    let file = options.state_file();
    let shape = shape(options, source, target);
    let state = match State::load(&file, plan.basis, shape, &plan.digests)? {
        Some(state) => state,
        None => State::new(plan.basis, shape),
    };
    let row_shape = RowShape { source: Extent::of(source.layout()), target: Extent::of(target.layout()) };
    let wanted = options.wants_rows();
    // Rows beyond the moments can be added to them, unless the moments are of a hidden state, which rows are not.
    let sequences = if shape.hidden == 0 { &plan.digests } else { &state.log };
    let open = || RowFile::resume(&options.rows_file(), plan.basis, row_shape, sequences);
    let rows = wanted.then(open).transpose()?;
    // Moments may have been kept without rows, or rows been written after the moments were: the others catch up.
    let first = rows.as_ref().map_or(state.log.len(), |rows| rows.chunks().min(state.log.len()));
    let mut captured = Captured { state, rows };
    let lengths: Vec<usize> = plan.sequences.iter().map(Vec::len).collect();
    let total = lengths.iter().sum();
    let (mut kept, mut clock) = (captured.state.log.len(), Instant::now());
    for i in first..plan.sequences.len() {
        let done = lengths[..i].iter().sum();
        if watch(Progress { stage: Stage::Capture, done, total }).is_break() {
            if kept < captured.state.log.len() {
                captured.save(&file)?;
            }
            return Err(FitError::Interrupted { stage: Stage::Capture.name(), file });
        }
        match &captured.rows {
            Some(rows) if rows.chunks() > i => {
                let [[xk, xv], [yk, yv]] = rows.chunk(i)?;
                let values = Rows { source: &xv, target: &yv };
                captured.state.add(plan.digests[i], Rows { source: &xk, target: &yk }, values, &[]);
            }
            _ => sequence(&mut captured, (plan, i), options, source, target)?,
        }
        if clock.elapsed() >= KEEP_EVERY && kept < captured.state.log.len() {
            captured.save(&file)?;
            (kept, clock) = (captured.state.log.len(), Instant::now());
        }
    }
    if kept < captured.state.log.len() {
        captured.save(&file)?;
    }
    let _ = watch(Progress { stage: Stage::Capture, done: total, total });
    Ok(captured)
}

/// Runs both models over one sequence of the plan.
fn sequence(
    captured: &mut Captured,
    (plan, index): (&Plan, usize),
    options: &FitOptions,
    source: &Model,
    target: &Model,
) -> Result<(), FitError> {
    let (digest, tokens) = (plan.digests[index], &plan.sequences[index]);
    let slots = Slots { start: options.head, end: tokens.len(), stride: options.stride };
    let prefill = |model: &Model, observer: Option<&mut All<'_>>| {
        let observer = observer.map(|all| all as &mut (dyn Observer + Send));
        let not_finite = |what| FitError::NotFinite {
            model: model.name().to_owned(),
            what,
            sequence: index,
            domain: plan.domains[index].clone(),
        };
        let prefilled = match model.prefill(tokens, PrefillOptions { room: 0, observer, ..PrefillOptions::default() }) {
            Err(EngineError::NotFiniteLogits { .. }) => return Err(not_finite("logits".to_owned())),
            prefilled => prefilled?,
        };
        let content = Content::read(prefilled.cache.planes(), prefilled.cache.positions(), slots);
        let layout = model.layout();
        match content.not_finite(layout.layers, layout.width()) {
            Some(what) => Err(not_finite(what)),
            None => Ok((prefilled.cache, content)),
        }
    };
    let (_, x) = prefill(source, None)?;
    let mut boundaries = captured.rows.is_some().then(|| Boundaries::new(tokens.len(), target.config()));
    let mut hidden = Hidden::behind(options.native_layers, target.config().hidden);
    let mut observers = All::default();
    observers.0.extend(boundaries.as_mut().map(|seen| seen as &mut (dyn Observer + Send)));
    if options.native_layers > 0 {
        observers.0.push(&mut hidden);
    }
    // Unwatched, a prefill need not finish its last layer.
    let watched = !observers.0.is_empty();
    let (cache, y) = prefill(target, watched.then_some(&mut observers))?;
    if let (Some(rows), Some(boundaries)) = (&mut captured.rows, boundaries) {
        let mass = boundaries.mass(cache.planes(), slots);
        let (source, target) = ([&x.keys[..], &x.values], [&y.keys[..], &y.values]);
        rows.append(&RowChunk { sequence: digest, source, target, mass: &mass })?;
    }
    if captured.rows.as_ref().is_none_or(|rows| rows.chunks() > captured.state.log.len()) {
        let keys = Rows { source: &x.keys, target: &y.keys };
        let values = Rows { source: &x.values, target: &y.values };
        captured.state.add(digest, keys, values, &hidden.rows(slots));
    }
    Ok(())
}

/// Layers and widths of the two models' caches.
fn shape(options: &FitOptions, source: &Model, target: &Model) -> MomentShape {
    MomentShape {
        source_layers: source.layout().layers,
        source_width: source.layout().width(),
        target_layers: target.layout().layers,
        target_width: target.layout().width(),
        hidden: if options.native_layers > 0 { target.config().hidden } else { 0 },
    }
}
