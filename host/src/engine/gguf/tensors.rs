//! The tensors of a GGUF file.

use std::{borrow::Cow, collections::HashSet};

use candle_core::{
    DType, Device, Module, Tensor,
    quantized::{GgmlDType, QMatMul, QStorage, QTensor},
};
use half::f16;

use crate::engine::{
    Architecture, EngineError, ModelConfig, Precision,
    linear::{Matrix, Numbers},
    weights::{LayerPart, Part, TensorFiles, check_finite, check_shape},
};

use super::{Gguf, TensorInfo};

/// A header and the bytes it describes.
pub(in crate::engine) struct Tensors<'a> {
    gguf: &'a Gguf,
    bytes: &'a [u8],
    /// Width of one head, for the architectures whose query and key rows are permuted.
    permuted: Option<usize>,
    /// Whether the embedding is the LM head too.
    tied: bool,
}

impl<'a> Tensors<'a> {
    /// `config` is `None` while it is being read: then only vectors make sense.
    pub(in crate::engine) fn new(gguf: &'a Gguf, bytes: &'a [u8], config: Option<&ModelConfig>) -> Tensors<'a> {
        // llama.cpp rotates adjacent dimensions of llama models, and its converter permutes the rows to match; Qwen's are
        // half-split as they came.
        let permuted = config.filter(|c| c.architecture == Architecture::Llama).map(|c| c.head_dim);
        Tensors { gguf, bytes, permuted, tied: config.is_some_and(|c| c.tied) }
    }

    /// Divisors of the RoPE frequencies, where the file has them.
    pub(in crate::engine) fn rope_factors(&self) -> Result<Option<Vec<f32>>, EngineError> {
        let name = "rope_freqs.weight";
        match self.gguf.tensors.get(name) {
            None => Ok(None),
            Some(tensor) => {
                let (kind, bytes) = self.locate(name, tensor)?;
                Ok(Some(self.dequantise(name, kind, &tensor.shape, bytes)?))
            }
        }
    }

    fn find(&self, part: Part, expected: &[usize]) -> Result<(String, GgmlDType, &'a [u8]), EngineError> {
        let name = self.name(part);
        let Some(tensor) = self.gguf.tensors.get(&name) else {
            let (file, expected) = (self.gguf.file.clone(), expected.to_vec());
            return Err(EngineError::MissingTensor { file, tensor: name, expected });
        };
        check_shape(&self.gguf.file, &name, &tensor.shape, expected)?;
        let (kind, bytes) = self.locate(&name, tensor)?;
        Ok((name, kind, bytes))
    }

    /// The bytes of a tensor, all of them in the file.
    fn locate(&self, name: &str, tensor: &TensorInfo) -> Result<(GgmlDType, &'a [u8]), EngineError> {
        let field = format!("tensor `{name}`");
        let kind = match tensor.kind {
            0 => GgmlDType::F32,
            1 => GgmlDType::F16,
            2 => GgmlDType::Q4_0,
            3 => GgmlDType::Q4_1,
            6 => GgmlDType::Q5_0,
            7 => GgmlDType::Q5_1,
            8 => GgmlDType::Q8_0,
            12 => GgmlDType::Q4K,
            13 => GgmlDType::Q5K,
            14 => GgmlDType::Q6K,
            30 => GgmlDType::BF16,
            other => {
                let expected = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K";
                return Err(self.gguf.unsupported(&field, format!("ggml type {other}"), expected));
            }
        };
        let width = tensor.shape.last().copied().unwrap_or(1);
        if !width.is_multiple_of(kind.block_size()) {
            let expected = format!("a multiple of {}, the block of {kind:?}", kind.block_size());
            return Err(self.gguf.malformed(&field, &format!("rows of {width} elements"), &expected));
        }
        // At most four extents below 2³²: their product fits, its bytes may not.
        let elements = tensor.shape.iter().map(|&n| n as u128).product::<u128>();
        if elements == 0 {
            return Err(self.gguf.malformed(&field, &tensor.shape, "at least one element"));
        }
        let length = (elements / kind.block_size() as u128).saturating_mul(kind.type_size() as u128);
        let start = u128::from(self.gguf.data) + u128::from(tensor.offset);
        let end = start.saturating_add(length);
        if end > self.bytes.len() as u128 {
            return Err(EngineError::Truncated {
                file: self.gguf.file.clone(),
                field,
                found: self.bytes.len() as u64,
                expected: u64::try_from(end).unwrap_or(u64::MAX),
            });
        }
        Ok((kind, &self.bytes[start as usize..end as usize]))
    }

    fn dequantise(&self, name: &str, kind: GgmlDType, shape: &[usize], bytes: &[u8]) -> Result<Vec<f32>, EngineError> {
        let values: Vec<f32> = match kind {
            GgmlDType::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            GgmlDType::F16 => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            _ => quantised(kind, shape, bytes)?.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1()?,
        };
        check_finite(&self.gguf.file, name, &values)?;
        Ok(values)
    }

    /// Query and key rows in half-split order: row `j + t·d/2` of a head is the file's row `2j + t`. Whole rows move, so
    /// that blocks stay whole.
    fn half_split<'b>(&self, part: Part, outputs: usize, bytes: &'b [u8]) -> Cow<'b, [u8]> {
        let rotated = matches!(part, Part::Layer(_, LayerPart::Q | LayerPart::K));
        let Some(d) = self.permuted.filter(|_| rotated) else { return bytes.into() };
        let row = bytes.len() / outputs;
        let mut ordered = Vec::with_capacity(bytes.len());
        for head in bytes.chunks_exact(d * row) {
            for from in (0..d).step_by(2).chain((1..d).step_by(2)) {
                ordered.extend_from_slice(&head[from * row..][..row]);
            }
        }
        ordered.into()
    }

    /// Refuses a block whose scale is NaN or infinite.
    fn check_scales(&self, name: &str, kind: GgmlDType, bytes: &[u8]) -> Result<(), EngineError> {
        let scales: &[usize] = match kind {
            GgmlDType::Q4_0 | GgmlDType::Q5_0 | GgmlDType::Q8_0 => &[0],
            GgmlDType::Q4_1 | GgmlDType::Q5_1 | GgmlDType::Q4K | GgmlDType::Q5K => &[0, 2],
            GgmlDType::Q6K => &[208],
            _ => &[],
        };
        for (i, block) in bytes.chunks_exact(kind.type_size()).enumerate() {
            for &at in scales {
                let scale = f16::from_le_bytes([block[at], block[at + 1]]);
                if !scale.is_finite() {
                    let (file, index) = (self.gguf.file.clone(), i * kind.block_size());
                    return Err(EngineError::NotFinite { file, tensor: name.into(), index, found: scale.to_f32() });
                }
            }
        }
        Ok(())
    }
}

fn is_float(kind: GgmlDType) -> bool {
    matches!(kind, GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16)
}

/// Whether the tensor library multiplies this type and shape with the processor's 8-bit instructions. Its other quantised
/// products take several times as long as single precision does.
fn has_kernel(kind: GgmlDType, outputs: usize, inputs: usize) -> bool {
    let shape = outputs.is_multiple_of(16) && inputs.is_multiple_of(256);
    shape && matches!(kind, GgmlDType::Q4K | GgmlDType::Q6K | GgmlDType::Q8_0)
}

fn quantised(kind: GgmlDType, shape: &[usize], bytes: &[u8]) -> Result<QTensor, EngineError> {
    // A copy: a tensor starts anywhere in the file, and candle asks for the block's alignment.
    let storage = QStorage::from_data(Cow::Owned(bytes.to_vec()), &Device::Cpu, kind)?;
    Ok(QTensor::new(storage, shape)?)
}

impl TensorFiles for Tensors<'_> {
    fn name(&self, part: Part) -> String {
        let (layer, part) = match part {
            Part::Embedding => return "token_embd.weight".into(),
            Part::Norm => return "output_norm.weight".into(),
            Part::Head => return "output.weight".into(),
            Part::Layer(layer, part) => (layer, part),
        };
        let name = match part {
            LayerPart::AttentionNorm => "attn_norm.weight",
            LayerPart::Q => "attn_q.weight",
            LayerPart::K => "attn_k.weight",
            LayerPart::V => "attn_v.weight",
            LayerPart::QBias => "attn_q.bias",
            LayerPart::KBias => "attn_k.bias",
            LayerPart::VBias => "attn_v.bias",
            LayerPart::QNorm => "attn_q_norm.weight",
            LayerPart::KNorm => "attn_k_norm.weight",
            LayerPart::O => "attn_output.weight",
            LayerPart::FfnNorm => "ffn_norm.weight",
            LayerPart::Gate => "ffn_gate.weight",
            LayerPart::Up => "ffn_up.weight",
            LayerPart::Down => "ffn_down.weight",
        };
        format!("blk.{layer}.{name}")
    }

    fn vector(&self, part: Part, len: usize) -> Result<Vec<f32>, EngineError> {
        let (name, kind, bytes) = self.find(part, &[len])?;
        self.dequantise(&name, kind, &[len], bytes)
    }

    fn matrix(&self, part: Part, outputs: usize, inputs: usize, precision: Precision) -> Result<Matrix, EngineError> {
        let (name, kind, bytes) = self.find(part, &[outputs, inputs])?;
        let bytes = self.half_split(part, outputs, bytes);
        // A table that is only looked up in stays as small as it came, whatever its type.
        let looked_up = part == Part::Embedding && !self.tied && !is_float(kind);
        let multiplied = precision == Precision::Quantised && has_kernel(kind, outputs, inputs);
        let numbers = if looked_up || multiplied {
            self.check_scales(&name, kind, &bytes)?;
            let weight = QMatMul::from_qtensor(quantised(kind, &[outputs, inputs], &bytes)?)?;
            if multiplied {
                // candle packs such a matrix for its kernels when it is first multiplied with, which takes as long as a few
                // dozen rows do: that belongs to loading, not to the first answer.
                weight.forward(&Tensor::zeros((2, inputs), DType::F32, &Device::Cpu)?)?;
            }
            Numbers::Quantised(weight)
        } else {
            Numbers::Dense(self.dequantise(&name, kind, &[outputs, inputs], &bytes)?)
        };
        Ok(Matrix { outputs, inputs, numbers })
    }

    fn count(&self) -> usize {
        self.gguf.tensors.len()
    }

    fn refuse_others(&self, expected: &HashSet<String>, config: &ModelConfig) -> Result<(), EngineError> {
        let others = self.gguf.tensors.keys().find(|name| !expected.contains(*name) && *name != "rope_freqs.weight");
        match others {
            None => Ok(()),
            Some(name) => {
                let found =
                    format!("a part that {:?} models with {} layers do not have", config.architecture, config.layers);
                Err(self.gguf.unsupported(&format!("tensor `{name}`"), found, "only the tensors of this architecture"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    /// Every element type, with random bits in every field of a block, against the `gguf` package's own dequantisation.
    #[test]
    fn every_element_type_is_read_as_the_reference_reads_it() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/gguf");
        let file = folder.join("elements.gguf");
        let bytes = fs::read(&file).unwrap();
        let gguf = Gguf::parse(&file, &bytes).unwrap();
        let tensors = Tensors::new(&gguf, &bytes, None);
        let expected = fs::read(folder.join("elements.safetensors")).unwrap();
        let expected = safetensors::SafeTensors::deserialize(&expected).unwrap();
        assert_eq!(gguf.tensors.len(), 11);
        for (name, tensor) in &gguf.tensors {
            let (kind, bytes) = tensors.locate(name, tensor).unwrap();
            tensors.check_scales(name, kind, bytes).unwrap();
            let found = tensors.dequantise(name, kind, &tensor.shape, bytes).unwrap();
            let expected = expected.tensor(name).unwrap();
            assert_eq!(expected.shape(), tensor.shape);
            for (found, bytes) in found.iter().zip(expected.data().as_chunks().0) {
                let expected = f32::from_le_bytes(*bytes);
                // One product and one sum in f32, which may be fused or not.
                assert!((found - expected).abs() <= 2e-6 * expected.abs().max(1e-3), "{name}: {found} {expected}");
            }
        }
    }

    #[test]
    fn rows_in_adjacent_order_come_out_half_split() {
        let file = Path::new("x.gguf");
        let gguf = Gguf { file: file.into(), metadata: Default::default(), tensors: Default::default(), data: 0 };
        let mut tensors = Tensors::new(&gguf, &[], None);
        tensors.permuted = Some(4);
        // Two heads of four rows of two bytes; the rows' names say where they belong: head, pair, half.
        let rows = *b"a0a2a1a3b0b2b1b3";
        let key = Part::Layer(0, LayerPart::K);
        assert_eq!(&*tensors.half_split(key, 8, &rows), b"a0a1a2a3b0b1b2b3");
        assert_eq!(&*tensors.half_split(Part::Layer(0, LayerPart::V), 8, &rows), &rows[..]);
    }

    #[test]
    fn a_block_with_an_infinite_scale_is_found() {
        let file = Path::new("x.gguf");
        let gguf = Gguf { file: file.into(), metadata: Default::default(), tensors: Default::default(), data: 0 };
        let mut bytes = vec![0u8; 2 * GgmlDType::Q6K.type_size()];
        let end = bytes.len();
        bytes[end - 2..].copy_from_slice(&f16::INFINITY.to_le_bytes());
        let error = Tensors::new(&gguf, &[], None).check_scales("w", GgmlDType::Q6K, &bytes).unwrap_err();
        assert!(matches!(error, EngineError::NotFinite { index: 256, .. }), "{error}");
    }
}
