"""What sampling costs a decode step: rows in use by what they ask for, beside greedy ones of the same engine.

Sequences with prompts of one token decode at once, without HTTP. The kinds take turns, and each figure is the median
of the turns' medians; ``faults`` are the page faults of a step, of the greedy rows.

    python -m bench.sampling DIR/llama-60m [--rows 2,8,32] [--slots 64] [--turns 5] [--json F]

To compare two trees, run the file of one with the other first in PYTHONPATH, in turns.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jserve
from bench import probe
from jserve import LLM, SamplingParams
from jserve.types import Request

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0, "seed": 1},
    "top_p": {"temperature": 0.7, "top_p": 0.9, "seed": 1},
    "top_p, penalties": {
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 1,
        "presence_penalty": 0.5,
    },
}
FIRST_ID = 300
"""Of the prompts: lower ids have embeddings of zeros in ``bench.models``, which the kernels pass over."""
SKIPPED = 8
"""Steps at the beginning of a turn, which compute prompts."""


def step_ms(llm: LLM, n_rows: int, n_tokens: int, asked: dict[str, Any], turn: str) -> float:
    """The median of the steps of as many sequences that decode at once, in milliseconds."""
    engine: Any = llm._engine
    for i in range(n_rows):
        params = SamplingParams(max_tokens=n_tokens, ignore_eos=True, **asked)
        engine.submit(Request(id=f"{turn}-{i}", prompt_ids=(FIRST_ID + i,), params=params))
    began = []
    while engine.busy:
        began.append(time.perf_counter())
        for out in engine.step():
            assert out.error is None, out.error
    pairs = zip(began[SKIPPED:], began[SKIPPED + 1 :], strict=False)
    return statistics.median(after - before for before, after in pairs) * 1e3


def measure(
    path: str, rows: Sequence[int], slots: int, turns: int, n_tokens: int
) -> list[dict[str, Any]]:
    lines = []
    with LLM(path, max_num_seqs=slots) as llm:
        for n in rows:
            found: dict[str, list[float]] = {name: [] for name in KINDS}
            n_faults = []
            for turn in range(turns + 1):
                for name, asked in KINDS.items():
                    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                    found[name].append(step_ms(llm, n, n_tokens, asked, f"{n}-{turn}-{name}"))
                    if name == "greedy":
                        after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                        n_faults.append((after - before) / n_tokens)
            ms = {name: statistics.median(each[1:]) for name, each in found.items()}  # one warms up
            line = {
                "model": Path(path).name,
                "rows": n,
                "slots": slots,
                "step_ms": {name: round(x, 2) for name, x in ms.items()},
                "over_greedy": {name: round(x / ms["greedy"], 2) for name, x in ms.items()},
                "faults": round(statistics.median(n_faults[1:])),
            }
            print(json.dumps(line), flush=True)
            lines.append(line)
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.sampling", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", help="model directory")
    parser.add_argument("--rows", default="2,8,32")
    parser.add_argument(
        "--slots", type=int, default=64, help="sequences that the engine has room for"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=80, help="of a sequence in a turn")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args(argv)
    print(f"jserve of {Path(jserve.__file__).parent.parent}", file=sys.stderr)
    rows = [int(n) for n in args.rows.split(",")]
    lines = measure(args.model, rows, args.slots, args.turns, args.tokens)
    if args.json is not None:
        options = {"turns": args.turns, "tokens": args.tokens}
        record = probe.record("sampling", options, lines)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
