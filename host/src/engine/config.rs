//! What a decoder needs to know about itself, whatever file said so.

use crate::cache::{CacheLayout, Elem, Pairing, Rope, RopeScaling};

use super::{EngineError, json::JsonFile};

/// A family of decoders that this engine computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2 and 3, SmolLM2, and Mistral where its attention is full.
    Llama,
    /// Qwen 2 and 2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen 3: every head of the queries and keys is normalised before the rotation.
    Qwen3,
}

impl Architecture {
    /// Whether the query, key and value projections add a bias.
    pub fn qkv_bias(self) -> bool {
        self == Architecture::Qwen2
    }

    /// Whether each head of queries and keys goes through an RMS norm.
    pub fn qk_norm(self) -> bool {
        self == Architecture::Qwen3
    }
}

/// Shape and constants of one decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Family.
    pub architecture: Architecture,
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Inner width of the feed-forward network.
    pub intermediate: usize,
    /// Query heads of a layer.
    pub heads: usize,
    /// Key/value heads of a layer; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_eps: f32,
    /// Rotation of queries and keys.
    pub rope: Rope,
    /// Whether the LM head is the embedding.
    pub tied: bool,
    /// Positions that the model was made for.
    pub max_positions: usize,
    /// Token that starts a text.
    pub bos: Option<u32>,
    /// Tokens that end one.
    pub eos: Vec<u32>,
}

impl ModelConfig {
    /// Layout of this model's caches with elements of type `elem`.
    pub fn layout(&self, elem: Elem) -> CacheLayout {
        CacheLayout {
            layers: self.layers,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            rope: self.rope.clone(),
            elem,
        }
    }

    /// Multiply-adds of one token's way through the layers, attention left out.
    pub fn macs_per_token(&self) -> usize {
        let attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads);
        self.layers * (attention + 3 * self.hidden * self.intermediate)
    }
}

/// Reads a Hugging Face `config.json`.
pub(super) fn from_hf(json: &JsonFile) -> Result<ModelConfig, EngineError> {
    let architecture = match json.text("model_type")? {
        Some("llama" | "mistral") => Architecture::Llama,
        Some("qwen2") => Architecture::Qwen2,
        Some("qwen3") => Architecture::Qwen3,
        other => {
            let found = other.map_or("nothing".into(), |name| format!("`{name}`"));
            return Err(json.unsupported("model_type", found, "llama, mistral, qwen2 or qwen3"));
        }
    };
    refuse_by_name(json, architecture)?;
    let hidden = json.need_size("hidden_size")?;
    let heads = json.need_size("num_attention_heads")?;
    let kv_heads = json.size("num_key_value_heads")?.unwrap_or(heads);
    let head_dim = match json.size("head_dim")? {
        Some(d) => d,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(json.malformed("num_attention_heads", heads.to_string(), "a divisor of hidden_size")),
    };
    if !heads.is_multiple_of(kv_heads) {
        return Err(json.malformed("num_key_value_heads", kv_heads.to_string(), "a divisor of num_attention_heads"));
    }
    if !head_dim.is_multiple_of(2) {
        return Err(json.malformed("head_dim", head_dim.to_string(), "an even width, for the rotation"));
    }
    Ok(ModelConfig {
        architecture,
        layers: json.need_size("num_hidden_layers")?,
        hidden,
        intermediate: json.need_size("intermediate_size")?,
        heads,
        kv_heads,
        head_dim,
        vocab: json.need_size("vocab_size")?,
        rms_eps: json.number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        rope: rope_from_hf(json, head_dim)?,
        tied: json.boolean("tie_word_embeddings")?.unwrap_or(false),
        max_positions: json.need_size("max_position_embeddings")?,
        bos: json.token_ids("bos_token_id")?.first().copied(),
        eos: json.token_ids("eos_token_id")?,
    })
}

fn refuse_by_name(json: &JsonFile, architecture: Architecture) -> Result<(), EngineError> {
    match json.text("hidden_act")? {
        None | Some("silu") => {}
        Some(other) => return Err(json.unsupported("hidden_act", format!("`{other}`"), "silu")),
    }
    let mut biases = vec!["mlp_bias"];
    if architecture != Architecture::Qwen2 {
        biases.push("attention_bias");
    }
    for field in biases {
        if json.boolean(field)? == Some(true) {
            return Err(json.unsupported(field, "a bias", "false"));
        }
    }
    // Qwen 2 and 3 configurations carry a window that is switched off by default; Mistral's is on where it is given.
    let window_is_off = match architecture {
        Architecture::Llama => false,
        Architecture::Qwen2 | Architecture::Qwen3 => json.boolean("use_sliding_window")? != Some(true),
    };
    if let Some(window) = json.get("sliding_window").filter(|_| !window_is_off) {
        return Err(json.unsupported("sliding_window", format!("a window of {window} tokens"), "full attention"));
    }
    let kinds = json.get("layer_types").and_then(|kinds| kinds.as_array());
    let other = kinds.and_then(|kinds| kinds.iter().find(|kind| kind.as_str() != Some("full_attention")));
    if let Some(other) = other {
        return Err(json.unsupported("layer_types", other, "full_attention in every layer"));
    }
    for field in ["num_experts", "num_local_experts", "attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(value) = json.get(field) {
            return Err(json.unsupported(field, value, "a dense model without it"));
        }
    }
    if json.get("quantization_config").is_some() {
        return Err(json.unsupported(
            "quantization_config",
            "a quantised checkpoint",
            "F32, F16 or BF16 weights, or GGUF",
        ));
    }
    match json.number("partial_rotary_factor")? {
        Some(factor) if factor != 1.0 => Err(json.unsupported("partial_rotary_factor", factor, "1")),
        _ => Ok(()),
    }
}

fn rope_from_hf(json: &JsonFile, head_dim: usize) -> Result<Rope, EngineError> {
    // `rope_parameters` is the spelling of transformers 5, `type` that of before 4.43.
    let group = if json.get("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
    let theta = match json.number(&format!("{group}.rope_theta"))? {
        Some(theta) => theta,
        None => json.number("rope_theta")?.unwrap_or(10_000.0),
    };
    let kind_field =
        ["rope_type", "type"].map(|key| format!("{group}.{key}")).into_iter().find(|f| json.get(f).is_some());
    let kind = match &kind_field {
        Some(field) => json.text(field)?,
        None => None,
    };
    let need = |key: &str| {
        let field = format!("{group}.{key}");
        json.number(&field)?.ok_or_else(|| json.malformed(&field, "nothing".into(), "a positive number"))
    };
    let scaling = match kind {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: need("factor")? },
        Some("llama3") => RopeScaling::Llama3 {
            factor: need("factor")?,
            low_freq_factor: need("low_freq_factor")?,
            high_freq_factor: need("high_freq_factor")?,
            original_max_positions: json.need_size(&format!("{group}.original_max_position_embeddings"))? as u32,
        },
        Some(other) => {
            let field = kind_field.unwrap_or_default();
            return Err(json.unsupported(&field, format!("RoPE scaling `{other}`"), "default, linear or llama3"));
        }
    };
    Ok(Rope { theta, dims: head_dim, pairing: Pairing::HalfSplit, scaling })
}
