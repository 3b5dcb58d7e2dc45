"""jserve: a language-model serving engine whose device programs are pure JAX functions.

Public names are loaded when first used, so that ``import jserve`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jserve.config import EngineConfig
    from jserve.llm import LLM, AsyncLLM
    from jserve.model.families import register_family
    from jserve.model.feature import StepFeature
    from jserve.model.features import register_feature
    from jserve.model.features.processor import logits_processor, sampler
    from jserve.model.features.row import RowView, row_state
    from jserve.model.features.steering import steering
    from jserve.model.features.tap import tap
    from jserve.model.module_family import family_of
    from jserve.outputs import CompletionOutput, Logprob, RequestOutput
    from jserve.request_options import Lane, RequestOptions, Retention
    from jserve.sampling import SamplingParams, StructuredOutputs
    from jserve.sharding import Sharding
    from jserve.sizing.explain import explain_sharding
    from jserve.weights.adapters import AdapterDelta

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AdapterDelta",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "Lane",
    "Logprob",
    "RequestOptions",
    "RequestOutput",
    "Retention",
    "RowView",
    "SamplingParams",
    "Sharding",
    "StepFeature",
    "StructuredOutputs",
    "explain_sharding",
    "family_of",
    "logits_processor",
    "register_family",
    "register_feature",
    "row_state",
    "sampler",
    "steering",
    "tap",
]

_HOMES = {
    "LLM": "jserve.llm",
    "AdapterDelta": "jserve.weights.adapters",
    "AsyncLLM": "jserve.llm",
    "RequestOptions": "jserve.request_options",
    "RequestOutput": "jserve.outputs",
    "CompletionOutput": "jserve.outputs",
    "EngineConfig": "jserve.config",
    "Lane": "jserve.request_options",
    "Logprob": "jserve.outputs",
    "Retention": "jserve.request_options",
    "SamplingParams": "jserve.sampling",
    "Sharding": "jserve.sharding",
    "StructuredOutputs": "jserve.sampling",
    "explain_sharding": "jserve.sizing.explain",
    "StepFeature": "jserve.model.feature",
    "family_of": "jserve.model.module_family",
    "register_family": "jserve.model.families",
    "register_feature": "jserve.model.features",
    "RowView": "jserve.model.features.row",
    "logits_processor": "jserve.model.features.processor",
    "row_state": "jserve.model.features.row",
    "sampler": "jserve.model.features.processor",
    "steering": "jserve.model.features.steering",
    "tap": "jserve.model.features.tap",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
