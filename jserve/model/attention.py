"""The table of attention backends: how KV is laid out, written and attended to.

It owns the ``AttentionBackend`` type and the registry of backends.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jserve.errors import ConfigError
from jserve.kv_layout import Span
from jserve.model import latent_pool
from jserve.model.arch import Arch, Attention, Latent, Moe
from jserve.model.draft_tree import TreeShape
from jserve.model.view import Bucket, StepDims, StepView

LayerKV = tuple[jax.Array, ...]
"""(keys, values) of one layer, each of the backend's ``kv_shape`` and perhaps in parts (``widths``), or its latents
[P, Z, A + Y] alone."""
Places = tuple[jax.Array, jax.Array]
"""(pages, offsets) of entries, int32[A] each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sinks:
    """Attention sinks: the first ``n`` positions, visible to every token in addition to its window. Their scores take
    the queries ``q_TNH``, rotated as if the cache held the sinks and the window alone."""

    n: int
    q_TNH: jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendArgs:
    """The queries of a step's tokens, and what each sees of its row's KV."""

    q_TNH: jax.Array
    """Turned to the tokens' positions."""
    window: int
    """Newest positions that a token sees, its own among them; 0: all."""
    scale: float
    """Of the scores."""
    chunk: int = 0
    """As ``Span.chunk``."""
    sink_logits_N: jax.Array | None = None
    """A logit per query head that joins the sum of its softmax, with a value of zero and no cap; None: nothing
    does."""
    soft_cap: float = 0.0
    """c: scaled scores become c * tanh(score / c), before the mask; 0: they stay."""
    sinks: Sinks | None = None
    """None: nothing behind the window."""
    o_dtype: Any = jnp.float32
    """The type that the caller casts the result to, which a backend may do for it."""

    @property
    def span(self) -> Span:
        return Span(self.window, self.chunk)

    def sink_logits(self, K: int) -> jax.Array | None:
        """float32[K, G]: those of the query heads of each kv head."""
        if self.sink_logits_N is None:
            return None
        return self.sink_logits_N.astype(jnp.float32).reshape(K, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentArgs:
    """The queries of a step's tokens over latents: A numbers of which each head makes its own key (H) and its value
    (V), then a turned key of Y numbers that all heads share. A token sees all before it."""

    q_TNH: jax.Array
    """The parts that meet the heads' own keys."""
    q_TNY: jax.Array
    """The parts that meet the shared key, turned to the tokens' positions."""
    k_up_NHA: jax.Array
    v_up_NVA: jax.Array
    scale: float
    """Of the scores."""


def capped(x: jax.Array, soft_cap: float) -> jax.Array:
    """``soft_cap * tanh(x / soft_cap)``; 0: ``x``."""
    return soft_cap * jnp.tanh(x / soft_cap) if soft_cap else x


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """The product of queries, keys and values of decode rows of one token each, and what follows it."""

    y_STKCH: jax.Array
    """float32: S partial sums; of each kv head its queries, its key, its value."""
    bias_KCH: jax.Array | None
    norms: tuple[jax.Array, jax.Array] | None
    """Weights [H] of the norms of queries and of keys."""
    eps: float
    """Of those norms."""
    tables: tuple[jax.Array, jax.Array]
    """As ``rope.rope_tables`` gives them."""
    window: int
    scale: float
    """As of ``AttendArgs``."""


class KVStored(NamedTuple):
    """The KV of a layer as it is kept."""

    dtype: Any
    """Of the pool."""
    form: str = ""
    """In which its bytes are numbers (``kv_bytes``); empty: they are of ``dtype``."""
    page_size: int = 64
    """Tokens of a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeKernels:
    """All that lies between the products of a decode layer, in kernels of the backend's own.

    serves:   (D, H, dtype of the weights, dtype of the pool) -> bool.
    attend:   (projected, kv, view) -> (o_TNH in the dtype of the pool, kv): writes keys and values, then attends.
    add_norm: (y_STD, x_TD, weight_D, eps, dtype) -> (x_TD + sum of y, dtype[T, D] its norm).
    """

    serves: Callable[[int, int, Any, Any], bool]
    attend: Callable[[Projected, LayerKV, StepView], tuple[jax.Array, LayerKV]]
    add_norm: Callable[[jax.Array, jax.Array, jax.Array, float, Any], tuple[jax.Array, jax.Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernel:
    """The products of a mixture's experts in kernels of the backend's own.

    serves: (``Moe``, parameters of the layer) -> bool.
    form:   one of ``moe.Form``.
    """

    serves: Callable[[Any, Any], bool]
    form: Callable[..., tuple[jax.Array, jax.Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackend:
    """One way to keep and read KV.

    kv_shape:  (heads, width, n_pages, page_size) -> shape in the pool of a ``KVArray`` of so many heads
               on the whole mesh.
    kv_dtype:  dtype of the values -> dtype they are stored in (a backend may keep their bits as
               integers).
    kv_axis:   dimension of that shape that holds kv heads (sharded over the tensor-parallel axis).
    page_axis: the one that counts pages.
    plan_shapes: (bucket, dims) -> names and shapes of the int32 fields it adds to the packed
               buffer.
    plan:      (views, bucket, dims) -> None; numpy, fills its own ``attn.*`` views from the
               others. The start of a decode row is an upper bound there (-1 in the buffer means:
               read the slot). By default nothing is planned: work lists can come from the true
               lengths, on the device.
    write_kv:  (kv, k_TKH, v_TKH, view) -> kv. Padding tokens go to page 0.
    widths:    width of a stored vector -> those of the arrays, one beside the other, in which the pool keeps its parts;
               a layer's KV is then (keys, their second part, values, their second part).
    attend:    (args, kv, view) -> o_TNH, causal, in float32 or ``args.o_dtype``. Padding rows are
               finite. Decode rows see what ``view.tree`` says where it is given (never with sinks).
               Behind the window the page table may say anything in range (0 once a page was given
               back) and the pages may hold anything, also NaN.
    move:      (kv, (page_A, off_A), (page_A, off_A)) -> kv with the entries of the first places
               copied to the second ones; page 0 may hold anything after it.
    attend_latent: (args, latents [P, Z, A + Y], view) -> float32[T, N, V], as ``attend``; None: the backend has no
               multi-head latent attention. All backends write and move latents alike (``latent_pool``).
    has_sinks: False where ``attend`` takes no sinks.
    has_chunks: False where it takes no chunks.
    decode:     kernels for the rest of a decode layer; None: XLA makes them.
    experts:    kernels for mixtures of experts; None: the forms of ``moe`` by platform.
    for_experts: True where these are all that it has beyond another backend.
    check:     (the layer's ``Attention``, KV as stored, shape of the trees of drafts or ()) -> None. Raises
               ConfigError for what this backend cannot serve, naming the option.
    check_latent: (``Latent``, dtype as stored, shape of the trees) -> None, as ``check``, of latent attention.
    """

    name: str
    kv_axis: int
    kv_shape: Callable[[int, int, int, int], tuple[int, ...]]
    write_kv: Callable[[LayerKV, jax.Array, jax.Array, StepView], LayerKV]
    attend: Callable[[AttendArgs, LayerKV, StepView], jax.Array]
    move: Callable[[LayerKV, Places, Places], LayerKV]
    plan_shapes: Callable[[Bucket, StepDims], Mapping[str, tuple[int, ...]]] = lambda *_: {}
    plan: Callable[[Mapping[str, np.ndarray], Bucket, StepDims], None] = lambda *_: None
    kv_dtype: Callable[[Any], Any] = jnp.dtype
    page_axis: int = 0
    widths: Callable[[int], tuple[int, ...]] = lambda width: (width,)
    attend_latent: Callable[[LatentArgs, jax.Array, StepView], jax.Array] | None = None
    has_sinks: bool = True
    has_chunks: bool = True
    decode: DecodeKernels | None = None
    experts: ExpertKernel | None = None
    for_experts: bool = False
    check: Callable[[Attention, KVStored, TreeShape], None] = lambda *_: None
    check_latent: Callable[[Latent, Any, TreeShape], None] = lambda *_: None

    def pool_shapes(
        self, heads: int, width: int, n_pages: int, page_size: int
    ) -> list[tuple[int, ...]]:
        """As ``kv_shape``, of each part, also of an array without heads (``KVArray``)."""
        if not heads:
            return [(n_pages, page_size, width)]
        return [self.kv_shape(heads, part, n_pages, page_size) for part in self.widths(width)]

    def parts(self, vectors: jax.Array) -> tuple[jax.Array, ...]:
        """Vectors [..., width] as ``kv_quant.stored`` gives them, in the arrays that the pool keeps them in."""
        borders = list(itertools.accumulate(self.widths(vectors.shape[-1])))[:-1]
        return tuple(jnp.split(vectors, borders, axis=-1))

    def moved(self, kv: LayerKV, old: Places, new: Places) -> LayerKV:
        """``move`` of any layer's KV."""
        if len(kv) == 1:
            return (latent_pool.move(kv[0], old, new),)
        return self.move(kv, old, new)


def check_layers(
    attention: AttentionBackend, arch: Arch, stored: Any, tree: TreeShape, page_size: int
) -> None:
    """Refuse a model that has a layer which ``attention`` cannot serve.

    Args:
        stored: dtype of KV as stored.
        tree: shape of the trees of drafts, or ().

    Raises:
        ConfigError: ``field`` is the option that asks for it.
    """
    if attention.for_experts and not any(isinstance(layer.ffn, Moe) for layer in arch.layers):
        raise ConfigError(
            f"attention_backend {attention.name} is for models with experts, {arch.family} has none; dense serves it",
            field="attention_backend",
        )
    forms = arch.kv_forms or ("",) * arch.L
    kinds = zip((layer.attn for layer in arch.layers), forms, strict=True)
    other = "xla" if attention.name == "native" else "dense"
    for kind, form in dict.fromkeys(kinds):
        if kind.chunk and not attention.has_chunks:
            raise ConfigError(
                f"attention_backend {attention.name} does not serve the chunks of attention of"
                f" {arch.family}, {other} does",
                field="attention_backend",
            )
        if kind.latent is None:
            try:
                attention.check(kind, KVStored(jnp.dtype(stored), form, page_size), tree)
            except ConfigError as error:
                raise ConfigError(f"{arch.family}: {error.message}", field=error.field) from None
        elif attention.attend_latent is None:
            raise ConfigError(
                f"attention_backend {attention.name} does not serve the latent attention of"
                f" {arch.family}, {other} does",
                field="attention_backend",
            )
        else:
            attention.check_latent(kind.latent, stored, tree)


_BACKENDS: dict[str, str] = {
    "ref": "jserve.model.attn_ref:REF",
    "xla": "jserve.model.attn_xla:XLA",
    "native": "jserve.model.attn_native:NATIVE",
    "dense": "jserve.model.attn_dense:DENSE",
    "dense_experts": "jserve.model.attn_hopper:dense_experts",
    "hopper": "jserve.model.attn_hopper:hopper",
    "hopper_fused": "jserve.model.attn_hopper_fused:hopper_fused",
}

OVER_HEADS = ("native", "hopper", "hopper_fused")
"""Backends whose attention is kernels, for the heads of one device."""
KERNELS = ("hopper", "hopper_fused", "dense_experts")
"""Backends with kernels of Pallas, which run on a Hopper alone."""
HOPPER = "9.0"
"""Compute capability of the devices that the kernels are written for."""
MISCOMPILED = range(12080, 12091)
"""CUDA releases (1000 * major + 10 * minor) whose ptxas miscompiles causal masks: 12.8.0 to before 12.9.1."""


def candidates(
    asked: str, platform: str, capability: str = "", *, native: bool = False
) -> tuple[str, ...]:
    """Names of the backends that may serve what option ``attention_backend`` asks for, best first. Of several
    the first one is taken that serves the model and passes its test on the device; the last one needs none.

    Args:
        platform: of the devices, as jax calls it.
        capability: of a CUDA device, e.g. ``9.0``; empty: it is none.
        native: whether the native kernels in use have attention.

    Raises:
        ConfigError: ``native`` without them, or one of ``KERNELS`` on a device that these cannot run on.
    """
    reason = "" if platform == "cpu" else unserved(capability)
    if asked in KERNELS and reason:
        raise ConfigError(f"attention_backend {asked}: {reason}", field="attention_backend")
    if asked == "native" and not native:
        raise ConfigError(
            "attention_backend native: the native kernels in use have no attention, or there are none",
            field="attention_backend",
        )
    if asked != "auto":
        return (asked,)
    if platform == "cpu":
        return ("native", "xla") if native else ("xla",)
    return ("dense",) if reason else ("hopper", "dense_experts", "dense")


def unserved(capability: str) -> str:
    """The reason why the kernels of ``hopper`` cannot run on a GPU of this compute capability; empty: they can."""
    if capability != HOPPER:
        return f"its kernels are for compute capability {HOPPER}, this device has {capability or 'none'}"
    if (
        not (0, 11) <= jax.__version_info__ < (0, 12)
    ):  # 0.12 gives a block fewer registers than are asked for
        return f"it needs jax 0.11, this is {jax.__version__}"
    cuda = cuda_version()
    if cuda in MISCOMPILED:
        return f"the compiler of CUDA {cuda // 1000}.{cuda % 1000 / 10:g} miscompiles causal masks"
    return ""


def cuda_version() -> int:
    """Of the CUDA runtime that jax's plugin for CUDA 12 has loaded, 1000 * major + 10 * minor; 0: there
    is no such plugin, or it cannot say."""
    try:
        versions = importlib.import_module("jax_cuda12_plugin._versions")
        return int(versions.cuda_runtime_get_version())
    except Exception:  # without a library of CUDA it raises RuntimeError
        return 0


def backend(name: str, platform: str = "cpu") -> AttentionBackend:
    """The backend of that name; ``auto`` is the one that serves on any device of the platform.

    Raises:
        ConfigError: no such backend, or not with this jax.
    """
    name = candidates(name, platform)[-1] if name == "auto" else name
    if name not in _BACKENDS:
        raise ConfigError(
            f"attention_backend {name!r} does not exist, only auto, {', '.join(_BACKENDS)}",
            field="attention_backend",
        )
    module, _, attribute = _BACKENDS[name].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    return found if isinstance(found, AttentionBackend) else found(platform)
