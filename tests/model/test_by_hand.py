"""Whole decoders against the same arithmetic in plain numpy, straight from the tensors of a checkpoint.

For machines without torch: what ``test_parity`` asks of transformers, in a few lines that share nothing
with ``jserve.model`` but the names of the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from jserve.model.arch import Arch
from jserve.model.families import family_for
from jserve.model.family import Family
from jserve.model.hand import Row
from jserve.model.param_spec import is_spec
from jserve.model.view import Bucket
from tests.model.driver import Driver

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
CASES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "Qwen2ForCausalLM": {"model_type": "qwen2", "tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "num_key_value_heads": 1},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": 5},
}
N_PROMPT, N_TOKENS = 15, 23


def tensors_of(family: Family, arch: Arch) -> dict[str, np.ndarray]:
    """float32 values for every tensor of a checkpoint, of sizes as a trained one's."""
    rng = np.random.default_rng(0)
    specs = jax.tree.leaves(family.specs(arch, 1), is_leaf=is_spec)
    shapes = {part.name: part.shape for spec in specs for part in spec.parts}
    found = {}
    for name, shape in sorted(shapes.items()):
        x = rng.standard_normal(shape)
        x = x / np.sqrt(shape[-1]) if len(shape) == 2 else 0.3 * x
        found[name] = (x + 1 if name.endswith("norm.weight") else x).astype(np.float32)
    return found


class Plain:
    """A decoder of one sequence without a cache, in float64."""

    def __init__(self, arch: Arch, tensors: Mapping[str, np.ndarray]) -> None:
        self.arch = arch
        self.tensors = {name: x.astype(np.float64) for name, x in tensors.items()}

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float64[T, V] of every token."""
        x_TD = self.tensors["model.embed_tokens.weight"][tokens]
        for i in range(self.arch.L):
            at = f"model.layers.{i}"
            x_TD = x_TD + self.attention(at, i, self.norm(f"{at}.input_layernorm", x_TD))
            x_TD = x_TD + self.mlp(at, self.norm(f"{at}.post_attention_layernorm", x_TD))
        head = "model.embed_tokens" if self.arch.tied else "lm_head"
        return self.linear(head, self.norm("model.norm", x_TD))

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.arch.norm.eps) * self.tensors[f"{name}.weight"]

    def mlp(self, at: str, x_TD: np.ndarray) -> np.ndarray:
        gate_TF = self.linear(f"{at}.mlp.gate_proj", x_TD)
        up_TF = self.linear(f"{at}.mlp.up_proj", x_TD)
        return self.linear(f"{at}.mlp.down_proj", gate_TF / (1 + np.exp(-gate_TF)) * up_TF)

    def attention(self, at: str, layer: int, x_TD: np.ndarray) -> np.ndarray:
        q_TNH, k_TNH, v_TNH = (self.heads(f"{at}.self_attn", name, x_TD) for name in "qkv")
        score_NTT = np.einsum("tnh,snh->nts", q_TNH, k_TNH) / np.sqrt(self.arch.H)
        ago_TT = np.arange(len(x_TD))[:, None] - np.arange(len(x_TD))
        window = self.arch.layers[layer].attn.window or len(x_TD)
        score_NTT[:, (ago_TT < 0) | (ago_TT >= window)] = -np.inf
        p_NTT = np.exp(score_NTT - score_NTT.max(axis=-1, keepdims=True))
        p_NTT /= p_NTT.sum(axis=-1, keepdims=True)
        o_TNH = np.einsum("nts,snh->tnh", p_NTT, v_TNH)
        return self.linear(f"{at}.self_attn.o_proj", o_TNH.reshape(len(x_TD), -1))

    def heads(self, at: str, name: str, x_TD: np.ndarray) -> np.ndarray:
        """Queries, keys or values by query head, turned to their positions where they are."""
        x_TXH = self.linear(f"{at}.{name}_proj", x_TD).reshape(len(x_TD), -1, self.arch.H)
        if name != "v":
            x_TXH = (
                self.norm(f"{at}.{name}_norm", x_TXH) if self.arch.layers[0].attn.qk_norm else x_TXH
            )
            x_TXH = self.turned(x_TXH)
        return np.repeat(x_TXH, self.arch.N // x_TXH.shape[1], axis=1)

    def turned(self, x_TXH: np.ndarray) -> np.ndarray:
        """Each half dimension and its partner as one complex number, turned by position and frequency."""
        half = self.arch.H // 2
        frequency = self.arch.ropes[0].theta ** (-np.arange(half) / half)
        z = x_TXH[..., :half] + 1j * x_TXH[..., half:]
        z = z * np.exp(1j * np.arange(len(x_TXH))[:, None] * frequency)[:, None]
        return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize("name", CASES)
def test_same_logits_as_by_hand(name: str) -> None:
    """A prompt in one step, then tokens one by one from the cache."""
    config = SMALL | CASES[name] | {"architectures": [name]}
    family = family_for(config)
    arch = family.arch(config)
    tensors = tensors_of(family, arch)
    driver = Driver(family, arch, tensors.__getitem__)
    tokens = np.random.default_rng(1).integers(0, arch.V, N_TOKENS).tolist()
    bucket, pages = Bucket(D=2, P=16, F=1), list(range(1, 1 + driver.dims.M))
    got = list(driver.step(bucket, prefill=[Row(pages, 0, tokens[:N_PROMPT])])[2:][:N_PROMPT])
    for at in range(N_PROMPT, N_TOKENS):
        got.append(driver.step(bucket, decode=[Row(pages, at, tokens[at : at + 1])])[0])
    want_TV = Plain(arch, tensors).logits(tokens)
    assert np.abs(np.stack(got) - want_TV).max() < 1e-4 * np.ptp(want_TV)
