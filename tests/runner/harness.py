"""A tiny model on the real ModelRunner, driven by hand-made plans.

What the runner tests build on: ``Rig`` plays a minimal scheduler. It keeps sequences with pages of their own,
hands out plans and applies the results, without any of the real scheduler's policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from jserve.config import EngineConfig
from jserve.model.families.llama import FAMILY as LLAMA
from jserve.model.shard import ShardRules, init_params, make_mesh
from jserve.runner.buckets import Ladder
from jserve.runner.runner import ModelRunner
from jserve.types import Request, RowPlan, SamplingParams, Sequence, SlotLoad, StepPlan, StepResult

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
