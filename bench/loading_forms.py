"""Loading a model in its own type, quantised while it is loaded, and from a quantised copy: seconds, and memory beyond
what stays.

    python -m bench.loading_forms MODEL --json FILE

The copies are written first (``jserve quantize`` by rounding). Each load is a process of its own, all ways in turns,
with the files in the page cache and XLA's programs in a compile cache: a first round does not count. *beyond* is
the most memory of the process, files that it maps left out, over what it had before and the parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import command, probe

SCHEMES = ("int8", "int4")
EVERY_S = 0.005
err = Console(stderr=True, highlight=False)


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Most:
    """The most of ``anonymous_bytes`` while it is entered."""

    def __enter__(self) -> Most:
        self.n_bytes, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(EVERY_S):
            self.n_bytes = max(self.n_bytes, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def one(model: str, quantization: str) -> dict[str, Any]:
    """Load ``model`` in this process."""
    import jax

    from jserve.config import EngineConfig
    from jserve.model.families import family_for
    from jserve.runner.layout import placement
    from jserve.weights.loader import load
    from jserve.weights.quant.scheme import quantised, scheme_of
    from jserve.weights.source import resolve

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    source = resolve(model)
    dtype = np.dtype(jax.numpy.bfloat16)
    scheme = scheme_of(source.config, dtype, quantization)
    family = quantised(family_for(source.config), scheme)
    mesh, rules = placement(EngineConfig.of(), None)
    jax.block_until_ready(jax.numpy.zeros(1))
    before, began = anonymous_bytes(), time.perf_counter()
    with Most() as most:
        how = (family.arch(source.config), source, mesh, rules, dtype)
        tree = jax.block_until_ready(load(family, *how, scheme=scheme))
    took = time.perf_counter() - began
    stays = sum(x.nbytes for x in jax.tree.leaves(tree))
    return {"load_s": took, "stays": stays, "beyond": max(0, most.n_bytes - before - stays)}


def measure(model: Path, rounds: int) -> dict[str, Any]:
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"}
        ways = {"own type": (str(model), "auto")}
        for scheme in SCHEMES:
            copy = f"{folder}/{scheme}"
            writes = [sys.executable, "-m", "jserve.cli", "quantize", str(model), copy]
            subprocess.run([*writes, "--scheme", scheme], check=True, env=env, stdout=sys.stderr)
            ways |= {f"{scheme} on load": (str(model), scheme), f"{scheme} copy": (copy, "auto")}
        for number in range(rounds + 1):
            names = list(ways) if number % 2 else list(reversed(ways))
            for name in names:
                command = [sys.executable, "-m", "bench.loading_forms", "--one", *ways[name]]
                got = subprocess.run(
                    command, check=True, env=env, stdout=subprocess.PIPE, text=True
                )
                line = {"way": name, **json.loads(got.stdout)}
                err.print(f"round {number} of {rounds}: {line}")
                if number:
                    lines.append(line)
    return probe.record("loading_forms", {"model": model.name, "rounds": rounds}, lines)


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{result['options']['model']}: medians of rounds")
    for name in ("way", "load s", "of own type", "stays MB", "beyond MB"):
        table.add_column(name, justify="right")
    lines = result["lines"]
    own = median(lines, "own type", "load_s")
    for way in dict.fromkeys(line["way"] for line in lines):
        load_s, stays, beyond = (median(lines, way, k) for k in ("load_s", "stays", "beyond"))
        row = (f"{load_s:.2f}", f"{load_s / own:.2f}", f"{stays / 1e6:.0f}", f"{beyond / 1e6:.0f}")
        table.add_row(way, *row)
    console.print(table)


def median(lines: list[dict[str, Any]], way: str, key: str) -> float:
    return statistics.median(line[key] for line in lines if line["way"] == way)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.loading_forms", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("model", help="a directory of safetensors in 16 bits")
    p.add_argument("quantization", nargs="?", help=argparse.SUPPRESS)
    p.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--rounds", type=int, default=5, help="of each way (5)")
    p.add_argument("--json", type=Path, help="result file to write")
    args = p.parse_args(argv)
    if args.one:
        print(json.dumps(one(args.model, args.quantization)))
        return 0
    result = measure(Path(args.model), args.rounds)
    command.tell(result, args.json, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
