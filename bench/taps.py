"""What taps cost: decode steps whose rows ask for the values of a point against steps whose rows do not.

Two engines of one model, turn by turn: one without taps, one that has them registered, as ``--allow-taps`` and
``--plugins`` make it. In the second, sequences decode that ask for nothing, for a whole point, and for a number that
is made of a point on the device: all of them, one of them, and one that decodes alone. The programs of steps without
taps are compared as text. Figures are medians of ratios within a turn, so that a machine that is not quiet spoils few
of them.

    python -m bench.taps [DIR/llama-1b] [--rows 8] [--slots 64] [--turns 9] [--json F]

The values of a step cost a few tenths of a millisecond of the host whatever the model, so their share is that of the
model that is given; by default the shipped one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench import probe
from jserve import LLM, SamplingParams, build, register_feature, tap
from jserve.model.step import make_step
from jserve.model.view import buffer_size
from jserve.types import Request

POINT = "blocks.2.hook_resid_post"
FIRST_ID = 300
"""Of the prompts: lower ids have embeddings of zeros in ``bench.models``, which the kernels pass over."""
OPTIONS: dict[str, Any] = {"structured_outputs": False, "prompt_logprobs": False}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole point": {"bench_whole": True},
    "reduced": {"bench_size": True},
}


def digests(llm: LLM) -> dict[str, str]:
    """Of the text that each program without features is lowered to."""
    engine: Any = llm._engine
    runner, model = engine.runner, engine.runner.model
    found = {}
    for bucket in (b for b in runner.ladder.buckets if not b.features):
        buf = jax.ShapeDtypeStruct((buffer_size(model.fields(bucket)),), jnp.int32)
        args = (model.abstract_params(), model.abstract_state(), buf)
        text = jax.jit(make_step(model, bucket), donate_argnums=(1,)).lower(*args).as_text()
        found[str(bucket)] = hashlib.sha256(text.encode()).hexdigest()
    return found


def step_ms(
    llm: LLM, n_rows: int, n_tokens: int, asked: dict[str, Any], turn: str, n_ask: int = 0
) -> tuple[float, float]:
    """Milliseconds from one token to the next of as many sequences that decode at once, after a quarter of them: the
    mean, since tokens of two steps may come together; and milliseconds of processor time for each token of a sequence,
    which others on the machine spoil less. The first ``n_ask`` of the sequences ask (0: all)."""
    engine: Any = llm._engine
    for i in range(n_rows):
        extra = asked if i < (n_ask or n_rows) else {}
        params = SamplingParams(
            temperature=0.0, max_tokens=n_tokens, ignore_eos=True, extra_args=extra
        )
        engine.submit(Request(id=f"{turn}-{i}", prompt_ids=(FIRST_ID + i,), params=params))
    came: dict[str, list[float]] = {}
    began = time.process_time()
    while engine.busy:
        for out in engine.step():
            assert out.error is None, out.error
            came.setdefault(out.request_id, []).extend([time.perf_counter()] * len(out.token_ids))
    processor_s = (time.process_time() - began) / n_tokens
    first = n_tokens // 4
    means = [(times[-1] - times[first]) / (len(times) - 1 - first) for times in came.values()]
    return statistics.median(means) * 1e3, processor_s * 1e3


def measure(path: str, n_rows: int, slots: int, turns: int, n_tokens: int) -> dict[str, Any]:
    options: dict[str, Any] = OPTIONS | {"max_num_seqs": max(slots, n_rows)}
    with LLM(path, **options) as without:
        before = digests(without)
        register_feature(tap("bench_whole", POINT))
        register_feature(tap("bench_size", POINT, reduce=lambda x_PD: (x_PD**2).sum()))
        with LLM(path, **options) as having:
            after = digests(having)
            made = [
                timed(without, having, n_rows, n_tokens, str(turn)) for turn in range(turns + 1)
            ]
            programs = [llm._engine.runner.ladder.buckets for llm in (without, having)]  # type: ignore[attr-defined]
    found = {name: [turn[name] for turn in made[1:]] for name in made[0]}  # the first one warms up
    return {
        "model": Path(path).name,
        "rows": n_rows,
        "slots": max(slots, n_rows),
        "programs_without_taps": len(before),
        "programs": len(programs[0]),
        "programs_with_taps": len(programs[1]),
        "same_text": before == after,
        **figures("", {name: [wall for wall, _ in each] for name, each in found.items()}),
        **figures("processor_", {name: [cpu for _, cpu in each] for name, each in found.items()}),
    }


def figures(kind: str, found: dict[str, list[float]]) -> dict[str, Any]:
    return {
        f"{kind}step_ms": {name: round(statistics.median(ms), 3) for name, ms in found.items()},
        f"{kind}over_plain": {
            name: round(over(ms, found["alone: plain" if "alone" in name else "plain"]), 4)
            for name, ms in found.items()
        },
    }


def timed(
    without: LLM, having: LLM, n_rows: int, n_tokens: int, turn: str
) -> dict[str, tuple[float, float]]:
    """``step_ms`` of one turn, by what is asked."""
    found = {"no taps there": step_ms(without, n_rows, n_tokens, {}, f"{turn}-none")}
    for name, asked in KINDS.items():
        found[name] = step_ms(having, n_rows, n_tokens, asked, f"{turn}-{name}")
        found[f"alone: {name}"] = step_ms(having, 1, n_tokens, asked, f"{turn}-alone-{name}")
        if asked:
            ms = step_ms(having, n_rows, n_tokens, asked, f"{turn}-one-{name}", n_ask=1)
            found[f"one row: {name}"] = ms
    return found


def over(ms: Sequence[float], base: Sequence[float]) -> float:
    """The median of the ratios within a turn."""
    return statistics.median([a / b for a, b in zip(ms, base, strict=True)])


def main(argv: Sequence[str] | None = None) -> int:
    """0: programs without taps are the same text. 1: they are not."""
    parser = argparse.ArgumentParser(prog="bench.taps", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default=str(build.shipped()), help="model directory")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--slots", type=int, default=64, help="of the engines")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence in a turn")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args(argv)
    found = measure(args.model, args.rows, args.slots, args.turns, args.tokens)
    print(json.dumps(found))
    if args.json is not None:
        record = probe.record("taps", {"turns": args.turns, "tokens": args.tokens}, [found])
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if found["same_text"] else 1


if __name__ == "__main__":
    sys.exit(main())
