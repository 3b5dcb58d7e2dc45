"""Lists every program that an engine compiles on a CPU, and compares two such lists.

It owns the manifest: a program is known by its bucket, by a digest of what JAX lowers it to, and by what XLA's
compiler says it costs. Nothing is loaded: weights and state are shapes. ::

    {
        "format": 1,
        "made_by": {"jax": ...},
        "model": ...,
        "options": {...},
        "sharding": "tp=2 vocab:tp ...",
        "programs": {
            "D8 P0 F0 J1": {
                "text": "3f...",
                "flops": ...,
                "bytes": ...,
                "scratch_bytes": ...,
                "collectives": {},
            }
        },
    }
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jserve import __version__
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.model.step import StepModel, make_step
from jserve.model.view import Bucket, buffer_size
from jserve.runner.layout import groups, placement
from jserve.runner.sizes import step_model
from jserve.sim.roofline import CHIPS
from jserve.sizing.explain import traced_collectives
from jserve.sizing.layout import lay_out
from jserve.sizing.models import find

FORMAT = 1
FIGURES = ("flops", "bytes", "scratch_bytes")
"""Of a program; ``bytes`` are those that XLA counts as read and written, all branches included."""


def manifest(
    name: str,
    config: EngineConfig,
    progress: Callable[[str, int, int], None],
    *,
    compiled: bool = True,
) -> dict[str, Any]:
    """The programs of an engine that serves ``name`` with these options on a CPU.

    Args:
        compiled: compile them, for ``FIGURES``; False: they have none.

    Raises:
        ConfigError: as the engine would at start.
    """
    forms = (config.model.quantization, config.model.quantization_config)
    options = config.model
    model = find(
        name,
        options.revision,
        options.dtype,
        quantization=forms,
        max_model_len=options.max_model_len,
    )
    group, meshes = groups(config, None)
    mesh, rules = placement(group, meshes[0])
    laid = lay_out(model, group, CHIPS["cpu"])
    step = step_model(laid.sizes, model.family, mesh, rules, laid.speculation)
    programs: dict[str, Any] = {}
    for done, bucket in enumerate(laid.buckets):
        progress("compile", done, len(laid.buckets))
        programs[bucket_name(bucket)] = _program(step, bucket, compiled=compiled)
    progress("compile", len(laid.buckets), len(laid.buckets))
    versions = {"jserve": __version__, "jax": jax.__version__, "jaxlib": version("jaxlib")}
    changed = {k: v for k, v in config.flat().items() if v != EngineConfig().flat()[k]}
    for name in ("model", "api_key", "kv_transfer_key"):  # named apart, and secrets
        changed.pop(name, None)
    about = {"format": FORMAT, "made_by": versions, "model": model.name, "options": changed}
    about |= {"sharding": rules.described(mesh.shape), "pages": laid.sizes.memory.n_pages}
    return {**about, "programs": programs}


def bucket_name(bucket: Bucket) -> str:
    """All that tells a bucket from others, in one line."""
    parts = [f"D{bucket.D} P{bucket.P} F{bucket.F} J{bucket.J}"]
    parts += [f"drafts {bucket.n_draft}"] * (bucket.n_draft > 0)
    parts += [f"tree {','.join(map(str, bucket.tree))}"] * (len(bucket.tree) > 0)
    return " ".join([*parts, *(feature.name for feature in bucket.features)])


def _program(model: StepModel, bucket: Bucket, *, compiled: bool) -> dict[str, Any]:
    buf = jax.ShapeDtypeStruct((buffer_size(model.fields(bucket)),), jnp.int32)
    args = (model.abstract_params(), model.abstract_state(), buf)
    traced = jax.jit(make_step(model, bucket), donate_argnums=1).trace(*args)
    lowered = traced.lower()
    found: dict[str, Any] = {
        "text": hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16],
        "collectives": dict(Counter(traced_collectives(traced.jaxpr.jaxpr))),
    }
    if not compiled:
        return found
    program = lowered.compile()
    costs, memory = program.cost_analysis() or {}, program.memory_analysis()
    return found | {
        "flops": costs.get("flops", 0.0),
        "bytes": costs.get("bytes accessed", 0.0),
        "scratch_bytes": memory.temp_size_in_bytes if memory is not None else 0,
    }


def read(path: Path) -> dict[str, Any]:
    """A manifest.

    Raises:
        ConfigError: it cannot be read, or is none; ``field`` is the file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "not JSON"
        raise ConfigError(f"{path}: {why}", field=str(path)) from None
    programs = found.get("programs") if isinstance(found, dict) else None
    if not isinstance(programs, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"{path}: no manifest of format {FORMAT}", field=str(path))
    if not all(isinstance(p, dict) and "text" in p for p in programs.values()):
        raise ConfigError(f"{path}: a program without a text", field=str(path))
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """A line for everything in which two manifests differ. Of programs that other versions made, of other layouts or of
    pools of other sizes, neither texts nor figures are compared: these differ anyway."""
    alike = True
    for key in ("model", "options", "made_by", "sharding", "pages"):
        if old.get(key) != new.get(key):
            alike = alike and key not in ("made_by", "sharding", "pages")
            yield f"{key}: {json.dumps(old.get(key))} -> {json.dumps(new.get(key))}"
    before, after = old["programs"], new["programs"]
    yield from (f"{name}: gone" for name in before if name not in after)
    for name, program in after.items():
        if name not in before:
            yield f"{name}: added"
        elif told := _changed(before[name], program, alike):
            yield f"{name}: {told}"


def _changed(old: Mapping[str, Any], new: Mapping[str, Any], alike: bool) -> str:
    told = [] if not alike or old["text"] == new["text"] else ["another program"]
    if old.get("collectives") != new.get("collectives"):
        told.append(f"collectives {old.get('collectives')} -> {new.get('collectives')}")
    for key in FIGURES if alike else ():
        a, b = old.get(key), new.get(key)
        if a is not None and b is not None and a != b:
            told.append(f"{key} {a:.4g} -> {b:.4g}" + (f" ({b / a - 1:+.1%})" if a else ""))
    return ", ".join(told)
