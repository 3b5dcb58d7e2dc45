"""A quality report: which model, on what, beside which reference, its figures, and what a gate made of them.

It owns the identity of a model in a form, which a server compares with its own, and the table for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jserve.config import EngineConfig
from jserve.quality.answers import Tally
from jserve.quality.gate import METRICS, Failure
from jserve.quality.metrics import Metric
from jserve.weights.hf import dtype_name
from jserve.weights.quant.on_load import KINDS
from jserve.weights.source import Source

if TYPE_CHECKING:
    from jserve.quality.drift import Drift

FORMAT = 1
SHOWN_LAYERS = 5


def identity(config: EngineConfig, source: Source) -> dict[str, Any]:
    """All that the answers of a model depend on, by options and files alone."""
    options = config.model
    given, asked = options.quantization_config, options.quantization
    return {
        "weights": source.fingerprint,
        # Names of formats say what the weights are anyway.
        "quantization": asked if asked in ("none", *KINDS) else "auto",
        "quantization_config": json.loads(given) if given else {},
        "dtype": dtype_name(source.config) if options.dtype == "auto" else options.dtype,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "kv_cache_dtype_skip_layers": list(config.cache.kv_cache_dtype_skip_layers),
        "kv_cache_rotate": config.cache.kv_cache_rotate,
    }


def form_of(weights: str, config: EngineConfig) -> str:
    """The name of a form in a gate file: of the weights, and of KV where that is not as the activations are."""
    kv = config.cache.kv_cache_dtype
    return weights if kv == "auto" else f"{weights}+kv-{kv}"


def assembled(
    *,
    model: Mapping[str, Any],
    reference: Mapping[str, Any],
    text: Mapping[str, Any],
    metrics: Mapping[str, Metric],
    tallies: Mapping[str, Tally],
    layers: Sequence[tuple[str, float]],
    drift: Sequence[Drift],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The report as JSON holds it, without a gate."""
    return {
        "format": FORMAT,
        **model,
        "reference": dict(reference),
        "text": dict(text),
        "metrics": {name: asdict(metrics[name]) for name in METRICS if name in metrics},
        "questions": {name: asdict(tally) for name, tally in tallies.items()},
        "layers": [{"product": name, "error": error} for name, error in layers],
        "drift": [asdict(one) for one in drift],
        "notes": list(notes),
    }


def gated(
    report: Mapping[str, Any], bounds: Mapping[str, float], failed: Sequence[Failure]
) -> dict[str, Any]:
    """``report`` with its gate."""
    verdict = {"bounds": dict(bounds), "failed": [asdict(failure) for failure in failed]}
    return {**report, "gate": verdict}


def shown(report: Mapping[str, Any]) -> str:
    """The report as text."""
    text, lines = report["text"], []
    lines.append(f"{report['model']} ({report['form']}) beside {report['reference']['model']}")
    lines.append(
        f"{text['tokens']} tokens of {text['texts']} texts ({text['name']}); intervals of 95 %"
    )
    for name, metric in report["metrics"].items():
        inside = f"{metric['low']:.6f} .. {metric['high']:.6f}"
        spread = "" if metric["low"] == metric["high"] else f"   {inside}"
        lines.append(f"  {name:13} {metric['value']:.6f}{spread}")
    for kind, tally in report["questions"].items():
        lines.append(
            f"  {kind:20} {tally['model']} right, the reference {tally['reference']} of {tally['asked']}"
        )
    for layer in report["layers"][:SHOWN_LAYERS]:
        lines.append(f"  layer {layer['product']:14} {layer['error']:.4f}")
    for one in report["drift"][:SHOWN_LAYERS]:
        lines.append(
            f"  drift {one['product']:14} {one['over']:.6f} over, largest {one['most']:.3f}"
        )
    lines += [f"  {note}" for note in report["notes"]]
    return "\n".join(lines) + "\n"
