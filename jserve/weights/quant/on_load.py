"""Quantisation on load: ``--quantization`` of a checkpoint in 16 or 32 bits.

It owns the names of the schemes and the options of ``--quantization-config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jserve.errors import ConfigError
from jserve.model.quant import Form
from jserve.weights.quant.rounding import METHODS
from jserve.weights.quant.values import check_patterns, is_linear, matches

KINDS = {"fp8": "e4m3", "int8": "int8", "int8-weight-only": "int8", "int4": "int4"}
"""``--quantization`` -> kind of the stored numbers."""
ROUNDED = ("fp8", "int8")
"""Those that round activations, too."""
GROUPS = (128, 64, 32)
"""Inputs of an int4 scale: the most of these that divide a matrix."""
FIELD = "quantization_config"
KEYS = ("ignore", "group_size", "method")


@dataclass(frozen=True, slots=True, kw_only=True)
class OnLoad:
    """The matrices of a model but those of ``ignore``, in one form."""

    form: Form
    group: int
    """Of int4; 0: the most of ``GROUPS`` that divide a matrix."""
    ignore: tuple[str, ...]

    def form_of(self, module: str, D: int) -> Form | None:
        """As ``Modules.form_of``. None where no group divides ``D``, too."""
        if not is_linear(module) or any(matches(module, name) for name in self.ignore):
            return None
        if self.form.kind != "int4":
            return self.form
        found = [g for g in ((self.group,) if self.group else GROUPS) if D % g == 0]
        return replace(self.form, group=found[0]) if found else None


def on_load(asked: str, dtype: str, options: Mapping[str, Any]) -> OnLoad:
    """The modules and form that ``--quantization`` and ``--quantization-config`` ask for.

    Raises:
        ConfigError: an unknown name or key, or a value that is not valid.
    """
    if asked not in KINDS:
        raise ConfigError(
            f"quantization {asked!r} is not one of {', '.join(KINDS)}", field="quantization"
        )
    for key in options:
        if key not in KEYS:
            raise ConfigError(f"{FIELD}: {key!r} is not one of {', '.join(KEYS)}", field=FIELD)
    kind = KINDS[asked]
    method = options.get("method", "mse" if kind == "int4" else "rtn")
    if method not in METHODS:
        field = f"{FIELD}.method"
        raise ConfigError(f"{field} must be {' or '.join(METHODS)}", field=field)
    return OnLoad(
        form=Form(kind=kind, rounded=asked in ROUNDED, dtype=dtype, method=method),
        group=_group(options, kind),
        ignore=_ignored(options.get("ignore", ["lm_head"])),
    )


def _group(options: Mapping[str, Any], kind: str) -> int:
    group = options.get("group_size", 0)
    field = f"{FIELD}.group_size"
    if group and kind != "int4":
        raise ConfigError(f"{field} is for int4; scales of 8 bits are per row", field=field)
    if isinstance(group, bool) or group not in (0, *GROUPS):
        raise ConfigError(f"{field} must be one of {GROUPS}", field=field)
    return group


def _ignored(names: Any) -> tuple[str, ...]:
    field = f"{FIELD}.ignore"
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{field} must be a list of module names", field=field)
    check_patterns(names, "ignore")
    return tuple(names)
