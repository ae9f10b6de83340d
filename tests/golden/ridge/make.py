"""Known answers of the ridge fit, solved by NumPy and SciPy and by nothing of ours.

    python3 -m pip install numpy scipy safetensors
    python3 tests/golden/ridge/make.py

Writes answers.safetensors beside this file; the versions it was made with are in its metadata.
"""

import json
import pathlib
import platform

import numpy as np
import scipy
import scipy.linalg
from safetensors.numpy import save_file

SOURCE = dict(layers=3, heads=2, dim=4)
TARGET = dict(layers=2, heads=2, dim=6)
ROWS, LAMBDA, SELECTION = 200, 0.01, [[0, 2], [0, 1, 2]]
CONVENTIONS = ["per-token", "per-token-relative", "sum"]

rng = np.random.default_rng(20_26)
answers = {}


def solve(c, b, lam, convention, rows):
    """(C + λ s I)⁻¹ B, through LDLᵀ rather than Cholesky."""
    scale = {"per-token": 1.0, "per-token-relative": np.mean(np.diag(c)), "sum": 1.0 / rows}[convention]
    return scipy.linalg.solve(c + lam * scale * np.eye(len(c)), b, assume_a="sym"), lam * scale


# 1. The same f64 moments: an ill-conditioned covariance of an order that one block does not cover.
n, m = 101, 7
g = rng.standard_normal((2 * n, n)) * np.geomspace(1, 1e-4, n)
answers["solve.c"] = g.T @ g / len(g)
answers["solve.b"] = rng.standard_normal((n, m))
for convention in CONVENTIONS:
    w, _ = solve(answers["solve.c"], answers["solve.b"], LAMBDA, convention, 1000)
    answers[f"solve.w.{convention}"] = w

# 2. End to end, from f32 rows: coordinates with means far from zero and a few of a hundred times the scale, as keys have.
width_s, width_t = SOURCE["heads"] * SOURCE["dim"], TARGET["heads"] * TARGET["dim"]
columns_s, columns_t = SOURCE["layers"] * width_s, TARGET["layers"] * width_t


def side(seed):
    r = np.random.default_rng(seed)
    mix = r.standard_normal((columns_s, columns_s)) * 0.3 + np.eye(columns_s)
    x = r.standard_normal((ROWS, columns_s)) @ mix
    x *= np.where(np.arange(columns_s) % 11 == 3, 100.0, 1.0)
    x += np.where(np.arange(columns_s) % 7 == 2, 250.0, 0.5)
    true = r.standard_normal((columns_s, columns_t)) / x.std(0)[:, None] / np.sqrt(columns_s)
    y = x @ true + 0.3 * r.standard_normal((ROWS, columns_t)) + 5.0 * r.standard_normal(columns_t)
    return x.astype(np.float32), y.astype(np.float32)


def ols_r2(x, y):
    x1 = np.hstack([x, np.ones((len(x), 1))])
    residual = y - x1 @ np.linalg.lstsq(x1, y, rcond=None)[0]
    return 1 - (residual**2).sum() / ((y - y.mean(0)) ** 2).sum()


for name, seed in (("keys", 1), ("values", 2)):
    x32, y32 = side(seed)
    answers[f"{name}.x"], answers[f"{name}.y"] = x32, y32
    x, y = x32.astype(np.float64), y32.astype(np.float64)
    scores = np.zeros((TARGET["layers"], SOURCE["layers"]))
    for t in range(TARGET["layers"]):
        for s in range(SOURCE["layers"]):
            per_head = []
            for h in range(TARGET["heads"]):
                a = h * SOURCE["heads"] // TARGET["heads"]
                xs = x[:, s * width_s + a * SOURCE["dim"] :][:, : SOURCE["dim"]]
                ys = y[:, t * width_t + h * TARGET["dim"] :][:, : TARGET["dim"]]
                per_head.append(ols_r2(xs, ys))
            scores[t, s] = np.mean(per_head)
    answers[f"{name}.r2"] = scores
    for t, layers in enumerate(SELECTION):
        xs = np.hstack([x[:, s * width_s : (s + 1) * width_s] for s in layers])
        ys = y[:, t * width_t : (t + 1) * width_t]
        xc, yc = xs - xs.mean(0), ys - ys.mean(0)
        for convention in CONVENTIONS:
            w, diagonal = solve(xc.T @ xc / ROWS, xc.T @ yc / ROWS, LAMBDA, convention, ROWS)
            bias = ys.mean(0) - xs.mean(0) @ w
            objective = ((ys - xs @ w - bias) ** 2).sum() / ROWS + diagonal * (w**2).sum()
            key = f"{name}.{t}.{convention}"
            answers[f"{key}.prediction"] = xs @ w + bias
            answers[f"{key}.objective"] = np.array([objective, diagonal])

versions = {"python": platform.python_version(), "numpy": np.__version__, "scipy": scipy.__version__}
path = pathlib.Path(__file__).with_name("answers.safetensors")
save_file({k: np.ascontiguousarray(v) for k, v in answers.items()}, path, metadata={"versions": json.dumps(versions)})
print(path.name, path.stat().st_size, "bytes", versions)
