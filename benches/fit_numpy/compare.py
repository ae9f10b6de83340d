"""Runs `fit_speed` and `fit.py` in turn on a folder of rows, and prints times, peak memory, and how far they are apart.

    python compare.py ROWS [--rounds 3] [--threads N] [--float64] [--fit-speed target/debug/examples/fit_speed]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 1 << 20


def allocated(pid, peak, done):
    """Watches the memory that a process has allocated, which the pages of files that it has mapped are not."""
    while not done.is_set():
        try:
            with open(f"/proc/{pid}/status") as status:
                fields = dict(line.split(":", 1) for line in status)
            peak[0] = max(peak[0], int(fields["RssAnon"].split()[0]) << 10)
        except (OSError, KeyError):
            return
        time.sleep(0.02)


def run(command, threads):
    """Runs a process to its end: its JSON, with its peak memory in bytes and its CPU time."""
    variables = {name: str(threads) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, env={**os.environ, **variables})
        anonymous, done = [0], threading.Event()
        watch = threading.Thread(target=allocated, args=(process.pid, anonymous, done))
        watch.start()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        done.set()
        watch.join()
        if process.returncode != 0:
            sys.exit(f"{' '.join(command)}: ended with {process.returncode}")
        output.seek(0)
        result = json.load(output)
    # Kilobytes, but bytes on macOS.
    peak = usage.ru_maxrss if sys.platform == "darwin" else usage.ru_maxrss << 10
    result.update(peak=peak, allocated=anonymous[0], cpu=usage.ru_utime + usage.ru_stime)
    return result


def figure(values):
    return f"{statistics.median(values):.1f} ({min(values):.1f} … {max(values):.1f})"


def line(name, ours, theirs):
    ratios = [b / a for a, b in zip(ours, theirs)]
    ratio = f"{statistics.median(ratios):.1f} ({min(ratios):.1f} … {max(ratios):.1f})" if all(ours) else ""
    print(f"| {name} | {figure(ours)} | {figure(theirs)} | {ratio} |")


def differences(ours, theirs, folders, target_layers):
    import numpy as np

    scores = [np.array(result["scores"]) for result in (ours, theirs)]
    r2 = [dict(map(tuple, result["r2"])) for result in (ours, theirs)]
    tops = [[set(np.argsort(-row, kind="stable")[: ours["k"]]) for row in side] for side in scores]
    print(f"k chosen: {ours['k']} and {theirs['k']}")
    print(f"layers selected for that k: {'the same' if tops[0] == tops[1] else 'NOT the same'}; scores differ by at most {np.abs(scores[0] - scores[1]).max():.1e}")
    print(f"held-out R² by k: {', '.join(f'{k}: {value:.4f}' for k, value in r2[0].items())}; they differ by at most {max(abs(r2[0][k] - r2[1][k]) for k in r2[0]):.1e}")
    if ours["k"] != theirs["k"]:
        return
    norm, largest = 0.0, 0.0
    for part in "kv":
        for layer in range(target_layers):
            a, b = (np.load(os.path.join(folder, f"{part}.{layer:02}.npy")) for folder in folders)
            norm = max(norm, np.linalg.norm(a - b) / np.linalg.norm(b))
            largest = max(largest, np.abs(a - b).max() / np.abs(b).max())
    print(f"weights: ‖W − W'‖/‖W'‖ at most {norm:.1e}, largest |w − w'| over the largest weight {largest:.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--fit-speed", default=os.path.join(HERE, "../../target/debug/examples/fit_speed"))
    options = parser.parse_args()
    with open(os.path.join(options.rows, "shape.json")) as file:
        shape = json.load(file)
    with tempfile.TemporaryDirectory(dir=options.rows) as scratch:
        folders = [os.path.join(scratch, name) for name in ("kvmig", "numpy")]
        commands = [
            [options.fit_speed, options.rows, folders[0]],
            [sys.executable, os.path.join(HERE, "fit.py"), options.rows, folders[1]] + ["--float64"] * options.float64,
        ]
        results = [[], []]
        for round in range(options.rounds):
            for side in (0, 1) if round % 2 == 0 else (1, 0):
                results[side].append(run(commands[side], options.threads))
                seconds = {stage: round_to(s) for stage, s in results[side][-1]["seconds"].items()}
                print(f"round {round + 1}, {('kvmig', 'numpy')[side]}: {seconds}", file=sys.stderr)
        ours, theirs = results
        print(f"{shape['rows']} rows, {shape['held_out']} held out, {options.threads} threads, {options.rounds} rounds: median (range)\n")
        print("| | kvmig | NumPy | NumPy / kvmig |\n|---|---|---|---|")
        for stage in ("moments", "selection", "sweep", "solve", "total"):
            line(f"{stage}, s", *([result["seconds"].get(stage, 0.0) for result in side] for side in results))
        line("CPU time, s", *([result["cpu"] for result in side] for side in results))
        line("peak, MiB", *([result["peak"] / MIB for result in side] for side in results))
        if all(result["allocated"] for result in ours + theirs):
            line("of it allocated, MiB", *([result["allocated"] / MIB for result in side] for side in results))
        print()
        differences(ours[-1], theirs[-1], folders, shape["target"]["layers"])


def round_to(seconds):
    return round(seconds, 2)


if __name__ == "__main__":
    main()
