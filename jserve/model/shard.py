"""The rules that map logical axes of weights to axes of a mesh, and what follows from them.

It owns ``ShardRules`` and ``Axes``, which the collectives of a step (``jserve.model.collectives``) read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jserve.errors import ConfigError
from jserve.model.mesh import AXIS, EXPERT_AXIS, MeshAxis, axis_names, mesh_axis, n_parts
from jserve.model.param_spec import ExpertSizes, OnMesh, ParamSpec, is_spec
from jserve.sharding import Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRules:
    """Logical axis -> mesh axis, or axes (None: replicated)."""

    vocab: MeshAxis = AXIS
    kv_heads: MeshAxis = AXIS
    ffn: MeshAxis = AXIS
    embed: MeshAxis = None
    extra: dict[str, MeshAxis] = field(default_factory=dict)
    """Rules of other names, and of ``ffn_expert``, the width of an expert, which lies as ``ffn`` does unless it is
    here, and ``experts``, which are whole on every device unless they are."""
    redundant_experts: int = 0
    """Slots of a layer beyond one for each expert, on all devices together."""
    sums: str = "float32"
    """As ``Sharding.sums``."""
    auto: bool = False
    """The step is written for one device, and XLA's partitioner inserts its collectives: any rule is honoured. Else
    it runs under shard_map with the collectives of ``Axes``."""
    params: tuple[tuple[str, tuple[MeshAxis, ...]], ...] = ()
    """With ``auto``: (regular expression of a parameter's path, mesh axes of each of its dimensions), before the rules;
    the first match counts."""
    logits: str = "gathered"
    """gathered: whole on every device; split: they lie as ``vocab`` does, and sampling is over the parts."""
    residual: str = "whole"
    """As ``Sharding.residual``."""
    stated: tuple[str, ...] | None = None
    """The logical axes whose rules a user's sharding has, in its order; errors name its keys. None: the rules follow
    from options."""

    @classmethod
    def of_sharding(
        cls, sharding: Sharding, sizes: Mapping[str, int], redundant_experts: int = 0
    ) -> ShardRules:
        """The rules of a sharding on a mesh of these axis sizes; of one without rules they are ``of_mesh``.

        Raises:
            ConfigError: the mesh does not go with it; ``field`` is the key.
        """
        sharding.check(sizes)
        if sharding.rules is None and not sharding.params:
            rules = cls.of_mesh(sizes, redundant_experts)
        else:
            given = sharding.rules or ()
            found: dict[str, Any] = {name: mesh_axis(axes) for name, axes in given}
            own = {name: found.pop(name, None) for name in _RULES}
            rules = cls(**own, extra=found, redundant_experts=redundant_experts)
        paths = tuple((path, tuple(map(mesh_axis, axes))) for path, axes in sharding.params)
        is_given = bool(sharding.mesh or sharding.params) or sharding.rules is not None
        return replace(
            rules,
            stated=tuple(name for name, _ in sharding.rules or ()) if is_given else None,
            auto=sharding.mode == "auto",
            params=paths,
            sums=sharding.sums,
            logits=sharding.logits,
            residual=sharding.residual,
        )

    @classmethod
    def of_mesh(cls, sizes: Mapping[str, int], redundant_experts: int = 0) -> ShardRules:
        """The rules of a mesh of these axis sizes: on one with an axis for experts these lie over it, their widths over
        the other one, and all else over both.

        Raises:
            ConfigError: redundant experts, and nothing that experts are split over.
        """
        if sizes.get(EXPERT_AXIS, 1) == 1:
            if redundant_experts:
                name = "num_redundant_experts"
                raise ConfigError(f"{name} needs an expert_parallel_size above 1", field=name)
            return cls()
        width = AXIS if AXIS in sizes else None
        both = mesh_axis([EXPERT_AXIS, *axis_names(width)])
        extra: dict[str, MeshAxis] = {"ffn_expert": width, "experts": EXPERT_AXIS}
        return cls(
            vocab=both,
            kv_heads=both,
            ffn=both,
            extra=extra,
            redundant_experts=redundant_experts,
        )

    @property
    def in_width(self) -> ShardRules:
        """The same for another model, each of whose experts is split over all devices, as an MLP is."""
        extra = {k: v for k, v in self.extra.items() if k not in _FOLLOWS}
        whole = replace(self, embed=None, logits="gathered", residual="whole")
        return replace(whole, extra=extra, redundant_experts=0, params=())

    def partition(self, axes: tuple[str | OnMesh | None, ...]) -> PartitionSpec:
        return PartitionSpec(*self.laid(axes))

    def laid(self, axes: tuple[str | OnMesh | None, ...]) -> tuple[MeshAxis, ...]:
        """The mesh axes of each dimension of a weight. Where with ``auto`` two rules name one mesh axis, the dimension
        of the earlier rule has it, and that of the later one is whole, as flax has it."""
        found = [self.axis(a) for a in axes]
        if not self.auto:
            return tuple(found)
        taken: set[str] = set()
        for d in sorted(range(len(axes)), key=lambda d: self._turn(axes[d])):
            if taken & set(axis_names(found[d])):
                found[d] = None
            taken |= set(axis_names(found[d]))
        return tuple(found)

    def _turn(self, name: str | OnMesh | None) -> int:
        order = self.names()
        return order.index(name) if name in order else len(order)

    def axis(self, name: str | OnMesh | None) -> MeshAxis:
        """The mesh axis of logical axis ``name``.

        Raises:
            ConfigError: no rule has that name; ``field`` is the rule.
        """
        if isinstance(name, OnMesh):
            return name.axis
        if name is None:
            return None
        if name in self.extra:
            return self.extra[name]
        if name in _FOLLOWS:
            followed = _FOLLOWS[name]
            return followed and self.axis(followed)
        if name not in _RULES:
            raise ConfigError(f"{rule(name)}: there is no such rule", field=rule(name))
        return getattr(self, name)

    def split(self, name: str | OnMesh, sizes: Mapping[str, int]) -> MeshAxis:
        """The mesh axes that split logical axis ``name`` on a mesh of these axis sizes, None where
        it is whole on every device.

        Raises:
            ConfigError: the mesh has no such axis; ``field`` is the rule.
        """
        names = axis_names(self.axis(name))
        lacking = next((axis for axis in names if axis not in sizes), None)
        if lacking is not None:
            field = rule(name)
            why = f"the mesh has no axis {lacking!r}, only {tuple(sizes)}"
            raise ConfigError(f"{field}: {why}", field=field)
        return mesh_axis([axis for axis in names if sizes[axis] > 1])

    def sharding(
        self, mesh: Mesh | AbstractMesh, axes: tuple[str | OnMesh | None, ...]
    ) -> NamedSharding:
        return NamedSharding(mesh, self.partition(axes))

    def described(self, sizes: Mapping[str, int]) -> str:
        """These rules on a mesh of these axis sizes, as one line: equal lines are equal sums, in the same order."""
        mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        laid = [(name, self.split(name, sizes)) for name in self._known]
        rules = [f"{name}:{'+'.join(axis_names(axis))}" for name, axis in laid if axis is not None]
        paths = [f"{path}:{axes}" for path, axes in self.params]
        others = ["auto"] * self.auto + [f"sums:{self.sums}"] * (self.sums != "float32")
        others += [f"logits:{self.logits}"] * (self.logits != "gathered")
        others += [f"residual:{self.residual}"] * (self.residual != "whole")
        others += [f"{a}<{b}" for a, b in self._contested() if self.auto]
        return " ".join([mesh, *rules, *paths, *others])

    def _contested(self) -> Iterator[tuple[str, str]]:
        """Rules that name one mesh axis for two dimensions of a weight, the one that has it first."""
        for a, b in combinations(self.names(), 2):
            if {a, b} & set(_BESIDE) and set(axis_names(self.axis(a))) & set(
                axis_names(self.axis(b))
            ):
                yield a, b

    def names(self) -> tuple[str, ...]:
        """The logical axes that have a rule, those that a user stated first; what follows one comes after it."""
        stated = self.stated or ()
        after = {name: [x for x in _followers(name) if x not in stated] for name in stated}
        first = [x for name in stated for x in (name, *after[name])]
        return tuple(dict.fromkeys((*first, *self._known)))

    @property
    def _known(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*_RULES, *_FOLLOWS, *self.extra)))


_RULES = ("vocab", "kv_heads", "ffn", "embed")
_FOLLOWS = {"ffn_expert": "ffn", "experts": None}
"""Logical axes of experts -> the one whose rule they have unless ``extra`` gives them their own."""
_BESIDE = ("embed", "experts")
"""Logical axes that weights have beside another one."""
_WHOLE = {"layers": "every device computes every layer"}
"""The reason why a dimension cannot be split."""


def _followers(name: str) -> list[str]:
    return [follower for follower, followed in _FOLLOWS.items() if followed == name]


def rule(name: str | OnMesh, table: str = "rules") -> str:
    """The name that errors give the rule of a logical axis, or the entry of another table."""
    return f"sharding.{table}.{name}" if isinstance(name, str) else f"sharding.params.{name.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The mesh axis that each logical dimension of a decoder is split over inside shard_map. None:
    whole on every device, so that a block over it needs no collective. Layers have no field here: a rule that splits
    them is refused."""

    heads: MeshAxis = None
    """Query heads and kv heads; those of one kv head lie together."""
    ffn: MeshAxis = None
    experts: MeshAxis = None
    ffn_expert: MeshAxis = None
    """The width of an expert."""
    vocab: MeshAxis = None
    embed: MeshAxis = None
    """The width of the residual stream."""
    sums: str = "float32"
    """As ``Sharding.sums``."""
    split_logits: bool = False
    """Logits of a split vocabulary stay where they are."""
    partitioned: bool = False
    """XLA's partitioner cuts the step, whose arrays are whole here."""
    tokens: MeshAxis = None
    """Of the residual stream, in steps that compute prompts (``Ctx.of``)."""

    @property
    def gathered(self) -> Axes:
        """The same for logits that are whole on every device."""
        return replace(self, split_logits=False)

    @property
    def whole_tokens(self) -> Axes:
        """The same for a residual stream that is whole on every device."""
        return replace(self, tokens=None)

    def exchanged(self, weights: Any) -> Any:
        """The type of partial sums between devices, of a product with ``weights``."""
        return weights.dtype if self.sums == "weights" else jnp.float32

    @property
    def routed(self) -> MeshAxis:
        """Of the sum over the experts that devices have, and over their widths."""
        return mesh_axis([*axis_names(self.experts), *axis_names(self.ffn_expert)])

    @classmethod
    def of(cls, rules: ShardRules, sizes: Mapping[str, int]) -> Axes:
        """The axes that ``rules`` give on a mesh of these axis sizes (``Mesh.shape``).

        Raises:
            ConfigError: the mesh lacks an axis, or no collective serves the rule; ``field`` is the
            rule.
        """
        found = {name: rules.split(name, sizes) for name in rules.names()}
        if rules.auto:
            return cls(partitioned=True)
        axes = cls(
            heads=found.pop("kv_heads"),
            ffn=found.pop("ffn"),
            experts=found.pop("experts"),
            ffn_expert=found.pop("ffn_expert"),
            vocab=found.pop("vocab"),
            embed=found.pop("embed"),
            sums=rules.sums,
            split_logits=rules.logits == "split",
        )
        if axes.split_logits and axes.vocab is None:
            field = "sharding.logits"
            raise ConfigError(f"{field}: split needs a rule that splits vocab", field=field)
        if rules.residual == "split":
            axes = replace(axes, tokens=axes.heads or axes.ffn)
            if axes.tokens is None:
                field = "sharding.residual"
                why = "split needs a rule that splits kv_heads or ffn"
                raise ConfigError(f"{field}: {why}", field=field)
        others = {*axis_names(axes.heads), *axis_names(axes.ffn), *axis_names(axes.vocab)}
        if both := set(axis_names(axes.embed)) & others:
            why = f"axis {min(both)!r} splits another dimension of the same weights"
            raise ConfigError(f"{rule('embed')}: {why}", field=rule("embed"))
        if set(axis_names(axes.experts)) & set(axis_names(axes.ffn_expert)):
            why = f"axis {axes.experts!r} splits the width of an expert already"
            raise ConfigError(f"{rule('experts')}: {why}", field=rule("experts"))
        for name, axis in found.items():
            if axis is not None:
                why = _WHOLE.get(name, "no collective of a step serves it")
                raise ConfigError(f"{rule(name)}: {why}; only null is supported", field=rule(name))
        return axes


def padded(specs: Any, rules: ShardRules, sizes: Mapping[str, int]) -> Any:
    """``specs`` with as many entries as the devices that share a dimension need for equal parts: a longer vocabulary,
    and spare slots of experts.

    Args:
        sizes: of the mesh's axes (``Mesh.shape``).

    Raises:
        ConfigError: the mesh has no such axis; ``field`` is the rule. Or experts do not fit it; ``field`` is the
            option, or the key of config.json.
    """
    n = n_parts(rules.split("vocab", sizes), sizes)

    def one(spec: ParamSpec) -> ParamSpec:
        if spec.experts is not None:
            return _with_slots(spec, spec.experts, rules, sizes)
        if "vocab" not in spec.axes:
            return spec
        d = spec.axes.index("vocab")
        pad = -spec.shape[d] % n
        if not pad:
            return spec
        assert len(spec.parts) == 1, "a vocabulary of several tensors"
        shape = (*spec.shape[:d], spec.shape[d] + pad, *spec.shape[d + 1 :])
        return replace(spec, shape=shape, concat=d, pad=pad)

    return _by_path(jax.tree.map(one, specs, is_leaf=is_spec), rules)


def _by_path(specs: Any, rules: ShardRules) -> Any:
    """``specs`` whose dimensions lie where ``rules.params`` says."""
    unused = {pattern for pattern, _ in rules.params}

    def one(path: Any, spec: ParamSpec) -> ParamSpec:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found = next((p for p in rules.params if re.fullmatch(p[0], name)), None)
        if found is None:
            return spec
        pattern, axes = found
        unused.discard(pattern)
        if len(axes) != len(spec.shape):
            field = rule(pattern, "params")
            why = f"{len(axes)} entries, but {name} has the dimensions {spec.shape}"
            raise ConfigError(f"{field}: {why}", field=field)
        return replace(spec, axes=tuple(OnMesh(axis, pattern) for axis in axes))

    laid = jax.tree_util.tree_map_with_path(one, specs, is_leaf=is_spec) if unused else specs
    if unused:
        field = rule(min(unused), "params")
        raise ConfigError(f"{field}: no parameter has such a path", field=field)
    return laid


def _with_slots(
    spec: ParamSpec, experts: ExpertSizes, rules: ShardRules, sizes: Mapping[str, int]
) -> ParamSpec:
    """The parameter of a layer's experts, with its spare slots."""
    assert (spec.axes[0], spec.concat) == ("experts", 0), "experts are along the first axis"
    n, spare, E = n_parts(rules.split("experts", sizes), sizes), rules.redundant_experts, experts.n
    width = n_parts(rules.split("ffn_expert", sizes), sizes)
    F = spec.shape[spec.axes.index("ffn_expert")] if "ffn_expert" in spec.axes else 0

    def field(option: str, logical: str) -> str:
        return option if rules.stated is None else rule(logical)

    if (E + spare) % n:
        most = f"{E} experts" + (f" and {spare} redundant ones" if spare else "")
        more = f"num_redundant_experts {spare + -(E + spare) % n} would fill them up"
        name = field("expert_parallel_size", "experts")
        raise ConfigError(f"{name} {n} does not divide {most}; {more}", field=name)
    if spare > E:
        name = "num_redundant_experts"
        raise ConfigError(f"{name} {spare} exceeds the {E} experts of a layer", field=name)
    if F % width:
        name = field(experts.width_key, "ffn_expert")
        why = f"{experts.width_key} {F} is not divisible by tensor_parallel_size {width}"
        raise ConfigError(why if rules.stated is None else f"{name}: {why}", field=name)
    copies = spare * (spec.shape[0] // E)
    return replace(spec, shape=(spec.shape[0] + copies, *spec.shape[1:]), copies=copies)


def partitions(specs: Any, rules: ShardRules) -> Any:
    """The tree of PartitionSpecs of a tree of ParamSpecs."""
    return jax.tree.map(lambda s: rules.partition(s.axes), specs, is_leaf=is_spec)


def shardings(specs: Any, mesh: Mesh, rules: ShardRules) -> Any:
    """The tree of NamedShardings of a tree of ParamSpecs."""
    return jax.tree.map(lambda s: rules.sharding(mesh, s.axes), specs, is_leaf=is_spec)


def abstract(specs: Any, mesh: Mesh, rules: ShardRules, dtype: Any) -> Any:
    """ShapeDtypeStructs with shardings, for ahead-of-time compilation and restore."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(
            s.shape, s.dtype or dtype, sharding=rules.sharding(mesh, s.axes)
        ),
        specs,
        is_leaf=is_spec,
    )
