//! The weights of a decoder and the names that the two file formats give them.

use std::{collections::HashSet, path::Path};

use rayon::prelude::*;

use super::{
    EngineError, ModelConfig, Precision,
    linear::{Linear, Matrix},
    team::Team,
};

/// All weights of one decoder.
#[derive(Debug)]
pub(super) struct Weights {
    /// `[vocab, hidden]`.
    pub(super) embedding: Matrix,
    pub(super) layers: Vec<LayerWeights>,
    /// `[hidden]`.
    pub(super) norm: Vec<f32>,
    /// `[vocab, hidden]`; the embedding where it is `None`.
    head: Option<Matrix>,
    /// Where most of the products run.
    pub(super) team: Team,
}

/// One layer's weights.
#[derive(Debug)]
pub(super) struct LayerWeights {
    pub(super) attention_norm: Vec<f32>,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    /// `[d]` each, for queries and keys (Qwen 3).
    pub(super) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    pub(super) o: Linear,
    pub(super) ffn_norm: Vec<f32>,
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
}

impl Weights {
    /// The matrix that turns the last hidden state into logits.
    pub(super) fn head(&self) -> &Matrix {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// In which numbers they are multiplied: a model without a quantised matrix computes the same whatever was asked for.
    pub(super) fn precision(&self) -> Precision {
        let mut matrices = matrices(&self.layers).chain([&self.embedding, self.head()]);
        match matrices.any(Matrix::is_quantised) {
            true => Precision::Quantised,
            false => Precision::Dequantised,
        }
    }

    pub(super) fn load(
        files: &impl TensorFiles,
        config: &ModelConfig,
        precision: Precision,
    ) -> Result<Weights, EngineError> {
        // Before anything is sized by it: a damaged number of layers is found at once.
        if config.layers > files.count() {
            let first = Part::Layer(files.count(), LayerPart::AttentionNorm);
            files.vector(first, config.hidden)?;
        }
        let expected: HashSet<String> = parts(config).map(|part| files.name(part)).collect();
        files.refuse_others(&expected, config)?;
        let table = |part| files.matrix(part, config.vocab, config.hidden, precision);
        let (tables, layers) = rayon::join(
            || -> Result<_, EngineError> {
                let head = if config.tied { None } else { Some(table(Part::Head)?) };
                Ok((table(Part::Embedding)?, head))
            },
            || {
                let layers = (0..config.layers).into_par_iter();
                layers.map(|layer| load_layer(files, config, precision, layer)).collect::<Result<Vec<_>, _>>()
            },
        );
        let (embedding, head) = tables?;
        let layers = layers?;
        let team = team(&layers);
        Ok(Weights { embedding, layers, norm: files.vector(Part::Norm, config.hidden)?, head, team })
    }
}

fn matrices(layers: &[LayerWeights]) -> impl Iterator<Item = &Matrix> {
    layers.iter().flat_map(|layer| {
        let LayerWeights { q, k, v, o, gate, up, down, .. } = layer;
        [q, k, v, o, gate, up, down].map(|linear| &linear.matrix)
    })
}

/// The team of most of the layers' weights.
fn team(layers: &[LayerWeights]) -> Team {
    let (quantised, dense): (Vec<&Matrix>, Vec<&Matrix>) = matrices(layers).partition(|m| m.is_quantised());
    let size = |matrices: &[&Matrix]| matrices.iter().map(|m| m.outputs * m.inputs).sum::<usize>();
    if size(&quantised) > size(&dense) { Team::Tensor } else { Team::Rayon }
}

fn load_layer(
    files: &impl TensorFiles,
    config: &ModelConfig,
    precision: Precision,
    layer: usize,
) -> Result<LayerWeights, EngineError> {
    let (hidden, inner, d) = (config.hidden, config.intermediate, config.head_dim);
    let (q, kv) = (config.heads * d, config.kv_heads * d);
    let vector = |part, len| files.vector(Part::Layer(layer, part), len);
    let linear = |part, bias: Option<LayerPart>, outputs, inputs| -> Result<Linear, EngineError> {
        let matrix = files.matrix(Part::Layer(layer, part), outputs, inputs, precision)?;
        let bias = bias.filter(|_| config.architecture.qkv_bias()).map(|part| vector(part, outputs)).transpose()?;
        Ok(Linear { matrix, bias })
    };
    let qk_norm = match config.architecture.qk_norm() {
        true => Some((vector(LayerPart::QNorm, d)?, vector(LayerPart::KNorm, d)?)),
        false => None,
    };
    Ok(LayerWeights {
        attention_norm: vector(LayerPart::AttentionNorm, hidden)?,
        q: linear(LayerPart::Q, Some(LayerPart::QBias), q, hidden)?,
        k: linear(LayerPart::K, Some(LayerPart::KBias), kv, hidden)?,
        v: linear(LayerPart::V, Some(LayerPart::VBias), kv, hidden)?,
        qk_norm,
        o: linear(LayerPart::O, None, hidden, q)?,
        ffn_norm: vector(LayerPart::FfnNorm, hidden)?,
        gate: linear(LayerPart::Gate, None, inner, hidden)?,
        up: linear(LayerPart::Up, None, inner, hidden)?,
        down: linear(LayerPart::Down, None, hidden, inner)?,
    })
}

/// Tensors by their part in the decoder: a Hugging Face folder or a GGUF file.
pub(super) trait TensorFiles: Sync {
    /// What this format calls a part.
    fn name(&self, part: Part) -> String;

    /// A vector as f32, checked for its length and for NaN.
    fn vector(&self, part: Part, len: usize) -> Result<Vec<f32>, EngineError>;

    /// A matrix `[outputs, inputs]`, checked likewise; query and key rows in half-split order.
    fn matrix(&self, part: Part, outputs: usize, inputs: usize, precision: Precision) -> Result<Matrix, EngineError>;

    /// How many tensors there are.
    fn count(&self) -> usize;

    /// Refuses tensors that are not `expected`: they would have changed what the model computes.
    fn refuse_others(&self, expected: &HashSet<String>, config: &ModelConfig) -> Result<(), EngineError>;
}

/// A tensor's part in a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Embedding,
    Norm,
    Head,
    Layer(usize, LayerPart),
}

/// A tensor's part in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayerPart {
    AttentionNorm,
    Q,
    K,
    V,
    QBias,
    KBias,
    VBias,
    QNorm,
    KNorm,
    O,
    FfnNorm,
    Gate,
    Up,
    Down,
}

/// Every part that a model of this configuration has.
fn parts(config: &ModelConfig) -> impl Iterator<Item = Part> {
    use LayerPart::*;
    let mut layer = vec![AttentionNorm, Q, K, V, O, FfnNorm, Gate, Up, Down];
    if config.architecture.qkv_bias() {
        layer.extend([QBias, KBias, VBias]);
    }
    if config.architecture.qk_norm() {
        layer.extend([QNorm, KNorm]);
    }
    let outer = [Part::Embedding, Part::Norm].into_iter().chain((!config.tied).then_some(Part::Head));
    outer.chain((0..config.layers).flat_map(move |l| layer.clone().into_iter().map(move |part| Part::Layer(l, part))))
}

/// Compares a shape in a file with the one the configuration asks for.
pub(super) fn check_shape(file: &Path, tensor: &str, found: &[usize], expected: &[usize]) -> Result<(), EngineError> {
    if found == expected {
        return Ok(());
    }
    let (found, expected) = (found.to_vec(), expected.to_vec());
    Err(EngineError::Shape { file: file.to_owned(), tensor: tensor.to_owned(), found, expected })
}

/// Refuses NaN and infinities.
pub(super) fn check_finite(file: &Path, tensor: &str, values: &[f32]) -> Result<(), EngineError> {
    // One pass without a branch first: x * 0 is NaN for NaN and infinities, 0 for everything else.
    let sum = values.chunks(4096).map(|chunk| chunk.iter().map(|x| x * 0.0).fold(0.0f32, |a, b| a + b)).sum::<f32>();
    if sum == 0.0 {
        return Ok(());
    }
    match values.iter().enumerate().find(|(_, x)| !x.is_finite()) {
        Some((index, &found)) => {
            Err(EngineError::NotFinite { file: file.to_owned(), tensor: tensor.to_owned(), index, found })
        }
        None => Ok(()),
    }
}
