"""Configurations that must be refused before any weight is read, each with the word that the refusal has to name."""

import json

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "vocab_size": 272, "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32",
}


def architecture(model_type, class_name, **changes):
    return LLAMA | {"model_type": model_type, "architectures": [class_name]} | changes


def scaled(**scaling):
    return LLAMA | {"rope_scaling": scaling}


# name: (config, words of which the refusal names at least one)
CASES = {
    "rope-yarn": (scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=128), ["yarn"]),
    "rope-yarn-old-spelling": (scaled(type="yarn", factor=4.0, original_max_position_embeddings=128), ["yarn"]),
    "rope-yarn-parameters": (
        {key: x for key, x in LLAMA.items() if key != "rope_theta"}
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}}, ["yarn"]),
    "rope-longrope": (
        scaled(rope_type="longrope", factor=4.0, short_factor=[1.0] * 8, long_factor=[2.0] * 8), ["longrope"]),
    "rope-dynamic": (scaled(rope_type="dynamic", factor=2.0), ["dynamic"]),
    "rope-unknown": (scaled(rope_type="spiral", factor=2.0), ["spiral"]),
    "rope-linear-without-factor": (scaled(rope_type="linear"), ["factor"]),
    "rope-linear-zero": (scaled(rope_type="linear", factor=0.0), ["factor"]),
    "rope-llama3-without-original": (
        scaled(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
        ["original_max_position_embeddings"]),
    "partial-rotary": (LLAMA | {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    "mistral-sliding": (architecture("mistral", "MistralForCausalLM", sliding_window=128), ["sliding"]),
    "qwen2-sliding": (
        architecture("qwen2", "Qwen2ForCausalLM", sliding_window=128, use_sliding_window=True, max_window_layers=0),
        ["sliding"]),
    "qwen3-layer-types": (
        architecture("qwen3", "Qwen3ForCausalLM", layer_types=["full_attention", "sliding_attention"]), ["sliding"]),
    "gemma2": (architecture("gemma2", "Gemma2ForCausalLM", sliding_window=4096), ["gemma2"]),
    "gemma3": (architecture("gemma3_text", "Gemma3ForCausalLM", sliding_window=512), ["gemma3"]),
    "mixtral": (architecture("mixtral", "MixtralForCausalLM", num_local_experts=8), ["mixtral"]),
    "qwen3-moe": (architecture("qwen3_moe", "Qwen3MoeForCausalLM", num_experts=8), ["qwen3_moe"]),
    "qwen3-next": (architecture("qwen3_next", "Qwen3NextForCausalLM"), ["qwen3_next"]),
    "mamba": (architecture("mamba", "MambaForCausalLM"), ["mamba"]),
    "gpt2": (architecture("gpt2", "GPT2LMHeadModel"), ["gpt2"]),
    "phi3": (architecture("phi3", "Phi3ForCausalLM"), ["phi3"]),
    "activation": (LLAMA | {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    "mlp-bias": (LLAMA | {"mlp_bias": True}, ["mlp_bias"]),
    "quantised": (LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantization_config", "gptq"]),
    "heads-indivisible": (LLAMA | {"num_key_value_heads": 3}, ["num_key_value_heads"]),
    "head-dim-odd": (LLAMA | {"head_dim": 15}, ["head_dim"]),
    "no-layers": (LLAMA | {"num_hidden_layers": 0}, ["num_hidden_layers"]),
    "no-hidden-size": ({key: x for key, x in LLAMA.items() if key != "hidden_size"}, ["hidden_size"]),
}


def make(root):
    """Writes refused/<name>/config.json and the list of them, refused.json."""
    listed = []
    for name, (config, names) in CASES.items():
        folder = root / "refused" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        listed.append({"name": name, "model": f"refused/{name}", "must_name": names})
    (root / "refused.json").write_text(json.dumps(listed, indent=1) + "\n")
