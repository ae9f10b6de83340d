//! A decoder's configuration from GGUF metadata.

use crate::{
    cache::{Pairing, Rope, RopeScaling},
    engine::{Architecture, EngineError, ModelConfig},
};

use super::Gguf;

/// Reads the configuration. `factors` is what `rope_freqs.weight` holds, if it is there.
pub(in crate::engine) fn read_config(gguf: &Gguf, factors: Option<&[f32]>) -> Result<ModelConfig, EngineError> {
    let name = gguf.text("general.architecture")?.unwrap_or("nothing");
    let architecture = match name {
        "llama" => Architecture::Llama,
        "qwen2" => Architecture::Qwen2,
        "qwen3" => Architecture::Qwen3,
        other => return Err(gguf.unsupported("general.architecture", format!("`{other}`"), "llama, qwen2 or qwen3")),
    };
    let key = |field: &str| format!("{name}.{field}");
    refuse_by_name(gguf, &key)?;
    let hidden = gguf.need_size(&key("embedding_length"))?;
    let heads = gguf.need_size(&key("attention.head_count"))?;
    let kv_heads = gguf.size(&key("attention.head_count_kv"))?.unwrap_or(heads);
    let head_dim = match gguf.size(&key("attention.key_length"))? {
        Some(d) => d,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(gguf.malformed(&key("attention.head_count"), &heads, "a divisor of embedding_length")),
    };
    if let Some(value_length) = gguf.size(&key("attention.value_length"))?.filter(|v| *v != head_dim) {
        let field = key("attention.value_length");
        return Err(gguf.unsupported(&field, value_length, &format!("{head_dim}, as wide as the keys")));
    }
    if !heads.is_multiple_of(kv_heads) {
        let field = key("attention.head_count_kv");
        return Err(gguf.malformed(&field, &kv_heads, "a divisor of attention.head_count"));
    }
    if !head_dim.is_multiple_of(2) {
        return Err(gguf.malformed(&key("attention.key_length"), &head_dim, "an even width, for the rotation"));
    }
    let dims = gguf.size(&key("rope.dimension_count"))?.unwrap_or(head_dim);
    if dims != head_dim {
        return Err(gguf.unsupported(&key("rope.dimension_count"), dims, &format!("{head_dim}, the whole head")));
    }
    let theta = gguf.number(&key("rope.freq_base"))?.unwrap_or(10_000.0);
    let scaling = rope_scaling(gguf, &key, theta, dims, factors)?;
    let embedding = gguf.tensors.get("token_embd.weight").and_then(|tensor| tensor.shape.first().copied());
    let vocab = match (embedding, gguf.size(&key("vocab_size"))?) {
        (Some(rows), _) => rows,
        (None, Some(size)) => size,
        (None, None) => gguf.texts("tokenizer.ggml.tokens")?.len(),
    };
    let token = |field: &str| -> Result<Option<u32>, EngineError> {
        // u32::MAX is how llama.cpp writes "none".
        let id = gguf.whole(&format!("tokenizer.ggml.{field}"))?.filter(|id| *id != i128::from(u32::MAX) && *id >= 0);
        match id {
            Some(id) if id >= vocab as i128 => {
                Err(gguf.malformed(&format!("tokenizer.ggml.{field}"), &id, &format!("a token id below {vocab}")))
            }
            id => Ok(id.map(|id| id as u32)),
        }
    };
    let mut eos: Vec<u32> = [token("eos_token_id")?, token("eot_token_id")?].into_iter().flatten().collect();
    eos.dedup();
    Ok(ModelConfig {
        architecture,
        layers: gguf.need_size(&key("block_count"))?,
        hidden,
        intermediate: gguf.need_size(&key("feed_forward_length"))?,
        heads,
        kv_heads,
        head_dim,
        vocab,
        rms_eps: gguf.number(&key("attention.layer_norm_rms_epsilon"))?.unwrap_or(1e-6) as f32,
        rope: Rope { theta, dims, pairing: Pairing::HalfSplit, scaling },
        tied: !gguf.tensors.contains_key("output.weight"),
        max_positions: gguf.need_size(&key("context_length"))?,
        bos: token("bos_token_id")?,
        eos,
    })
}

fn refuse_by_name(gguf: &Gguf, key: &impl Fn(&str) -> String) -> Result<(), EngineError> {
    for field in ["attention.sliding_window", "expert_count", "attn_logit_softcapping", "final_logit_softcapping"] {
        match gguf.get(&key(field)) {
            None | Some(super::Value::Whole(0)) => {}
            Some(value) => {
                return Err(gguf.unsupported(&key(field), format!("{value:?}"), "a dense model without it"));
            }
        }
    }
    Ok(())
}

fn rope_scaling(
    gguf: &Gguf,
    key: &impl Fn(&str) -> String,
    theta: f64,
    dims: usize,
    factors: Option<&[f32]>,
) -> Result<RopeScaling, EngineError> {
    let kind = gguf.text(&key("rope.scaling.type"))?;
    let named = match kind {
        None | Some("none") => RopeScaling::None,
        Some("linear") => {
            let factor = gguf.number(&key("rope.scaling.factor"))?.unwrap_or(1.0);
            if factor == 1.0 { RopeScaling::None } else { RopeScaling::Linear { factor } }
        }
        Some(other) => {
            let expected = "none, linear, or llama3's rope_freqs.weight";
            return Err(gguf.unsupported(&key("rope.scaling.type"), format!("RoPE scaling `{other}`"), expected));
        }
    };
    match factors {
        None => Ok(named),
        Some(factors) if named == RopeScaling::None => llama3_from_factors(gguf, theta, dims, factors),
        Some(_) => Err(gguf.unsupported("rope_freqs.weight", "frequency factors beside a RoPE scaling", "one of them")),
    }
}

/// Llama 3's scaling is written as one divisor per frequency, without the settings it was made from. The factor is the
/// largest divisor; the others have the same values in every Llama 3 release, and the formula has to give back every
/// divisor with them.
fn llama3_from_factors(gguf: &Gguf, theta: f64, dims: usize, factors: &[f32]) -> Result<RopeScaling, EngineError> {
    if factors.len() != dims / 2 {
        let expected = format!("{} of them, one for each frequency of {dims} rotated dimensions", dims / 2);
        return Err(gguf.malformed("rope_freqs.weight", &factors.len(), &expected));
    }
    let factor = f64::from(factors.iter().copied().fold(1.0, f32::max));
    let scaling =
        RopeScaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_positions: 8192 };
    let rope = |scaling| Rope { theta, dims, pairing: Pairing::HalfSplit, scaling }.frequencies();
    let expected = rope(RopeScaling::None).into_iter().zip(rope(scaling)).map(|(plain, scaled)| plain / scaled);
    for (i, (found, expected)) in factors.iter().zip(expected).enumerate() {
        // The file's divisors were computed in f32.
        if (f64::from(*found) / expected - 1.0).abs() > 1e-5 {
            let field = format!("rope_freqs.weight[{i}]");
            let expected = format!("{expected}, as llama3's scaling by {factor} of 8192 positions gives");
            return Err(gguf.unsupported(&field, format!("a divisor of {found}"), &expected));
        }
    }
    Ok(scaling)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Divisors that no frequency has, and frequencies that have none.
    #[test]
    fn each_frequency_has_its_divisor() {
        let file = Path::new("x.gguf");
        let gguf = Gguf { file: file.into(), metadata: Default::default(), tensors: Default::default(), data: 0 };
        let scaling = |count| llama3_from_factors(&gguf, 5e5, 64, &vec![1.0; count]);
        assert!(matches!(scaling(32), Ok(RopeScaling::Llama3 { factor: 1.0, .. })));
        for count in [0, 31, 33] {
            let error = scaling(count).unwrap_err().to_string();
            let expected = format!("x.gguf: rope_freqs.weight: found {count}, expected 32 of them");
            assert!(error.starts_with(&expected), "{error}");
        }
    }
}
