"""Names the places of a decoder pass whose values can be read; they are TransformerLens's::

    hook_embed                  what enters layer 0
    blocks.I.hook_resid_pre     the residual stream that enters layer I
    blocks.I.attn.hook_q        queries, [T, N, H]: projected with their bias, before norms and positions
    blocks.I.attn.hook_k        keys, [T, K, H], like them
    blocks.I.attn.hook_v        values, [T, K, H]
    blocks.I.attn.hook_rot_q    queries as scores take them: normed, turned to their positions
    blocks.I.attn.hook_rot_k    keys, like them
    blocks.I.attn.hook_z        what each head attends to, [T, N, H], before the output projection
    blocks.I.hook_attn_out      what its attention adds
    blocks.I.hook_resid_mid     the stream between both; parallel layers have none
    blocks.I.hook_mlp_out       what its MLP, or its experts, add
    blocks.I.hook_resid_post    the stream that leaves it
    ln_final.hook_normalized    after the final norm, what logits are made of

All are float32, [T, D] where nothing else is said, the same on every device. Latent attention has no keys and values
of its heads: of ``attn`` it has ``hook_z`` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from jserve.errors import ConfigError
from jserve.model.arch import Arch
from jserve.model.feature import StepFeature

EMBED, NORMALIZED = "hook_embed", "ln_final.hook_normalized"
PRE, POST = "hook_resid_pre", "hook_resid_post"
ATTN_OUT, MID, MLP_OUT = "hook_attn_out", "hook_resid_mid", "hook_mlp_out"
HOOK_Q, HOOK_K, HOOK_V = "attn.hook_q", "attn.hook_k", "attn.hook_v"
ROT_Q, ROT_K, HOOK_Z = "attn.hook_rot_q", "attn.hook_rot_k", "attn.hook_z"
BY_HEAD = (HOOK_Q, HOOK_K, HOOK_V, ROT_Q, ROT_K, HOOK_Z)
"""The points of a layer that have an axis of heads."""
INSIDE = (*BY_HEAD, ATTN_OUT, MID, MLP_OUT)
"""The points of a layer that only the layer itself sees."""


def in_layer(layer: int, name: str) -> str:
    """The whole name of a layer's point."""
    return f"blocks.{layer}.{name}"


def entering(layer: int, L: int) -> str:
    """The point of the residual stream that enters ``layer``; L: that enters the final norm."""
    return in_layer(layer, PRE) if layer < L else in_layer(L - 1, POST)


def inside(points: Sequence[str], layer: int) -> tuple[str, ...]:
    """Those of ``INSIDE`` that ``points`` has of ``layer``."""
    return tuple(name for name in INSIDE if in_layer(layer, name) in points)


def all_points(arch: Arch) -> tuple[str, ...]:
    """Every point of a model, in the order in which a pass comes to them."""
    names = [EMBED]
    for i, layer in enumerate(arch.layers):
        lacks = {MID} if layer.parallel else set()
        lacks |= set(BY_HEAD) - {HOOK_Z} if layer.attn.latent is not None else set()
        middle = [name for name in INSIDE if name not in lacks]
        names += [in_layer(i, name) for name in (PRE, *middle, POST)]
    return (*names, NORMALIZED)


def is_by_head(point: str) -> bool:
    """True for a whole name of ``BY_HEAD``."""
    return point.endswith(BY_HEAD)


def between_layers(arch: Arch) -> tuple[str, ...]:
    """Points of the residual stream before and after each layer, where it can be changed."""
    return tuple(in_layer(i, name) for i in range(arch.L) for name in (PRE, POST))


def matching(arch: Arch, patterns: Sequence[str], field: str) -> tuple[str, ...]:
    """The points that any of ``patterns`` names, in the order of a pass; ``*`` in a pattern stands for anything.

    Raises:
        ConfigError: a pattern names none; ``field`` is the field that it was given in.
    """
    known = all_points(arch)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            of_layers = dict.fromkeys(name.split(".", 2)[2] for name in known[1:-1])
            raise ConfigError(
                f"{field}: {pattern!r} names no point of this model; its points are {EMBED},"
                f" blocks.0 to {arch.L - 1} with {', '.join(of_layers)}, and {NORMALIZED}",
                field=field,
            )
    return tuple(name for name in known if any(fnmatchcase(name, p) for p in patterns))


def written_by(arch: Arch, feature: StepFeature) -> tuple[str, ...]:
    """The points of a model where a step feature changes the residual stream.

    Raises:
        ConfigError: the model has none of that name, or it is not between layers; ``field`` is the feature's.
    """
    if not feature.writes:
        return ()
    found = matching(arch, feature.writes, feature.name)
    for name in found:
        if name not in between_layers(arch):
            why = f"{name} cannot be changed, only {PRE} and {POST} of a layer"
            raise ConfigError(f"{feature.name}: {why}", field=feature.name)
    return found


def read_by(arch: Arch, feature: StepFeature) -> tuple[str, ...]:
    """The points of a model that a step feature reads.

    Raises:
        ConfigError: the model has none of that name; ``field`` is the feature's.
    """
    return matching(arch, feature.points, feature.name) if feature.points else ()
