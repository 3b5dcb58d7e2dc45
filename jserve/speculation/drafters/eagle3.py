"""EAGLE-3 heads: one decoder layer over the target's hidden states and the tokens that followed.

It owns the arithmetic of the head and its parameter tree, named as published checkpoints name it. Entry p of its KV
is made of ``f_p`` and token p + 1; ``f`` is the target's tapped hidden states through ``fc``, and for the head's
own drafts its own last output::

    f_p          = fc [tap_0; tap_1; tap_2] at p          or the output h of the entry before
    x            = [norm(embed(token p + 1)); norm(f_p)]
    h            = f_p + attention(x);  h = h + mlp(norm(h))
    draft p + 2  ~ unembed(norm(h)), of the draft vocabulary: row i is token i + d2t[i]

Source: EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.kv_layout import heads_over
from jserve.model import decoder
from jserve.model.arch import Arch
from jserve.model.attention import LayerKV
from jserve.model.ctx import Ctx
from jserve.model.dot import dot
from jserve.model.layers import attend_normed, embed, ffn_block, unembed
from jserve.model.norms import rms_norm
from jserve.model.param_spec import ParamSpec, Part
from jserve.model.shard import Axes
from jserve.model.view import StepView
from jserve.speculation.drafters.drafter import Drafter, Seen, Target

LAYER = "midlayer"


def eagle3(
    arch: Arch,
    target: Arch,
    *,
    taps: tuple[int, ...],
    own_embed: bool,
    own_unembed: bool = True,
    mapped: bool = True,
    norm_before_residual: bool = False,
) -> Drafter:
    """A head as the drafter of ``target``.

    Args:
        arch: of the head; ``arch.V`` is its draft vocabulary.
        taps: layers of the target whose entering residual streams it reads, in order.
        own_embed: it has an embedding; else the target's is used.
        own_unembed: it has an lm_head; else the target's is used, whole.
        mapped: it has d2t; else row i of its lm_head is token i.
        norm_before_residual: the residual stream starts at norm(f_p), not at f_p.

    Raises:
        ConfigError: sizes that do not go together.
    """
    if any(not 0 <= tap <= target.L for tap in taps) or not taps:
        raise ConfigError(
            f"speculative.model: hidden states of layers {list(taps)}, the target has {target.L}",
            field="speculative.model",
        )
    if (arch.V != target.V and not mapped) or arch.V > target.V:
        raise ConfigError(
            f"speculative.model: vocab_size is {arch.V}, the target's is {target.V}",
            field="speculative.model",
        )
    if arch.D != target.D and not (own_embed and own_unembed):
        raise ConfigError(
            f"speculative.model: hidden_size {arch.D} cannot share the embedding of the target's"
            f" {target.D}",
            field="speculative.model",
        )
    if not own_unembed and arch.V != target.V:
        raise ConfigError(
            "speculative.model: a draft vocabulary needs an lm_head of its own",
            field="speculative.model",
        )
    head = _Head(arch, target, taps, own_embed, own_unembed, mapped, norm_before_residual)
    return Drafter(
        name="eagle3",
        arch=arch,
        n_max=15,
        taps=taps,
        reads_next=True,
        specs=head.specs,
        observe=head.observe,
        advance=head.advance,
        logits=head.logits,
    )


class _Head:
    """The functions of one head."""

    def __init__(
        self,
        arch: Arch,
        target: Arch,
        taps: tuple[int, ...],
        own_embed: bool,
        own_unembed: bool,
        mapped: bool,
        norm_before_residual: bool,
    ) -> None:
        self.arch, self.target, self.taps = arch, target, taps
        self.own_embed, self.own_unembed, self.mapped = own_embed, own_unembed, mapped
        self.norm_before_residual = norm_before_residual

    def observe(
        self, of: Target, params: Any, seen: Seen, kv: list[LayerKV], axes: Axes
    ) -> tuple[jax.Array, list[LayerKV]]:
        f_TD = dot(jnp.concatenate(seen.taps, axis=1), params["fc"])
        ctx = Ctx.of(self.arch, seen.view, of.attn, axes)
        h_TD, kv = self._layer(ctx, of, params, f_TD, seen.next_T, kv)
        return h_TD[seen.last_R], kv

    def advance(
        self,
        of: Target,
        params: Any,
        carry_ED: jax.Array,
        view: StepView,
        kv: list[LayerKV],
        axes: Axes,
    ) -> tuple[jax.Array, list[LayerKV]]:
        ctx = Ctx.of(self.arch, view, of.attn, axes)
        return self._layer(ctx, of, params, carry_ED, view.tok_T, kv)

    def logits(self, of: Target, params: Any, h_ED: jax.Array, depth: int, axes: Axes) -> jax.Array:
        y_ED = rms_norm(h_ED, params["norm"], self.arch.norm.eps)
        if not self.own_unembed:
            return of.logits(y_ED)
        y_EV = unembed(params["unembed"], y_ED, axes, self.arch.V)
        if not self.mapped:
            return y_EV
        at_V = jnp.arange(self.arch.V, dtype=jnp.int32) + params["d2t"]
        whole_EV = jnp.full((y_EV.shape[0], self.target.V), -jnp.inf)
        return whole_EV.at[:, at_V].set(y_EV, mode="drop")

    def _layer(
        self,
        ctx: Ctx,
        of: Target,
        params: Any,
        f_TD: jax.Array,
        tok_T: jax.Array,
        kv: list[LayerKV],
    ) -> tuple[jax.Array, list[LayerKV]]:
        arch, p = self.arch, params["layer"]
        e_TD = embed(params["embed"], tok_T, ctx.axes) if self.own_embed else of.embed(tok_T)
        normed_TD = rms_norm(f_TD, p["hidden_norm"], arch.norm.eps)
        x_TX = jnp.concatenate([rms_norm(e_TD, p["embed_norm"], arch.norm.eps), normed_TD], axis=1)
        ctx = ctx.with_tables()
        y_TD, layer_kv = attend_normed(ctx, p, x_TX, kv[0])
        h_TD = (normed_TD if self.norm_before_residual else f_TD) + y_TD
        return h_TD + ffn_block(ctx, p, h_TD)[0], [layer_kv]

    def specs(self, tp: int) -> dict[str, Any]:
        """The parameter tree.

        Raises:
            ConfigError: the head cannot be split over ``tp`` shards.
        """
        arch, target = self.arch, self.target
        decoder.check_tp(arch, tp)
        attn, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
        tree: dict[str, Any] = {
            "fc": decoder.matrix("fc", (arch.D, len(self.taps) * target.D), (None, None)),
            "layer": {
                "embed_norm": decoder.norm(f"{LAYER}.input_layernorm", arch.D),
                "hidden_norm": decoder.norm(f"{LAYER}.hidden_norm", arch.D),
                "qkv": decoder.qkv(arch, attn, heads_over(arch.K, tp), "weight", width=2 * arch.D),
                "o": decoder.matrix(
                    f"{attn}.o_proj", (arch.D, arch.N * arch.H), ("embed", "kv_heads")
                ),
                "mlp_norm": decoder.norm(f"{LAYER}.post_attention_layernorm", arch.D),
                "gate_up": decoder.gate_up(arch.D, arch.F, mlp, "weight"),
                "down": decoder.matrix(f"{mlp}.down_proj", (arch.D, arch.F), ("embed", "ffn")),
            },
            "norm": decoder.norm("norm", arch.D),
        }
        if self.own_unembed:
            tree["unembed"] = decoder.matrix("lm_head", (arch.V, arch.D), ("vocab", "embed"))
        if self.own_embed:
            tree["embed"] = decoder.matrix("embed_tokens", (target.V, arch.D), ("vocab", "embed"))
        if self.mapped:
            part = Part(name="d2t", shape=(arch.V,), view=(arch.V,))
            tree["d2t"] = ParamSpec(
                shape=(arch.V,), axes=(None,), parts=(part,), init=0.0, dtype=jnp.int32
            )
        return tree
