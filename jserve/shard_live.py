"""Runs a trace under one sharding on the devices there are, in a process of its own.

A sharding that ends its process, or leaves memory behind, is one row of a comparison. The child is given its job as
JSON on stdin, and writes what came of it to a file::

    parent  {config, sharding, trace} --stdin--> child     engine, requests, steps
            Live, or the child's error <--file--           nothing there: the child died
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jserve import build, xla
from jserve.config import EngineConfig
from jserve.errors import ConfigError, JserveError
from jserve.progress import start_progress
from jserve.sampling import SamplingParams
from jserve.sharding import Sharding
from jserve.sizing.explain import BUCKETS
from jserve.sizing.twin import StepCost, step_cost
from jserve.types import Request

ROWS = BUCKETS[0].D
"""Sequences of the priced step that decodes."""
PACED_TOKENS = 48
"""Of each sequence whose tokens are timed."""
TIMED_STEPS = 15
"""Of each program whose collectives are timed."""
Answers = dict[str, tuple[int, ...]]
"""Id of a request -> the tokens that it drew."""


class RunFailed(JserveError):
    """The process of a sharding ended before it was done."""

    code = "run_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A trace run under one sharding on the devices there are."""

    answers: Answers
    wall_s: float
    n_drawn: int
    step_ms: float
    """Between two tokens of a sequence where each group decodes as many as the priced step has: the median over
    sequences of each one's mean."""
    dtype: str
    """Of the weights."""
    programs: tuple[StepCost, ...] = ()
    """Those of the priced steps, and what their collectives cost."""
    first_other: str = ""
    """The first request whose tokens are others than under the first sharding; empty: none is."""
    n_other: int = 0


def command(out: Path) -> list[str]:
    """The command of a child that writes what came of the job on its stdin to ``out``."""
    return [sys.executable, "-c", f"from jserve.shard_live import main; main({str(out)!r})"]


def ran(config: EngineConfig, sharding: Sharding, trace: str, environ: Mapping[str, str]) -> Live:
    """Run ``trace`` under ``sharding`` in a child with ``environ`` and as many devices as it takes.

    Raises:
        ConfigError: as the engine's start, or a request of the trace is too long.
        RunFailed: the child ended otherwise.
    """
    job = {"config": config.flat(), "sharding": str(sharding), "trace": trace}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "live.json"
        env = xla.with_devices(sharding.n_devices, environ)
        done = subprocess.run(command(out), input=json.dumps(job).encode(), env=env, check=False)
        found: dict[str, Any] = json.loads(out.read_bytes()) if out.exists() else {}
    if "live" in found:
        return _live(found["live"])
    if "config_error" in found:
        raise ConfigError(found["config_error"], field=found["field"])
    code = done.returncode
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    raise RunFailed(found.get("error") or f"its process ended with {how}")


def _live(found: dict[str, Any]) -> Live:
    answers = {name: tuple(tokens) for name, tokens in found["answers"].items()}
    programs = tuple(StepCost(**program) for program in found["programs"])
    return Live(**{**found, "answers": answers, "programs": programs})


def main(out: str) -> None:
    """The child's side. An error that is about what was asked is written; any other one is for the log and the exit
    code."""
    job = json.load(sys.stdin)
    try:
        config = EngineConfig.of(**job["config"])
        items = items_of(config, job["trace"])
        run = _run(config, Sharding.of(job["sharding"]), items, Console(stderr=True))
        found: dict[str, Any] = {"live": dataclasses.asdict(run)}
    except ConfigError as error:
        found = {"config_error": error.message, "field": error.field}
    except JserveError as error:
        found = {"error": error.message}
    Path(out).write_text(json.dumps(found))


def items_of(config: EngineConfig, trace: str) -> Sequence[Any]:
    """The requests that ``trace`` names: as of ``load_trace``, or the lines of an OpenAI batch file, all at once."""
    from jserve.sim import recorded, study
    from jserve.sizing.models import find

    model = config.model.model or str(build.shipped())
    if not recorded.is_batch(Path(trace)):
        return study.load_trace(trace, config.model.seed)
    from jserve.serve_commands import batch_requests

    arch = find(model, max_model_len=config.model.max_model_len).arch
    longest = config.model.max_model_len or arch.max_position
    asked = batch_requests(config, Path(trace), vocab_size=arch.V, max_model_len=longest)
    return recorded.of_requests(asked, longest)


def _run(config: EngineConfig, sharding: Sharding, items: Sequence[Any], console: Any) -> Live:
    # No request of a trace has a structure or asks for scores, and programs with them are a third of those to compile.
    unused = {"structured_outputs": False, "prompt_logprobs": False}
    device = dataclasses.replace(config.device, sharding=str(sharding), **unused)
    with start_progress(console) as progress:
        engine, info = build.engines(dataclasses.replace(config, device=device), progress)
    try:
        limits = build.each_of(engine)[0].scheduler.limits
        for request in _requests(items, limits.vocab_size, limits.max_model_len):
            engine.submit(request)
        began, drawn = time.monotonic(), dict[str, tuple[int, ...]]()
        for out in engine.drain():
            if out.error is not None:
                raise ConfigError(f"{out.request_id}: {out.error}", field="trace")
            drawn[out.request_id] = (*drawn.get(out.request_id, ()), *out.token_ids)
        wall_s = time.monotonic() - began
        step_ms = _step_ms(engine, min(ROWS, limits.n_slots) * sharding.dp, limits.max_model_len)
        programs = _costs(build.each_of(engine)[0].runner)
    finally:
        build.close(engine)
    n_drawn = sum(map(len, drawn.values()))
    return Live(
        answers=drawn,
        wall_s=wall_s,
        n_drawn=n_drawn,
        step_ms=step_ms,
        dtype=info["dtype"],
        programs=programs,
    )


def _costs(runner: Any) -> tuple[StepCost, ...]:
    """Of the programs of an engine that take the priced steps, or its largest ones."""
    decode = [b for b in runner.plain_buckets if not b.P]
    prefill = [b for b in runner.plain_buckets if b.P]
    most = min(BUCKETS[1].P, max(b.P for b in prefill))
    buckets = (
        min(decode, key=lambda b: (b.D < ROWS, abs(b.D - ROWS))),
        min((b for b in prefill if most <= b.P), key=lambda b: (b.P, b.T)),
    )
    return tuple(step_cost(runner, bucket, TIMED_STEPS) for bucket in buckets)


def _step_ms(engine: Any, n_sequences: int, longest: int) -> float:
    """Milliseconds from one token to the next of so many sequences that decode at once, after a quarter of them: the
    mean, since tokens of two steps may come together."""
    n_tokens = min(PACED_TOKENS, longest - 1)
    params = SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
    for i in range(n_sequences):
        engine.submit(Request(id=f"paced-{i}", prompt_ids=(i % 7,), params=params))
    came: dict[str, list[float]] = {}
    while engine.busy:
        for out in engine.step():
            came.setdefault(out.request_id, []).extend([time.monotonic()] * len(out.token_ids))
    first = n_tokens // 4
    means = [(times[-1] - times[first]) / (n_tokens - 1 - first) for times in came.values()]
    return float(np.median(means)) * 1e3


def _requests(items: Sequence[Any], vocab: int, longest: int) -> list[Request]:
    """Those of a trace all at once, every other one sampled by a seed."""
    from jserve.sim.trace import Streams, request_of

    streams, found = Streams(), []
    for i, item in enumerate(items):
        ids = tuple(t % vocab for t in request_of(item, streams, 0.0).prompt_ids)
        n = max(sum(piece[2] for piece in pieces) for pieces in item.outputs)
        params = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=n, ignore_eos=True)
        if len(ids) + n > longest:
            raise ConfigError(
                f"trace: {item.id} takes {len(ids) + n} tokens, the context is {longest}",
                field="trace",
            )
        found.append(Request(id=item.id, prompt_ids=ids, params=params))
    return found
