"""Bounds on a quality report, and what a server asks of one.

It owns the file of bounds::

    {"bounds": {"mean_kl": 0.06, "same_top": 0.9},          for every form
     "forms": {"int8": {"mean_kl": 0.005}}}                 for one, over those

A model in several forms, ``int4+int8``, has the looser bound of each metric where the file does not name it itself.

A bound is compared with the worse end of the 95 % interval. Divergences must not be above it, shares not below.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jserve.errors import ConfigError

AT_MOST = ("mean_kl", "p99_kl", "ln_ppl_ratio", "worst_layer")
AT_LEAST = ("same_top", "needle", "json", "skills", "worst_skill")
METRICS = (*AT_MOST, *AT_LEAST)
KEYS = ("bounds", "forms")
LARGEST_FILE = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A bound that does not hold. ``value`` None: the metric was not measured."""

    metric: str
    value: float | None
    bound: float

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.metric} was not measured, bound {self.bound:g}"
        side = "above" if self.metric in AT_MOST else "below"
        return f"{self.metric} {self.value:.6g} is {side} {self.bound:g}"


Sections = dict[str, Mapping[str, float]]


def read_gate(path: Path) -> Sections:
    """The sections of a gate file: ``bounds``, and ``forms.NAME``.

    Raises:
        ConfigError: the file cannot be read, has an unknown key or metric, or a bound that is no number; ``field`` is
            the file.
    """
    found = read_object(path, "gate")
    for key in found:
        if key not in KEYS:
            raise _wrong(path, f"{key!r} is not one of {', '.join(KEYS)}")
    forms = found.get("forms", {})
    if not isinstance(forms, Mapping):
        raise _wrong(path, "forms must be an object")
    sections = {
        "bounds": found.get("bounds", {}),
        **{f"forms.{k}": v for k, v in forms.items()},
    }
    for at, section in sections.items():
        _check_section(path, at, section)
    return sections


def bounds_of(sections: Sections, path: Path, form: str) -> dict[str, float]:
    """The bounds for a model in this form (``report.form_of``).

    Raises:
        ConfigError: there is none for it, or for one of several; ``field`` is the file.
    """
    loosest: dict[str, float] = {}
    for part in [form] if f"forms.{form}" in sections else _parts(form):
        bounds = {**sections["bounds"], **sections.get(f"forms.{part}", {})}
        if not bounds:
            raise _wrong(path, f"has no bound for the form {part}")
        for name, bound in bounds.items():
            looser = max if name in AT_MOST else min
            loosest[name] = looser(float(bound), loosest.get(name, float(bound)))
    return loosest


def _parts(form: str) -> list[str]:
    """The forms in ``a+b+kv-c``, that of KV as it is beside weights as they are: ``none+kv-c``."""
    weights, _, kv = form.partition("+kv-")
    found = weights.split("+")
    if not kv:
        return found
    return [name for name in found if name != "none"] + [f"none+kv-{kv}"]


def _check_section(path: Path, at: str, section: Any) -> None:
    if not isinstance(section, Mapping):
        raise _wrong(path, f"{at} must be an object")
    for name, bound in section.items():
        if name not in METRICS:
            raise _wrong(path, f"{at}: {name!r} is not one of {', '.join(METRICS)}")
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise _wrong(path, f"{at}.{name} must be a number")


def failures(
    metrics: Mapping[str, Mapping[str, float]], bounds: Mapping[str, float]
) -> list[Failure]:
    """The bounds that do not hold.

    Args:
        metrics: name -> value, low, high.
    """
    found = []
    for name, bound in bounds.items():
        metric = metrics.get(name)
        if metric is None:
            found.append(Failure(metric=name, value=None, bound=bound))
        elif name in AT_MOST and not metric["high"] <= bound:
            found.append(Failure(metric=name, value=metric["high"], bound=bound))
        elif name in AT_LEAST and not metric["low"] >= bound:
            found.append(Failure(metric=name, value=metric["low"], bound=bound))
    return found


def check_report(path: Path, identity: Mapping[str, Any]) -> None:
    """Refuse to serve a model that a stored report does not vouch for.

    Args:
        path: what ``jserve quality --gate --report`` wrote.
        identity: of the model that is to be served, as ``report.identity`` gives it.

    Raises:
        ConfigError: the report is missing, broken, has no bounds, is of other weights or another form, or a bound does
            not hold; ``field`` is quality_gate.
    """
    if not path.exists():
        raise _not_ready(f"{path} is missing: jserve quality --gate FILE --report {path} writes it")
    try:
        found = read_object(path, "report")
        about, metrics, bounds = found["identity"], found["metrics"], found["gate"]["bounds"]
        failed = failures(metrics, bounds)
        wrong = [key for key, value in identity.items() if about.get(key) != value]
    except (KeyError, TypeError, AttributeError, ConfigError):
        raise _not_ready(f"{path} is no report of jserve quality --gate") from None
    if not bounds:
        raise _not_ready(f"{path} has no bounds")
    if wrong:
        key = wrong[0]
        why = f"{key} is {about.get(key)!r} there, {identity[key]!r} here"
        raise _not_ready(f"{path} is of another model: {why}")
    if failed:
        raise _not_ready(f"{path}: {'; '.join(map(str, failed))}")


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in ``path``. Raises ConfigError; ``field`` is the file."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise _wrong(path, "is too large")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise _wrong(path, "is not JSON") from None
    if not isinstance(found, dict):
        raise _wrong(path, f"is no {what}: not a JSON object")
    return found


def _wrong(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: {why}", field=str(path))


def _not_ready(why: str) -> ConfigError:
    return ConfigError(f"quality_gate: {why}", field="quality_gate")
