"""A tiny bfloat16 model on the real runner, with the kernels or without."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax.numpy as jnp

from jserve.config import EngineConfig
from jserve.model.families import family_for
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.model.view import Bucket
from jserve.runner.buckets import Ladder
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
BUCKETS = (Bucket(D=2, P=0, F=0), Bucket(D=8, P=0, F=0), Bucket(D=8, P=64, F=8))


@lru_cache(maxsize=4)
def runner(kernels: str, tp: int = 1, quantization: str = "auto") -> ModelRunner:
    """With pages of 16, which attention takes."""
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
    mesh, rules = make_mesh(tp), ShardRules()
    arch = family.arch(CONFIG)
    params = load(family, arch, source, mesh, rules, jnp.bfloat16, seed=3, scheme=scheme)
    params = {**params, "embed": params["embed"] * 30}
    options = equal.OPTIONS | {"page_size": 16, "max_drafts": 0, "kernels": kernels}
    config = EngineConfig.of(**options)
    ladder = Ladder(buckets=BUCKETS)
    return ModelRunner(family, arch, params, mesh, config, rules=rules, ladder=ladder)
