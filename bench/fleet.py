"""Microseconds of one choice between replicas: pages named, looked up, prices compared.

It owns the timing of ``fleet.router``. Views, pages and requests are made up; nothing runs behind them.

    python -m bench.fleet [--replicas 64] [--prompt 4096] [--page-size 16,32,64] [--repeats 2000] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import report
from bench.probe import record
from jserve.engine.view import PageEvent, View
from jserve.fleet.pages import PageNames, digests_of
from jserve.fleet.route import Asked
from jserve.fleet.router import ReplicaRouter

PREFIXES = 200
NEW = 64
"""Tokens of a prompt behind one of the prefixes."""


def router_of(n: int, prompts: list[tuple[bytes, ...]], rng: random.Random) -> ReplicaRouter:
    """A router whose ``n`` replicas run something, each with an eighth of all prefixes and parts of others."""
    router = ReplicaRouter(n)
    for i in range(n):
        view = View(
            n_rows=rng.randrange(64),
            wait_s={"standard": rng.random()},
            prefill_token_s=2e-5,
            row_s=1e-5,
        )
        held = [d for p in prompts if rng.random() < 0.125 for d in p[: rng.randrange(len(p) + 1)]]
        router.update(i, view, [PageEvent(True, digest) for digest in held])
    return router


def measure(n: int, n_prompt: int, page_size: int, repeats: int) -> dict[str, Any]:
    """Percentiles in microseconds of a choice, of naming the pages of its prompt as if it were the first one, of naming
    them where all but the last ``NEW`` tokens were named before, and of those names and the choice together. The tenth
    is what it takes while nobody else uses the core."""
    rng = random.Random(0)
    tokens = [[rng.randrange(32000) for _ in range(n_prompt)] for _ in range(PREFIXES)]
    prompts = [digests_of(("", "", None), t, page_size) for t in tokens]
    router = router_of(n, prompts, rng)
    names, key = PageNames(), ("", "", None)
    for prompt in tokens:
        names.of(key, prompt, page_size)
    columns: dict[str, list[float]] = {
        name: [] for name in ("choice_us", "names_us", "known_names_us", "both_us")
    }
    for k in range(repeats):
        prompt = (*tokens[k % PREFIXES][:-NEW], *[rng.randrange(32000) for _ in range(NEW)])
        at = [time.perf_counter()]
        digests_of(key, prompt, page_size)
        at.append(time.perf_counter())
        pages = names.of(key, prompt, page_size)
        at.append(time.perf_counter())
        asked = Asked(pages=pages, page_size=page_size, n_prompt=n_prompt, n_out=200)
        choice = router.choose(asked)
        at.append(time.perf_counter())
        cold, known, chosen = [(b - a) * 1e6 for a, b in itertools.pairwise(at)]
        for column, us in zip(columns.values(), (chosen, cold, known, known + chosen), strict=True):
            column.append(us)
        router.over(asked, choice.replica)
    found = {"replicas": n, "prompt": n_prompt, "page_size": page_size}
    for name, us in columns.items():
        cuts = statistics.quantiles(us, n=100)
        found |= {f"{name}_p10": cuts[9], f"{name}_p50": cuts[49], f"{name}_p99": cuts[98]}
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--page-size", default="16,32,64")
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    sizes = [int(size) for size in args.page_size.split(",")]
    rows = [measure(args.replicas, args.prompt, size, args.repeats) for size in sizes]
    table = Table(title="one choice between replicas")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" for value in row.values()))
    Console().print(table)
    if args.json is not None:
        options = {"repeats": args.repeats, "prefixes": PREFIXES}
        report.write(record("fleet", options, rows), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
