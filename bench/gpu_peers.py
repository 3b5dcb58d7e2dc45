"""Stages of ``bench.gpu``: what others do with the same shapes on the same machine.

Owns torch's attention, a decode loop of torch kernels in a CUDA graph with random weights of the
model's shape (static KV, fused projections, no page table: what a hand-written loop reaches), and
the call of ``bench.serving``. Must not know jserve's steps. Without torch each figure says so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu import Record

torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None


def _device() -> str:
    if torch is None:
        raise RuntimeError("torch is not installed")
    return "cuda" if torch.cuda.is_available() else "cpu"


def _seconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """Median seconds of a call, by CUDA events; by the clock on a CPU."""
    for _ in range(3):
        call()
    if _device() == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    times = []
    for _ in range(repeats):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        call()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) / 1e3)
    return statistics.median(times)


def sdpa_seconds(B: int, T: int, S: int, N: int, K: int, H: int, *, causal: bool) -> float:
    """Seconds of torch's scaled_dot_product_attention on dense keys, grouped heads, bfloat16."""
    where = {"device": _device(), "dtype": torch.bfloat16}
    q = torch.randn(B, N, T, H, **where)
    k, v = (torch.randn(B, K, S, H, **where) for _ in range(2))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return _seconds(lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=True))


class Loop:
    """A Llama-shaped decode step in torch: fused QKV and gate-up, static KV, greedy."""

    def __init__(self, L: int, D: int, F: int, N: int, K: int, H: int, V: int) -> None:
        where = {"device": _device(), "dtype": torch.bfloat16}

        def matrix(rows: int, columns: int) -> Any:
            return torch.randn(rows, columns, **where) * 0.02

        self.dims = (D, F, N, K, H)
        self.layers = [
            (matrix((N + 2 * K) * H, D), matrix(D, N * H), matrix(2 * F, D), matrix(D, F))
            for _ in range(L)
        ]
        self.embed, self.where = matrix(V, D), where

    def prepare(self, batch: int, context: int) -> Callable[[], Any]:
        """A call that runs one step; a replayed CUDA graph on a GPU."""
        _, _, _, K, H = self.dims
        shape = (len(self.layers), 2, batch, K, context, H)
        self.kv = torch.randn(shape, **self.where)
        self.tokens = torch.zeros(batch, dtype=torch.long, device=self.where["device"])
        if self.where["device"] == "cpu":
            return self._step
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                self._step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay

    def _step(self) -> None:
        F_ = torch.nn.functional
        D, F, N, K, H = self.dims
        x = self.embed[self.tokens]
        for i, (qkv, o, up, down) in enumerate(self.layers):
            y = F_.linear(F_.rms_norm(x, (D,)), qkv).view(-1, N + 2 * K, H)
            q, k, v = y.split((N, K, K), 1)
            self.kv[i, 0, :, :, -1], self.kv[i, 1, :, :, -1] = k, v
            kv = self.kv[i]
            a = F_.scaled_dot_product_attention(q[:, :, None], kv[0], kv[1], enable_gqa=True)
            x = x + F_.linear(a.flatten(1), o)
            gate, other = F_.linear(F_.rms_norm(x, (D,)), up).split(F, 1)
            x = x + F_.linear(F_.silu(gate) * other, down)
        self.tokens.copy_(F_.linear(F_.rms_norm(x, (D,)), self.embed).argmax(-1))


SHAPES = {
    "1b": {"L": 16, "D": 2048, "F": 8192, "N": 32, "K": 8, "H": 64, "V": 128256},
    "8b": {"L": 32, "D": 4096, "F": 14336, "N": 32, "K": 8, "H": 128, "V": 128256},
    "tiny": {"L": 1, "D": 64, "F": 96, "N": 2, "K": 1, "H": 64, "V": 384},
}


def peers(record: Record) -> None:
    """Torch's step at the shapes of ``steps_1b`` and ``steps_8b``."""
    loads = {"1b": ((1, 512), (64, 2048)), "8b": ((1, 512), (32, 2048), (128, 2048))}
    for name, points in {"tiny": ((2, 70),)}.items() if record.tiny else loads.items():
        for batch, context in points:
            measure = functools.partial(_torch_step, name, batch, context)
            record.attempt(f"torch graph, {name}, batch {batch}, context {context}", measure)


def _torch_step(name: str, batch: int, context: int) -> dict[str, float]:
    with torch.no_grad() if torch else tempfile.TemporaryDirectory():
        _device()
        spent = _seconds(Loop(**SHAPES[name]).prepare(batch, context))
    return {"ms": spent * 1e3, "tok_per_s": batch / spent}


def serving(record: Record) -> None:
    """``bench.serving`` over HTTP with the dummy model of 1B, the hopper backend; its own report
    goes to ``serving.json`` beside the record."""
    if record.tiny:
        record.add("tiny", skipped="bench.serving has tests of its own")
        return
    with tempfile.TemporaryDirectory() as folder:
        record.attempt("llama-1b", functools.partial(_serve, record, Path(folder)))


def _serve(record: Record, folder: Path) -> dict[str, Any]:
    run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
    run([sys.executable, "-m", "bench.models", "llama-1b", "--out", str(folder)])
    out = record.folder / "serving.json"
    command = [sys.executable, "-m", "bench.serving", str(folder / "llama-1b"), "--sweep", "1,32"]
    command += ["--jserve-args=--attention-backend hopper", "--json", str(out)]
    done = run(command, timeout=max(record.left() - 5, 1))
    print(done.stdout, flush=True)
    return {"report": out.name}
