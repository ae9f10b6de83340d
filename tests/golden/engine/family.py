"""Answers of the bundled family on texts of its own evaluation set."""

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from answers import GREEDY_MARGIN, answer, greedy, store

# member: (text, tokens with the end token that comes first). The prose is public domain; the code is ours, because the
# family's own code texts may not be copied.
PROMPTS = {
    "large": [("prose", 256), ("code", 64)],
    "medium": [("prose", 200)],
    "medium-code": [("code", 128)],
}
STEPS = 40

CODE = [
    '''"""Reads a table of measurements."""
import csv
import os


class Table:
    """Rows of a file, by column name."""

    def __init__(self, path, delimiter=","):
        if not os.path.exists(path):
            raise FileNotFoundError(path)
        with open(path) as file:
            self.rows = list(csv.DictReader(file, delimiter=delimiter))

    def column(self, name):
        return [float(row[name]) for row in self.rows]

    def mean(self, name):
        values = self.column(name)
        return sum(values) / len(values)
''',
    '''def parse(text, default=None):
    """Return the settings in text as a dictionary."""
    settings = dict(default or {})
    for number, line in enumerate(text.splitlines()):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, found, value = line.partition("=")
        if not found:
            raise ValueError("line %d has no equals sign" % number)
        settings[key.strip()] = value.strip()
    return settings


def render(settings):
    lines = []
    for key in sorted(settings):
        lines.append("%s = %s" % (key, settings[key]))
    return lines
''',
]


def make(root, family):
    """Writes every member's answers and yields their entries of cases.json."""
    tokenizer = Tokenizer.from_file(str(family / "tokenizer.json"))
    for member, prompts in PROMPTS.items():
        model = AutoModelForCausalLM.from_pretrained(
            family / member, dtype=torch.float32, attn_implementation="eager").eval()
        for text, count in prompts:
            documents = CODE if text == "code" else prose(family)
            document, tokens = settled(model, tokenizer, documents, count)
            name = f"family-{member}-{text}"
            stored = answer(model, tokens, STEPS)
            about = {"case": name, "prompt": tokenizer.decode(tokens[1:]),
                     "continuation": tokenizer.decode(stored["greedy"].tolist(), skip_special_tokens=False)}
            store(root / "answers" / f"{name}.safetensors", stored, **about)
            yield {"name": name, "model": f"family:{member}", "weights": "f16",
                   "why": f"the bundled {member} on {count} tokens of {text}, document {document}"}


def prose(family):
    """The public-domain books of the family's evaluation texts."""
    return (family / "texts" / "prose.eval.txt").read_text().split("<|end|>")


def settled(model, tokenizer, documents, count):
    """The first document whose greedy continuation is free of near ties."""
    for index, document in enumerate(documents):
        tokens = [0] + tokenizer.encode(document.strip()).ids[: count - 1]
        if len(tokens) == count and min(greedy(model, tokens, STEPS)[1]) >= 4 * GREEDY_MARGIN:
            return index, tokens
    raise AssertionError(f"no document of {count} tokens continues free of near ties")
