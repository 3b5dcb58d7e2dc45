"""A model that the native attention does not take runs on XLA's, says why, and has the programs that this needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.model.arch import Arch, Attention, Latent
from jserve.native.library import LEVELS
from jserve.runner.memory import DeviceMemory
from jserve.runner.sizes import chosen_attention, sizes_of
from tests.runner.harness import ARCH

BF16 = jnp.dtype(jnp.bfloat16)
LATENT = Latent(rank=32, turned=32, own=32, value=32)
CASES: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"H": 80}, {}, "multiples of 32 up to 256, not of 80", "attention_backend"),
    ({"H": 288}, {}, "multiples of 32 up to 256, not of 288", "attention_backend"),
    ({"N": 34, "K": 2}, {}, "up to 16 query heads a kv head, not 17", "attention_backend"),
    ({"soft_cap": 50.0}, {}, "no capped scores", "attention_backend"),
    ({"sink_logits": True}, {}, "no sink logits", "attention_backend"),
    ({"chunk": 64}, {}, "the chunks of attention", "attention_backend"),
    ({"latent": LATENT, "K": 1, "H": 64}, {}, "the latent attention", "attention_backend"),
    ({}, {"page_size": 8}, "multiple of 16 tokens, not of 8", "page_size"),
    ({}, {"kv_cache_dtype": "float32"}, "KV in bfloat16, not in float32", "kv_cache_dtype"),
    ({}, {"kv_cache_dtype": "int8_per_token_head"}, "not in int8", "kv_cache_dtype"),
]


def arch_of(**attention: Any) -> Arch:
    """Its last layer alone has what is asked for."""
    plain = dataclasses.replace(ARCH.layers[0].attn, H=64)
    last = dataclasses.replace(plain, **attention)
    assert isinstance(last, Attention)
    layers = [dataclasses.replace(layer, attn=plain) for layer in ARCH.layers]
    layers[-1] = dataclasses.replace(layers[-1], attn=last)
    return dataclasses.replace(ARCH, layers=tuple(layers))


def config_of(**options: Any) -> EngineConfig:
    return EngineConfig.of(**{"page_size": 16, "n_pages": 64, **options})


@pytest.mark.parametrize(("attention", "options", "why", "field"), CASES)
def test_it_is_xlas_and_says_why(
    attention: dict[str, Any], options: dict[str, Any], why: str, field: str
) -> None:
    arch = arch_of(**attention)
    name, reason = chosen_attention(arch, config_of(**options), BF16, "cpu", kernels=LEVELS[1])
    assert name == "xla"
    assert why in reason
    asked = config_of(attention_backend="native", **options)
    with pytest.raises(ConfigError, match=why) as refused:
        sizes(arch, asked)
    assert refused.value.field == field


def test_steps_that_pay_for_padding_have_all_their_sizes() -> None:
    native, xla = sizes(arch_of(), config_of()), sizes(arch_of(soft_cap=50.0), config_of())
    assert (native.attention.name, native.no_better_attention) == ("native", "")
    assert xla.attention.name == "xla"
    assert "capped" in xla.no_better_attention
    assert len(xla.ladder.buckets) > len(native.ladder.buckets)


def sizes(arch: Arch, config: EngineConfig) -> Any:
    return sizes_of(
        arch,
        config,
        dtype=BF16,
        platform="cpu",
        tp=1,
        weight_bytes=0,
        memory=DeviceMemory(total=2**34, taken=0, is_host=True),
        kernels=LEVELS[1],
    )
