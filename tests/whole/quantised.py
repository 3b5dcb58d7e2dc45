"""The tiny model of ``equal`` with quantised weights: quantised as they are loaded, or read from a file of a format."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jserve.model.shard import ShardRules
from jserve.runner.runner import ModelRunner
from jserve.weights.loader import adopted, load
from jserve.weights.quant.scheme import quantised, scheme_of
from jserve.weights.source import resolve
from tests.weights.test_weights_gguf import Written as Gguf, gguf_name
from tests.weights.test_weights_quant import FORMATS, Written, is_matrix, said
from tests.whole import equal

Made = tuple[Any, Any, Any]
"""(family, arch, parameters)."""
FLOAT32 = jnp.dtype("float32")
LARGER = 8
"""Factor of the scales of 4-bit integers, with which their products count for something beside the embedding."""


def on_load(asked: str, options: str, stated: Mapping[str, Any], mesh: Any, rules: Any) -> Made:
    """The weights of ``equal.drawn``, quantised by an option."""
    family, arch, params = equal.drawn(stated, mesh, rules)
    family = quantised(family, scheme_of({}, FLOAT32, asked, options))
    return family, arch, adopted(family, arch, params, mesh, rules, FLOAT32)


def of_format(
    name: str, more: Mapping[str, Any], stated: Mapping[str, Any], mesh: Any, rules: Any
) -> Made:
    """Random weights of a checkpoint in a format of ``tests.weights``; ``more``: of its config."""
    with tempfile.TemporaryDirectory() as path:
        model = Written(Path(path), FORMATS[name], _larger, base=dict(stated), **more)
        return _loaded(model.family, model.path, mesh, rules)


def _larger(tensors: dict[str, np.ndarray]) -> None:
    stems = {n.rpartition(".")[0] for n in tensors if n.endswith(("qweight", "weight_packed"))}
    for name in [n for n in tensors if n.rpartition(".")[0] in stems]:
        if name.endswith((".scales", ".weight_scale")) and tensors[name].dtype.itemsize > 1:
            tensors[name] *= LARGER


def of_gguf(kind: str, stated: Mapping[str, Any], mesh: Any, rules: Any) -> Made:
    """Random weights of a GGUF file whose matrices have this type."""
    with tempfile.TemporaryDirectory() as path:
        plain = Gguf(Path(path), "llama", dict(stated))
        kinds = {gguf_name(n, False): kind for n, x in plain.wide.items() if is_matrix(n, x)}
        model = Gguf(Path(path), "llama", dict(stated), kinds)
        return _loaded(model.family, model.path, mesh, rules)


def _loaded(family: Any, path: Path, mesh: Any, rules: ShardRules) -> Made:
    source = resolve(str(path))
    scheme = scheme_of(source.config, FLOAT32)
    family, arch = quantised(family, scheme), family.arch(source.config)
    return family, arch, load(family, arch, source, mesh, rules, FLOAT32, scheme=scheme)


UNTIED = {"tie_word_embeddings": False}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
Case = tuple[Callable[..., Made], Mapping[str, Any], str]
"""(weights, what the config has otherwise, the form of gate and up)."""
CASES: dict[str, Case] = {
    "int8": (partial(on_load, "int8", ""), {}, "int8 rounded"),
    "int8-weight-only": (partial(on_load, "int8-weight-only", ""), {}, "int8"),
    "fp8": (partial(on_load, "fp8", ""), {}, "e4m3 rounded"),
    "int4": (partial(on_load, "int4", ""), {}, "int4 g32"),
    "int4, head too": (partial(on_load, "int4", '{"ignore": []}'), UNTIED, "int4 g32"),
    "zeros": (partial(of_format, "awq", {}), {}, "int4 g32 zeros"),
    "zeros of int8": (partial(of_format, "int-quantized, zeros", {}), {}, "int8 zeros"),
    "order": (partial(of_format, "gptq ordered", {}), {}, "int4 g32 ordered"),
    "order and zeros": (
        partial(of_format, "gptq ordered, zeros", {}),
        {},
        "int8 g16 zeros ordered",
    ),
    "nvfp4": (partial(of_format, "nvfp4", {}), {}, "e2m1 g16"),
    "mxfp4": (partial(of_format, "mxfp4", {}), {}, "e2m1 g32"),
    "mxfp8": (partial(of_format, "mxfp8", {}), {}, "e4m3 g32"),
    "fp8 blocks": (partial(of_format, "fp8 blocks", {}), {}, "e4m3 g8 rounded"),
    "fp8 static": (partial(of_format, "fp8 static", {}), {}, "e4m3 static"),
    "fp8 bounded": (partial(of_format, "fbgemm", {}), {}, "e4m3 bounded"),
    "shifts": (partial(of_gguf, "Q4_1"), {}, "uint4 g32 shifts"),
    "shifts of int8": (partial(of_gguf, "Q5_1"), {}, "int8 g32 shifts"),
    "experts, int8": (partial(on_load, "int8-weight-only", ""), MOE, "int8"),
    "experts": (
        partial(of_format, "awq", {"modules_to_not_convert": ["mlp.gate"]}),
        MOE,
        "int4 g32 zeros",
    ),
}
ROUNDED = ("int8", "fp8", "fp8 blocks", "fp8 static", "fp8 bounded")
"""Those that round activations: what differs in the last bit may be rounded to another neighbour."""


@lru_cache
def runner(name: str, tp: int = 1) -> ModelRunner:
    """A runner with weights of ``CASES``."""
    weights, model, form = CASES[name]
    made = equal.make_runner(tp, model=model, weights=weights)
    layer = made.params["layers"][0]
    got = said(layer["expert_gate_up" if "expert_gate_up" in layer else "gate_up"])
    assert got == form, got
    return made
