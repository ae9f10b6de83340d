//! Networks where a linear map falls short (arXiv:2608.03893 §4.4, METHOD §4): per target layer, head, and keys or values
//! `in → H → H → out` with ReLU, trained on the spilled rows by Adam on the mean squared error.
//!
//! A layer's keys and values train side by side, all heads of one in batched products. Inputs and outputs are standardised for
//! the training, and the weights adjusted for it in the end. A share of the *sequences* is held out, not of the rows, which
//! are their neighbours' likes; when their loss no longer falls, the training ends with the best weights that it had. The same
//! rows, settings and machine give the same bytes. A finished layer is kept beside the state.
//!
//! Memory: `WINDOW` bytes of rows for the keys and as many for the values, whatever there is on disk, and once more for the
//! sequences held out.

mod adam;
mod data;
pub(super) mod kept;
mod network;
mod product;

use std::{io, ops::ControlFlow, path::Path, path::PathBuf};

use super::{
    FitError, Progress, Stage,
    rows::{Of, Part, RowFile, RowsError},
};
use crate::{
    cache::Elem,
    measure::random::Random,
    pair::{MlpSettings, Tensor, TrainingRecord, rounded},
};
use data::{Data, Split};
use kept::Kept;
use network::Trainer;

/// Bytes of rows in memory at once, for keys and for values each.
const WINDOW: usize = 512 << 20;

/// One in so many sequences is held out.
const HELD_OUT: usize = 10;

/// Epochs without a better loss on what is held out, and the training ends.
const PATIENCE: usize = 3;

/// Bytes of a tensor at most, counted as f32: heads are grouped so.
const LARGEST_TENSOR: usize = 128 << 20;

/// Settings of a training.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Units of a hidden layer: one width for all networks of a pair.
    pub width: usize,
    /// Times that the rows are gone through, at most.
    pub epochs: usize,
    /// Rows of a step.
    pub batch: usize,
    /// Seed of weights, order and what is held out.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { width: 128, epochs: 20, batch: 128, seed: 1 }
    }
}

/// A training that gave no networks.
#[derive(Debug, thiserror::Error)]
pub enum MlpError {
    /// Too few sequences to train on some and hold others out.
    #[error(
        "{found} calibration sequences, expected at least 2: one is held out of the training; raise --tokens or lower --context"
    )]
    TooFewSequences {
        /// Sequences with rows.
        found: usize,
    },
    /// The loss is no number any more.
    #[error(
        "the networks of target layer {layer} diverge in epoch {epoch}: expected finite rows; refit from an empty state"
    )]
    Diverged {
        /// The target layer.
        layer: usize,
        /// Counted from 0.
        epoch: usize,
    },
    /// The tensor library failed.
    #[error("training the networks of target layer {layer}: {source}")]
    Tensor {
        /// The target layer.
        layer: usize,
        /// Why.
        source: candle_core::Error,
    },
    /// A finished layer can't be kept or read.
    #[error("{}: {source}; the layers finished before it are kept: make room and run the same command again", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// What lies where a finished layer would is none, or damaged.
    #[error("{}: holds no finished layer of this version, or a damaged one ({found}): remove it", file.display())]
    Foreign {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        found: String,
    },
}

/// Networks of all heads for the keys or the values of a target layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    /// Three products: `[heads, in, H]`, `[heads, H, H]`, `[heads, H, d_t]`.
    weights: [Vec<f32>; 3],
    /// What is added to each: `[heads, H]`, `[heads, H]`, `[heads, d_t]`. The first is for rows without their mean.
    biases: [Vec<f32>; 3],
    /// Mean of the rows trained on, `[in]`: what a rounded first product needs to find its bias again.
    source_mean: Vec<f64>,
    /// R² on the sequences held out.
    pub r2: f64,
    /// Epochs behind the weights that were kept.
    pub epochs: usize,
}

/// Networks of one target layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerNetworks {
    /// The target layer.
    pub layer: usize,
    /// Source layers it reads, in the order of its first products' rows.
    pub sources: Vec<usize>,
    /// The keys'.
    pub keys: Network,
    /// The values'.
    pub values: Network,
}

impl LayerNetworks {
    /// The keys' or the values'.
    pub fn part(&self, part: Part) -> &Network {
        match part {
            Part::Keys => &self.keys,
            Part::Values => &self.values,
        }
    }
}

/// A trained mapper.
#[derive(Clone, Debug, PartialEq)]
pub struct Mlp {
    /// Target layers, ascending.
    pub layers: Vec<LayerNetworks>,
    settings: Settings,
    /// KV heads of the target.
    heads: usize,
    /// Sequences held out.
    held_out: usize,
}

impl Mlp {
    /// The module's settings.
    pub fn settings(&self) -> String {
        let layers = self.layers.iter().map(|layer| layer.sources.clone()).collect();
        MlpSettings { layers, width: self.settings.width }.to_json()
    }

    /// Mean R² over target layers on the sequences held out.
    pub fn r2(&self, part: Part) -> f64 {
        self.layers.iter().map(|layer| layer.part(part).r2).sum::<f64>() / self.layers.len() as f64
    }

    /// How it was trained.
    pub fn training(&self) -> TrainingRecord {
        let Settings { width, epochs, batch, seed: _ } = self.settings;
        let kept = self.layers.iter().flat_map(|layer| [layer.keys.epochs, layer.values.epochs]);
        let epochs_kept = kept.sum::<usize>() as f64 / (2 * self.layers.len()) as f64;
        TrainingRecord { width, epochs, epochs_kept, batch, held_out: self.held_out }
    }

    /// Per target layer, part and group of G heads `layers.{l}.{p}.{g}.in.weight` `[G, in, H]`, `.in.bias` `[G · H]`, `.mid.weight`
    /// `[G, H, H]`, `.mid.bias`, `.out.weight` `[G, H, d_t]` and `.out.bias`. Matrices are of type `elem`, biases f32; the first one is
    /// adjusted to its rounded matrix.
    pub fn tensors(&self, elem: Elem) -> Vec<Tensor> {
        let parts = self.layers.iter().flat_map(|layer| Part::BOTH.map(|part| (layer, part)));
        parts.flat_map(|(layer, part)| self.part_tensors(layer, part, elem)).collect()
    }

    fn part_tensors(&self, layer: &LayerNetworks, part: Part, elem: Elem) -> Vec<Tensor> {
        let (network, heads) = (layer.part(part), self.heads);
        let inputs = network.source_mean.len();
        let outputs = network.biases[2].len() / heads;
        let shapes =
            [(inputs, self.settings.width), (self.settings.width, self.settings.width), (self.settings.width, outputs)];
        let group = group(heads, inputs, self.settings.width, outputs);
        let mut tensors = Vec::new();
        for (g, start) in (0..heads).step_by(group).enumerate() {
            let count = group.min(heads - start);
            for (i, (product, (rows, cols))) in ["in", "mid", "out"].into_iter().zip(shapes).enumerate() {
                let numbers = &network.weights[i][start * rows * cols..(start + count) * rows * cols];
                let weight = rounded(numbers.iter().map(|&w| f64::from(w)), elem);
                let mut bias = network.biases[i][start * cols..(start + count) * cols].to_vec();
                if i == 0 {
                    uncentre(&mut bias, &weight, &network.source_mean, self.settings.width);
                }
                let name = |tensor: &str| format!("layers.{}.{}.{g}.{product}.{tensor}", layer.layer, part.letter());
                let shape = vec![count, rows, cols];
                tensors.push(Tensor { name: name("weight"), elem, shape, numbers: weight });
                tensors.push(Tensor { name: name("bias"), elem: Elem::F32, shape: vec![bias.len()], numbers: bias });
            }
        }
        tensors
    }
}

/// Makes a bias for rows without their mean one for rows as they are; `weight` is `[heads, in, H]`.
fn uncentre(bias: &mut [f32], weight: &[f32], mean: &[f64], width: usize) {
    for (bias, weight) in bias.chunks_exact_mut(width).zip(weight.chunks_exact(mean.len() * width)) {
        for (j, b) in bias.iter_mut().enumerate() {
            let shift: f64 = mean.iter().zip(weight.chunks_exact(width)).map(|(m, row)| m * f64::from(row[j])).sum();
            *b = (f64::from(*b) - shift) as f32;
        }
    }
}

/// Heads whose tensors go together; the last group may have fewer.
pub(crate) fn group(heads: usize, inputs: usize, width: usize, outputs: usize) -> usize {
    (LARGEST_TENSOR / head_bytes(inputs, width, outputs)).clamp(1, heads)
}

/// Bytes of one head's largest tensor.
fn head_bytes(inputs: usize, width: usize, outputs: usize) -> usize {
    width.saturating_mul(4).saturating_mul(inputs.max(width).max(outputs))
}

/// Whether one head's tensors stay below what a binding may hold.
pub(super) fn check_width(width: usize, features: usize, outputs: usize) -> Result<(), FitError> {
    if head_bytes(features, width, outputs) <= LARGEST_TENSOR {
        return Ok(());
    }
    let largest = LARGEST_TENSOR >> 20;
    let expected = format!("a width at which one head's weights of {features} features take at most {largest} MiB");
    Err(FitError::Setting { field: "width", found: width.to_string(), expected })
}

/// Trains the last `selection.len()` layers of the target (the ones before are native), each from its source layers. Finished
/// layers are kept in the folder `kept`, and taken from there if they are of the same rows and settings.
///
/// # Errors
/// [`FitError::Mlp`], [`FitError::Rows`]; [`FitError::Setting`] for a width whose tensors would be too large;
/// [`FitError::Interrupted`] where `watch` breaks.
///
/// # Panics
/// If `selection` is of more layers than the target has, or names one that the source has not.
pub fn fit(
    rows: &RowFile,
    selection: &[Vec<usize>],
    settings: &Settings,
    kept: &Path,
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Mlp, FitError> {
    let shape = rows.shape();
    let first = shape.target.layers.checked_sub(selection.len()).expect("no more layers than the target has");
    let widest = selection.iter().map(Vec::len).max().unwrap_or(0) * shape.source.width();
    check_width(settings.width, widest, shape.target.head_dim)?;
    let split = Split::draw(rows, settings.seed)?;
    let kept = Kept::new(kept, rows.digest(), settings);
    let mut layers = Vec::new();
    for (i, sources) in selection.iter().enumerate() {
        let layer = first + i;
        let mut step = |epoch: usize| {
            let (done, total) = (i * settings.epochs + epoch, selection.len() * settings.epochs);
            let stopped = watch(Progress { stage: Stage::Train, done, total }).is_break();
            let interrupted = || FitError::Interrupted { stage: Stage::Train.name(), file: kept.folder().to_owned() };
            if stopped { Err(interrupted()) } else { Ok(()) }
        };
        step(0)?;
        let networks = match kept.load(layer, sources)? {
            Some(networks) => networks,
            None => {
                let networks = train(rows, &split, layer, sources, settings, &mut step)?;
                kept.save(&networks)?;
                networks
            }
        };
        layers.push(networks);
    }
    let total = selection.len() * settings.epochs;
    let _ = watch(Progress { stage: Stage::Train, done: total, total });
    let held_out = split.held_out.len();
    Ok(Mlp { layers, settings: settings.clone(), heads: shape.target.kv_heads, held_out })
}

/// One target layer, keys and values side by side.
fn train(
    rows: &RowFile,
    split: &Split,
    layer: usize,
    sources: &[usize],
    settings: &Settings,
    step: &mut dyn FnMut(usize) -> Result<(), FitError>,
) -> Result<LayerNetworks, FitError> {
    let trainer = |part: Part| -> Result<Trainer<'_>, FitError> {
        // Every network has a generator of its own, so that an interrupt changes nothing.
        let mut seeds = Random::new(settings.seed);
        let seed = (0..=2 * layer + part as usize).map(|_| seeds.next_u64()).last().unwrap_or_default();
        let data = Data::new(rows, split, part, layer, sources)?;
        Trainer::new(data, settings, Random::new(seed)).map_err(|source| MlpError::Tensor { layer, source }.into())
    };
    let (mut keys, mut values) = (trainer(Part::Keys)?, trainer(Part::Values)?);
    for epoch in 0..settings.epochs {
        if keys.done() && values.done() {
            break;
        }
        if epoch > 0 {
            step(epoch)?;
        }
        let (k, v) = rayon::join(|| keys.epoch(epoch), || values.epoch(epoch));
        k.and(v).map_err(|error| error.of(layer, epoch))?;
    }
    Ok(LayerNetworks { layer, sources: sources.to_vec(), keys: keys.finish(), values: values.finish() })
}

/// What can stop an epoch.
#[derive(Debug)]
enum EpochError {
    Rows(RowsError),
    Tensor(candle_core::Error),
    Diverged,
}

impl EpochError {
    fn of(self, layer: usize, epoch: usize) -> FitError {
        match self {
            EpochError::Rows(error) => error.into(),
            EpochError::Tensor(source) => MlpError::Tensor { layer, source }.into(),
            EpochError::Diverged => MlpError::Diverged { layer, epoch }.into(),
        }
    }
}

impl From<RowsError> for EpochError {
    fn from(error: RowsError) -> EpochError {
        EpochError::Rows(error)
    }
}

impl From<candle_core::Error> for EpochError {
    fn from(error: candle_core::Error) -> EpochError {
        EpochError::Tensor(error)
    }
}

#[cfg(test)]
mod tests;
