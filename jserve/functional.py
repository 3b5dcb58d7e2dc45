"""A served model as pure functions of its parameters: what a trainer differentiates.

``forward``, ``logits`` and ``logprobs`` take flat, ragged tokens, and run under ``jit``, ``grad`` and ``vmap``::

    tokens    | 11 12 13 14 | 21 22 | 31 32 33 | pad |      int32[T]
    segments  |  0  0  0  0 |  1  1 |  2  2  2 | -1  |      int32[T]: a run of one number is one text

They know no mesh: XLA splits the work as the parameters lie, so any layout computes the same. The parameters are the
tree that ``LLM(params=)`` and ``LLM.update_weights`` take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jserve.errors import ConfigError
from jserve.kv_layout import KVLayer
from jserve.model.arch import Arch
from jserve.model.attn_train import BLOCK, train
from jserve.model.ctx import Ctx, Edit
from jserve.model.families import family_for
from jserve.model.family import Family
from jserve.model.mesh import make_mesh
from jserve.model.norms import normed
from jserve.model.param_spec import ParamSpec, is_spec
from jserve.model.points import POST, PRE, between_layers, matching
from jserve.model.rope import for_context
from jserve.model.shard import Axes, ShardRules, shardings
from jserve.model.view import SAMPLING, StepView
from jserve.weights.hf import read_config
from jserve.weights.loader import load
from jserve.weights.source import resolve

LOGITS_BLOCK = 128
"""Tokens whose logits exist at once in ``logprobs``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionalModel:
    """A model without its parameters: hashable, so that it can be a static argument of ``jit``."""

    family: Family
    arch: Arch
    dtype: Any
    """Of parameters whose spec names none, and of keys and values."""

    @property
    def specs(self) -> Any:
        """The parameters as ``ParamSpec``s, on one device."""
        return self.family.specs(self.arch, 1)


def model(
    source: str | Path | Mapping[str, Any], *, dtype: Any = "float32", max_model_len: int = 0
) -> FunctionalModel:
    """The model of a directory, or of a config.json as a mapping; no weights are read. ``max_model_len``
    beyond a model's original context gives all texts longrope's long factors, where the engine decides by request.

    Raises:
        ConfigError: the architecture or one of its keys is not supported, or the checkpoint is quantised.
    """
    config = source if isinstance(source, Mapping) else read_config(Path(source))
    if config.get("quantization_config"):
        why = "quantised weights have no gradient; convert them to a floating dtype first"
        raise ConfigError(f"quantization_config: {why}", field="quantization_config")
    family = family_for(config)
    arch = for_context(family.arch(config), max_model_len)
    return FunctionalModel(family=family, arch=arch, dtype=jnp.dtype(dtype))


def init(model: FunctionalModel, key: jax.Array) -> Any:
    """Random parameters: normal, with the mean and deviation that each spec names. Under ``jax.jit`` with
    ``out_shardings`` each device makes its own part."""
    specs, tree = jax.tree.flatten(model.specs, is_leaf=is_spec)

    def one(i: int, spec: ParamSpec) -> jax.Array:
        x = jax.random.normal(jax.random.fold_in(key, i), spec.shape, jnp.float32)
        return (x * spec.init + spec.init_mean).astype(spec.dtype or model.dtype)

    return jax.tree.unflatten(tree, [one(i, spec) for i, spec in enumerate(specs)])


def load_params(model: FunctionalModel, directory: str | Path) -> Any:
    """The parameters of a checkpoint (safetensors or Orbax), whole on the first device.

    Raises:
        ConfigError, WeightsError: as of the engine's own start.
    """
    source = resolve(str(directory))
    return load(model.family, model.arch, source, make_mesh(1), _WHOLE, model.dtype)


_WHOLE = ShardRules(vocab=None, kv_heads=None, ffn=None)


def param_shardings(model: FunctionalModel, mesh: Mesh, rules: ShardRules | None = None) -> Any:
    """The tree of NamedShardings that ``rules`` give on ``mesh``: one layout among many. ``rules.embed`` may name an
    axis here, as no collective of ours has to serve it."""
    return shardings(model.specs, mesh, rules or ShardRules())


def forward(
    model: FunctionalModel,
    params: Any,
    tokens: jax.Array,
    segments: jax.Array,
    *,
    longest: int | None = None,
    taps: Sequence[str] = (),
    add: Mapping[str, Any] | None = None,
) -> Any:
    """float32[T, D] after the final norm; with ``taps`` (that, {point: float32[T, D], of heads [T, N, H]}).

    Args:
        tokens: int32[T].
        segments: int32[T]; a run of one number is one text, a negative one padding.
        longest: tokens of the longest segment, by default T. Attention costs T * longest; values of tokens further
            on in their segment are NaN.
        taps: points to read, as ``jserve.model.points`` names them; ``*`` in one stands for anything.
        add: point of the residual stream (``hook_resid_pre`` or ``hook_resid_post``) -> [D] or [T, D] that is added to
            it there, before it is read.

    Raises:
        ConfigError: the model has no such point, or this family none; ``field`` is ``taps`` or ``add``.
    """
    points = matching(model.arch, taps, "taps") if taps else ()
    T = tokens.shape[0]
    view = flat_view(tokens, segments)
    ctx = Ctx.of(model.arch, view, train(longest or T), Axes())
    ctx = replace(ctx, edits=_edits(model, add or {}, view.pos_T.shape[0]))
    kv = unkept(model.arch.kv_layers, view.pos_T.shape[0], model.dtype)
    found: list[jax.Array] = []
    if points or add:
        if model.family.tapped is None:
            field = "taps" if points else "add"
            raise ConfigError(f"{field}: the family {model.family.name} has no points", field=field)
        x_TD, _, found = model.family.tapped(ctx, params, kv, points)
    else:
        x_TD, _ = model.family.forward(ctx, params, kv)
    reached_T = view.pos_T < (longest or T)
    x_TD, *found = (_nan_beyond(reached_T, y)[:T] for y in (x_TD, *found))
    return (x_TD, dict(zip(points, found, strict=True))) if taps else x_TD


def _nan_beyond(reached_T: jax.Array, x: jax.Array) -> jax.Array:
    """``x``, [T, ...], with NaN at the tokens that are not reached."""
    return jnp.where(reached_T.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.nan)


def lens(model: FunctionalModel, params: Any, x_TD: jax.Array) -> jax.Array:
    """float32[T, V]: the logits of a residual stream as if it left the last layer (the logit lens)."""
    return unembed(model, params, normed(model.arch.norm, x_TD, params["final_norm"]))


def unembed(model: FunctionalModel, params: Any, x_TD: jax.Array) -> jax.Array:
    """float32[T, V]: the logits of what ``forward`` gives."""
    return model.family.logits(model.arch, params, x_TD, Axes())


def logits(
    model: FunctionalModel,
    params: Any,
    tokens: jax.Array,
    segments: jax.Array,
    *,
    longest: int | None = None,
) -> jax.Array:
    """float32[T, V]: entry t is what the token after t is drawn by. Arguments as of ``forward``."""
    return unembed(model, params, forward(model, params, tokens, segments, longest=longest))


def logprobs(
    model: FunctionalModel,
    params: Any,
    tokens: jax.Array,
    segments: jax.Array,
    *,
    longest: int | None = None,
) -> jax.Array:
    """float32[T]: the log-probability of each token after those before it in its segment, as the engine reports it;
    0 for the first of a segment and for padding. Arguments as of ``forward``."""
    x_TD = forward(model, params, tokens, segments, longest=longest)
    T, D = x_TD.shape
    B = min(LOGITS_BLOCK, T)
    after_T = jnp.roll(tokens, -1)
    pad = -T % B
    items = (
        jnp.pad(x_TD, ((0, pad), (0, 0))).reshape(-1, B, D),
        jnp.pad(after_T, (0, pad)).reshape(-1, B),
    )

    @jax.checkpoint
    def block(item: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_BD, token_B = item
        raw_BV = unembed(model, params, x_BD)
        chosen_B = jnp.take_along_axis(raw_BV, token_B[:, None], axis=1)[:, 0]
        return chosen_B - jax.nn.logsumexp(raw_BV, axis=1)

    after = jax.lax.map(block, items).reshape(-1)[:T]
    return jnp.where(_places(segments)[0] > 0, jnp.roll(after, 1), 0.0)


def _edits(model: FunctionalModel, add: Mapping[str, Any], T: int) -> dict[str, Edit]:
    """``add`` for a pass over ``T`` tokens."""
    for name in add:
        if name not in between_layers(model.arch):
            raise ConfigError(
                f"add: {name!r} is no point of the residual stream: blocks.0 to"
                f" {model.arch.L - 1} with {PRE} or {POST}",
                field="add",
            )
    found = {name: jnp.asarray(x, jnp.float32) for name, x in add.items()}
    added = {
        name: x if x.ndim == 1 else jnp.pad(x, ((0, T - x.shape[0]), (0, 0)))
        for name, x in found.items()
    }
    return {name: partial(jnp.add, x) for name, x in added.items()}


def _places(segments_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(int32[T] position of each token in its segment, -1 for padding; int32[T] number of its segment)."""
    index_T = jnp.arange(segments_T.shape[0], dtype=jnp.int32)
    begins_T = jnp.concatenate([jnp.ones(1, bool), segments_T[1:] != segments_T[:-1]])
    first_T = jax.lax.cummax(jnp.where(begins_T, index_T, 0))
    row_T = jnp.cumsum(begins_T.astype(jnp.int32)) - 1
    return jnp.where(segments_T < 0, -1, index_T - first_T), row_T


def flat_view(tokens_T: jax.Array, segments_T: jax.Array) -> StepView:
    """The tokens as a step has them, padded to whole blocks; what only pages and draws need is empty."""
    pad = -tokens_T.shape[0] % BLOCK
    tok_T = jnp.pad(tokens_T.astype(jnp.int32), (0, pad))
    pos_T, row_T = _places(jnp.pad(segments_T.astype(jnp.int32), (0, pad), constant_values=-1))
    T = tok_T.shape[0]
    index_T, none_R = jnp.arange(T, dtype=jnp.int32), jnp.zeros(0, jnp.int32)
    unused = {c.name: none_R for c in SAMPLING}
    rows = ("slot_R", "start_R", "count_R", "first_R", "kv_len_R", "emit_R", "page_table_RM")
    return StepView(
        **unused,
        **dict.fromkeys(rows, none_R),
        flags=jnp.int32(0),
        n_decode=jnp.int32(0),
        n_prefill=jnp.int32(0),
        tok_T=jnp.where(pos_T < 0, 0, tok_T),
        row_T=row_T,
        pos_T=pos_T,
        write_page_T=index_T,
        write_off_T=jnp.zeros(T, jnp.int32),
        extra={},
        next_F=None,
        backfill_F=None,
        attn={},
        D=0,
        P=T,
        F=0,
        J=1,
    )


def unkept(layers: Sequence[KVLayer], T: int, dtype: Any) -> list[Any]:
    """A pool of one token a page for ``layers``, which says in what type keys and values are kept."""

    def array(heads: int, width: int) -> jax.Array:
        return jnp.zeros((T, 1, heads, width) if heads else (T, 1, width), dtype)

    return [tuple(array(a.heads, a.width) for a in layer.arrays) for layer in layers]
