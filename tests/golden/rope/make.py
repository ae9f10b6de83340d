#!/usr/bin/env python3
"""Makes rope.json: rotation frequencies of transformers' own functions, evaluated in f64. See README.md."""

import json
import pathlib
from unittest import mock

import numpy as np
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = pathlib.Path(__file__).resolve().parent
LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}
# name: (theta, rotated dimensions, scaling in the config's words)
CASES = {
    "family": (10000.0, 32, {"rope_type": "default"}),
    "smollm2": (100000.0, 64, {"rope_type": "default"}),
    "qwen2.5": (1000000.0, 128, {"rope_type": "default"}),
    "odd-width": (10000.0, 6, {"rope_type": "default"}),
    "linear-4": (10000.0, 64, {"rope_type": "linear", "factor": 4.0}),
    "linear-2.5": (500000.0, 32, {"rope_type": "linear", "factor": 2.5}),
    "llama-3.1": (500000.0, 128, LLAMA31),
    "llama-3.2-1b": (500000.0, 64, LLAMA31 | {"factor": 32.0}),
    "llama3-short": (500.0, 32, LLAMA31 | {"original_max_position_embeddings": 64}),
    "llama3-narrow-ramp": (10000.0, 64, LLAMA31 | {"low_freq_factor": 2.0, "high_freq_factor": 2.5, "factor": 3.0}),
}
POSITIONS = [0, 1, 63, 1000, 32767]


def rounded(values):
    """To nine digits: the tables it is compared with are f32."""
    return [round(x, 9) for x in values.ravel().tolist()]


def main():
    made = []
    for name, (theta, dims, scaling) in CASES.items():
        config = LlamaConfig(hidden_size=2 * dims, num_attention_heads=2, head_dim=dims,
                             rope_parameters={"rope_theta": theta} | scaling)
        kind = scaling["rope_type"]
        compute = LlamaRotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
        # The functions name torch.float; under this alias the same formula is evaluated in f64.
        with mock.patch.object(torch, "float", torch.float64):
            frequencies, attention = compute(config)
        assert frequencies.dtype == torch.float64 and attention == 1.0
        angles = np.outer(POSITIONS, frequencies.numpy())
        made.append({"name": name, "theta": theta, "dims": dims, "scaling": scaling,
                     "frequencies": frequencies.tolist(), "positions": POSITIONS,
                     "cos": rounded(np.cos(angles)), "sin": rounded(np.sin(angles))})
    text = "[\n" + ",\n".join(json.dumps(case) for case in made) + "\n]\n"
    (HERE / "rope.json").write_text(text)


if __name__ == "__main__":
    main()
