"""Seconds that ``jserve plan --search`` takes for eight H200 that are not there: dense models and models of experts,
with targets that a layout keeps and with some that none does.

    python -m bench.search [--json F]

Each search is that of the page (``docs/sharding.md``): 200 requests of 512 tokens, 40 a second. Processor seconds are
what it takes of a machine that others use, too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import probe
from jserve.config import EngineConfig
from jserve.sim.report import Slo
from jserve.sim.study import load_trace
from jserve.sizing.search import search

LOAD = "rate=40,n=200,prompt=512,output=128"
MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3")
TARGETS_MS = ((60.0, 12.0), (60.0, 4.0))
"""(first token, each later one)."""
GOAL_S = 10.0


def measure(model: str, ttft_ms: float, tpot_ms: float, devices: int) -> dict[str, Any]:
    trace, slo = load_trace(LOAD, 0), Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms)
    wall, cpu = time.perf_counter(), time.process_time()
    found = search(model, "h200", devices, trace, slo, EngineConfig(), lambda *_: None)
    seconds, processor = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "model": model,
        "devices": devices,
        "ttft_ms": ttft_ms,
        "tpot_ms": tpot_ms,
        "layouts": len(found.candidates),
        "winner": None if found.winner is None else str(found.winner.sharding),
        "seconds": round(seconds, 2),
        "processor_seconds": round(processor, 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """0: every search keeps the goal, in processor seconds. 1: not."""
    parser = argparse.ArgumentParser(
        prog="bench.search", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args(argv)
    lines = []
    for model in MODELS:
        for ttft_ms, tpot_ms in TARGETS_MS:
            lines.append(measure(model, ttft_ms, tpot_ms, args.devices))
            print(json.dumps(lines[-1]), flush=True)
    if args.json is not None:
        record = probe.record("search", {"load": LOAD, "device": "h200"}, lines)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(line["processor_seconds"] <= GOAL_S for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
