"""Reads what config.json says of experts, in the keys that families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jserve.model.arch import Mlp, Moe, Router
from jserve.model.hf_config import activation
from jserve.model.hf_values import Config, integer, only, refuse, without_effect

COUNT = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys for the number of experts; files of one family have one or another."""


def experts(
    config: Config,
    router: Router,
    *,
    width: str = "intermediate_size",
    shared: int = 0,
    **fields: Any,
) -> Moe:
    """The experts of a layer.

    Args:
        width: the key of an expert's width.
        shared: width of the MLP that every token goes through; 0: there is none.
        fields: others of ``Moe``, by name.

    Raises:
        ConfigError: a key is missing or wrong, or a token has more experts than there are; ``field`` names it.
    """
    E, X = n_experts(config), integer(config, "num_experts_per_tok")
    act = activation(config)
    if E % router.groups:
        refuse("n_group", f"{router.groups} does not divide the {E} experts")
    most = E // router.groups * router.top_groups
    if most < X:
        refuse("num_experts_per_tok", f"{X} exceeds the {most} experts that can be chosen")
    return Moe(
        E=E,
        X=X,
        F=integer(config, width),
        router=router,
        shared=Mlp(F=shared, activation=act) if shared else None,
        **{"activation": act, **fields},
    )


def n_experts(config: Config) -> int:
    """The number of experts, under whichever key it is; two keys have to agree."""
    found = {key: integer(config, key) for key in COUNT if config.get(key) is not None}
    if len(set(found.values())) > 1:
        refuse(list(found)[-1], f"does not agree with {next(iter(found))}: {found}")
    return next(iter(found.values()), 0) or integer(config, COUNT[0])


def sparse_layers(config: Config) -> list[bool]:
    """True for each layer that has experts, as Qwen states it: every ``decoder_sparse_step``-th one, but for those of
    ``mlp_only_layers``."""
    L, step = integer(config, "num_hidden_layers"), integer(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(type(i) is int for i in dense):
        refuse("mlp_only_layers", f"must list numbers of layers, not {dense!r}")
    return [i not in dense and (i + 1) % step == 0 for i in range(L)]


_OF_EXPERTS = (
    *("num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor", "norm_topk_prob"),
    *("topk_method", "n_group", "topk_group"),
)
"""The keys of DeepSeek's experts beside their number."""


def deepseek_experts(
    config: Config, router: Callable[[], Router], *, n_shared: int
) -> list[Moe | None]:
    """The experts of each layer as DeepSeek states them: none in the first ``first_k_dense_replace`` layers, nor
    without ``n_routed_experts``.

    Args:
        router: read where a layer has experts.
        n_shared: shared experts where config.json is silent; they lie side by side in one MLP.
    """
    only(config, "moe_layer_freq", 1)
    L = integer(config, "num_hidden_layers")
    dense = integer(config, "first_k_dense_replace", 0, low=0)
    shared = integer(config, "n_shared_experts", n_shared, low=0)
    if not config.get("n_routed_experts") or dense >= L:
        without_effect(config, *_OF_EXPERTS)
        return [None] * L
    width = "moe_intermediate_size"
    moe = experts(config, router(), width=width, shared=shared * integer(config, width))
    return [None if i < dense else moe for i in range(L)]
