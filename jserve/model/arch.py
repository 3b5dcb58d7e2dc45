"""One decoder as values: each layer's own description, and what all layers share.

It owns ``Arch``, which everything that computes or sizes a model reads. A layer says itself which heads, rope, window
and norms it has, so families differ in values and the decoder has no switch for any of them::

    Arch  D, V, norm, ...      layers[0]  DecoderLayer   attn  Attention  N K H  rope  window  scale  ...
                               layers[1]  ...            ffn   Mlp        F  activation
                                                          or   Moe        E  X  F  router  shared
                               ...                       parallel  residual_scale
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jserve.errors import ConfigError
from jserve.kv_layout import KV_FORMS, SKIPPED, KVLayer, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Rotary scaling as config.json states it; ``kind`` is one of ``rope.KINDS``."""

    kind: str
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()
    """Of longrope: what each frequency is divided by."""
    long_factors: tuple[float, ...] = ()
    """The same for texts that outgrow ``original_max_position``."""
    longest: int = 0
    """Tokens of context under ``long_factors``."""
    by_row: bool = False
    """Each row of a step says which of the two it has (``view.LONG``); else all have ``factors``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The rotation of queries and keys by their position."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    rotary: int = 0
    """First dimensions of a head that turn, the rest stay; 0: all turn."""
    pairs: bool = False
    """Dimensions 2i and 2i + 1 turn together; else i and i + H/2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention: of a token a vector is kept, from which every head makes its key and its value,
    and one turned key that all heads share."""

    rank: int
    """Numbers of that vector."""
    turned: int
    """Numbers of the shared key, and of each query that meets it."""
    own: int
    """Numbers of a head's own key, and of each query that meets it; these do not turn."""
    value: int
    """Numbers of a head's value."""
    q_rank: int = 0
    """Queries are made from a vector of so many numbers; 0: from the layer's input."""

    @property
    def width(self) -> int:
        """Numbers that are kept of a token."""
        return self.rank + self.turned


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """Queries grow with their position: they are multiplied by 1 + scale * log(1 + floor((position + 1) / every))."""

    scale: float
    every: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """A layer's attention: N query heads over K kv heads of H numbers."""

    N: int
    K: int
    H: int
    rope: Rope | None = Rope()
    """None: positions show in the order of the tokens alone."""
    window: int = 0
    """Newest positions that a token sees, its own among them; 0: all."""
    chunk: int = 0
    """Positions are cut every so many, and a token sees those of its own piece; 0: all."""
    scale: float = 0.0
    """Of the scores; 0: H ** -0.5."""
    soft_cap: float = 0.0
    """c: scores become c * tanh(score / c); 0: they stay."""
    sink_logits: bool = False
    """A learned logit per query head joins the sum of its softmax (not the sinks of StreamingLLM)."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str = ""
    """Norm of queries and keys before they turn: ``head`` of each head, ``width`` of all heads together; ``turned``:
    of each head after it turned, without scales; empty: none."""
    clip_qkv: float = 0.0
    """Queries, keys and values are clipped to plus and minus this, after the norms; 0: they stay."""
    temperature: Temperature | None = None
    latent: Latent | None = None
    """Then K is 1 and H is ``Latent.width``, since every query is compared with what is kept. ``qkv_bias`` is that of
    what the vectors are made with; no norm, span, cap, temperature or sink logit goes with it."""

    @property
    def span(self) -> Span:
        return Span(self.window, self.chunk)

    @property
    def kv(self) -> KVLayer:
        """The KV that it keeps of a token."""
        if self.latent is not None:
            return KVLayer.latent(self.latent.width)
        span = self.span
        return KVLayer.attention(self.K, self.H, window=span.most, chunked=span.chunk > 0)

    def n_weights(self, D: int) -> int:
        """Parameters of the matrices of a layer that is D wide."""
        if (latent := self.latent) is None:
            return 2 * D * self.H * (self.N + self.K)
        own, q = self.N * (latent.own + latent.value), self.N * (latent.own + latent.turned)
        queries = latent.q_rank * (D + q) if latent.q_rank else D * q
        return queries + latent.width * D + latent.rank * own + self.N * latent.value * D

    @property
    def key_flops(self) -> int:
        """Of one query token and one key, in all heads."""
        width = self.H + self.latent.rank if self.latent is not None else 2 * self.H
        return 2 * self.N * width


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamped:
    """An activation of gate and up: (min(max(up, -limit), limit) + 1) * g * sigmoid(alpha g), g = min(gate, limit)."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A layer's gated MLP: down(activation(gate x) * up x), F wide."""

    F: int
    activation: str = "silu"
    """silu, gelu or gelu_tanh."""
    mlp_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The choice of a token's experts, and of the weights of their outputs; all in float32 (``moe.route``)."""

    score: str = "softmax"
    """softmax or sigmoid of the logits."""
    choose: str = "scores"
    """``scores``: the best scores of all experts. ``logits``: the best logits, and scores are of those alone."""
    normalise: bool = False
    """The weights of a token are divided by their sum."""
    scale: float = 1.0
    """Multiplies the weights."""
    logit_bias: bool = False
    """The logits have a bias."""
    choice_bias: bool = False
    """A learned number of each expert is added to its score for the choice, and not to the weight."""
    groups: int = 1
    """Experts lie in so many groups of equal size, and only those of the best groups can be chosen."""
    top_groups: int = 1
    group_score: str = "max"
    """A group is as good as its best expert, or, with ``top2``, as its two best together."""
    on_input: bool = False
    """The weight multiplies the expert's input in place of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """A layer of E gated MLPs, X of which a token goes through; each is F wide."""

    E: int
    X: int
    F: int
    router: Router = Router()
    activation: str | Clamped = "silu"
    expert_bias: bool = False
    """Both products of an expert have a bias."""
    shared: Mlp | None = None
    """An MLP that every token goes through; its output is added."""
    shared_gate: bool = False
    """That output is multiplied by the sigmoid of a learned product with the input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer. Where its norms lie, the parameters say (``decoder.decoder_layer``)."""

    attn: Attention
    ffn: Mlp | Moe
    parallel: bool = False
    """Attention and MLP read the same normed input, and both are added to the residual stream."""
    residual_scale: float = 1.0
    """Multiplies what attention and MLP add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """The norm of a decoder, one kind for all places."""

    eps: float = 1e-6
    centered: bool = False
    """LayerNorm without a bias: the mean is taken off; else RMS norm."""
    plus_one: bool = False
    """Its scales are stored less 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One decoder, normalised from config.json. Hashable: a static jit argument."""

    family: str
    D: int
    V: int
    max_position: int
    layers: tuple[DecoderLayer, ...]
    norm: Norm = Norm()
    tied: bool = False
    embed_scale: float = 1.0
    """Of the embedding's rows, rounded to the type of the table."""
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    """As ``Attention.soft_cap``, of logits; after their scale."""
    kv_scales: str = ""
    """Scales for KV of 8 bits in the checkpoint: ``tensor``, one for all kv heads, or ``attn_head``, one for each; or
    empty, none."""
    sinks: int = 0
    """First tokens that stay visible beside the windows (an option of the engine, not of config.json)."""
    kv_forms: tuple[str, ...] = ()
    """The form in which each layer's KV is kept as bytes (``kv_bytes``); empty: all in the pool's own type. An option
    of the engine, too."""
    kv_rotated: bool = False
    """Queries and keys meet turned by a Hadamard matrix, in which a channel of outliers is spread over all."""

    @property
    def L(self) -> int:
        return len(self.layers)

    @property
    def N(self) -> int:
        """Query heads; as K and H the same in all layers (``hf_config.decoder_arch``)."""
        return self.layers[0].attn.N

    @property
    def K(self) -> int:
        return self.layers[0].attn.K

    @property
    def H(self) -> int:
        return self.layers[0].attn.H

    @property
    def F(self) -> int:
        """Width of the dense MLPs, the same in all of them; 0 where every layer has experts."""
        return next((x.ffn.F for x in self.layers if isinstance(x.ffn, Mlp)), 0)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different ones, by first layer."""
        found = [layer.attn.rope for layer in self.layers]
        return tuple(dict.fromkeys(rope for rope in found if rope is not None))

    @property
    def kv_form(self) -> str:
        """Of the layers that are not skipped, and of a drafter's; empty: the pool's own type."""
        forms = (*(form for form in self.kv_forms if form not in SKIPPED), *self.kv_forms, "")
        return forms[0]

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        """The KV that each layer keeps of a token."""
        layers = tuple(layer.attn.kv for layer in self.layers)
        if not self.kv_forms:
            return layers
        return tuple(map(KVLayer.as_bytes, layers, self.kv_forms))


def resized(arch: Arch, *, L: int = 0, windows: Sequence[int] = (), **fields: Any) -> Arch:
    """``arch`` with other values of fields of ``Arch``, ``Attention``, ``Mlp`` or ``Moe``, in all such layers.

    Args:
        L: layers, as the first ones are, or more like these; 0: as many as before.
        windows: of each layer; empty: as before.
    """
    known = {name for of in (Attention, Mlp, Moe) for name in of.__dataclass_fields__}
    own = {name: fields.pop(name) for name in list(fields) if name in known}
    n, before = L or len(windows) or arch.L, arch.layers
    layers = [before[i % len(before)] for i in range(n)]
    layers = [replace(x, attn=_changed(x.attn, own), ffn=_changed(x.ffn, own)) for x in layers]
    if windows:
        layers = [
            replace(x, attn=replace(x.attn, window=w)) for x, w in zip(layers, windows, strict=True)
        ]
    return replace(arch, layers=tuple(layers), **fields)


def _changed(part: Any, fields: dict[str, Any]) -> Any:
    own = part.__dataclass_fields__
    return replace(part, **{name: value for name, value in fields.items() if name in own})


LEAST_HEAD = 16
"""Numbers of the smallest heads, of which all forms of KV differ in width."""


def with_kv_forms(
    arch: Arch, form: str, skipped: Sequence[str], dtype: str, *, rotate: bool = False
) -> Arch:
    """``arch`` with the form of each layer's KV, where it is not one plain type for all.

    Args:
        form: option ``kv_cache_dtype``.
        skipped: option ``kv_cache_dtype_skip_layers``: numbers of layers, from 0, or ``sliding_window``.
        dtype: of the activations, which skipped layers keep (float16 in float32).
        rotate: option ``kv_cache_rotate``.

    Raises:
        ConfigError: these heads or this attention have no such form, or a layer does not exist; ``field`` is the
            option.
    """
    if rotate and (form not in KV_FORMS or arch.H & (arch.H - 1)):
        why = f"needs kv_cache_dtype {' or '.join(KV_FORMS)} and heads of a power of two"
        raise ConfigError(
            f"kv_cache_rotate {why}, not {form} and {arch.H}", field="kv_cache_rotate"
        )
    if form not in KV_FORMS and not (skipped and form == "fp8_e4m3"):
        if skipped:
            raise _not_skipped(f"kv_cache_dtype {form} leaves nothing to skip")
        return arch
    why = ""
    if any(layer.attn.latent is not None for layer in arch.layers):
        why = f"does not go with the latents of {arch.family}"
    elif arch.H % 2 or arch.H < LEAST_HEAD:
        why = f"needs heads of {LEAST_HEAD} or more, an even number, not {arch.H}"
    if why:
        raise ConfigError(f"kv_cache_dtype {form} {why}", field="kv_cache_dtype")
    whole, kept = "bfloat16" if dtype == "bfloat16" else "float32", _skipped(arch, skipped)
    forms = tuple(whole if i in kept else form for i in range(arch.L))
    return replace(arch, kv_forms=forms, kv_rotated=rotate)


def _skipped(arch: Arch, names: Sequence[str]) -> set[int]:
    found: set[int] = set()
    for name in ",".join(names).replace(" ", "").split(",") if names else ():
        if name == "sliding_window":
            found |= {i for i, layer in enumerate(arch.layers) if layer.attn.window}
        elif name.isdecimal() and int(name) < arch.L:
            found.add(int(name))
        else:
            raise _not_skipped(
                f"{name!r} is no layer from 0 to {arch.L - 1}, and not sliding_window"
            )
    return found


def _not_skipped(why: str) -> ConfigError:
    name = "kv_cache_dtype_skip_layers"
    return ConfigError(f"{name}: {why}", field=name)
