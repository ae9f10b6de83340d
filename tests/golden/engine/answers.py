"""Runs a transformers model on given tokens and stores what it answered.

One answer file holds, all little-endian and row-major (T tokens, V vocabulary, L layers):

  tokens            u32 [T]           the prompt
  greedy            u32 [n]           greedy continuation, one argmax a step, end tokens included
  greedy_margin     f32 [n]           best logit minus second best of each step
  logits_last       f32 [V] or [c]    logits after the last token (at `last_cols` where that tensor exists)
  last_cols         u32 [c]           only where V is too large to store
  top_ids, top      u32, f32 [t]      the largest logits after the last token, descending (only with `last_cols`)
  logits_norm       f32 [2]           mean and Euclidean norm of the last row (only with `last_cols`)
  logits_rows       u32 [r]           positions, and
  logits_cols       u32 [c]           token ids, of
  logits            f32 [r, c]        the logits at them
  kv_layers         u32 [l]           layers, and
  kv_positions      u32 [p]           positions, of
  k, v              f32 [l, n_kv, p, d]  keys after the rotation (half-split pairing) and values at them
"""

import json

import numpy as np
import torch
from safetensors.numpy import save_file

GREEDY_MARGIN = 5e-3
"""A step whose two best logits are closer than this would test rounding, not the model."""


def picked(count, n):
    """n indices of 0 .. count - 1, ends included, spread evenly."""
    return np.unique(np.linspace(0, count - 1, min(n, count)).round().astype(np.uint32))


@torch.no_grad()
def prefill(model, tokens):
    """Logits [T, V] and per layer the cache's K and V [n_kv, T, d], all f32."""
    out = model(torch.tensor([tokens]), use_cache=True)
    cache = [(layer.keys[0].float().numpy(), layer.values[0].float().numpy()) for layer in out.past_key_values.layers]
    return out.logits[0].float().numpy(), cache


@torch.no_grad()
def greedy(model, tokens, steps):
    """The greedy continuation with its margins, token by token over one cache."""
    ids, margins, cache, step = [], [], None, torch.tensor([tokens])
    for _ in range(steps):
        out = model(step, past_key_values=cache, use_cache=True)
        cache, row = out.past_key_values, out.logits[0, -1].float()
        best = torch.topk(row, 2)
        ids.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        step = torch.tensor([[ids[-1]]])
    return ids, margins


def answer(model, tokens, steps, layers=3, positions=6, rows=6, cols=128, last_cols=None):
    """Everything an answer file holds, by name. `last_cols`: stride of the last row's stored columns."""
    logits, cache = prefill(model, tokens)
    ids, margins = greedy(model, tokens, steps)
    assert min(margins) >= GREEDY_MARGIN, f"greedy margin {min(margins):.1e} at step {int(np.argmin(margins))}"
    count, vocabulary = logits.shape
    at_layers, at_positions = picked(len(cache), layers), picked(count, positions)
    at_rows, at_cols = picked(count, rows), picked(vocabulary, cols)
    stored = {
        "tokens": np.array(tokens, np.uint32),
        "greedy": np.array(ids, np.uint32),
        "greedy_margin": np.array(margins, np.float32),
        "logits_rows": at_rows,
        "logits_cols": at_cols,
        "logits": logits[np.ix_(at_rows, at_cols)],
        "kv_layers": at_layers,
        "kv_positions": at_positions,
        "k": np.stack([cache[layer][0][:, at_positions] for layer in at_layers]),
        "v": np.stack([cache[layer][1][:, at_positions] for layer in at_layers]),
    }
    last = logits[-1]
    if last_cols is None:
        stored["logits_last"] = last
    else:
        at = np.arange(0, vocabulary, last_cols, dtype=np.uint32)
        top = np.argsort(-last, kind="stable")[:200].astype(np.uint32)
        norm = np.array([last.astype(np.float64).mean(), np.linalg.norm(last.astype(np.float64))], np.float32)
        stored |= {"last_cols": at, "logits_last": last[at], "top_ids": top, "top": last[top], "logits_norm": norm}
    assert all(np.isfinite(x).all() for x in stored.values()), "an answer is not finite"
    return stored


def store(path, stored, **about):
    """Writes an answer file; `about` (strings) becomes one JSON object in its metadata, where several entries would be
    written in an order of chance."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.ascontiguousarray(x) for name, x in stored.items()}
    save_file(arrays, str(path), metadata={"about": json.dumps(about)})
