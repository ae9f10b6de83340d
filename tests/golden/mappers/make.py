"""Known answers of the head-matched and the MLP mapper's forward passes, computed by NumPy in f64 and by nothing of ours.

    python3 -m pip install numpy safetensors
    python3 tests/golden/mappers/make.py

Writes answers.safetensors beside this file; the versions it was made with are in its metadata.
"""

import json
import pathlib
import platform

import numpy as np
from safetensors.numpy import save_file

# Numbers of heads that don't divide each other, a rotation of some dimensions of a head only.
SOURCE = dict(layers=4, heads=3, dim=10, rope=8, theta=10_000.0)
TARGET = dict(layers=2, heads=4, dim=14, rope=12, theta=500_000.0)
LAYERS = [[3, 0], [1, 3]]
TOKENS, FIRST, WIDTH = 45, 11, 24

rng = np.random.default_rng(20_27)
answers = {}


def normal(*shape, scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def rotate(x, shape, sign):
    """Turns the half-split pairs of `[heads, T, dim]` by `sign` times the angle of their position."""
    half = shape["rope"] // 2
    angle = np.outer(np.arange(FIRST, FIRST + TOKENS), shape["theta"] ** (-np.arange(half) / half))
    cos, sin = np.cos(angle), sign * np.sin(angle)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def store(name, weight, bias):
    answers[f"{name}.weight"], answers[f"{name}.bias"] = weight, bias.reshape(-1)
    return weight.astype(np.float64), bias.astype(np.float64)


heads, outputs, dim = TARGET["heads"], TARGET["dim"], SOURCE["dim"]
for side in ("k", "v"):
    cache = normal(SOURCE["layers"], SOURCE["heads"], TOKENS, dim)
    # A few outliers, as keys have.
    cache[..., 3] *= 20
    answers[f"source.{side}"] = cache
    content = cache.astype(np.float64)
    if side == "k":
        content = np.stack([rotate(layer, SOURCE, -1.0) for layer in content])
    for l, selected in enumerate(LAYERS):
        inputs = len(selected) * dim
        w, b = store(f"head-matched.layers.{l}.{side}", normal(heads, inputs, outputs, scale=inputs**-0.5), normal(heads, outputs))
        matched = np.stack(
            [
                np.concatenate([content[s, h * SOURCE["heads"] // heads] for s in selected], axis=-1) @ w[h] + b[h]
                for h in range(heads)
            ]
        )
        features = np.concatenate([content[s, a] for s in selected for a in range(SOURCE["heads"])], axis=-1)
        name, wide = f"mlp.layers.{l}.{side}.0", features.shape[1]
        w1, b1 = store(f"{name}.in", normal(heads, wide, WIDTH, scale=wide**-0.5), normal(heads, WIDTH))
        w2, b2 = store(f"{name}.mid", normal(heads, WIDTH, WIDTH, scale=WIDTH**-0.5), normal(heads, WIDTH))
        w3, b3 = store(f"{name}.out", normal(heads, WIDTH, outputs, scale=WIDTH**-0.5), normal(heads, outputs))
        hidden = [np.maximum(np.maximum(features @ w1[h] + b1[h], 0) @ w2[h] + b2[h], 0) for h in range(heads)]
        networks = np.stack([hidden[h] @ w3[h] + b3[h] for h in range(heads)])
        for kind, out in (("head-matched", matched), ("mlp", networks)):
            answers[f"{kind}.target.{l}.{side}"] = rotate(out, TARGET, 1.0) if side == "k" else out

about = {
    "versions": json.dumps({"python": platform.python_version(), "numpy": np.__version__}),
    "source": json.dumps(SOURCE),
    "target": json.dumps(TARGET),
    "layers": json.dumps(LAYERS),
    "first": str(FIRST),
    "width": str(WIDTH),
}
path = pathlib.Path(__file__).with_name("answers.safetensors")
save_file({k: np.ascontiguousarray(v) for k, v in answers.items()}, path, metadata=about)
print(path.name, path.stat().st_size, "bytes", about["versions"])
