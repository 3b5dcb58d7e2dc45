"""The parameters of a layer of experts: their shapes, and the tensors of a checkpoint in either spelling.

Checkpoints hold experts one by one (three tensors each), or all in two tensors, as transformers 5 keeps them::

    experts.0.gate_proj.weight [F, D]   experts.0.up_proj.weight   experts.0.down_proj.weight [D, F]   experts.1...
    experts.gate_up_proj [E, 2F, D]     experts.down_proj [E, D, F]

or in these two transposed, [E, D, 2F] and [E, F, D], in two ways: the columns of gate, then those of up (``halves``),
or a column of each in turn (``alternating``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jserve.errors import ConfigError
from jserve.model.arch import Arch, Moe
from jserve.model.param_spec import ExpertSizes, ParamSpec, Part
from jserve.model.shard import ShardRules, rule


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeNames:
    """The tensors of a layer's experts, after the layer's own name, and the keys of config.json that errors name."""

    each: str = "mlp.experts"
    """Before the number of an expert; empty: no checkpoint has them one by one."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    all: tuple[tuple[str, str], ...] = (("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),)
    """Gate with up, and down, of all experts together, in the ways that checkpoints spell them."""
    columns: str = ""
    """``halves`` or ``alternating``: tensors of all experts together are transposed so; empty: they are not."""
    mxfp4: bool = False
    """Checkpoints may have tensors of all experts together in mxfp4, as ``_blocks`` and ``_scales``; their rows of gate
    and up alternate."""
    router: tuple[str, ...] = ("mlp.gate.weight",)
    """In the ways that checkpoints spell it."""
    router_bias: str = "mlp.router.bias"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate.weight"
    shared_gate_up: str = ""
    """One tensor in ``shared`` for gate and up; empty: gate_proj and up_proj."""
    shared_down: str = "down_proj"
    width_key: str = "moe_intermediate_size"
    shared_width_key: str = "shared_expert_intermediate_size"


def routed_specs(moe: Moe, D: int, at: str, names: MoeNames) -> dict[str, ParamSpec]:
    """Router and experts of the layer called ``at``; its shared expert apart."""
    E, F, router = moe.E, moe.F, moe.router
    experts = ExpertSizes(n=E, width_key=names.width_key)
    both = [(_gate_up(f"{at}.{name}", E, F, D, names.columns),) for name, _ in names.all]
    down = [(_down(f"{at}.{name}", E, F, D, names.columns),) for _, name in names.all]
    if names.mxfp4 and D % 32 == 0 and F % 32 == 0:
        both += [(_packed(f"{at}.{name}", (E, F, 2, D), (0, 2, 1, 3)),) for name, _ in names.all]
        down += [(_packed(f"{at}.{name}", (E, D, F), (0, 1, 2)),) for _, name in names.all]
    layer = {
        "router": _exact((E, D), *(f"{at}.{name}" for name in names.router)),
        "expert_gate_up": _spec(
            (2 * E, F, D),
            ("experts", "ffn_expert", "embed"),
            [_each(E, at, names, (names.gate, names.up), (F, D)), *both],
            experts=experts,
        ),
        "expert_down": _spec(
            (E, D, F),
            ("experts", "embed", "ffn_expert"),
            [_each(E, at, names, (names.down,), (D, F)), *down],
            experts=experts,
        ),
    }
    if router.logit_bias:
        layer["router_bias"] = _exact((E,), f"{at}.{names.router_bias}")
    if router.choice_bias:
        layer["choice_bias"] = _exact((E,), f"{at}.{names.choice_bias}")
    if moe.expert_bias:
        layer |= _biases(moe, D, at, names)
    if moe.shared_gate:
        layer["shared_gate"] = _exact((1, D), f"{at}.{names.shared_gate}")
    return layer


def check_has_experts(arch: Arch, rules: ShardRules, sizes: Mapping[str, int]) -> None:
    """Refuse to spread the experts of a model that has none over a mesh of these axis sizes."""
    if rules.split("experts", sizes) and not any(isinstance(x.ffn, Moe) for x in arch.layers):
        name = "expert_parallel_size" if rules.stated is None else rule("experts")
        raise ConfigError(f"{name}: the model has no experts", field=name)


def _biases(moe: Moe, D: int, at: str, names: MoeNames) -> dict[str, ParamSpec]:
    """Of all experts together."""
    E, F = moe.E, moe.F
    experts = ExpertSizes(n=E, width_key=names.width_key)
    both = [(_gate_up_bias(f"{at}.{name}_bias", E, F, names.columns),) for name, _ in names.all]
    down = [_whole(f"{at}.{name}_bias", (E, D), (E, D)) for _, name in names.all]
    return {
        "expert_gate_up_bias": _spec((2 * E, F), ("experts", "ffn_expert"), both, experts=experts),
        "expert_down_bias": _spec((E, D), (None, "embed"), down),
    }


def _exact(shape: tuple[int, ...], *names: str) -> ParamSpec:
    """A parameter that decides a choice: float32, whole on every device; the tensor has one of these names."""
    ways = [_whole(name, shape, shape) for name in names]
    return _spec(shape, (None,) * len(shape), ways, dtype=jnp.float32)


def _each(
    E: int, at: str, names: MoeNames, of: Sequence[str], shape: tuple[int, int]
) -> tuple[Part, ...]:
    """A tensor for each of ``of``, of each expert in turn; () where checkpoints have none such."""
    if not names.each:
        return ()
    return tuple(
        Part(name=f"{at}.{names.each}.{e}.{name}.weight", shape=shape, view=(1, *shape))
        for e in range(E)
        for name in of
    )


def _gate_up(name: str, E: int, F: int, D: int, columns: str) -> Part:
    """[2E, F, D] out of a tensor of all experts."""
    if not columns:
        return Part(name=name, shape=(E, 2 * F, D), view=(2 * E, F, D))
    halves = columns == "halves"
    return Part(
        name=name,
        shape=(E, D, 2 * F),
        view=(2 * E, F, D),
        cut=(E, D, 2, F) if halves else (E, D, F, 2),
        order=(0, 2, 3, 1) if halves else (0, 3, 2, 1),
    )


def _gate_up_bias(name: str, E: int, F: int, columns: str) -> Part:
    """[2E, F] out of a tensor of all experts."""
    part = Part(name=name, shape=(E, 2 * F), view=(2 * E, F))
    return replace(part, cut=(E, F, 2), order=(0, 2, 1)) if columns == "alternating" else part


def _down(name: str, E: int, F: int, D: int, columns: str) -> Part:
    """[E, D, F] out of a tensor of all experts."""
    if not columns:
        return Part(name=name, shape=(E, D, F), view=(E, D, F))
    return Part(name=name, shape=(E, F, D), view=(E, D, F), cut=(E, F, D), order=(0, 2, 1))


def _packed(name: str, cut: tuple[int, ...], order: tuple[int, ...]) -> Part:
    """A tensor in mxfp4, of experts of all rows and then columns."""
    E, *rows, D = cut
    shape = [cut[axis] for axis in order]
    return Part(
        name=f"{name}_blocks",
        scales=f"{name}_scales",
        shape=(E, math.prod(rows), D // 32, 16),
        view=(math.prod(shape[:-2]), *shape[-2:]),
        cut=cut,
        order=order,
    )


def _whole(name: str, shape: tuple[int, ...], view: tuple[int, ...]) -> tuple[Part, ...]:
    return (Part(name=name, shape=shape, view=view),)


def _spec(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    ways: Sequence[tuple[Part, ...]],
    dtype: Any = None,
    experts: ExpertSizes | None = None,
) -> ParamSpec:
    """A parameter that checkpoints spell in these ways; those that are empty do not count."""
    parts, *spellings = (way for way in ways if way)
    return ParamSpec(
        shape=shape,
        axes=axes,
        parts=parts,
        spellings=tuple(spellings),
        dtype=dtype,
        experts=experts,
    )
