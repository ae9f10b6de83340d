"""Tiny random GGUF models whose matrices take every element type in turn, with transformers' answers.

Hidden size 256, because a row of a K-quantised matrix is a multiple of 256 wide. llama.gguf is of the llama
architecture, whose Q and K rows lie in the adjacent pairing; qwen2.gguf has biases, tied embeddings and the half-split
pairing.
"""

import itertools
import json

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type, GGUFWriter, TokenType
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from answers import GREEDY_MARGIN, answer, greedy, store
from elements import random_tensor

HIDDEN, HEADS, KV_HEADS, HEAD, FFN = 256, 4, 2, 64, 256
TYPES = [Type.Q4_K, Type.Q6_K, Type.Q5_0, Type.Q8_0, Type.Q5_K, Type.Q4_0, Type.Q4_1, Type.F16, Type.BF16, Type.Q5_1]
# architecture: what its file says
MODELS = {
    "llama": {"layers": 2, "theta": 10000.0, "epsilon": 1e-5, "bias": False, "tied": False, "pre": "smollm"},
    "qwen2": {"layers": 1, "theta": 1000000.0, "epsilon": 1e-6, "bias": True, "tied": True, "pre": "qwen2"},
}
STEPS, TOKENS = 32, 72
TEXT = "the ship and the lamp in the night 12 34 def return self import value the and ing er on or an in re at " * 4


def make(root):
    """Writes llama.gguf, qwen2.gguf and their answers; yields their entries of cases.json."""
    for name, about in MODELS.items():
        tokens = np.random.default_rng(len(name)).integers(3, 256, TOKENS).tolist()
        tokenizer = tokenizer_of(about["pre"])
        model, seed = settled(root, name, about, tokenizer, tokens)
        store(root / "answers" / f"gguf-{name}.safetensors", answer(model, tokens, STEPS, cols=64), case=f"gguf-{name}")
        strings = ["the ship and 1234", "return self\n\n    x", "naïve 🙂", "<|end|>the", ""]
        yield {"name": f"gguf-{name}", "model": f"{name}.gguf", "seed": seed,
               "why": f"{name} GGUF with a matrix of every element type",
               "strings": [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False).ids} for text in strings]}


def settled(root, name, about, tokenizer, tokens):
    """Draws weights until the greedy continuation is varied and free of near ties."""
    for seed in range(200):
        write(root / f"{name}.gguf", name, about, tokenizer, seed)
        model = AutoModelForCausalLM.from_pretrained(
            root, gguf_file=f"{name}.gguf", dtype=torch.float32, attn_implementation="eager").eval()
        ids, margins = greedy(model, tokens, STEPS)
        if min(margins) >= 4 * GREEDY_MARGIN and len(set(ids)) >= (4 if about["tied"] else 12):
            return model, seed
    raise AssertionError(f"{name}: no seed gives a greedy continuation free of near ties")


def write(path, name, about, tokenizer, seed):
    random, types = np.random.default_rng(seed), itertools.cycle(TYPES)
    vocabulary = tokenizer.get_vocab_size()
    writer = GGUFWriter(path, name)
    writer.add_name(f"random {name}")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(about["layers"])
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(about["theta"])
    writer.add_layer_norm_rms_eps(about["epsilon"])
    writer.add_vocab_size(vocabulary)
    if name == "llama":
        writer.add_rope_dimension_count(HEAD)
    add_tokenizer(writer, tokenizer, about["pre"])

    def norm(tensor):
        writer.add_tensor(tensor, (1 + 0.2 * random.standard_normal(HIDDEN)).astype(np.float32))

    def matrix(tensor, rows, columns, kind, scale):
        data = random_tensor(kind, (rows, columns), random, scale, centred=True)
        writer.add_tensor(tensor, data, raw_dtype=kind, raw_shape=data.shape)

    # A tied model with large embeddings repeats its last token for ever.
    matrix("token_embd.weight", vocabulary, HIDDEN, Type.Q8_0, 0.1 if about["tied"] else 0.3)
    norm("output_norm.weight")
    if not about["tied"]:
        matrix("output.weight", vocabulary, HIDDEN, Type.Q6_K, HIDDEN ** -0.5)
    for layer in range(about["layers"]):
        of = f"blk.{layer}."
        norm(of + "attn_norm.weight")
        norm(of + "ffn_norm.weight")
        for part, rows, columns in [
            ("attn_q", HEADS * HEAD, HIDDEN), ("attn_k", KV_HEADS * HEAD, HIDDEN), ("attn_v", KV_HEADS * HEAD, HIDDEN),
            ("attn_output", HIDDEN, HEADS * HEAD), ("ffn_gate", FFN, HIDDEN), ("ffn_up", FFN, HIDDEN),
            ("ffn_down", HIDDEN, FFN),
        ]:
            matrix(of + part + ".weight", rows, columns, next(types), columns ** -0.5)
            if about["bias"] and part in ("attn_q", "attn_k", "attn_v"):
                writer.add_tensor(of + part + ".bias", (0.5 * random.standard_normal(rows)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizer_of(pre):
    """A byte-level BPE of a few merges that splits its text as `pre` does."""
    built = Tokenizer(models.BPE())
    qwen2 = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
                  r"|\s+(?!\S)|\s+")
    built.pre_tokenizer = pre_tokenizers.Sequence({
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "qwen2": [pre_tokenizers.Split(qwen2, "isolated"),
                  pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)],
    }[pre])
    built.decoder = decoders.ByteLevel()
    built.train_from_iterator([TEXT], trainers.BpeTrainer(
        vocab_size=288, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    return built


def add_tokenizer(writer, tokenizer, pre):
    held = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(held["vocab"], key=held["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token == "<|end|>" else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in held["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
