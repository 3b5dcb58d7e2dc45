"""Points inside attention against what transformers' own modules see, and the models that have none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve import functional
from jserve.errors import ConfigError
from jserve.model.arch import Arch
from jserve.model.points import BY_HEAD, all_points, in_layer
from tests.model import hf
from tests.model.assembly import assemble_all
from tests.model.test_parity import CASES

torch = pytest.importorskip("torch")

TEXTS = [[5, 9, 11, 100, 7, 23, 42, 1, 77, 64, 3, 19, 8, 55], [90, 2], [31, 30, 29, 28, 60, 61]]
LEAN = ("llama3-biases-gqa8", "gemma3")
SLOW = ("gemma2", "qwen3-bias-window", "olmo2", "cohere2", "granite", "qwen2-window-yarn")


@contextmanager
def watched(oracle: Any) -> Iterator[dict[str, Any]]:
    """Point -> float32[S, heads, H] of the last pass: what projections give, and what attention takes and gives."""
    found: dict[str, Any] = {}
    attentions = [m for m in oracle.modules() if hasattr(m, "o_proj")]
    modules = sys.modules[type(attentions[0]).__module__]

    def kept(name: str, H: int, module: Any, args: Any, out: Any) -> None:
        found[name] = out[0].reshape(out.shape[1], -1, H).numpy()

    def entering(name: str, H: int, module: Any, args: Any) -> None:
        found[name] = args[0][0].reshape(args[0].shape[1], -1, H).numpy()

    def attend(whole: Any, module: Any, q: Any, k: Any, *args: Any, **rest: Any) -> Any:
        i = attentions.index(module)
        for name, x in (("attn.hook_rot_q", q), ("attn.hook_rot_k", k)):
            found[in_layer(i, name)] = x[0].transpose(0, 1).numpy()
        return whole(module, q, k, *args, **rest)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as hooks, torch.no_grad():
        patch.setattr(
            modules, "eager_attention_forward", partial(attend, modules.eager_attention_forward)
        )
        for i, attn in enumerate(attentions):
            H = attn.head_dim
            for x in "qkv":
                to = partial(kept, in_layer(i, f"attn.hook_{x}"), H)
                hooks.callback(getattr(attn, f"{x}_proj").register_forward_hook(to).remove)
            to = partial(entering, in_layer(i, "attn.hook_z"), H)
            hooks.callback(attn.o_proj.register_forward_pre_hook(to).remove)
        yield found


@pytest.mark.parametrize("name", [*LEAN, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_heads_are_those_of_transformers(name: str) -> None:
    architecture, options = CASES[name]
    oracle, config = hf.tiny(architecture, **{k: v for k, v in options.items() if k != "seed"})
    model = functional.model(config)
    params = assemble_all(model.specs, hf.weights(oracle), model.dtype)
    tokens = jnp.array([t for text in TEXTS for t in text])
    segments = jnp.array([i for i, text in enumerate(TEXTS) for _ in text])
    run = jax.jit(partial(functional.forward, model), static_argnames="taps")
    _, found = run(params, tokens, segments, taps=("blocks.*.attn.*",))
    assert set(found) == {in_layer(i, p) for i in range(model.arch.L) for p in BY_HEAD}
    at = 0
    for text in TEXTS:
        with watched(oracle) as want:
            oracle(torch.tensor([text]))
        for point, x in found.items():
            mine = np.asarray(x)[at : at + len(text)]
            np.testing.assert_allclose(mine, want[point], rtol=1e-4, atol=1e-4, err_msg=point)
        at += len(text)


@pytest.mark.slow
def test_a_text_that_is_too_long_has_no_heads_there() -> None:
    architecture, options = CASES["gemma3"]
    _, config = hf.tiny(architecture, **{k: v for k, v in options.items() if k != "seed"})
    model = functional.model(config)
    params = functional.init(model, jax.random.key(0))
    tokens, segments = jnp.arange(6), jnp.zeros(6, jnp.int32)
    names = ("blocks.0.attn.hook_rot_k",)
    _, found = functional.forward(model, params, tokens, segments, longest=4, taps=names)
    missing = np.isnan(np.asarray(found[names[0]])).all(axis=(1, 2))
    assert missing.tolist() == [False] * 4 + [True] * 2


def latent() -> tuple[Any, functional.FunctionalModel, Any]:
    architecture, options = CASES["deepseek-v2"]
    oracle, config = hf.tiny(architecture, **options)
    model = functional.model(config)
    return oracle, model, assemble_all(model.specs, hf.weights(oracle), model.dtype)


def test_latent_attention_has_outputs_of_heads_alone() -> None:
    oracle, model, params = latent()
    text = TEXTS[0]
    given = (model, params, jnp.array(text), jnp.zeros(len(text), jnp.int32))
    _, found = functional.forward(*given, taps=("blocks.*.attn.hook_z",))
    seen: list[Any] = []
    for layer in oracle.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    with torch.no_grad():
        oracle(torch.tensor([text]))
    for x, want in zip(found.values(), seen, strict=True):
        mine = np.asarray(x).reshape(len(text), -1)
        np.testing.assert_allclose(mine, want.numpy(), rtol=1e-4, atol=1e-4)
    for name in ("hook_q", "hook_k", "hook_v", "hook_rot_q", "hook_rot_k"):
        with pytest.raises(ConfigError, match=r"names no point .* blocks\.0 to 2 with") as caught:
            functional.forward(*given, taps=(f"blocks.0.attn.{name}",))
        assert caught.value.field == "taps"
        assert f"attn.{name}" not in str(caught.value).split("its points")[1]


def test_points_come_in_the_order_of_a_pass() -> None:
    from tests.runner.harness import ARCH

    arch: Arch = ARCH
    of_layer = [name.split(".", 2)[2] for name in all_points(arch) if name.startswith("blocks.1.")]
    assert of_layer == [
        "hook_resid_pre",
        *(f"attn.hook_{x}" for x in ("q", "k", "v", "rot_q", "rot_k", "z")),
        "hook_attn_out",
        "hook_resid_mid",
        "hook_mlp_out",
        "hook_resid_post",
    ]
