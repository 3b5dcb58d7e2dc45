"""Implements ``jserve quantize`` and ``jserve quality``: what they read, print and return."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jserve.build import text_side
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.progress import start_progress

if TYPE_CHECKING:
    from jserve.quality.run import QualityWish
    from jserve.weights.offline.wish import Wish


def quantize(source: str, target: Path, wish: Wish, calibration: Path | None, console: Any) -> None:
    """Write ``source`` quantised, as a compressed-tensors directory.

    Raises:
        ConfigError: the source, the target, an option or the calibration file cannot be used.
        WeightsError: a tensor is broken.
    """
    from jserve.quality.texts import shipped, token_texts
    from jserve.weights.offline.job import check_source, quantize as write

    check_source(source, wish)
    texts = []
    if wish.needs_texts:
        text = text_side(EngineConfig.of(model=source))
        texts = token_texts(text, calibration or shipped("calibration.jsonl"))
    with start_progress(console) as shown:
        write(source, target, wish, texts, shown)
    console.print(f"wrote {target}", highlight=False)


def quality(
    config: EngineConfig,
    asked: QualityWish,
    gate: Path | None,
    report: Path | None,
    *,
    as_json: bool,
    console: Any,
) -> int:
    """Judge a model beside its reference and print the report. Returns the exit code: 1 where a bound fails.

    Raises:
        ConfigError: an option, file or model cannot be used.
    """
    from jserve.quality.gate import bounds_of, failures, read_gate
    from jserve.quality.report import gated, shown
    from jserve.quality.run import judge, served_form

    forms = None if gate is None else read_gate(gate)
    if gate is not None and forms is not None:
        bounds_of(forms, gate, served_form(config))  # refused before it is judged for minutes
    with start_progress(console) as progress:
        found = judge(config, asked, progress)
    failed = []
    if gate is not None and forms is not None:
        bounds = bounds_of(forms, gate, found["form"])
        failed = failures(found["metrics"], bounds)
        found = gated(found, bounds, failed)
    text = json.dumps(found, indent=1) + "\n"
    if report is not None:
        write_file(report, text)
    print(text if as_json else shown(found), end="", flush=True)
    for failure in failed:
        console.print(f"[red]gate:[/] {failure}", soft_wrap=True, highlight=False)
    return 1 if failed else 0


def write_file(path: Path, text: str) -> None:
    """Raises ConfigError: it cannot be written; ``field`` is the file."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}", field=str(path)) from None
