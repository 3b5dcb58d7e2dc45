"""The quantised parameters of a family: its specs, with a ``QTensor`` of specs in place of a matrix.

It owns the names under which the loader asks for the parts of a quantised matrix, and what becomes of forms where
several tensors make one parameter or devices share its inputs::

    qkv  [K, G+2, H, D]   q_proj k_proj v_proj    QTensor   q      [K, G+2, H, D]        q_proj.weight:q      ...
                                                            scale  [K, G+2, H, groups]   q_proj.weight:scale  ...

A scale lies where its row does, so heads that are repeated, or split over devices, take theirs along.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jserve.model.arch import Arch
from jserve.model.family import Family
from jserve.model.param_spec import ParamSpec, Part, is_spec
from jserve.model.quant import HALF_BYTES, KINDS, PACKED, WIDE, Form, QTensor

FormOf = Callable[[str, int], Form | None]
"""(module of a checkpoint: a tensor without ``.weight``, its inputs) -> its form; None: it is not quantised."""

WEIGHT = ".weight"
NUMBERS, SCALE, ZERO = ":q", ":scale", ":zero"
SHIFT, ORDER, INPUT = ":shift", ":order", ":input"
ENDINGS = (NUMBERS, SCALE, ZERO, SHIFT, ORDER, INPUT)
"""Of the tensors that a quantised matrix consists of, whatever a file calls them."""
BLOCKS = "_blocks"
"""Ending of a tensor of all experts in mxfp4."""
EXPERTS = ("expert_gate_up", "expert_down")
MULTIPLIED = (
    *("qkv", "q", "q_a", "kv_a", "o", "gate_up", "down", "shared_gate_up", "shared_down"),
    *EXPERTS,
    "unembed",
)
"""The parameters that ``dot`` multiplies. Tables that rows are read from stay as they are."""
DEVIATION = 36.0
"""Of dummy integers: they stay within 8 bits."""


def quantised_specs(family: Family, form_of: FormOf) -> Family:
    """``family`` with the matrices of its layers and head as ``form_of`` says."""
    return replace(family, specs=partial(_specs, family, form_of), wide=family)


def _specs(family: Family, form_of: FormOf, arch: Arch, tp: int) -> Any:
    def one(path: Any, spec: ParamSpec) -> Any:
        name = getattr(path[-1], "key", None)
        if name not in MULTIPLIED:
            return spec
        spec, form = _found(form_of, spec)
        if form is not None and name in EXPERTS and form.ordered:
            return spec  # each has an order of its own
        fitted = form and _fitted(form, spec, tp)
        return spec if fitted is None else quantised_spec(spec, fitted)

    return jax.tree_util.tree_map_with_path(one, family.specs(arch, tp), is_leaf=is_spec)


def _found(form_of: FormOf, spec: ParamSpec) -> tuple[ParamSpec, Form | None]:
    """``spec`` with the parts that are quantised, and their form; as it is, and None, where none are."""
    D = spec.shape[-1]
    packed = next((way for way in spec.spellings if way[0].scales), ())
    if packed and (form := form_of(packed[0].name, D)) is not None:
        parts = tuple(replace(p, scales="", shape=(*p.shape[:2], D)) for p in packed)
        return replace(spec, parts=parts, spellings=()), form
    return spec, common([form_of(stem(part.name), D) for part in spec.parts])


def stem(tensor: str) -> str:
    """The module of a tensor: its name without ``.weight``."""
    return tensor.removesuffix(WEIGHT)


def common(forms: list[Form | None]) -> Form | None:
    """The form that holds all of these exactly; None where one is not quantised, or they do not go together."""
    first, whole = forms[0], [form for form in forms if form is not None]
    if first is None or len(whole) < len(forms) or len({_inputs(f) for f in whole}) > 1:
        return None
    kind = _holding({form.kind for form in whole})
    zeros, shifts = any(form.zeros for form in whole), any(form.shifts for form in whole)
    if kind is None or (zeros and shifts):
        return None
    group = math.gcd(*(form.group for form in whole))
    return replace(first, kind=kind, group=group, zeros=zeros, shifts=shifts)


def _inputs(form: Form) -> tuple[Any, ...]:
    """The ways of a form with the inputs of its matrix."""
    return form.rounded, form.static, form.bound, form.ordered


def _holding(kinds: set[str]) -> str | None:
    """The kind that has all numbers of these: 8 bits hold both of 4, e4m3 holds them, too."""
    if len(kinds) == 1:
        return None if WIDE in kinds else next(iter(kinds))
    if "e4m3" not in kinds:
        return None if WIDE in kinds else "int8"
    return None if kinds & {WIDE, "int8"} else "e4m3"


def _fitted(form: Form, spec: ParamSpec, tp: int) -> Form | None:
    """``form`` for a device's share of the inputs: groups that devices would cut become smaller ones of the same
    scales. None where devices share inputs that are in an order: those of a group are anywhere."""
    split = tp if spec.axes[-1] in ("kv_heads", "ffn", "ffn_expert") else 1
    if split > 1 and form.ordered:
        return None
    D = spec.shape[-1] // split
    kind = "int8" if form.kind in HALF_BYTES and D % PACKED else form.kind
    fitted = replace(form, kind=kind, group=math.gcd(form.group, D) if form.group else 0)
    return replace(fitted, made_as=form) if form.method and fitted != form else fitted


def quantised_spec(spec: ParamSpec, form: Form) -> QTensor:
    """The specs of a matrix in this form."""
    D = spec.shape[-1]
    groups = form.groups(D)
    packed = form.kind in HALF_BYTES
    scale = replace(
        _with_inputs(spec, groups, SCALE),
        axes=(*spec.axes[:-1], spec.axes[-1] if form.group else None),
        dtype=jnp.float32,
        init=0.0,
        init_mean=spec.init / (3.0 if packed else DEVIATION),
    )
    return QTensor(
        q=replace(
            _with_inputs(spec, form.stored(D), NUMBERS),
            dtype=jnp.dtype(KINDS[form.kind]),
            init=DEVIATION,
            init_mean=128.0 if packed else 0.0,
        ),
        scale=scale,
        zero=_beside(scale, ZERO, jnp.int8) if form.zeros else None,
        form=form,
        shift=_beside(scale, SHIFT, jnp.float32) if form.shifts else None,
        order=_of_tensors(spec, (D,), ORDER, jnp.int32) if form.ordered else None,
        input_scale=_of_tensors(spec, (), INPUT, jnp.float32) if form.static else None,
    )


def _beside(scale: ParamSpec, ending: str, dtype: Any) -> ParamSpec:
    """The spec of another number for each scale."""
    parts = tuple(replace(p, name=p.name.removesuffix(SCALE) + ending) for p in scale.parts)
    return replace(scale, parts=parts, init_mean=0.0, dtype=jnp.dtype(dtype))


def _of_tensors(spec: ParamSpec, shape: tuple[int, ...], ending: str, dtype: Any) -> ParamSpec:
    """The spec of what each tensor of a matrix has once: [tensors, *shape], whole on every device."""
    names = dict.fromkeys(part.name + ending for part in spec.parts)
    parts = tuple(Part(name=name, shape=shape or (1,), view=(1, *shape)) for name in names)
    whole = (len(parts), *shape)
    return ParamSpec(
        shape=whole,
        axes=(None,) * len(whole),
        parts=parts,
        dtype=jnp.dtype(dtype),
        init=0.0,
        init_mean=0.0 if shape else 1.0,
    )


def _with_inputs(spec: ParamSpec, n: int, ending: str) -> ParamSpec:
    """``spec`` with ``n`` numbers to a row."""

    def part(of: Part) -> Part:
        view, shape = (*of.view[:-1], n), (*of.shape[:-1], n)
        cut = (*of.cut[:-1], n) if of.cut else ()
        return replace(of, name=of.name + ending, shape=shape, view=view, cut=cut)

    return replace(spec, shape=(*spec.shape[:-1], n), parts=tuple(map(part, spec.parts)))
