"""Stage of ``bench.gpu``: what other engines make of the same shapes on the same machine.

It owns a decode loop of torch kernels in a CUDA graph with random weights of the model's shape (static KV, fused
projections, no page table: what a hand-written loop reaches), the same compiled by inductor, and transformers'
continuous batching.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from bench.gpu_record import NotHere, Record
from bench.gpu_torch import device, seconds, torch
from bench.workloads import Item
from jserve.shapes import SHAPES


class Loop:
    """A Llama-shaped decode step in torch: fused QKV and gate-up, static KV, greedy."""

    def __init__(self, L: int, D: int, F: int, N: int, K: int, H: int, V: int) -> None:
        where = {"device": device(), "dtype": torch.bfloat16}

        def matrix(rows: int, columns: int) -> Any:
            return torch.randn(rows, columns, **where) * 0.02

        self.dims = (D, F, N, K, H)
        self.layers = [
            (matrix((N + 2 * K) * H, D), matrix(D, N * H), matrix(2 * F, D), matrix(D, F))
            for _ in range(L)
        ]
        self.embed, self.where = matrix(V, D), where

    def prepare(self, batch: int, context: int, *, compiled: bool) -> Callable[[], Any]:
        """A call that runs one step, by torch's kernels or by inductor's; a replayed CUDA graph on a
        GPU."""
        _, _, _, K, H = self.dims
        shape = (len(self.layers), 2, batch, K, context, H)
        self.kv = torch.randn(shape, **self.where)
        self.tokens = torch.zeros(batch, dtype=torch.long, device=self.where["device"])
        on_cpu = self.where["device"] == "cpu"
        backend = "aot_eager" if on_cpu else "inductor"
        step = torch.compile(self._step, backend=backend) if compiled else self._step
        if on_cpu:
            return step
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
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


TINY = {"L": 1, "D": 64, "F": 96, "N": 2, "K": 1, "H": 64, "V": 384}


def sizes(name: str) -> dict[str, int]:
    """``Loop``'s arguments for a known shape."""
    c = SHAPES[name]
    return {
        "L": c["num_hidden_layers"],
        "D": c["hidden_size"],
        "F": c["intermediate_size"],
        "N": c["num_attention_heads"],
        "K": c["num_key_value_heads"],
        "H": c.get("head_dim", c["hidden_size"] // c["num_attention_heads"]),
        "V": c["vocab_size"],
    }


def peers(record: Record) -> None:
    """At shapes of ``steps_1b`` and ``steps_8b``."""
    shapes = {"1b": sizes("llama-3.2-1b"), "8b": sizes("llama-3.1-8b")}
    loads = {"8b": ((1, 2048), (32, 2048), (128, 2048)), "1b": ((1, 2048), (64, 2048))}
    users, prompt, generated = 32, 512, 128
    if record.tiny:
        shapes, loads = {"tiny": TINY}, {"tiny": ((2, 70),)}
        users, prompt, generated = 2, 20, 3
    for name, points in loads.items():
        for batch, context in points:
            title = f"{name}, batch {batch}, context {context}"
            for kind in ("graph", "compile"):
                measure = functools.partial(_torch_step, shapes[name], batch, context, kind)
                record.attempt(f"torch {kind}, {title}", measure)
    for name, size in shapes.items():
        measure = functools.partial(_continuous, size, users, prompt, generated)
        record.attempt(f"transformers, {name}, {users} users of {prompt} + {generated}", measure)


def _torch_step(size: dict[str, int], batch: int, context: int, kind: str) -> dict[str, float]:
    device()
    with torch.no_grad():
        step = Loop(**size).prepare(batch, context, compiled=kind == "compile")
        spent = seconds(step)
    return {"ms": spent * 1e3, "tok_per_s": batch / spent}


def _continuous(
    size: dict[str, int], users: int, n_prompt: int, generated: int
) -> dict[str, float]:
    """transformers' continuous batching with a model of that shape, drawn on the device."""
    from bench.offline_engines import continuous

    prompt = tuple(range(3, 3 + n_prompt))
    model = _transformers_model(size)
    items = [Item(prompt=prompt, max_tokens=generated) for _ in range(users)]
    pages = -(-(len(prompt) + generated) // 256) + 1
    with continuous(model, seqs=users, blocks=users * pages, batch_tokens=2048) as generate:
        generate(items[:1])
        begin = time.perf_counter()
        outs = generate(items)
        spent = time.perf_counter() - begin
    short = sum(len(ids) != generated for ids in outs)
    if short:
        raise RuntimeError(f"{short} of {users} answers are short")
    return {"tok_per_s": users * generated / spent, "seconds": spent}


def _transformers_model(size: dict[str, int]) -> Any:
    where = device()
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise NotHere(f"transformers: {error}") from None
    config = LlamaConfig(
        vocab_size=size["V"],
        hidden_size=size["D"],
        intermediate_size=size["F"],
        num_hidden_layers=size["L"],
        num_attention_heads=size["N"],
        num_key_value_heads=size["K"],
        head_dim=size["H"],
        max_position_embeddings=8192,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(where):
            model: Any = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
