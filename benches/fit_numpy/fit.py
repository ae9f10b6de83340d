"""From captured rows to chosen ridge maps, the straightforward NumPy way: `python fit.py ROWS OUT [--float64]`.

Prints what it found as JSON; OUT gets the maps, `{k,v}.{target layer}.npy`, f64 `[k * n_kv * d, n_kv * d]`.
"""

import argparse
import json
import os
import time

import numpy as np

LAMBDA = 0.01
SWEEP = [1, 2, 4, 6, 8, 10, 12, 16, 20, 24]


class Rows:
    def __init__(self, folder, dtype):
        with open(os.path.join(folder, "shape.json")) as file:
            self.shape = json.load(file)
        self.dtype, self.fitted = dtype, self.shape["rows"]
        sides = {
            (model, part): [
                np.load(os.path.join(folder, f"{model}.{part}.{layer:02}.npy"), mmap_mode="r")
                for layer in range(self.shape[model]["layers"])
            ]
            for model in ("source", "target")
            for part in "kv"
        }
        self.source = {part: sides["source", part] for part in "kv"}
        self.target = {part: sides["target", part] for part in "kv"}

    def x(self, part, layers, rows):
        return np.concatenate([self.source[part][layer][rows] for layer in layers], axis=1, dtype=self.dtype)

    def y(self, part, layer, rows):
        return self.target[part][layer][rows].astype(self.dtype)


def centred(rows):
    mean = rows.mean(axis=0, dtype=np.float64)
    rows -= mean.astype(rows.dtype)
    return rows, mean


def single_r2(x, y):
    """R² of least squares, of centred rows."""
    cross = (x.T @ y).astype(np.float64)
    w = np.linalg.solve((x.T @ x).astype(np.float64), cross)
    return np.sum(w * cross) / np.sum(np.square(y), dtype=np.float64)


def select(rows):
    """Score of every source layer with every target layer: R² averaged over heads, keys and values."""
    source, target = rows.shape["source"], rows.shape["target"]
    fitted = slice(0, rows.fitted)
    scores = np.zeros((target["layers"], source["layers"]))
    for t in range(target["layers"]):
        for part in "kv":
            y, _ = centred(rows.y(part, t, fitted))
            for s in range(source["layers"]):
                x, _ = centred(rows.x(part, [s], fitted))
                for h in range(target["kv_heads"]):
                    d, a = target["head_dim"], h * source["kv_heads"] // target["kv_heads"]
                    own = slice(a * source["head_dim"], (a + 1) * source["head_dim"])
                    scores[t, s] += single_r2(x[:, own], y[:, h * d : (h + 1) * d]) / target["kv_heads"] / 2
    return scores


def ridge(rows, part, t, layers):
    fitted = slice(0, rows.fitted)
    (x, x_mean), (y, y_mean) = centred(rows.x(part, layers, fitted)), centred(rows.y(part, t, fitted))
    covariance = (x.T @ x).astype(np.float64) / rows.fitted
    cross = (x.T @ y).astype(np.float64) / rows.fitted
    covariance[np.diag_indices_from(covariance)] *= 1 + LAMBDA
    w = np.linalg.solve(covariance, cross)
    return w, y_mean - x_mean @ w


def held_out_r2(rows, part, t, layers, w, b):
    held_out = slice(rows.fitted, None)
    x, y = rows.x(part, layers, held_out), rows.y(part, t, held_out)
    residual = y - (x @ w.astype(rows.dtype) + b.astype(rows.dtype))
    return 1 - np.sum(np.square(residual), dtype=np.float64) / np.sum(np.square(centred(y)[0]), dtype=np.float64)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows")
    parser.add_argument("out")
    parser.add_argument("--float64", action="store_true", help="multiply in f64 too")
    options = parser.parse_args()

    start = time.perf_counter()
    rows = Rows(options.rows, np.float64 if options.float64 else np.float32)
    target_layers, source_layers = (rows.shape[model]["layers"] for model in ("target", "source"))
    scores = select(rows)
    # The best first; of equals the earlier one.
    ranking = np.argsort(-scores, axis=1, kind="stable")
    selected = time.perf_counter()

    r2 = {}
    for k in [k for k in SWEEP if k < source_layers] + [source_layers]:
        of_k = []
        for t in range(target_layers):
            layers = sorted(ranking[t, :k])
            for part in "kv":
                of_k.append(held_out_r2(rows, part, t, layers, *ridge(rows, part, t, layers)))
        r2[k] = float(np.mean(of_k))
    chosen = max(r2, key=r2.get)
    swept = time.perf_counter()

    maps = {}
    for t in range(target_layers):
        for part in "kv":
            maps[part, t] = ridge(rows, part, t, sorted(ranking[t, :chosen]))[0]
    solved = time.perf_counter()

    seconds = {"selection": selected - start, "sweep": swept - selected, "solve": solved - swept, "total": solved - start}
    print(json.dumps({"seconds": seconds, "scores": scores.tolist(), "r2": list(r2.items()), "k": chosen}))
    os.makedirs(options.out, exist_ok=True)
    for (part, t), w in maps.items():
        np.save(os.path.join(options.out, f"{part}.{t:02}.npy"), w)


if __name__ == "__main__":
    main()
