#!/usr/bin/env python3
"""Makes the GGUF files of this folder and their known answers. See README.md for versions and the command."""

import json
import pathlib
import sys

import torch

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "engine"))

import elements  # noqa: E402: after the folder of answers.py is added
import models  # noqa: E402
import pieces  # noqa: E402


def main():
    torch.set_num_threads(1)
    elements.make(HERE)
    cases = list(models.make(HERE))
    texts = HERE.parents[2] / "host/assets/family/texts/wiki.calib.txt"
    pieces.make(HERE, texts.read_text()[:300_000])
    (HERE / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
