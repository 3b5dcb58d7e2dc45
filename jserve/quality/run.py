"""The order of a judgement: the reference, from its file or from an engine, then the model, then its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jserve import build
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.model.families import family_for
from jserve.model.quant import form_name
from jserve.quality import answers, reference as kept
from jserve.quality.bench import Bench
from jserve.quality.drift import Drift, drift
from jserve.quality.layers import Loadable, layer_errors, why_not
from jserve.quality.metrics import Compared, Metric, compared, metrics
from jserve.quality.reference import Reference
from jserve.quality.report import assembled, form_of, identity
from jserve.quality.texts import Texts, held_out, token_texts
from jserve.weights.quant.scheme import quantised, scheme_of
from jserve.weights.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityWish:
    """The options of a judgement."""

    reference: str = ""
    """A model; empty: the judged one without quantisation, KV as activations."""
    text: Path | None = None
    """None: what ships."""
    questions: bool = True
    drift: Path | None = None
    """Prompts for the share of activations beyond static scales."""
    directory: Path
    """The directory that keeps references."""


def judge(config: EngineConfig, asked: QualityWish, progress: build.Progress) -> dict[str, Any]:
    """The report of ``config``'s model, without a gate.

    Raises:
        ConfigError: an option, file or model cannot be used, or there is no reference.
    """
    source, base = build.located(config), reference_config(config, asked.reference)
    side = build.text_side(config)
    drifted = [] if asked.drift is None else _drift(config, source, token_texts(side, asked.drift))
    texts = held_out(side, asked.text, questions=asked.questions)
    origin = build.located(base)
    reference = _reference(base, origin, texts, asked.directory, progress)
    found, said, info = _measured(config, texts, reference, progress)
    tallies = answers.tallies(texts.questions, reference.answers, said)
    figures = metrics(found, _text_numbers(texts)) | answers.metrics(tallies)
    layers, note = _layers(base, origin, config, source, texts)
    if layers:
        figures["worst_layer"] = Metric(*(layers[0][1],) * 3)
    return assembled(
        model={
            "model": source.name,
            "form": form_of(info["form"], config),
            "identity": identity(config, source),
            "tensor_parallel_size": config.device.tensor_parallel_size,
        },
        reference={"model": origin.name, "identity": identity(base, origin)},
        text={
            "name": texts.name,
            "digest": kept.digest(texts),
            "texts": len(texts.scored),
            "tokens": len(found.kl_n),
        },
        metrics=figures,
        tallies=tallies,
        layers=layers,
        drift=drifted,
        notes=[note] if note else [],
    )


def served_form(config: EngineConfig) -> str:
    """The form of ``config``'s model in a gate file, by its files' headers alone.

    Raises:
        ConfigError: the model or its quantisation is not supported.
    """
    source = build.located(config)
    family = quantised(family_for(source.config), _loadable(config, source).scheme)
    specs = family.specs(family.arch(source.config), config.device.tensor_parallel_size)
    return form_of(form_name(specs), config)


def reference_config(config: EngineConfig, reference: str) -> EngineConfig:
    """The engine of the reference: as ``config``, without quantisation and with KV as its activations are.

    Raises:
        ConfigError: none is named, and the model's own checkpoint is quantised; ``field`` is reference.
    """
    plain = {
        "quantization": "auto",
        "quantization_config": "",
        "kv_cache_dtype": "auto",
        "kv_cache_dtype_skip_layers": (),
        "kv_cache_rotate": False,
        "dtype": _dtype(config),
    }
    if reference:
        plain["model"] = reference
    made = EngineConfig.of(**{**config.flat(), **plain})
    source = build.located(made)
    scheme = scheme_of(source.config, jnp.dtype(plain["dtype"]))
    if scheme is not None:
        why = f"{source.name} is quantised ({scheme.name}); name the model it was made of"
        raise ConfigError(f"reference: {why}", field="reference")
    return made


def _drift(config: EngineConfig, source: Source, texts: Sequence[Sequence[int]]) -> list[Drift]:
    why = why_not(source, source)
    if why:
        raise ConfigError(f"drift: {why}", field="drift")
    return drift(_loadable(config, source), texts)


def _loadable(config: EngineConfig, source: Source) -> Loadable:
    dtype, options = jnp.dtype(_dtype(config)), config.model
    scheme = scheme_of(source.config, dtype, options.quantization, options.quantization_config)
    return Loadable(source=source, scheme=scheme, dtype=dtype)


def _dtype(config: EngineConfig) -> str:
    return identity(config, build.located(config))["dtype"]


def _reference(
    config: EngineConfig, source: Source, texts: Texts, directory: Path, progress: build.Progress
) -> Reference:
    path = kept.place(directory, identity(config, source), texts)
    # Dummy weights have no fingerprint, so a file could be of others.
    found = kept.read(path) if source.fingerprint else None
    if found is not None:
        return found
    with Bench(config, progress) as bench:
        bench.check(texts.scored)
        parts = list(_told(bench.scores(texts.scored), texts, progress, "score the reference"))
        made = Reference(scores=kept.joined(parts), answers=tuple(bench.answers(texts.questions)))
    kept.write(path, made)
    return made


def _measured(
    config: EngineConfig, texts: Texts, reference: Reference, progress: build.Progress
) -> tuple[Compared, list[str], dict[str, Any]]:
    """(the model beside the reference, its answers, facts of its engine)."""
    parts, at = [], 0
    with Bench(config, progress) as bench:
        bench.check(texts.scored)
        n_vocab = bench.info["vocab_size"]
        if int(reference.scores.ids_nK.max()) >= n_vocab:
            why = f"the reference has other tokens than the model's {n_vocab}"
            raise ConfigError(f"reference: {why}", field="reference")
        for scores in _told(bench.scores(texts.scored), texts, progress, "score"):
            n = len(scores.logprob_n)
            parts.append(compared(kept.part(reference.scores, at, n), scores, n_vocab))
            at += n
        said = bench.answers(texts.questions)
        info = bench.info
    found = Compared(
        kl_n=np.concatenate([p.kl_n for p in parts]),
        same_n=np.concatenate([p.same_n for p in parts]),
        worse_n=np.concatenate([p.worse_n for p in parts]),
    )
    return found, said, info


def _told(scores: Any, texts: Texts, progress: build.Progress, stage: str) -> Any:
    total, done = sum(len(ids) - 1 for ids in texts.scored), 0
    progress(stage, done, total)
    for found in scores:
        done += len(found.logprob_n)
        progress(stage, done, total)
        yield found


def _text_numbers(texts: Texts) -> np.ndarray:
    lengths: Sequence[int] = [len(ids) - 1 for ids in texts.scored]
    return np.repeat(np.arange(len(lengths)), lengths)


def _layers(
    base: EngineConfig, origin: Source, config: EngineConfig, source: Source, texts: Texts
) -> tuple[list[tuple[str, float]], str]:
    """(errors of layers, why there are none)."""
    why = why_not(origin, source)
    if why:
        return [], f"no errors of layers: {why}"
    found = layer_errors(_loadable(base, origin), _loadable(config, source), texts.scored)
    if found:
        return found, ""
    return [], "no errors of layers: the embedding is another one (rotated or quantised?)"
