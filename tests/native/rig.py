"""A tiny bfloat16 model on the real runner, with the kernels or without."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp

from jserve.config import EngineConfig
from jserve.model.arch import Arch
from jserve.model.families import family_for
from jserve.model.family import Family
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.model.view import Bucket
from jserve.runner.buckets import Ladder
from jserve.runner.program_files import ProgramFiles
from jserve.runner.runner import ModelRunner
from jserve.weights.loader import load
from jserve.weights.quant.scheme import quantised, scheme_of
from jserve.weights.source import Source
from tests.whole import equal

CONFIG = equal.TINY | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "torch_dtype": "bfloat16",
}
BUCKETS = (Bucket(D=2, P=0, F=0), Bucket(D=8, P=0, F=0, J=4), Bucket(D=8, P=64, F=8, J=4))


class Model(NamedTuple):
    """A model whose weights lie on a mesh."""

    family: Family
    arch: Arch
    mesh: Any
    params: Any


def model(tp: int = 1, quantization: str = "auto") -> Model:
    """Of drawn weights, the same for the same arguments, whose likeliest tokens have a fifth of the probability: where
    one has all of it, no log-probability would show an error, and every draw would be the greedy choice."""
    scheme = scheme_of(CONFIG, "bfloat16", quantization)
    family = quantised(family_for(CONFIG), scheme)
    source: Any = Source(
        name="tiny",
        directory=None,  # type: ignore[arg-type]
        format="dummy",
        weights=None,
        config=CONFIG,
        generation={},
    )
    mesh, arch = make_mesh(tp), family.arch(CONFIG)
    params = load(family, arch, source, mesh, ShardRules(), jnp.bfloat16, seed=3, scheme=scheme)
    return Model(family, arch, mesh, {**params, "embed": params["embed"] * 3})


def made(
    kernels: str,
    of: Model,
    buckets: Sequence[Bucket] = BUCKETS,
    files: ProgramFiles | None = None,
) -> ModelRunner:
    """With pages of 16, which attention takes."""
    options = equal.OPTIONS | {"page_size": 16, "kernels": kernels}
    return ModelRunner(
        of.family,
        of.arch,
        of.params,
        of.mesh,
        EngineConfig.of(**options),
        rules=ShardRules(),
        ladder=Ladder(buckets=tuple(buckets)),
        files=files,
    )


@lru_cache(maxsize=4)
def runner(kernels: str, tp: int = 1, quantization: str = "auto") -> ModelRunner:
    """For tests that leave it as they found it."""
    return made(kernels, model(tp, quantization))
