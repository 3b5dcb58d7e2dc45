"""The served model as pure functions: values and gradients against transformers, in any layout."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jserve import functional
from jserve.errors import ConfigError
from jserve.model.mesh import make_mesh
from jserve.model.points import in_layer
from jserve.model.shard import ShardRules
from tests.model import hf
from tests.model.assembly import assemble_all
from tests.model.test_parity import CASES

torch = pytest.importorskip("torch")

TEXTS = [[5, 9, 11, 100, 7, 23, 42, 1, 77, 64, 3, 19, 8], [90, 2], [31, 30, 29, 28, 60, 61, 62]]
LEAN = ("llama-tied-gqa1", "olmoe")
"""Of the families; the others are in the slow tier."""


@lru_cache(maxsize=2)
def made(name: str) -> tuple[Any, functional.FunctionalModel, Any]:
    architecture, options = CASES[name]
    options = {k: v for k, v in options.items() if k != "seed"}
    oracle, config = hf.tiny(architecture, **options)
    model = functional.model(config)
    return oracle, model, assemble_all(model.specs, hf.weights(oracle), model.dtype)


def flat(texts: list[list[int]]) -> tuple[jax.Array, jax.Array]:
    tokens = [t for text in texts for t in text] + [0, 0]
    segments = [i for i, text in enumerate(texts) for _ in text] + [-1, -1]
    return jnp.array(tokens), jnp.array(segments)


def of_transformers(oracle: Any, texts: list[list[int]]) -> Any:
    """Log-probabilities of all tokens but the first ones, with their graph."""
    found = []
    for text in texts:
        ids = torch.tensor([text])
        scores = torch.log_softmax(oracle(ids).logits[0].float(), -1)
        found.append(scores[torch.arange(len(text) - 1), ids[0, 1:]])
    return torch.cat(found)


def drawn(texts: list[list[int]], values: Any) -> np.ndarray:
    """Those of ``logprobs`` that ``of_transformers`` has."""
    at = [i for text in texts for i in range(len(text))]
    return np.asarray(values)[: len(at)][np.array(at) > 0]


@pytest.mark.parametrize(
    "name", [*LEAN, *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n not in LEAN)]
)
def test_logprobs_and_gradients_are_those_of_transformers(name: str) -> None:
    oracle, model, params = made(name)
    tokens, segments = flat(TEXTS)

    @jax.jit
    def loss(params: Any) -> Any:
        found = functional.logprobs(model, params, tokens, segments)
        return found.sum(), found

    (_, found), grads = jax.value_and_grad(loss, has_aux=True)(params)
    expected = of_transformers(oracle, TEXTS)
    np.testing.assert_allclose(drawn(TEXTS, found), expected.detach(), rtol=1e-4, atol=1e-4)
    assert not np.asarray(found)[-2:].any()
    oracle.zero_grad()
    expected.sum().backward()
    embedding = oracle.get_input_embeddings()
    table, found = embedding.weight.grad.numpy(), np.array(grads["embed"])
    if embedding.padding_idx is not None:  # torch gives that row no gradient
        found[embedding.padding_idx] = table[embedding.padding_idx]
    np.testing.assert_allclose(found, table, atol=2e-4 * np.abs(table).max())
    assert all(np.isfinite(np.asarray(g)).all() for g in jax.tree.leaves(grads))


def test_a_text_does_not_depend_on_those_beside_it() -> None:
    """Across blocks of queries too; a bound on segments changes nothing within it and shows what lies beyond it."""
    _, model, params = made("llama-tied-gqa1")
    rng = np.random.default_rng(0)
    texts = [[int(x) for x in rng.integers(0, 128, n)] for n in (61, 9, 70, 1, 40)]
    run = jax.jit(partial(functional.logprobs, model), static_argnames="longest")
    found = np.asarray(run(params, *flat(texts)))
    at = 0
    for text in texts:
        alone = np.asarray(run(params, *flat([text])))[: len(text)]
        np.testing.assert_allclose(found[at : at + len(text)], alone, rtol=2e-5, atol=2e-5)
        at += len(text)
    bound = np.asarray(run(params, *flat(texts), longest=70))
    np.testing.assert_allclose(bound, found, rtol=1e-5, atol=1e-5)
    short = np.asarray(run(params, *flat(texts), longest=61))
    assert np.isnan(short[70 + 62 :][: 70 - 62]).all()
    assert np.isfinite(short[: 70 + 62]).all()
    assert np.isfinite(short[140:]).all()


def layouts(model: functional.FunctionalModel) -> dict[str, Any]:
    mesh = make_mesh(4)
    auto = (AxisType.Auto,) * 2
    grid = jax.make_mesh((2, 2), ("data", "model"), axis_types=auto, devices=jax.devices()[:4])
    rules = ShardRules(vocab="model", kv_heads=None, ffn="model", embed="data")
    odd = jax.tree.map(
        lambda s: NamedSharding(
            mesh, PartitionSpec(*("tp" if n % 4 == 0 else None for n in s.shape[:1]))
        ),
        jax.eval_shape(partial(functional.init, model), jax.random.key(0)),
    )
    return {
        "vocab and mlp": functional.param_shardings(model, mesh, ShardRules(kv_heads=None)),
        "two axes, residual stream split": functional.param_shardings(model, grid, rules),
        "every first axis": odd,
    }


@pytest.mark.slow
def test_any_layout_gives_the_same_values_and_gradients() -> None:
    _, model, _ = made("llama-tied-gqa1")
    params = functional.init(model, jax.random.key(1))
    tokens, segments = flat(TEXTS)
    grad = jax.jit(
        jax.value_and_grad(lambda p: functional.logprobs(model, p, tokens, segments).mean())
    )
    value, grads = grad(params)
    for name, where in layouts(model).items():
        placed = jax.jit(partial(functional.init, model), out_shardings=where)(jax.random.key(1))
        assert not all(x.is_fully_replicated for x in jax.tree.leaves(placed)), name
        other, split = grad(placed)
        np.testing.assert_allclose(float(other), float(value), rtol=1e-5, err_msg=name)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(split), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_it_maps_over_parameters() -> None:
    """Evolution strategies: a population of parameters in one call."""
    _, model, _ = made("llama-tied-gqa1")
    keys = jax.random.split(jax.random.key(2), 3)
    many = jax.vmap(partial(functional.init, model))(keys)
    run = partial(functional.logprobs, model)
    tokens, segments = flat(TEXTS[:2])
    found = jax.jit(jax.vmap(run, in_axes=(0, None, None)))(many, tokens, segments)
    one = jax.jit(run)(functional.init(model, keys[1]), tokens, segments)
    np.testing.assert_allclose(np.asarray(found[1]), np.asarray(one), rtol=1e-5, atol=1e-5)


def test_taps_are_the_hidden_states_of_transformers() -> None:
    oracle, model, params = made("llama-tied-gqa1")
    tokens, segments = flat(TEXTS)
    run = jax.jit(partial(functional.forward, model), static_argnames="taps")
    _, found = run(params, tokens, segments, taps=("blocks.*.hook_resid_*", "ln_final.*"))
    L = model.arch.L
    names = [*(in_layer(i, "hook_resid_pre") for i in range(L)), "ln_final.hook_normalized"]
    at = 0
    for text in TEXTS:
        with torch.no_grad():
            states = oracle(torch.tensor([text]), output_hidden_states=True).hidden_states
        for name, state in zip(names, states, strict=True):
            mine = np.asarray(found[name])[at : at + len(text)]
            np.testing.assert_allclose(mine, state[0].numpy(), rtol=1e-4, atol=1e-4, err_msg=name)
        at += len(text)
    assert len(found) == 3 * L + 1


def test_what_is_added_to_the_stream_reaches_the_end() -> None:
    """A vector after layer 0 is the same as one before layer 1; at one token it changes later ones alone."""
    _, model, params = made("llama-tied-gqa1")
    tokens, segments = flat(TEXTS)
    run = jax.jit(partial(functional.forward, model), static_argnames="taps")
    vector = jax.random.normal(jax.random.key(3), (model.arch.D,))
    plain = run(params, tokens, segments)
    after, found = run(
        params,
        tokens,
        segments,
        taps=("blocks.0.hook_resid_post",),
        add={"blocks.0.hook_resid_post": vector},
    )
    before = run(params, tokens, segments, add={"blocks.1.hook_resid_pre": vector})
    np.testing.assert_array_equal(np.asarray(after), np.asarray(before))
    assert not np.allclose(after, plain)
    _, unsteered = run(params, tokens, segments, taps=("blocks.0.hook_resid_post",))
    for name, x_TD in unsteered.items():
        np.testing.assert_allclose(np.asarray(found[name]), np.asarray(x_TD + vector), rtol=1e-5)
    at = jnp.zeros((len(tokens), model.arch.D)).at[4].set(vector)
    late = np.asarray(run(params, tokens, segments, add={"blocks.0.hook_resid_pre": at}))
    changed = np.abs(late - np.asarray(plain)).max(axis=1) > 1e-6
    assert changed.tolist() == [4 <= t < len(TEXTS[0]) for t in range(len(tokens))]
    last = functional.lens(
        model,
        params,
        run(params, tokens, segments, taps=("blocks.1.hook_resid_post",))[1][
            "blocks.1.hook_resid_post"
        ],
    )
    np.testing.assert_allclose(
        last, functional.logits(model, params, tokens, segments), rtol=1e-5, atol=1e-5
    )


def test_points_are_checked() -> None:
    _, model, params = made("llama-tied-gqa1")
    with pytest.raises(ConfigError, match="no point of the residual stream") as caught:
        functional.forward(model, params, *flat(TEXTS), add={"blocks.0.hook_mlp_out": 1.0})
    assert caught.value.field == "add"
    with pytest.raises(ConfigError, match=r"blocks\.7") as caught:
        functional.forward(model, params, *flat(TEXTS), taps=("blocks.7.hook_mlp_out",))
    assert caught.value.field == "taps"
