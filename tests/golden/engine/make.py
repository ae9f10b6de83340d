#!/usr/bin/env python3
"""Makes the known answers in this folder from Hugging Face transformers. See README.md for versions and the command."""

import argparse
import json
import pathlib
import shutil

import torch

import family
import refused
import tiny

HERE = pathlib.Path(__file__).resolve().parent


def main():
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--family", type=pathlib.Path, required=True, help="folder of the bundled family, with texts/")
    parse.add_argument("--out", type=pathlib.Path, default=HERE)
    at = parse.parse_args()
    torch.set_num_threads(1)
    for made in ("tiny", "answers", "refused"):
        shutil.rmtree(at.out / made, ignore_errors=True)
    cases = [*tiny.make(at.out), *family.make(at.out, at.family)]
    (at.out / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
    refused.make(at.out)


if __name__ == "__main__":
    main()
