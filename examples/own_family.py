"""A model family of one's own: GPT-NeoX (Pythia), with LayerNorm and its bias, a GELU without a gate, attention and
MLP in parallel, heads that turn in part, one tensor for queries, keys and values.

python examples/own_family.py path/to/pythia
jserve serve path/to/pythia --plugins examples/own_family.py
"""

import sys
from collections.abc import Mapping
from typing import Any

import jax

import jserve
from jserve import SamplingParams, register_family
from jserve.model import decoder
from jserve.model.arch import Arch
from jserve.model.attention import LayerKV
from jserve.model.collectives import reduce
from jserve.model.ctx import Ctx
from jserve.model.dot import dot
from jserve.model.family import Family
from jserve.model.hf_config import decoder_arch
from jserve.model.hf_keys import every_key
from jserve.model.hf_rope import rope
from jserve.model.hf_values import boolean, integer, number, refuse
from jserve.model.layers import Params, attend_normed, embed, unembed
from jserve.model.param_spec import ParamSpec, Part
from jserve.model.shard import Axes


@every_key
def arch(config: Mapping[str, Any]) -> Arch:
    """Every key is honoured or refused by name: ``every_key`` sees to those that nothing here reads."""
    fixed = {"use_parallel_residual": True, "tie_word_embeddings": False, "attention_bias": True}
    for key, only in fixed.items():
        if boolean(config, key, only) is not only:
            refuse(key, f"must be {only}")
    turns = {"rope_theta": 1e4, "partial_rotary_factor": 0.25}
    turns |= config.get("rope_parameters") or {}
    for old, new in (("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor")):
        turns[new] = number(config, old, turns[new])
    N = integer(config, "num_attention_heads")
    if integer(config, "num_key_value_heads", N) != N:
        refuse("num_key_value_heads", f"must be num_attention_heads {N}")
    L, H = integer(config, "num_hidden_layers"), integer(config, "hidden_size") // N
    how = {"activations": {"gelu": "gelu"}, "eps": "layer_norm_eps", "default_eps": 1e-5}
    ropes = (rope({"rope_parameters": turns}, H=H),) * L
    return decoder_arch(config, "gpt-neox", ropes=ropes, **how)


def specs(arch: Arch, tp: int) -> dict[str, Any]:
    """Shapes, the logical axis of each dimension, and where each lies in a checkpoint."""
    decoder.check_tp(arch, tp)
    table = ("vocab", "embed")
    return {
        "embed": decoder.matrix("gpt_neox.embed_in", (arch.V, arch.D), table),
        "layers": [layer_specs(arch, f"gpt_neox.layers.{i}") for i in range(arch.L)],
        "final_norm": norm("gpt_neox.final_layer_norm", arch.D),
        "unembed": decoder.matrix("embed_out", (arch.V, arch.D), table),
    }


def layer_specs(arch: Arch, at: str) -> dict[str, Any]:
    D, F, N, H = arch.D, arch.F, arch.N, arch.H
    qkv, o = f"{at}.attention.query_key_value", f"{at}.attention.dense"
    up, down = f"{at}.mlp.dense_h_to_4h", f"{at}.mlp.dense_4h_to_h"
    heads = ("kv_heads", None, None)
    return {
        "attn_norm": norm(f"{at}.input_layernorm", D),
        "mlp_norm": norm(f"{at}.post_attention_layernorm", D),
        "qkv": viewed(f"{qkv}.weight", (3 * N * H, D), (N, 3, H, D), (*heads, "embed")),
        "qkv_bias": viewed(f"{qkv}.bias", (3 * N * H,), (N, 3, H), heads),
        "o": decoder.matrix(o, (D, N * H), ("embed", "kv_heads")),
        "o_bias": decoder.bias(o, D),
        "up": decoder.matrix(up, (F, D), ("ffn", "embed")),
        "up_bias": viewed(f"{up}.bias", (F,), (F,), ("ffn",)),
        "down": decoder.matrix(down, (D, F), ("embed", "ffn")),
        "down_bias": decoder.bias(down, D),
    }


def viewed(name: str, stored: tuple, shape: tuple, axes: tuple) -> ParamSpec:
    return ParamSpec(shape=shape, axes=axes, parts=(Part(name=name, shape=stored, view=shape),))


def norm(at: str, D: int) -> dict[str, ParamSpec]:
    return {"scale": decoder.norm(at, D), "shift": decoder.bias(at, D)}


def layer_norm(x_TD: jax.Array, p: Params, eps: float) -> jax.Array:
    x_TD = x_TD - x_TD.mean(axis=-1, keepdims=True)
    size_T1 = jax.lax.rsqrt((x_TD * x_TD).mean(axis=-1, keepdims=True) + eps)
    return x_TD * size_T1 * p["scale"] + p["shift"]


def forward(ctx: Ctx, params: Any, kv: list[LayerKV]) -> tuple[jax.Array, list[LayerKV]]:
    """Inside shard_map; a product over a split dimension ends in ``reduce``, and its bias comes after."""
    x_TD, eps, new_kv = embed(params["embed"], ctx.view.tok_T, ctx.axes), ctx.arch.norm.eps, []
    ctx = ctx.with_tables()
    for i, p in enumerate(params["layers"]):
        attn_in, mlp_in = (layer_norm(x_TD, p[at], eps) for at in ("attn_norm", "mlp_norm"))
        attn_TD, layer_kv = attend_normed(ctx.at(i), p, attn_in, kv[i])
        x_TD, new_kv = x_TD + attn_TD + mlp(ctx, p, mlp_in), [*new_kv, layer_kv]
    return layer_norm(x_TD, params["final_norm"], eps), new_kv


def mlp(ctx: Ctx, p: Params, x_TD: jax.Array) -> jax.Array:
    h_TF = jax.nn.gelu(dot(x_TD, p["up"]) + p["up_bias"], approximate=False)
    return reduce(dot(h_TF, p["down"]), ctx.axes.ffn) + p["down_bias"]


def logits(arch: Arch, params: Any, x_ED: jax.Array, axes: Axes) -> jax.Array:
    return unembed(params["unembed"], x_ED, axes, arch.V)


FAMILY = Family(
    name="gpt-neox",
    architectures=("GPTNeoXForCausalLM",),
    arch=arch,
    specs=specs,
    forward=forward,
    logits=logits,
)
register_family(FAMILY)


def main(model: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    with jserve.LLM(model) as llm:
        print(llm.generate("One, two, three,", params)[0].outputs[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:])
