"""Writes rows for `fit.py` and `fit_speed`: synthetic ones, or those of a `.rows` file of `kvmig fit --keep-state`.

    python rows.py OUT --synthetic [--rows 16384] [--held-out 2048] [--seed 1]
    python rows.py OUT --from OUT.rows [--rows 16384] [--held-out 2048]

OUT gets `shape.json` and `{source,target}.{k,v}.{layer}.npy`, f32 `[rows + held_out, n_kv * d]`; the last rows are held out.
"""

import argparse
import json
import os
import struct
import sys

import numpy as np

# Qwen2.5-Coder 0.5B -> 1.5B.
SHAPE = {
    "source": {"layers": 24, "kv_heads": 2, "head_dim": 64},
    "target": {"layers": 28, "kv_heads": 2, "head_dim": 128},
}
BLOCK = 2048


def width(side):
    return side["kv_heads"] * side["head_dim"]


def create(out, shape, total):
    files = {}
    for model in ("source", "target"):
        for part in "kv":
            for layer in range(shape[model]["layers"]):
                path = os.path.join(out, f"{model}.{part}.{layer:02}.npy")
                files[model, part, layer] = np.lib.format.open_memmap(
                    path, mode="w+", dtype="<f4", shape=(total, width(shape[model]))
                )
    return files


def synthetic(files, shape, total, seed):
    """Layers of both models as maps of one slowly changing latent state, each near the layer before it, and some of their own.

    The latent's coordinates have a falling spectrum and are turned by a tanh in the target, so that no linear map is exact and more
    source layers help.
    """
    random = np.random.default_rng(seed)
    latent = 512
    spectrum = (1.0 / np.sqrt(1.0 + np.arange(latent) / 8.0)).astype(np.float32)
    maps, means = {}, {}
    for model in ("source", "target"):
        for part in "kv":
            before = None
            for layer in range(shape[model]["layers"]):
                columns = width(shape[model])
                fresh = random.standard_normal((latent, columns), dtype=np.float32)
                before = fresh if before is None else 0.9 * before + np.float32(np.sqrt(1 - 0.9**2)) * fresh
                maps[model, part, layer] = before * spectrum[:, None] / np.float32(np.sqrt(latent / 8))
                means[model, part, layer] = random.standard_normal(columns, dtype=np.float32)
    state = np.zeros(latent, np.float32)
    for start in range(0, total, BLOCK):
        rows = min(BLOCK, total - start)
        z = random.standard_normal((rows, latent), dtype=np.float32)
        for row in z:
            row *= np.float32(np.sqrt(1 - 0.5**2))
            row += np.float32(0.5) * state
            state = row
        bent = np.tanh(1.5 * z)
        for (model, part, layer), file in files.items():
            own = 0.2 * random.standard_normal((rows, file.shape[1]), dtype=np.float32)
            rotated = z if model == "source" else bent
            scale = np.float32(1 + layer)
            file[start : start + rows] = scale * (rotated @ maps[model, part, layer] + own + means[model, part, layer])


def captured(path):
    """The chunks of a `.rows` file (`host/src/fit/rows/`): rows, and where each section begins."""
    with open(path, "rb") as file:
        header = json.loads(file.readline())
        if header.get("format") != "kvmig-fit-rows-1":
            sys.exit(f"{path}: begins like no rows of this version: expected kvmig-fit-rows-1")
        shape, at = header["shape"], file.tell()
        source, target = shape["source"], shape["target"]
        head = 8 + 32 * (2 * (source["layers"] + 2 * target["layers"]) + 2)
        part = source["layers"] * width(source) + target["layers"] * (width(target) + target["kv_heads"])
        length, chunks = os.path.getsize(path), []
        while at + head <= length:
            file.seek(at)
            (rows,) = struct.unpack("<Q", file.read(8))
            end = at + head + 4 * rows * 2 * part
            if end > length:
                break
            chunks.append((rows, at + head))
            at = end
    return shape, part, chunks


def copy(path, files, part_width, chunks, shape, total):
    all_bytes, done = np.memmap(path, np.uint8, "r"), 0
    for rows, payload in chunks:
        kept = min(rows, total - done)
        for p, part in enumerate("kv"):
            at = payload + 4 * rows * p * part_width
            for model in ("source", "target"):
                columns = width(shape[model])
                for layer in range(shape[model]["layers"]):
                    section = all_bytes[at : at + 4 * rows * columns].view("<f4").reshape(rows, columns)
                    files[model, part, layer][done : done + kept] = section[:kept]
                    at += 4 * rows * columns
        done += kept
        if done == total:
            return


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--synthetic", action="store_true")
    what.add_argument("--from", dest="file")
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--held-out", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    total = options.rows + options.held_out
    shape = SHAPE
    if options.file:
        shape, part_width, chunks = captured(options.file)
        there = sum(rows for rows, _ in chunks)
        if there < total:
            sys.exit(f"{options.file}: found {there} rows, expected {total}: ask for fewer with --rows and --held-out")
    os.makedirs(options.out, exist_ok=True)
    files = create(options.out, shape, total)
    if options.file:
        copy(options.file, files, part_width, chunks, shape, total)
    else:
        synthetic(files, shape, total, options.seed)
    with open(os.path.join(options.out, "shape.json"), "w") as file:
        json.dump({**shape, "rows": options.rows, "held_out": options.held_out}, file)


if __name__ == "__main__":
    main()
