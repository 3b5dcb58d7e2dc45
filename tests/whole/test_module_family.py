"""A module of another library as a family: the tokens of its own loop on one device and two, windows, clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve import LLM, SamplingParams, family_of, register_family
from jserve.errors import ConfigError
from jserve.model import families
from jserve.model.hand import step_model_of
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.model.step import make_step
from jserve.model.view import Bucket, buffer_size
from tests.whole.conftest import SMALL_OPTIONS

V, D, L, N, K, H = 320, 16, 3, 4, 2, 8
WINDOWS = (0, 5, 0)
SIZES: dict[str, Any] = {
    "vocab": V,
    "layers": L,
    "heads": N,
    "kv_heads": K,
    "head_dim": H,
    "context": 160,
}


def weights() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32) / np.sqrt(shape[0])

    layers = [{"qkv": matrix(D, (N + 2 * K) * H), "out": matrix(N * H, D)} for _ in range(L)]
    return {"embed": matrix(V, D) * 4, "place": matrix(160, D), "layers": layers}


def apply(params: Any, tok_T: jax.Array, pos_T: jax.Array, attend: Any) -> jax.Array:
    x_TD = params["embed"][tok_T] + params["place"][pos_T]
    for i, p in enumerate(params["layers"]):
        y = (jnp.tanh(x_TD) @ p["qkv"]).reshape(-1, N + 2 * K, H)
        o = attend(i, y[:, :N], y[:, N : N + K], y[:, N + K :])
        x_TD = x_TD + o.reshape(-1, N * H) @ p["out"]
    return x_TD


def unembed(params: Any, x_ED: jax.Array) -> jax.Array:
    return x_ED @ params["embed"].T


@jax.jit
def following(params: Any, tok_T: jax.Array) -> jax.Array:
    pos_T = jnp.arange(len(tok_T))

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        far = pos_T[:, None] - pos_T
        seen = (far >= 0) & ((far < WINDOWS[layer]) | (WINDOWS[layer] == 0))
        k, v = (jnp.repeat(x, N // K, axis=1) for x in (k, v))
        scores = jnp.where(seen, jnp.einsum("qnh,knh->nqk", q, k) * H**-0.5, -jnp.inf)
        return jnp.einsum("nqk,knh->qnh", jax.nn.softmax(scores), v)

    return unembed(params, apply(params, tok_T, pos_T, attend)).argmax(axis=-1)


def greedy(params: Any, ids: list[int], n: int) -> list[int]:
    for _ in range(n):
        padded = jnp.array([*ids, *[0] * (160 - len(ids))])
        ids = [*ids, int(following(params, padded)[len(ids) - 1])]
    return ids[-n:]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tp", [1, 2])
def test_tokens_are_those_of_its_own_loop(tiny_dir: Path, tmp_path: Path, tp: int) -> None:
    """Prompts longer than a chunk and than the window, several at once, a prefix that is cached."""
    params = weights()
    config = {"architectures": ["Mine"], "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = [[7, 8, 9], list(range(10, 80)), list(range(10, 75))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "_FAMILIES", {**families._FAMILIES})
        register_family(family_of("Mine", apply, params, **SIZES, windows=WINDOWS, logits=unembed))
        options = {**SMALL_OPTIONS, "tokenizer": str(tiny_dir), "dtype": "float32"}
        with LLM(str(tmp_path), params=params, **options, tensor_parallel_size=tp) as llm:
            asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            for _ in range(2):
                outs = llm.generate(prompts, asked, use_tqdm=False)
                got = [list(out.outputs[0].token_ids) for out in outs]
                assert got == [greedy(params, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"kv_heads": 3}, "kv_heads"),
        ({"windows": (1,)}, "windows"),
        ({"layers": 0}, "layers"),
        ({"context": -1}, "context"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        family_of("Mine", apply, weights(), **SIZES | changed)
    assert caught.value.field == field


def _traced(module: Any, tp: int = 1, logits: Any = unembed) -> None:
    family = family_of("Mine", module, weights(), **SIZES, logits=logits)
    mesh, rules = make_mesh(tp), ShardRules()
    model = step_model_of(family, family.arch({}), mesh=mesh, rules=rules, dtype=jnp.float32)
    bucket = Bucket(D=2, P=0, F=0)
    buf = jax.ShapeDtypeStruct((buffer_size(model.fields(bucket)),), jnp.int32)
    jax.eval_shape(make_step(model, bucket), model.abstract_params(), model.abstract_state(), buf)


def test_a_module_that_does_not_keep_to_it_is_refused_by_name() -> None:
    def once_too_often(params: Any, tok_T: Any, pos_T: Any, attend: Any) -> Any:
        return apply(params, tok_T, pos_T, lambda i, q, k, v: attend(min(i, 1), q, k, v))

    def whole_heads(params: Any, tok_T: Any, pos_T: Any, attend: Any) -> Any:
        return apply(params, tok_T, pos_T, lambda i, q, k, v: attend(i, q, q, q))

    _traced(apply)
    for module, field in ((once_too_often, "layers"), (whole_heads, "heads")):
        with pytest.raises(ConfigError) as caught:
            _traced(module)
        assert caught.value.field == field
    with pytest.raises(ConfigError) as caught:
        _traced(apply, logits=None)
    assert caught.value.field == "vocab"
    with pytest.raises(ConfigError) as caught:
        _traced(apply, tp=4)
    assert caught.value.field == "kv_heads"
