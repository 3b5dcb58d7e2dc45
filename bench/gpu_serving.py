"""Stage of ``bench.gpu``: tokens a second over HTTP at the token shapes of TensorRT-LLM's published H200 table.

It owns which shapes are asked for and with how many users. ``bench.serving`` starts the server and measures; its
own report goes to a file of the stage's name beside the record. Weights are drawn on the device, so no file of them is
needed.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import models
from bench.gpu import PROGRAMS
from bench.gpu_record import Record

DRAFTED_SHAPES = ("S1", "1000/1000@128")
SHAPES = ("S1", "1000/1000@128", "128/128@256", "128/2048@128", "2048/128@64", "5000/500@32")
TINY_SHAPES = ("16/4@2", "40/6@3")
MASKLESS = " --no-structured-outputs"
DRAFTS = " --speculative.method synthetic --speculative.synthetic-acceptance-rate 0.7"
"""Seven that cost nothing to make; 2.1 of them stand, by masks. The engine verifies them as it would a drafter's."""
OPTIONS = (
    "--load-format dummy --page-size 64 --max-num-seqs 256"
    " --max-num-batched-tokens 2048 --no-prompt-logprobs"
)
TINY_OPTIONS = (
    "--load-format dummy --max-num-seqs 4 --max-num-batched-tokens 32 --kv-memory-gb 0.01"
    " --max-model-len 1024 --no-prompt-logprobs"
)
SHOWN = {
    "output_tok_s": ("output_tok_s",),
    "ttft_p50_ms": ("ttft_ms", "p50"),
    "itl_p50_ms": ("itl_ms", "p50"),
    "itl_p99_ms": ("itl_ms", "p99"),
    "errors": ("errors",),
}


def serving(record: Record) -> None:
    """One server of the 8B shape, every token shape in turn."""
    _served(record, TINY_SHAPES if record.tiny else SHAPES, MASKLESS)


def serving_speculative(record: Record) -> None:
    """The same server with drafts, beside what stage ``serving`` measured: the host's part of speculation, widths and
    verification, without a drafter's price."""
    _served(record, TINY_SHAPES[:1] if record.tiny else DRAFTED_SHAPES, DRAFTS)


def _served(record: Record, shapes: tuple[str, ...], more: str) -> None:
    name, options = ("llama-tiny", TINY_OPTIONS) if record.tiny else ("llama-8b", OPTIONS)
    if record.attn == "none":
        record.add(name, skipped="a server without attention")
        return
    with tempfile.TemporaryDirectory() as folder:
        model = models.write(Path(folder) / name, models.SHAPES[name], weights=False)
        options += f"{more} --cuda-graphs {record.cuda_graphs}"
        if not record.tiny:
            options += f" --attention-backend {record.attn}"
        record.attempt(name, functools.partial(_serve, record, model, shapes, options), share=1.0)


def _serve(record: Record, model: Path, shapes: tuple[str, ...], options: str) -> dict[str, Any]:
    out = record.folder / f"{record.stage}.json"
    command = [sys.executable, "-m", "bench.serving", str(model), "--rounds", "1"]
    command += ["--scale", "0.5", "--compile-cache", str(PROGRAMS), f"--jserve-args={options}"]
    command += [f"--workload={shape}" for shape in shapes]
    command += ["--json", str(out), "--ready-timeout", str(max(record.left() - 20, 1))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=max(record.left() - 5, 1), check=False
    )
    print(done.stdout, flush=True)
    if not out.exists():
        raise RuntimeError(done.stderr.strip()[-250:])
    return _figures(record, json.loads(out.read_text())["turns"][0])


def _figures(record: Record, turn: dict[str, Any]) -> dict[str, Any]:
    """A line for each token shape; the start's figures are the stage's own."""
    if "error" in turn:
        raise RuntimeError(turn["error"][-250:])
    for shape, result in turn["workloads"].items():
        record.add(
            shape,
            **{key: _at(result, path) for key, path in SHOWN.items()}
            | _beside(record, shape, result),
        )
    start = turn["start"]
    wrong = sum(w["errors"] for w in turn["workloads"].values())
    return {"ready_s": start["ready_s"], "first_token_s": start["first_token_s"], "ok": not wrong}


def _beside(record: Record, shape: str, result: Any) -> dict[str, float]:
    """With drafts: how many times the output of the plain server, where it was measured."""
    plain = record.figure("serving", shape, "output_tok_s", None)
    if record.stage == "serving" or not plain:
        return {}
    return {"over_plain": result["output_tok_s"] / plain}


def _at(result: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        result = result.get(key) if isinstance(result, dict) else None
    return result
