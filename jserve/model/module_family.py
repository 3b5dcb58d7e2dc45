"""Serves a module of another library as a family: its forward pass is a function that asks for attention by layer.

The module sees the tokens of a step as one flat axis T, each with its position, and never the KV: ``attend`` writes
keys and values to the pages of the engine and reads them there. Its parameters are whole on every device; over several
devices only KV and attention are split, by heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.model.arch import Arch, Attention, DecoderLayer, Mlp
from jserve.model.attention import AttendArgs, LayerKV
from jserve.model.collectives import gather, n_shards, shard_index
from jserve.model.ctx import Ctx
from jserve.model.family import Family
from jserve.model.param_spec import ParamSpec
from jserve.model.shard import Axes


class Attend(Protocol):
    """The attention of one layer over all that its text had before."""

    def __call__(
        self,
        layer: int,
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array,
        *,
        scale: float | None = None,
    ) -> jax.Array:
        """float32[T, N, H]. Once for each layer, in any order.

        Args:
            q_TNH, k_TKH: turned to their positions already, where the module does that.
            scale: of the scores; by default H ** -0.5.
        """
        ...


Apply = Callable[[Any, jax.Array, jax.Array, Attend], jax.Array]
"""(params, int32[T] tokens, int32[T] positions from 0, attend) -> [T, D] that ``logits`` takes."""


def family_of(
    name: str,
    apply: Apply,
    params: Any,
    *,
    vocab: int,
    layers: int,
    heads: int,
    head_dim: int,
    kv_heads: int = 0,
    context: int,
    windows: Sequence[int] = (),
    logits: Callable[[Any, jax.Array], jax.Array] | None = None,
) -> Family:
    """A family for ``register_family``: a config.json whose ``architectures`` names ``name`` is served by ``apply``.

    Args:
        apply: a pure function of jax operations; what it gives for a token depends on others by ``attend`` alone.
        params: nested dicts or lists of arrays (or of their shapes), as ``LLM(params=)`` is given them.
        kv_heads: by default ``heads``.
        context: most tokens of a text.
        windows: of each layer, the newest positions that it sees, 0 for all; (): all see all.
        logits: (params, [E, D]) -> [E, vocab]; by default ``apply`` gives logits.

    Raises:
        ConfigError: numbers that do not fit each other; ``field`` is the name of one.
    """
    K = kv_heads or heads
    numbers = {
        "vocab": vocab,
        "layers": layers,
        "heads": heads,
        "head_dim": head_dim,
        "context": context,
    }
    for key, value in numbers.items():
        if value < 1:
            raise ConfigError(f"{key} must be at least 1, not {value}", field=key)
    if heads % K:
        raise ConfigError(f"kv_heads {K} does not divide heads {heads}", field="kv_heads")
    if windows and len(windows) != layers:
        raise ConfigError(f"windows must be {layers} numbers, one a layer", field="windows")
    arch = Arch(
        family=name,
        D=heads * head_dim,
        V=vocab,
        max_position=context,
        layers=tuple(
            DecoderLayer(
                attn=Attention(N=heads, K=K, H=head_dim, rope=None, window=window),
                ffn=Mlp(F=4 * heads * head_dim),
            )
            for window in windows or (0,) * layers
        ),
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    of = _Module(name, arch, apply, shapes, logits)
    return Family(
        name=name,
        architectures=(name,),
        arch=lambda config: arch,
        specs=of.specs,
        forward=of.forward,
        logits=of.logits,
    )


@dataclass(frozen=True, slots=True)
class _Module:
    """The arguments of ``family_of``, and the functions of its family."""

    name: str
    arch: Arch
    apply: Apply
    shapes: Any
    unembed: Callable[[Any, jax.Array], jax.Array] | None

    def specs(self, arch: Arch, tp: int) -> Any:
        """Raises ConfigError for devices that heads cannot be split over."""
        if arch.K % tp:
            why = f"{arch.K} kv heads cannot be split over {tp} devices"
            raise ConfigError(f"{self.name}: {why}", field="kv_heads")
        return jax.tree.map(
            lambda x: ParamSpec(shape=x.shape, axes=(None,) * len(x.shape), parts=()), self.shapes
        )

    def forward(self, ctx: Ctx, params: Any, kv: list[LayerKV]) -> tuple[jax.Array, list[LayerKV]]:
        """Raises ConfigError for a module that does not attend once in every layer."""
        attend = _Attending(ctx, kv)
        x_TD = self.apply(params, ctx.view.tok_T, jnp.maximum(ctx.view.pos_T, 0), attend)
        if sorted(attend.done) != list(range(self.arch.L)):
            why = f"attends in layers {attend.done}, not once in each of {self.arch.L}"
            raise ConfigError(f"{self.name} {why}", field="layers")
        return x_TD.astype(jnp.float32), attend.kv

    def logits(self, arch: Arch, params: Any, x_ED: jax.Array, axes: Axes) -> jax.Array:
        found_EV = x_ED if self.unembed is None else self.unembed(params, x_ED)
        if found_EV.shape[1] != arch.V:
            why = f"gives {found_EV.shape[1]} logits, vocab is {arch.V}"
            raise ConfigError(f"{self.name} {why}", field="vocab")
        return found_EV.astype(jnp.float32)


class _Attending:
    """The attention of one pass; it owns the KV while that lasts."""

    def __init__(self, ctx: Ctx, kv: list[LayerKV]) -> None:
        self._ctx, self.kv = ctx, list(kv)
        self.done: list[int] = []

    def __call__(
        self,
        layer: int,
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array,
        *,
        scale: float | None = None,
    ) -> jax.Array:
        self.done.append(layer)
        ctx, at = self._ctx.of_layer(layer, layer), self._ctx.view.array(layer)
        self._check(q_TNH, k_TKH, v_TKH)
        q_TNH, k_TKH, v_TKH = (_own(x, ctx.axes) for x in (q_TNH, k_TKH, v_TKH))
        self.kv[at] = ctx.attn.write_kv(self.kv[at], k_TKH, v_TKH, ctx.view)
        args = AttendArgs(
            q_TNH=q_TNH,
            window=ctx.spec.attn.window,
            scale=scale or ctx.spec.attn.H**-0.5,
        )
        return gather(ctx.attn.attend(args, self.kv[at], ctx.view), ctx.axes.heads, 1)

    def _check(self, *given: jax.Array) -> None:
        arch = self._ctx.arch
        for name, x, n in zip(("q", "k", "v"), given, (arch.N, arch.K, arch.K), strict=True):
            if x.ndim != 3 or x.shape[1:] != (n, arch.H):
                why = f"{name} of {arch.family} has shape {x.shape}, must be [T, {n}, {arch.H}]"
                raise ConfigError(why, field="heads")


def _own(x_TNH: jax.Array, axes: Axes) -> jax.Array:
    """float32: the heads of this device."""
    n, x_TNH = x_TNH.shape[1] // n_shards(axes.heads), x_TNH.astype(jnp.float32)
    if axes.heads is None:
        return x_TNH
    return jax.lax.dynamic_slice_in_dim(x_TNH, shard_index(axes.heads) * n, n, axis=1)
