"""Logits of quantised checkpoints: transformers' with the matrices that they stand for, and, where activations are
rounded, those of a model in plain numpy that rounds them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jserve.model.hand import Row
from jserve.model.shard import partitions
from jserve.model.view import Bucket
from jserve.weights.quant.scheme import quantised, scheme_of
from tests.model import hf
from tests.model.driver import Driver
from tests.weights.test_weights_quant import CONFIG, FORMATS, RULES, Written, loaded

TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 64, 20)]
BASE = CONFIG | {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def served(model: Any, tp: int = 1, asked: str = "auto") -> np.ndarray:
    """float32[tokens, V] of the engine's step."""
    driver = Driver(model.family, model.arch, model.wide.__getitem__, tp=tp)
    driver.params = loaded(model, tp, asked)
    family = quantised(model.family, scheme_of(model.config, jnp.float32, asked))
    driver.param_specs = partitions(family.specs(model.arch, tp), RULES)
    rows = [Row([1, 2, 3], 0, TOKENS)]
    return driver.step(Bucket(D=2, P=24, F=1), prefill=rows)[2:22]


def by_transformers(model: Any) -> np.ndarray:
    """Those of its own Llama with the plain matrices."""
    sizes = {k: v for k, v in BASE.items() if k not in ("architectures", "model_type")}
    oracle, _ = hf.tiny("LlamaForCausalLM", **sizes)
    state = {name: hf.torch.from_numpy(np.array(x)) for name, x in model.wide.items()}
    oracle.load_state_dict(state)
    with hf.torch.no_grad():
        return oracle(hf.torch.tensor([TOKENS])).logits[0].numpy()


def near(got: np.ndarray, want: np.ndarray, part: float = 1e-4) -> None:
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, atol=part * np.abs(want).max())


ROUNDED = ("rounded", "static", "bounded")


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = Written(tmp_path, FORMATS[name], base=BASE)
    want = by_transformers(model)
    near(served(model, 1, "none"), want)
    if FORMATS[name].form.split()[-1] in ROUNDED:
        assert np.abs(served(model) - want).max() > 1e-3 * np.abs(want).max()
        return
    for tp in (1, 2):
        near(served(model, tp), want)


# ---- activations that are rounded ----------------------------------------------------------------

Rule = Callable[[np.ndarray, str], np.ndarray]
"""(activations [T, D], module) -> what the product sees."""


def nearest(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "int8":
        return np.rint(x).astype(np.float32)
    return x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def per_token(kind: str, group: int = 0, bound: float = 0.0) -> Callable[[Any], Rule]:
    """A scale of the largest of a token, or of each group of its numbers, of which as many as divide them; at most
    ``bound``."""
    top = {"int8": 127, "e4m3": 448}[kind]

    def rule(x: np.ndarray, module: str) -> np.ndarray:
        made = np.empty_like(x)
        for t, row in enumerate(x):
            width = math.gcd(group, len(row)) if group else len(row)
            for first in range(0, len(row), width):
                part = row[first : first + width]
                most = np.abs(part).max()
                scale = np.float32(min(most, bound or most)) * np.float32(1 / top)
                inside = np.clip(part / scale, -top, top)
                made[t, first : first + len(part)] = nearest(inside, kind) * scale
        return made

    return lambda model: rule


def static(model: Any, kind: str = "e4m3") -> Rule:
    """The checkpoint's scale of a matrix; of q, k and v, or gate and up, the largest."""
    least, most = {"int8": (-128, 127), "e4m3": (-448, 448)}[kind]
    beside = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": ("gate", "up"), "up": ("gate", "up")}

    def rule(x: np.ndarray, module: str) -> np.ndarray:
        stem, _, last = module.rpartition(".")
        own = last.removesuffix("_proj")
        names = [f"{stem}.{part}_proj.input_scale" for part in beside.get(own, (own,))]
        scale = np.float32(max(float(model.tensors[n].reshape(-1)[0]) for n in names))
        return nearest(np.clip(x / scale, least, most), kind) * scale

    return rule


def in_numpy(model: Any, rule: Rule) -> np.ndarray:
    """float32[T, V] of a Llama, its matrices multiplied with what ``rule`` makes of their inputs."""
    N, K, H = (CONFIG[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    w, T = model.wide, len(TOKENS)

    def product(x: np.ndarray, module: str) -> np.ndarray:
        return (rule(x, module).astype(np.float64) @ w[f"{module}.weight"].T).astype(np.float32)

    def normed(x: np.ndarray, name: str) -> np.ndarray:
        wide = x.astype(np.float64)
        size = np.sqrt((wide**2).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"])
        return (wide / size * w[f"{name}.weight"]).astype(np.float32)

    angle = np.outer(np.arange(T), CONFIG["rope_theta"] ** -(np.arange(H // 2) * 2 / H))

    def turned(x: np.ndarray) -> np.ndarray:
        a, b = x[..., : H // 2], x[..., H // 2 :]
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][TOKENS]
    for i in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{i}"
        h = normed(x, f"{at}.input_layernorm")
        q, k, v = (product(h, f"{at}.self_attn.{n}_proj").reshape(T, -1, H) for n in "qkv")
        q, k = turned(q), turned(k)
        k, v = (np.repeat(y, N // K, axis=1) for y in (k, v))
        score = np.einsum("tnh,snh->nts", q, k) / np.sqrt(H)
        score = np.where(np.tril(np.ones((T, T), bool)), score, -np.inf)
        p = np.exp(score - score.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        seen = np.einsum("nts,snh->tnh", p, v).reshape(T, -1).astype(np.float32)
        x = x + product(seen, f"{at}.self_attn.o_proj")
        h = normed(x, f"{at}.post_attention_layernorm")
        gate, up = (product(h, f"{at}.mlp.{n}_proj") for n in ("gate", "up"))
        x = x + product((gate / (1 + np.exp(-gate)) * up).astype(np.float32), f"{at}.mlp.down_proj")
    return normed(x, "model.norm") @ w["lm_head.weight"].T


def shared(rule: Rule, tp: int, divides: bool) -> Rule:
    """``rule`` of each device's part of the inputs of ``o`` and ``down``, which have a scale of their own unless it is
    the checkpoint's."""

    def made(x: np.ndarray, module: str) -> np.ndarray:
        if not divides or not module.endswith(("o_proj", "down_proj")):
            return rule(x, module)
        return np.concatenate([rule(part, module) for part in np.split(x, tp, axis=1)], axis=1)

    return made


RULES_OF: dict[str, Callable[[Any], Rule]] = {
    "int-quantized": per_token("int8"),
    "naive-quantized": per_token("int8"),
    "naive-quantized, float": per_token("e4m3"),
    "float-quantized": per_token("e4m3"),
    "fp8": per_token("e4m3"),
    "fp8 powers of two": per_token("e4m3", 32),
    "fp8 blocks": per_token("e4m3", 8),
    "fp8 blocks, bfloat16 scales": per_token("e4m3", 32),
    "auto-round fp8": per_token("e4m3", 32),
    "float blocks": per_token("e4m3", 8),
    "fbgemm": per_token("e4m3", bound=1200.0),
    "fp8 static": static,
    "modelopt fp8": static,
    "float static": static,
    "int static": partial(static, kind="int8"),
}


def test_the_model_in_numpy_is_that_of_transformers(tmp_path: Path) -> None:
    model = Written(tmp_path, FORMATS["int-quantized"], base=BASE)
    near(in_numpy(model, lambda x, module: x), by_transformers(model))


def test_every_format_that_rounds_has_a_rule() -> None:
    rounds = {name for name, fmt in FORMATS.items() if fmt.form.split()[-1] in ROUNDED}
    assert rounds == set(RULES_OF)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", RULES_OF)
def test_rounded_activations_are_those_of_numpy(tmp_path: Path, name: str, tp: int) -> None:
    """Few numbers lie so near to the middle of two that another order of sums rounds them to the other one."""
    model = Written(tmp_path, FORMATS[name], base=BASE)
    rule = shared(RULES_OF[name](model), tp, "static" not in FORMATS[name].form)
    got, want = served(model, tp), in_numpy(model, rule)
    plain = in_numpy(model, lambda x, module: x)
    off = np.abs(got - want).mean()
    assert off < 0.02 * np.abs(plain - want).mean(), "the rounding is another one"
