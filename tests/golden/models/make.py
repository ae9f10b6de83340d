#!/usr/bin/env python3
"""Makes the known answers of real GGUF models, which are not in the tree. See README.md."""

import argparse
import hashlib
import json
import pathlib
import subprocess
import sys

import torch
from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "engine"))

from answers import GREEDY_MARGIN, answer, greedy, store  # noqa: E402: it lies in the folder added above

STEPS = 32
PROSE = (
    "The lighthouse keeper climbed the stairs every evening at six. There were one hundred and ninety-two steps, and he "
    "counted them each time, as his father had done before him. When he reached the top he lit the lamp, polished the "
    "great lens with a soft cloth, and wrote the weather in his book."
)
CODE = '''import math


class Vector:
    """A vector in the plane."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y)

    def length(self):
        return math.sqrt(self.x ** 2 + self.y ** 2)

    def __mul__(self, factor):
'''
ENDINGS = {
    "prose": [" That night, for the first time in thirty years,", " One winter evening, a ship", " The next morning he", ""],
    "code": ["", "        return"],
}
# file: stride of the stored columns of the last row of logits
MODELS = {"smollm2-135m": 4, "qwen25-coder-0.5b": 16}
KINDS = {"prose": PROSE, "code": CODE}
"""Texts, each tried with the endings until no greedy step is a near tie."""


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--models", type=pathlib.Path, required=True, help="folder of the GGUF files")
    parse.add_argument("--node", type=pathlib.Path, required=True, help="folder whose node_modules has node-llama-cpp")
    parse.add_argument("--only", choices=MODELS, nargs="*", default=list(MODELS))
    parse.add_argument("--threads", type=int, default=1)
    at = parse.parse_args()
    torch.set_num_threads(at.threads)
    strings = json.loads((HERE / "strings.json").read_text())
    for name in at.only:
        file = at.models / f"{name}.gguf"
        pre, tokenizer = tokenizer_of(file)
        model = AutoModelForCausalLM.from_pretrained(
            at.models, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager").eval()
        prompts, cases = {}, []
        for kind, text in KINDS.items():
            prompt, tokens = settled(model, tokenizer, text, ENDINGS[kind])
            stored = answer(model, tokens, STEPS, last_cols=MODELS[name])
            continuation = tokenizer.decode(stored["greedy"].tolist(), skip_special_tokens=False)
            store(HERE / "answers" / f"{name}-{kind}.safetensors", stored, case=f"{name}-{kind}", prompt=prompt,
                  continuation=continuation)
            prompts[kind] = tokens
            cases.append({"name": f"{name}-{kind}", "prompt": prompt, "continuation": continuation})
        del model
        other = llama_cpp(at.node, file, strings, list(prompts.values()))
        for case, theirs in zip(cases, other["greedy"], strict=True):
            case["llama_cpp_greedy"] = theirs
            case["llama_cpp_continuation"] = tokenizer.decode(theirs, skip_special_tokens=False)
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in strings]
        differs = [text for text, a, b in zip(strings, ids, other["ids"], strict=True) if a != b]
        with file.open("rb") as data:
            digest = hashlib.file_digest(data, "sha256").hexdigest()
        made = {"model": file.name, "sha256": digest, "bytes": file.stat().st_size, "pre_tokenizer": pre,
                "llama_cpp": other["release"], "llama_cpp_ids_differ": differs, "cases": cases,
                "strings": [{"text": text, "ids": x} for text, x in zip(strings, ids, strict=True)]}
        (HERE / f"{name}.json").write_text(one_a_line(made))


def settled(model, tokenizer, text, endings):
    """The text with the first ending after which no greedy step is a near tie, and its token ids."""
    for ending in endings:
        tokens = tokenizer.encode(text + ending).ids
        if min(greedy(model, tokens, STEPS)[1]) >= 2 * GREEDY_MARGIN:
            return text + ending, tokens
    raise AssertionError("every ending leads to a near tie")


def one_a_line(made):
    """JSON with one line a string or case, ASCII only so that invisible characters stay visible."""
    body = []
    for key, value in made.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(x) for x in value) + "\n ]"
        body.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(body) + "\n}\n"


def llama_cpp(node, file, strings, prompts):
    """llama.cpp's token ids and greedy continuations."""
    script = node / "llama_cpp.mjs"
    script.write_text((HERE / "llama_cpp.mjs").read_text())
    asked = json.dumps({"strings": strings, "prompts": prompts, "steps": STEPS})
    told = subprocess.run(["node", script, file.resolve()], input=asked, capture_output=True, check=True, text=True)
    return json.loads(told.stdout)


def tokenizer_of(path):
    """The file's `tokenizer.ggml.pre` and its tokenizer, built from vocabulary, merges and the published pre-tokenizer.

    transformers reads the vocabulary and the merges of a GGUF file but ignores `tokenizer.ggml.pre` (SmolLM2 loses
    the splitting of digits), so the pre-tokenizers are those of the models' own tokenizer.json.
    """
    fields = GGUFReader(path).fields
    pre = fields["tokenizer.ggml.pre"].contents()
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"].contents()]
    built = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    qwen2 = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
                  r"|\s+(?!\S)|\s+")
    built.pre_tokenizer = pre_tokenizers.Sequence({
        "smollm": [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "qwen2": [pre_tokenizers.Split(qwen2, "isolated"),
                  pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)],
    }[pre])
    built.decoder = decoders.ByteLevel()
    # Types of llama.cpp: 3 control, 4 user-defined. Both are matched in the text before the merges.
    built.add_special_tokens([AddedToken(t, normalized=False) for t, kind in zip(tokens, kinds, strict=True) if kind == 3])
    built.add_tokens([AddedToken(t, normalized=False) for t, kind in zip(tokens, kinds, strict=True) if kind == 4])
    assert built.get_vocab_size() == len(tokens), "a special token was added anew"
    return pre, built


if __name__ == "__main__":
    main()
