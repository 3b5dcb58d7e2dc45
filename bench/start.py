"""Starting: seconds from the command to the first token, and what the idle server holds beside weights and KV pool.

    python -m bench.start DIR/llama-1b --rounds 3 --json FILE

A round is a start that finds nothing compiled, then ``--warm`` starts that find what it left. Each server is alone
and gets one request of one token. Memory is the proportional set size of its processes two seconds after that, less
the weights' bytes, as the server reports them, and those of the pool.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from bench import probe
from bench.client import Target
from bench.engines import EngineError, Paths, Running, build
from bench.serving import ending_unwinds, first_token
from jserve.build import shipped

READY_S = 600.0
SETTLE_S = 2.0
POOL_GIB = 0.5
"""A pool of a fixed size, so that the programs of two machines are the same."""
WEIGHTS = re.compile(r"^jserve:weight_form_bytes\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)
err = Console(stderr=True, highlight=False)
Line = dict[str, Any]


def started(paths: Paths) -> Line:
    """One start of jserve: seconds, processor seconds and MiB.

    Raises:
        EngineError: it did not start, or gave no token.
    """
    engine = build("jserve", paths)
    assert not isinstance(engine, str)
    with Running(engine) as server:
        ready = server.wait_ready(READY_S)
        target = Target(url=server.url, model=engine.model, timeout_s=60.0)
        vocab: int = json.loads((paths.model / "config.json").read_text())["vocab_size"]
        first = first_token(target, seed=1, vocab=vocab) - server.begin
        used = probe.Clock.read(server.pid).server
        time.sleep(SETTLE_S)
        held = pss_mib(server.pid)
        with urllib.request.urlopen(server.url + "/metrics", timeout=10) as reply:
            text = reply.read().decode()
    named = sum(float(n) for n in WEIGHTS.findall(text)) / 2**20 + POOL_GIB * 2**10
    return {
        "cold": server.cold,
        "ready_s": round(ready, 2),
        "first_token_s": round(first, 2),
        "cpu_s": round(used, 2),
        "held_mib": round(held, 1),
        "beside_mib": round(held - named, 1),
    }


def pss_mib(pid: int) -> float:
    """Proportional set size of a process and its descendants: a page that n processes share counts 1/n in each."""
    root = psutil.Process(pid)
    family = [root, *root.children(recursive=True)]
    return sum(process.memory_full_info().pss for process in family) / 2**20


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument(
        "model", type=Path, nargs="?", default=shipped(), help="default: the shipped one"
    )
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--warm", type=int, default=2, help="starts after each cold one (2)")
    p.add_argument("--jserve-args", default="", help="more arguments for jserve, quoted as one")
    p.add_argument("--json", type=Path, help="result file to write")
    args = p.parse_args(argv)
    lines = []
    try:
        with ending_unwinds():
            for n in range(args.rounds):
                with tempfile.TemporaryDirectory(prefix="bench-start-") as cache:
                    extra = {"jserve": f"--kv-memory-gb {POOL_GIB} {args.jserve_args}"}
                    paths = Paths(model=args.model, compile_cache=Path(cache), extra=extra)
                    for _ in range(1 + args.warm):
                        lines.append({"round": n, **started(paths)})
                        err.print(lines[-1])
    except (EngineError, OSError) as e:
        p.error(str(e))
    options = {"model": args.model.name, "rounds": args.rounds, "warm": args.warm}
    found = probe.record("start", options, lines) | {"medians": medians(lines)}
    print(json.dumps(found["medians"], indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def medians(lines: list[Line]) -> dict[str, dict[str, float]]:
    """Of starts that found nothing compiled, and of the others."""
    named = {"cold": [x for x in lines if x["cold"]], "warm": [x for x in lines if not x["cold"]]}
    keys = ("ready_s", "first_token_s", "cpu_s", "beside_mib")
    return {
        kind: {key: round(statistics.median(x[key] for x in some), 2) for key in keys}
        for kind, some in named.items()
        if some
    }


if __name__ == "__main__":
    sys.exit(main())
