"""Tiny random models as Hugging Face folders, one for each thing an engine can get wrong, with their answers."""

import json
import string

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from answers import GREEDY_MARGIN, answer, greedy, prefill, store

VOCABULARY = 272
"""256 bytes, one end token, the rest unused."""

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

# name: (what it holds the engine to, dtype of the file, changes of BASE, tokens of the prompt)
CASES = {
    "llama-gqa-tied": ("GQA of 4 query heads on 1 KV head, tied embeddings, three layers", "f32",
        {"num_key_value_heads": 1, "num_hidden_layers": 3, "tie_word_embeddings": True}, 40),
    "llama-mha-untied": ("as many KV heads as query heads, an output matrix of its own, no head_dim field", "bf16",
        {"num_key_value_heads": 4}, 48),
    "llama-head-dim": ("head_dim 24: heads * head_dim is not the hidden size", "f16", {"head_dim": 24}, 48),
    "llama3-rope": ("llama3 frequency scaling, original length 64, prompt beyond it", "f16",
        {"head_dim": 32, "rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3"} | LLAMA3}, 200),
    "llama3-rope-parameters": ("the same in the rope_parameters field of transformers 5, without rope_theta", "bf16",
        {"head_dim": 32, "rope_theta": None, "dtype": "bfloat16",
         "rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0} | LLAMA3}, 150),
    "linear-rope": ("linear scaling in the old spelling (type), prompt beyond the original length", "f16",
        {"rope_scaling": {"type": "linear", "factor": 4.0}}, 150),
    "qwen2": ("biases on q, k and v; a sliding_window field that use_sliding_window turns off", "bf16",
        QWEN2 | {"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 2}, 64),
    "qwen2-tied": ("biases, tied embeddings", "f16", QWEN2 | {"tie_word_embeddings": True}, 48),
    "qwen3": ("per-head q and k norms before the rotation, head_dim 32 with 4 heads on a hidden size of 64", "bf16",
        QWEN3 | {"head_dim": 32, "attention_bias": False, "use_sliding_window": False, "sliding_window": None}, 64),
    "mistral": ("Mistral without a sliding window", "bf16",
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None, "head_dim": 16}, 48),
    "sharded": ("weights in three files with an index", "f16", {"num_hidden_layers": 3, "vocab_size": VOCABULARY}, 48),
}
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
HF_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
STEPS = 32


def make(root):
    """Writes every case under `root`/tiny and yields its entry of cases.json."""
    for name, (why, dtype, changes, count) in CASES.items():
        folder = root / "tiny" / name
        folder.mkdir(parents=True, exist_ok=True)
        config = {key: x for key, x in (BASE | {"torch_dtype": HF_DTYPES[dtype]} | changes).items()
                  if x is not None or key == "sliding_window"}
        if "dtype" in config:
            del config["torch_dtype"]
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        tokenizer().save(str(folder / "tokenizer.json"), pretty=False)
        tokens = np.random.default_rng(count).integers(1, 257, count).tolist()
        model, seed = settled(folder, config, dtype, tokens, sharded=name == "sharded")
        bites(folder, config, model, tokens)
        store(root / "answers" / f"tiny-{name}.safetensors", answer(model, tokens, STEPS, cols=64), case=name)
        yield {"name": f"tiny-{name}", "model": f"tiny/{name}", "why": why, "weights": dtype, "seed": seed}


def settled(folder, config, dtype, tokens, sharded):
    """Draws weights until the greedy continuation is varied (random tied models like to repeat a token) and free of
    near ties."""
    for seed in range(1000):
        weights = {name: x.to(DTYPES[dtype]) for name, x in draw(config, seed)}
        for old in folder.glob("*.safetensors*"):
            old.unlink()
        write(folder, weights, sharded)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        ids, margins = greedy(model, tokens, STEPS)
        if min(margins) >= 4 * GREEDY_MARGIN and len(set(ids)) >= (4 if config["tie_word_embeddings"] else 12):
            return model, seed
    raise AssertionError(f"{folder.name}: no seed gives a greedy continuation free of near ties")


def draw(config, seed):
    """Weights of unit gain, norms about 1, biases large enough to matter, by their names in the file."""
    random = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).state_dict()
    for name, shape in shapes.items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        normal = torch.randn(shape.shape, generator=random)
        if name.endswith("norm.weight"):
            yield name, 1 + 0.2 * normal
        elif name.endswith("bias"):
            yield name, 0.5 * normal
        elif "embed_tokens" in name:
            yield name, 0.3 * normal
        else:
            yield name, normal * shape.shape[1] ** -0.5


def write(folder, weights, sharded):
    """One file, or three with the index that names them."""
    if not sharded:
        save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
        return
    names, index, total = list(weights), {}, 0
    for part in range(3):
        file = f"model-{part + 1:05}-of-00003.safetensors"
        held = {name: weights[name] for name in names[part::3]}
        save_file(held, str(folder / file), metadata={"format": "pt"})
        index |= {name: file for name in held}
        total += sum(x.numel() * x.element_size() for x in held.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text + "\n")


def bites(folder, config, model, tokens):
    """A scaled rotation must change the logits, or the case would pass without it."""
    scaled = config.get("rope_scaling") or config.get("rope_parameters")
    if not scaled:
        return
    theta = config.get("rope_theta") or scaled["rope_theta"]
    plain = {key: x for key, x in config.items() if key not in ("rope_scaling", "rope_parameters")} | {"rope_theta": theta}
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model(**plain), attn_implementation="eager").eval()
    other.load_state_dict(model.state_dict())
    change = np.abs(prefill(model, tokens)[0] - prefill(other, tokens)[0])[-1].max()
    assert change > 0.05, f"{folder.name}: the scaled rotation changes the logits by {change} only"


def tokenizer():
    """One token a byte, id 0 = <|end|>: small, but a real tokenizer.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert all(c in alphabet for c in string.ascii_letters)
    vocabulary = {"<|end|>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens(["<|end|>"])
    return bytes_only
