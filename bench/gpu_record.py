"""Where the figures of ``bench.gpu`` go: a line on the terminal and a line of JSON, at once.

Owns the record of a call and what becomes of a measurement that fails. Must not know stages.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from typing import Any


class NotHere(Exception):
    """What a measurement needs is not on this machine; the text says what."""


class Record:
    """Where figures go: a line on the terminal and a line of JSON, at once."""

    def __init__(self, folder: Path, stage: str, *, tiny: bool, seconds: float) -> None:
        self.stage, self.tiny = stage, tiny
        self.folder = folder
        self._file = folder / "gpu.jsonl"
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds this stage may still run."""
        return self._end - time.monotonic()

    def add(self, name: str, **figures: Any) -> None:
        shown = "  ".join(f"{k} {_short(v)}" for k, v in figures.items())
        print(f"{self.stage:16s} {name:44s} {shown}", flush=True)
        line = json.dumps({"stage": self.stage, "name": name, "tiny": self.tiny, **figures})
        with self._file.open("a") as f:
            f.write(line + "\n")
            f.flush()
            os.fsync(f.fileno())

    def attempt(self, name: str, measure: Any) -> None:
        """Add ``measure()``'s figures; an error is a figure too. Skipped when time is up or what it
        needs is not there."""
        if self.left() < 2:
            self.add(name, skipped="out of time")
            return
        try:
            self.add(name, **measure())
        except NotHere as reason:
            self.add(name, skipped=str(reason))
        except Exception as error:
            with self._file.with_name("errors.log").open("a") as f:
                f.write(f"--- {self.stage} / {name}\n{traceback.format_exc()}\n")
            self.add(name, error=f"{type(error).__name__}: {error}"[:300])

    def figure(self, stage: str, name: str, key: str, default: float) -> float:
        """A figure that an earlier stage recorded in this folder, else ``default``."""
        return next((x[key] for x in read(self._file) if _is(x, stage, name) and key in x), default)


def _is(line: dict[str, Any], stage: str, name: str) -> bool:
    return line["stage"] == stage and line["name"] == name


def _short(x: Any) -> str:
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a record; none if there is no such file."""
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
