"""``Sharding``: where a model lies on a mesh of devices, as data, from YAML, JSON, a mapping or ``tp=4``.

It owns the format and the checks that need no model. What the rules do to weights and to a step is in
``jserve.model.shard``. ::

    mesh: {x: 2, y: 4}          # axes and their sizes; the last one varies fastest over the devices
                                # dp: groups of devices, outermost, each with an engine of its own
    mode: manual                # manual: shard_map, the collectives are ours; auto: XLA's partitioner inserts them
    rules:                      # logical axis -> mesh axis, several of them, or null; one that is absent is null
      kv_heads: y
      ffn: [x, y]
      vocab: [x, y]
    sums: weights               # type in which devices exchange partial sums: float32 (the default), or the weights'
    params:                     # mode auto only: regular expression of a parameter's path -> an entry per dimension
      layers/.*/down: [null, [x, y]]
    logits: gathered            # or split: sampling over the parts of a split vocabulary, mode manual only
    residual: whole             # or split: over the tokens, in steps that compute prompts, mode manual only
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jserve.errors import ConfigError
from jserve.option_names import hint

FIELD = "sharding"
KEYS = ("mesh", "mode", "rules", "sums", "logits", "residual", "params")
MODES = ("manual", "auto")
SUMS = ("float32", "weights")
LOGITS = ("gathered", "split")
RESIDUAL = ("whole", "split")
LOGICAL = ("vocab", "kv_heads", "ffn", "embed", "experts", "ffn_expert")
"""The axes of weights that have a rule."""
OWN = ("tp", "ep")
"""Mesh axes that need no rules: of tensor parallelism, and of whole experts."""
DP = "dp"
"""The mesh axis over groups of devices that share no request: data parallel engines. No rule may name it."""
LATER = {
    "pp": "stages of layers are not built",
    "context": "a context split over devices is not built",
}
"""Mesh axes of others, and why there are none such here."""

MeshAxes = tuple[str, ...]
"""Axes of a mesh that one dimension is split over, the first one outermost; (): it is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """A mesh, and what lies over which of its axes."""

    mesh: tuple[tuple[str, int], ...] = ()
    """(axis, devices) of one engine; (): the mesh is given beside this."""
    dp: int = 1
    """Groups of so many devices, one engine each."""
    mode: str = "manual"
    rules: tuple[tuple[str, MeshAxes], ...] | None = None
    """(logical axis, mesh axes); None: those of a mesh of ``OWN`` axes, or none beside ``params``."""
    sums: str = "float32"
    """The type in which devices exchange partial sums, which are added in float32: that, or the one of the weights."""
    params: tuple[tuple[str, tuple[MeshAxes, ...]], ...] = ()
    """(regular expression of a parameter's path, mesh axes of each dimension); the first match counts."""
    logits: str = "gathered"
    """gathered: whole on every device where tokens are drawn; split: they stay split as ``vocab`` is."""
    residual: str = "whole"
    """whole on every device between the products; split: over the tokens of steps that compute prompts."""

    @classmethod
    def of(cls, given: Sharding | Mapping[str, Any] | str | Path) -> Sharding:
        """``given`` as a value: a mapping, its JSON text, the path of its YAML file, or sizes as in ``tp=4,ep=2``.

        Raises:
            ConfigError: it cannot be honoured on any model; ``field`` is the key, as in ``sharding.rules.ffn``.
        """
        if isinstance(given, Sharding):
            return given
        found = given if isinstance(given, Mapping) else _read(str(given))
        for key in found:
            if key not in KEYS:
                raise _bad(str(key), f"there is no such key{hint(str(key), KEYS)}")
        mode = _one_of("mode", found.get("mode", "manual"), MODES)
        sizes = _mesh(found.get("mesh") or {})
        dp = sizes.pop(DP, 1)
        if dp > 1 and not sizes:
            sizes = {OWN[0]: 1}
        sharding = cls(
            mesh=tuple(sizes.items()),
            dp=dp,
            mode=mode,
            rules=_rules(found["rules"]) if "rules" in found else None,
            sums=_one_of("sums", found.get("sums", SUMS[0]), SUMS, mode),
            params=_params(found.get("params") or {}, mode),
            logits=_one_of("logits", found.get("logits", LOGITS[0]), LOGITS, mode),
            residual=_one_of("residual", found.get("residual", RESIDUAL[0]), RESIDUAL, mode),
        )
        if sharding.mesh:
            sharding.check(dict(sharding.mesh))
        return sharding

    @property
    def n_devices(self) -> int:
        """Of all groups."""
        return self.dp * self.group_size

    @property
    def group_size(self) -> int:
        """Devices of one engine."""
        return math.prod(size for _, size in self.mesh)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> devices of one engine.

        Raises:
            ConfigError: the mesh is to be given beside this; for those that have none.
        """
        if not self.mesh:
            raise _bad("mesh", "is missing, and no Mesh is given beside it")
        return dict(self.mesh)

    @property
    def group(self) -> Sharding:
        """Of one engine."""
        return replace(self, dp=1)

    def check(self, sizes: Mapping[str, int]) -> None:
        """Refuse what a mesh of these axis sizes cannot honour.

        Raises:
            ConfigError: a rule names an axis that the mesh lacks, or nothing uses one of its axes.
        """
        uses = [(f"rules.{name}", axes) for name, axes in self.rules or ()]
        uses += [(f"params.{path}", sum(each, ())) for path, each in self.params]
        for name, axes in uses:
            if DP in axes:
                raise _bad(
                    name, "groups of axis 'dp' share no request, so that nothing is split over it"
                )
            lacking = next((axis for axis in axes if axis not in sizes), None)
            if lacking is not None:
                raise _bad(name, f"the mesh has no axis {lacking!r}, only {tuple(sizes)}")
        used = {axis for _, axes in uses for axis in axes}
        used |= set(OWN) if self.rules is None and not self.params else set()
        for axis, size in sizes.items():
            if size > 1 and axis not in used:
                raise _bad(f"mesh.{axis}", f"no rule uses its {size} devices")

    def as_mapping(self) -> dict[str, Any]:
        """The mapping that ``of`` reads as this value."""
        found: dict[str, Any] = {"mesh": dict(self._sizes), "mode": self.mode}
        if self.rules is not None:
            found["rules"] = {name: list(axes) or None for name, axes in self.rules}
        if self.sums != "float32":
            found["sums"] = self.sums
        if self.params:
            found["params"] = {
                path: [list(axes) or None for axes in each] for path, each in self.params
            }
        if self.logits != LOGITS[0]:
            found["logits"] = self.logits
        if self.residual != RESIDUAL[0]:
            found["residual"] = self.residual
        return found

    @property
    def _sizes(self) -> tuple[tuple[str, int], ...]:
        return ((DP, self.dp), *self.mesh) if self.dp > 1 else self.mesh

    def __str__(self) -> str:
        """One line: the sizes, and the rest as JSON where it says more."""
        sizes = ",".join(f"{axis}={size}" for axis, size in self._sizes)
        chosen = (self.mode, self.sums, self.logits, self.residual)
        if self.rules is None and chosen == (MODES[0], SUMS[0], LOGITS[0], RESIDUAL[0]):
            return sizes
        return json.dumps(self.as_mapping(), separators=(",", ":"))


def _bad(name: str, why: str) -> ConfigError:
    field = f"{FIELD}.{name}"
    return ConfigError(f"{field}: {why}", field=field)


def _one_of(name: str, given: Any, known: tuple[str, ...], mode: str = MODES[0]) -> str:
    """``given``, one of ``known``; of mode auto only the first."""
    if given not in known:
        raise _bad(name, f"must be {' or '.join(known)}, not {given!r}")
    if mode == "auto" and given != known[0]:
        raise _bad(name, f"{given} is for mode manual; XLA chooses the collectives of mode auto")
    return given


def _read(text: str) -> Mapping[str, Any]:
    """Text of an option, as a mapping."""
    text = text.strip()
    if text.startswith("{"):
        return _mapping(text, "JSON")
    if Path(text).suffix in (".yaml", ".yml", ".json"):
        try:
            return _mapping(Path(text).read_text(encoding="utf-8"), text)
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "not UTF-8"
            raise ConfigError(f"{FIELD} {text}: {why}", field=FIELD) from None
    pairs = [item.partition("=") for item in text.split(",")]
    if not all(axis.strip() and size.strip().isdecimal() for axis, _, size in pairs):
        why = f"{text!r} is none of tp=4, a file that ends in .yaml or .json, a JSON object"
        raise ConfigError(f"{FIELD} {why}", field=FIELD)
    names = [axis.strip() for axis, _, _ in pairs]
    if len(set(names)) < len(names):
        raise ConfigError(f"{FIELD} {text!r} names an axis twice", field=FIELD)
    return {"mesh": {name: int(size) for name, (_, _, size) in zip(names, pairs, strict=True)}}


def _mapping(text: str, where: str) -> Mapping[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(f"{FIELD} {where}: not valid", field=FIELD) from None
    if not isinstance(found, Mapping):
        raise ConfigError(f"{FIELD} {where}: no mapping", field=FIELD)
    return found


def _mesh(given: Any) -> dict[str, int]:
    if not isinstance(given, Mapping):
        raise _bad("mesh", f"must map axes to sizes, not {given!r}")
    for axis, size in given.items():
        if not isinstance(axis, str) or not axis.isidentifier():
            raise _bad("mesh", f"{axis!r} is no name of an axis")
        if axis in LATER:
            raise _bad(f"mesh.{axis}", LATER[axis])
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 4096:
            raise _bad(f"mesh.{axis}", f"must be a number of devices, not {size!r}")
    return dict(given)


def _rules(given: Any) -> tuple[tuple[str, MeshAxes], ...]:
    if not isinstance(given, Mapping):
        raise _bad("rules", f"must map logical axes to mesh axes, not {given!r}")
    for name in given:
        if name not in LOGICAL:
            raise _bad(f"rules.{name}", f"there is no such rule{hint(str(name), LOGICAL)}")
    return tuple((name, _axes(f"rules.{name}", axes)) for name, axes in given.items())


def _params(given: Any, mode: str) -> tuple[tuple[str, tuple[MeshAxes, ...]], ...]:
    if not isinstance(given, Mapping):
        raise _bad("params", f"must map paths to lists of mesh axes, not {given!r}")
    if given and mode != "auto":
        raise _bad("params", "is for mode auto; collectives of mode manual follow the rules")
    found = []
    for path, each in given.items():
        name = f"params.{path}"
        try:
            re.compile(path)
        except (re.error, TypeError, RecursionError):
            raise _bad(name, "is no regular expression") from None
        if not isinstance(each, list | tuple):
            raise _bad(name, f"must be a list with an entry per dimension, not {each!r}")
        found.append((path, tuple(_axes(name, axes) for axes in each)))
        _once(name, sum(found[-1][1], ()))
    return tuple(found)


def _axes(name: str, given: Any) -> MeshAxes:
    """Mesh axes from null, a name or a list of names."""
    axes = () if given is None else (given,) if isinstance(given, str) else given
    if not isinstance(axes, list | tuple) or not all(isinstance(axis, str) for axis in axes):
        raise _bad(name, f"must be a mesh axis, a list of them or null, not {given!r}")
    _once(name, tuple(axes))
    return tuple(axes)


def _once(name: str, axes: MeshAxes) -> None:
    if len(set(axes)) < len(axes):
        raise _bad(name, f"names a mesh axis twice: {list(axes)}")
