"""Known answers of the attention-weighted head-matched ridge, solved by NumPy and SciPy and by nothing of ours.

    python3 -m pip install numpy scipy safetensors
    python3 tests/golden/head_matched/make.py

Writes answers.safetensors beside this file; the versions it was made with are in its metadata.
"""

import json
import pathlib
import platform

import numpy as np
import scipy
import scipy.linalg
from safetensors.numpy import save_file

# Twice as many heads in the target: two of them read each source head.
SOURCE = dict(layers=3, heads=2, dim=4)
TARGET = dict(layers=2, heads=4, dim=3)
ROWS, LAMBDA, SELECTION = 200, 0.01, [[0, 2], [0, 1, 2]]
CONVENTIONS = ["per-token", "per-token-relative", "sum", "standardised"]

answers = {}
width_s, width_t = SOURCE["heads"] * SOURCE["dim"], TARGET["heads"] * TARGET["dim"]
columns_s, columns_t = SOURCE["layers"] * width_s, TARGET["layers"] * width_t


def side(seed):
    """Coordinates with means far from zero and a few of a hundred times the scale, as keys have."""
    r = np.random.default_rng(seed)
    mix = r.standard_normal((columns_s, columns_s)) * 0.3 + np.eye(columns_s)
    x = r.standard_normal((ROWS, columns_s)) @ mix
    x *= np.where(np.arange(columns_s) % 11 == 3, 100.0, 1.0)
    x += np.where(np.arange(columns_s) % 7 == 2, 250.0, 0.5)
    true = r.standard_normal((columns_s, columns_t)) / x.std(0)[:, None] / np.sqrt(columns_s)
    y = x @ true + 0.3 * r.standard_normal((ROWS, columns_t)) + 5.0 * r.standard_normal(columns_t)
    # Mass that spreads little in the first heads and very much in the last ones.
    spread = np.linspace(0.3, 2.5, TARGET["layers"] * TARGET["heads"])[:, None]
    mass = np.exp(r.standard_normal((TARGET["layers"] * TARGET["heads"], ROWS)) * spread)
    mass[1, ::7] = 0.0
    return x.astype(np.float32), y.astype(np.float32), mass.astype(np.float32)


def weights(mass, features):
    r = mass / mass.mean()
    tau = min(ROWS, 2 * features)
    alpha = min(1.0, np.sqrt((ROWS / tau - 1) / r.var()))
    return 1 + alpha * (r - 1), alpha


def ridge(x, y, w, convention):
    """Rows scaled by √w, λ as rows of the design, least squares: no normal equations at all."""
    mean_x, mean_y = np.average(x, axis=0, weights=w), np.average(y, axis=0, weights=w)
    root = np.sqrt(w / w.sum())[:, None]
    xc, yc = (x - mean_x) * root, (y - mean_y) * root
    variance = (xc**2).sum(0)
    scales = {"per-token": 1.0, "per-token-relative": variance.mean(), "sum": 1.0 / ROWS, "standardised": variance}
    penalty = LAMBDA * scales[convention] * np.ones(len(variance))
    design = np.vstack([xc, np.diag(np.sqrt(penalty))])
    w_hat = scipy.linalg.lstsq(design, np.vstack([yc, np.zeros((len(variance), y.shape[1]))]), lapack_driver="gelsd")[0]
    prediction = (x - mean_x) @ w_hat + mean_y
    residual = (w[:, None] * (y - prediction) ** 2).sum() / w.sum()
    objective = residual + (penalty[:, None] * w_hat**2).sum()
    return np.vstack([w_hat, mean_y - mean_x @ w_hat]), objective, penalty, 1 - residual / (yc**2).sum()


for name, seed in (("keys", 1), ("values", 2)):
    x32, y32, m32 = side(seed)
    answers[f"{name}.x"], answers[f"{name}.y"], answers[f"{name}.mass"] = x32, y32, m32
    x, y, mass = x32.astype(np.float64), y32.astype(np.float64), m32.astype(np.float64)
    for t, layers in enumerate(SELECTION):
        for h in range(TARGET["heads"]):
            a = h * SOURCE["heads"] // TARGET["heads"]
            xs = np.hstack([x[:, s * width_s + a * SOURCE["dim"] :][:, : SOURCE["dim"]] for s in layers])
            ys = y[:, t * width_t + h * TARGET["dim"] :][:, : TARGET["dim"]]
            weighted, alpha = weights(mass[t * TARGET["heads"] + h], xs.shape[1])
            answers[f"{name}.{t}.{h}.alpha"] = np.array([alpha, weighted.sum() ** 2 / (weighted**2).sum()])
            answers[f"{name}.{t}.{h}.weights"] = weighted
            for weighting, w in (("attention", weighted), ("uniform", np.ones(ROWS))):
                for convention in CONVENTIONS:
                    solution, objective, penalty, r2 = ridge(xs, ys, w, convention)
                    key = f"{name}.{t}.{h}.{weighting}.{convention}"
                    answers[f"{key}.solution"] = solution
                    answers[f"{key}.penalty"] = penalty
                    answers[f"{key}.figures"] = np.array([objective, r2])

alphas = [answers[key][0] for key in sorted(answers) if key.endswith(".alpha")]
assert any(a == 1 for a in alphas) and any(a < 1 for a in alphas), alphas
versions = {"python": platform.python_version(), "numpy": np.__version__, "scipy": scipy.__version__}
path = pathlib.Path(__file__).with_name("answers.safetensors")
save_file({k: np.ascontiguousarray(v) for k, v in answers.items()}, path, metadata={"versions": json.dumps(versions)})
print(path.name, path.stat().st_size, "bytes", versions)
