//! The description that makes a block of numbers a KV cache.

use serde::{Deserialize, Serialize};

/// Element type of a cache's planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Elem {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 half precision.
    F16,
}

impl Elem {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Elem::F32 => 4,
            Elem::F16 => 2,
        }
    }
}

/// Which two dimensions of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pairing {
    /// `(i, i + dims/2)`: Hugging Face layouts and Qwen GGUF files; the canonical one inside kvmig.
    HalfSplit,
    /// `(2i, 2i + 1)`: llama-arch GGUF files, whose Q/K weights are permuted to match.
    Adjacent,
}

/// How a RoPE's frequencies are scaled beyond the trained length.
///
/// Only variants covered by a parity test exist; the others (YaRN, LongRoPE, dynamic) are refused by name when a model
/// is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind", deny_unknown_fields)]
pub enum RopeScaling {
    /// Frequencies as trained.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// Divisor of every frequency.
        factor: f64,
    },
    /// Llama 3.1's piecewise scaling: long wavelengths divided by `factor`, short ones kept, a smooth ramp between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_positions / low_freq_factor` are divided by `factor`.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_positions / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length, in tokens, before the scaling.
        original_max_positions: u32,
    },
}

/// Rotary position embedding of one model (Su et al. 2021), in the half-split pairing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rope {
    /// Base of the geometric sequence of frequencies.
    pub theta: f64,
    /// Rotated dimensions of a head; the remaining `d - dims` carry no position.
    pub dims: usize,
    /// Which dimensions rotate together.
    pub pairing: Pairing,
    /// Change of the frequencies.
    pub scaling: RopeScaling,
}

impl Rope {
    /// Angular frequency per position, `[dims / 2]`, in radians per token.
    pub fn frequencies(&self) -> Vec<f64> {
        (0..self.dims / 2)
            .map(|i| self.theta.powf(-2.0 * i as f64 / self.dims as f64))
            .map(|f| match self.scaling {
                RopeScaling::None => f,
                RopeScaling::Linear { factor } => f / factor,
                RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                    let wavelength = 2.0 * std::f64::consts::PI / f;
                    let original = f64::from(original_max_positions);
                    if wavelength < original / high_freq_factor {
                        f
                    } else if wavelength > original / low_freq_factor {
                        f / factor
                    } else {
                        let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                        (1.0 - smooth) * f / factor + smooth * f
                    }
                }
            })
            .collect()
    }

    /// Cosine and sine of each position, `[positions, dims / 2, 2]`, computed in f64 because the shading languages
    /// promise too little of their own `cos`.
    pub fn table(&self, positions: &[u32]) -> Vec<f32> {
        let frequencies = self.frequencies();
        let mut table = Vec::with_capacity(positions.len() * self.dims);
        for &position in positions {
            for &frequency in &frequencies {
                let (sin, cos) = (f64::from(position) * frequency).sin_cos();
                table.extend([cos as f32, sin as f32]);
            }
        }
        table
    }
}

/// Shape and meaning of a cache: `layers` times keys and values of `[kv_heads, T, head_dim]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheLayout {
    /// Transformer layers.
    pub layers: usize,
    /// Key/value heads of a layer (GQA: fewer than query heads).
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Rotation of the keys.
    pub rope: Rope,
    /// Element type.
    pub elem: Elem,
}

impl CacheLayout {
    /// Elements that one token takes in one plane, `kv_heads * head_dim`.
    pub fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Bytes that one token takes in the whole cache.
    pub fn bytes_per_token(&self) -> usize {
        2 * self.layers * self.width() * self.elem.bytes()
    }
}
