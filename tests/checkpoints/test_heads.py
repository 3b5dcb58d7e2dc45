"""Speculative heads: what is trained, what is measured and what jserve drafts are the same thing."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from checkpoints.recipe import acceptance, export, heads, packing, storage, tokenizer, train
from checkpoints.recipe.acceptance import Answer
from checkpoints.recipe.chat import prompt_and_answer
from checkpoints.recipe.eagle import EagleConfig
from checkpoints.recipe.evaluate import held_out
from checkpoints.recipe.head_export import export_head, hf_config, import_head
from checkpoints.recipe.medusa import MedusaConfig
from checkpoints.recipe.model import SIZES, init_params, packed_features
from jserve.model.attention import backend
from jserve.model.ctx import Ctx
from jserve.model.families import family_for
from jserve.model.family import Family
from jserve.model.hand import Row, pack
from jserve.model.mesh import make_mesh
from jserve.model.points import entering
from jserve.model.shard import Axes, ShardRules
from jserve.model.view import Bucket, StepDims, layout, unpack
from jserve.speculation.drafters.drafter import Drafter, Seen, Target
from jserve.speculation.drafters.heads import read_head
from jserve.weights.loader import load
from jserve.weights.source import resolve

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
TARGET = dataclasses.replace(SIZES["tiny"], layers=3)
HEADS = {
    "eagle3": EagleConfig(TARGET, taps=(0, 1, 2), ffn=40, vocab=96, steps=4),
    "medusa": MedusaConfig(TARGET, steps=3),
}


def shaken(params: Any, seed: int, scale: float) -> Any:
    """Parameters without the zeros and ones that training starts from."""
    keys = jax.random.split(jax.random.key(seed), len(jax.tree.leaves(params)))
    leaves = zip(jax.tree.leaves(params), keys, strict=True)
    moved = [x + scale * jax.random.normal(key, x.shape) for x, key in leaves]
    return jax.tree.unflatten(jax.tree.structure(params), moved)


@pytest.fixture(scope="module")
def tiny_tokenizer():
    return tokenizer.train_tokenizer(chats=300, vocab_size=TARGET.vocab)


@pytest.fixture(scope="module")
def target():
    return shaken(init_params(TARGET, 0), 1, 0.1)


@pytest.fixture(scope="module", params=list(HEADS))
def trained(request, target, tiny_tokenizer):
    """(config, task, params) of heads with random weights."""
    config = HEADS[request.param]
    task = heads.head_task(config, target, tiny_tokenizer)
    return config, task, shaken(task.init(0), 2, 0.1)


WIDTH = 32


@partial(jax.jit, static_argnums=0)
def _drafts(config: Any, frozen: Any, params: Any, tokens_BT: Any, documents_BT: Any) -> Any:
    features = packed_features(config.target, frozen["target"], tokens_BT, documents_BT)
    rows_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    of = (config, frozen, params, features, tokens_BT, documents_BT, rows_BT)
    return jnp.stack(heads.draft_logits(*of))


def drafts(
    config: Any, frozen: Any, params: Any, tokens: list[int], documents: list[int] | None = None
) -> np.ndarray:
    """float32[I, T, vocab] of one row of tokens, of one document if not said otherwise."""
    n = len(tokens)
    tokens_BT, documents_BT = np.zeros((2, 1, WIDTH), np.int32)
    tokens_BT[0, :n], documents_BT[0, :n] = tokens, documents or [1] * n
    return np.asarray(_drafts(config, frozen, params, tokens_BT, documents_BT))[:, 0, :n]


def some_tokens(n: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(1, TARGET.vocab, n).tolist()


@pytest.mark.slow
def test_what_comes_later_does_not_change_a_draft(trained):
    """The step i of row t may know tokens up to t + 1 + i, and must know the last of them."""
    config, task, params = trained
    tokens, other, at = some_tokens(12), some_tokens(12), 7
    other[at] = (tokens[at] + 1) % TARGET.vocab
    a, b = (drafts(config, task.frozen, params, x) for x in (tokens, other))
    for i in range(config.steps):
        ahead = 1 + i if isinstance(config, EagleConfig) else 0
        np.testing.assert_array_equal(a[i, : at - ahead], b[i, : at - ahead])
        assert not np.array_equal(a[i, at - ahead], b[i, at - ahead])


@pytest.mark.slow
def test_other_documents_do_not_change_a_draft(trained):
    config, task, params = trained
    tokens, documents = some_tokens(12), [1] * 5 + [2] * 7
    a = drafts(config, task.frozen, params, tokens, documents)
    b = drafts(config, task.frozen, params, [9] * 5 + tokens[5:], documents)
    np.testing.assert_array_equal(a[:, 5:], b[:, 5:])
    assert not np.array_equal(a[:, 4], b[:, 4])


@pytest.mark.slow
def test_feeding_the_text_counts_what_free_drafting_would(trained):
    """The measure feeds the text; a head that is fed its own drafts keeps as many, to the draft."""
    config, task, params = trained
    ids = np.asarray(task.frozen["draft_ids"])
    for seed in range(3):
        tokens, t = some_tokens(6, seed), 4
        free = list(tokens)
        for i in range(config.steps):
            best_I = drafts(config, task.frozen, params, [*free, 0])[:, t].argmax(-1)
            free.append(int(ids[best_I[i]]))
        for right in range(config.steps + 1):
            said = [*free[: 6 + right], *[1] * (config.steps - right)]
            fed = ids[drafts(config, task.frozen, params, said)[:, t].argmax(-1)]
            wrong = np.flatnonzero(fed != said[6:])
            kept = int(wrong[0]) if len(wrong) else config.steps
            assert kept >= right
            assert kept == right or said[6 + right] == free[6 + right]


def test_chains_start_where_the_assistant_speaks_on():
    said_BT = jnp.array([[0, 1, 1, 1, 0, 0, 1, 0] + 8 * [0]], bool)
    rows_BQ, ok_BQ = heads.chain_starts(said_BT)
    assert rows_BQ.shape == (1, 6)
    assert rows_BQ[ok_BQ].tolist() == [1, 2]


def test_the_draft_vocabulary_is_what_is_said_most(tiny_tokenizer):
    ids = heads.draft_vocabulary(tiny_tokenizer, 96)
    assert len(set(ids.tolist())) == 96
    assert (np.diff(ids) > 0).all()
    assert tiny_tokenizer.token_to_id("<|im_end|>") in ids
    assert tiny_tokenizer.token_to_id("<tool_response>") not in ids


@pytest.mark.slow
def test_only_the_draft_vocabulary_is_learnt(target, tiny_tokenizer):
    """Where the target's best token cannot be drafted, nothing is to be learnt."""
    config = dataclasses.replace(HEADS["eagle3"], steps=1)
    task = heads.head_task(config, target, tiny_tokenizer)
    tokens_BT = jnp.array([some_tokens(32)])
    ones_BT = jnp.ones_like(tokens_BT)
    logits_BTV = packed_features(TARGET, target, tokens_BT, ones_BT).logits_BTV
    best = set(np.asarray(logits_BTV.argmax(-1)).ravel().tolist())
    others = [t for t in range(TARGET.vocab) if t not in best]
    some = sorted([*best, *others])[: config.vocab]
    batch, loss = (tokens_BT, ones_BT, ones_BT.astype(jnp.float32)), jax.jit(task.loss)

    def lost(ids: list[int]) -> float:
        frozen = {**task.frozen, "draft_ids": np.array(ids)}
        return float(loss(frozen, task.init(0), batch))

    assert lost(others[: config.vocab]) == 0.0
    assert lost(some) > 1.0


SLOW = [pytest.param("eagle3", marks=pytest.mark.slow), "medusa"]  # compiling takes a minute


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_heads_learn(name, target, tiny_tokenizer):
    """One batch, seen again and again."""
    config = HEADS[name]
    task = heads.head_task(config, target, tiny_tokenizer)
    state, optimizer = train.fresh_state(task, 1)
    update = train.make_update(task, optimizer)
    batch = packing.short_batch(tiny_tokenizer, 1, 0, rows=4, length=128)
    arrays = tuple(map(jnp.asarray, dataclasses.astuple(batch)))
    losses = []
    for _ in range(12):
        state, loss = update(state, arrays, np.float32(1.0))
        losses.append(float(loss))
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_resumed_run_is_the_same_run(name, target, tiny_tokenizer, tmp_path):
    config = HEADS[name]
    task = heads.head_task(config, target, tiny_tokenizer)
    plan = train.Plan(config, 0.0, 6, tokens=512, length=128, long_every=0, save_every=3)
    train.run(plan, task, tiny_tokenizer, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train.run(plan, task, tiny_tokenizer, tmp_path / "parts", _stop_after(4))
    train.run(plan, task, tiny_tokenizer, tmp_path / "parts")
    whole, parts = (_stored(task, tmp_path / part) for part in ("whole", "parts"))
    jax.tree.map(np.testing.assert_array_equal, whole, parts)


def _stop_after(step: int):
    def report(clock, loss):
        if clock.step > step:
            raise KeyboardInterrupt

    return report


def _stored(task: train.Task, out: Path) -> Any:
    return storage.load_state(out / "state.safetensors", train.fresh_state(task, 1)[0])[0]


def test_replay_takes_the_right_drafts_and_one_token_more():
    answer = Answer(np.array([50, 51, 1, 2, 3, 4, 5, 6, 7]), prompt=2)  # says 1 2 3 4 5 6 7
    drafts_TI = np.zeros((9, 3), int)
    drafts_TI[1] = [2, 3, 9]  # after 1: two right, 4 is the target's own
    drafts_TI[4] = [9, 6, 7]  # after 4: the first is wrong
    drafts_TI[5] = [6, 7, 1]  # after 5: all that is left
    assert acceptance._replay(answer, drafts_TI) == [3, 1, 2]
    assert acceptance.tokens_per_step(lambda *_: drafts_TI[None], [answer]) == 2.0


def test_a_perfect_drafter_is_measured_as_one(target, tiny_tokenizer):
    """The target as its own draft model: every draft is right."""
    said = acceptance.answers(TARGET, target, tiny_tokenizer, "story", 2, temperature=0.0)
    drafter = acceptance.model_drafter(TARGET, target, steps=4)
    tokens = sum(len(answer.tokens) - answer.prompt - 1 for answer in said)
    steps = sum(-(-(len(answer.tokens) - answer.prompt - 1) // 5) for answer in said)
    assert acceptance.tokens_per_step(drafter, said) == tokens / steps


def test_sampled_answers_follow_the_seed(target, tiny_tokenizer):
    def said(temperature: float) -> list[Any]:
        found = acceptance.answers(TARGET, target, tiny_tokenizer, "story", 2, temperature)
        return [answer.tokens.tolist() for answer in found]

    assert said(0.7) == said(0.7)
    assert said(0.7) != said(0.0)


@dataclasses.dataclass
class Served:
    """A target and its heads as jserve loads them from their folders, in float32."""

    family: Family
    target: Target
    drafter: Drafter
    params: Any


def serve(folder: Path, target: Path, method: str) -> Served:
    source, mesh, rules = resolve(str(target)), make_mesh(1), ShardRules()
    family = family_for(source.config)
    arch = family.arch(source.config)
    params = load(family, arch, source, mesh, rules, jnp.float32)
    of = Target(
        arch=arch,
        params=params,
        embedding=family.embed,
        unembedding=family.logits,
        attn=backend("ref"),
        axes=Axes(),
    )
    drafter, load_weights = read_head(method, resolve(str(folder)), arch)
    return Served(family, of, drafter, load_weights(mesh, rules, jnp.float32))


def served_logits(served: Served, tokens: list[int], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """(float32[T, V]: the first draft after each token, float32[steps, V]: the chain after the last
    but ``steps``), by the functions that the step program calls."""
    of, drafter, params = served.target, served.drafter, served.params
    n = len(tokens) - steps
    row = Row(range(1, 9), 0, tokens[:n], slot=0)
    next_T = jnp.zeros(n + 2, jnp.int32).at[2:].set(jnp.array(tokens[1 : n + 1]))

    @jax.jit
    def observe(params, buf):
        view = _view(of, Bucket(D=2, P=n, F=1), buf)
        x_TD, taps = _pass(served, view)
        last_R = jnp.arange(2, n + 2)
        seen = Seen(view=view, next_T=next_T, x_TD=x_TD, taps=taps, last_R=last_R)
        kv = [_pages(of, drafter.arch) for _ in drafter.kv_layers]
        carry, kv = drafter.observe(of, params, seen, kv, Axes())
        return drafter.logits(of, params, carry, 0, Axes()), carry, kv

    @jax.jit
    def advance(params, carry, kv, buf):
        if drafter.advance is None:
            return carry, kv
        view = _view(of, Bucket(D=2, P=0, F=0), buf)
        return drafter.advance(of, params, carry, view, kv, Axes())

    first, carry, kv = observe(params, _buffer(of, Bucket(D=2, P=n, F=1), [], [row]))
    carry, chain = jnp.repeat(carry[-1:], 2, axis=0), [first[-1]]
    for i in range(1, steps):
        row = Row(range(1, 9), n + i - 1, [tokens[n + i]], slot=0)
        carry, kv = advance(params, carry, kv, _buffer(of, Bucket(D=2, P=0, F=0), [row], []))
        chain.append(drafter.logits(of, params, carry, i, Axes())[0])
    return np.asarray(first), np.asarray(jnp.stack(chain))


def _dims(of: Target) -> StepDims:
    return StepDims(C=2, M=8, Z=8, V=of.arch.V)


def _buffer(of: Target, bucket: Bucket, decode: list[Row], prefill: list[Row]) -> np.ndarray:
    return pack(bucket, _dims(of), of.attn, decode, prefill)


def _view(of: Target, bucket: Bucket, buf: jax.Array) -> Any:
    fields = layout(bucket, _dims(of), of.attn.plan_shapes(bucket, _dims(of)))
    zeros = jnp.zeros(2, jnp.int32)
    slots: Any = type("Slots", (), {"len_C": zeros, "last_C": zeros})
    return unpack(buf, fields, bucket, _dims(of), slots)


def _pass(served: Served, view: Any) -> tuple[jax.Array, list[jax.Array]]:
    of, drafter, tapped = served.target, served.drafter, served.family.tapped
    assert tapped is not None
    kv = [_pages(of, of.arch) for _ in range(of.arch.L)]
    points = [entering(i, of.arch.L) for i in drafter.taps]
    x_TD, _, taps = tapped(Ctx.of(of.arch, view, of.attn, Axes()), of.params, kv, points)
    return x_TD, taps


def _pages(of: Target, arch: Any) -> tuple[jax.Array, jax.Array]:
    shape = of.attn.kv_shape(arch.K, arch.H, 9, 8)
    return jnp.zeros(shape), jnp.zeros(shape)


def check_parity(folder: Path, target: Path, config: Any, tokens: list[int]) -> None:
    """jserve's logits of heads in a folder are those of the recipe's modules."""
    method = "eagle3" if isinstance(config, EagleConfig) else "medusa"
    params, ids = import_head(folder, config)
    frozen = {"target": export.import_params(target, config.target), "draft_ids": ids}
    ours = drafts(config, frozen, params, tokens)
    first, chain = served_logits(serve(folder, target, method), tokens, config.steps)
    n, scale = len(first), np.abs(ours).max()
    np.testing.assert_allclose(first[:, ids], ours[0, :n], rtol=0, atol=2e-4 * scale)
    np.testing.assert_allclose(chain[:, ids], ours[:, n - 1], rtol=0, atol=2e-4 * scale)
    unknown = np.setdiff1d(np.arange(config.target.vocab), ids)
    assert np.isneginf(chain[:, unknown]).all()


@pytest.mark.slow
def test_jserve_drafts_what_was_trained(trained, target, tiny_tokenizer, tmp_path):
    config, task, params = trained
    export.export(target, TARGET, tiny_tokenizer, tmp_path / "target", dtype=jnp.float32)
    stored = jax.tree.map(np.asarray, params)  # as a training state comes from disk
    export_head(stored, config, task.frozen["draft_ids"], "target", tmp_path / "head")
    check_parity(tmp_path / "head", tmp_path / "target", config, some_tokens(30))


SHIPPED = CHECKPOINTS / "jserve-mini"
FLOORS = {"eagle3": 5.0, "medusa": 2.0}
"""Tokens per verify step that the shipped heads reach, with a margin for the few answers judged."""


def shipped(method: str) -> tuple[Path, Any]:
    folder = CHECKPOINTS / f"jserve-mini-{method}"
    if not (folder / "config.json").exists():
        pytest.skip("no trained heads in this tree")
    return folder, heads.HEADS[method](export.read_config(SHIPPED))


@pytest.mark.parametrize("method", list(HEADS))
def test_the_shipped_heads_are_what_the_recipe_describes(method):
    folder, config = shipped(method)
    assert json.loads((folder / "config.json").read_text()) == hf_config(config, SHIPPED.name)
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size <= {"eagle3": 1_970_000, "medusa": 540_000}[method]


@pytest.mark.slow
@pytest.mark.parametrize("method", list(HEADS))
def test_jserve_drafts_what_the_shipped_heads_do(method):
    folder, config = shipped(method)
    text = (
        Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
        .encode(prompt_and_answer(held_out("tools", 1)[0])[0])
        .ids
    )
    check_parity(folder, SHIPPED, config, text[:32])


@pytest.mark.slow
@pytest.mark.parametrize("method", list(HEADS))
def test_the_shipped_heads_keep_their_promises(method):
    """A quick look at one skill; the table over all is in the model card."""
    folder, config = shipped(method)
    target, shipped_tokenizer = (
        export.import_params(SHIPPED, config.target),
        Tokenizer.from_file(str(SHIPPED / "tokenizer.json")),
    )
    params, ids = import_head(folder, config)
    drafter = acceptance.head_drafter(config, {"target": target, "draft_ids": ids}, params)
    said = acceptance.answers(config.target, target, shipped_tokenizer, "dialogue", 8, 0.0)
    assert acceptance.tokens_per_step(drafter, said) > FLOORS[method]
