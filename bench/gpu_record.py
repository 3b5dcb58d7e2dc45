"""Where the figures of ``bench.gpu`` go: a line on the terminal and a line of JSON, at once.

A case is one named measurement of a stage. While it runs its name lies in ``case.json``, so that
whoever started the process can tell which case ended it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

STICKY = 3
"""Exit code of a process whose device answers every further call with an error."""
GRAPHS = ("step", "xla", "off")
"""Values of the engine's option ``cuda_graphs``, which stage ``graphs`` decides among."""


class NotHere(Exception):
    """What a measurement needs is not on this machine; the text says what."""


class Record:
    """The figures of one stage; what the folder's record holds of it already is not measured again.

    ``seconds`` is the time that the stage may take, ``attn`` the attention that its steps run, ``kernels`` the level
    of those for quantised weights, empty for XLA's products. Where these ``decide`` the stage's figures each line names
    them, and a line of others counts as none.
    """

    def __init__(
        self,
        folder: Path,
        stage: str,
        *,
        tiny: bool,
        seconds: float,
        attn: str = "hopper",
        kernels: str = "hopper",
        decide: bool = False,
    ) -> None:
        self.stage, self.tiny, self.attn, self.kernels = stage, tiny, attn, kernels
        self._how = {"attn": attn, "kernels": kernels} if decide else {}
        self.folder = folder
        self._file = folder / "gpu.jsonl"
        self._end = time.monotonic() + seconds
        self._known = {x["name"] for x in self.cases()}

    @property
    def cuda_graphs(self) -> str:
        """What stage ``graphs`` found to run, and fastest."""
        return self.figure("graphs", "verdict", "cuda_graphs", GRAPHS[0])

    def left(self) -> float:
        """Seconds this stage may still run."""
        return self._end - time.monotonic()

    def add(self, name: str, **figures: Any) -> None:
        shown = "  ".join(f"{k} {_short(v)}" for k, v in figures.items())
        print(f"{self.stage:16s} {name:44s} {shown}", flush=True)
        about = {"stage": self.stage, "name": name, "tiny": self.tiny, **self._how}
        line = json.dumps(about | figures)
        with self._file.open("a+") as f:
            f.write(line + "\n" if _ends_whole(self._file) else f"\n{line}\n")
            f.flush()
            os.fsync(f.fileno())

    def attempt(
        self, name: str, measure: Callable[[], dict[str, Any]], *, share: float = 0.5
    ) -> None:
        """Add ``measure()``'s figures; an error is a figure too. Skipped when time is up or what it
        needs is not there.

        It may take ``share`` of the time that is left to the stage: then the process ends, its
        stacks in ``errors.log``. After an error that the device does not recover from the process
        ends with ``STICKY``.
        """
        if name in self._known:
            return
        if self.left() < 2:
            self.add(name, skipped="out of time")
            return
        limit = max(share * self.left(), 1.0)
        _case(self.folder).write_text(json.dumps({"name": name, "limit": limit, "at": time.time()}))
        with (self.folder / "errors.log").open("a") as errors:
            faulthandler.dump_traceback_later(limit, exit=True, file=errors)
            try:
                self.add(name, **measure())
            except NotHere as reason:
                self.add(name, skipped=str(reason))
            except Exception as error:
                errors.write(f"--- {self.stage} / {name}\n{traceback.format_exc()}\n")
                errors.flush()
                self.add(name, error=f"{type(error).__name__}: {error}"[:300])
                _end_if_lost(self.folder)
            finally:
                faulthandler.cancel_dump_traceback_later()
        _case(self.folder).unlink(missing_ok=True)

    def figure(self, stage: str, name: str, key: str, default: Any) -> Any:
        """A figure that an earlier stage recorded in this folder, its last one, else ``default``."""
        found = [x[key] for x in self._lines() if _is(x, stage, name) and key in x]
        return found[-1] if found else default

    def cases(self) -> list[dict[str, Any]]:
        """This stage's lines so far, those of earlier processes too."""
        return [x for x in self._lines() if x["stage"] == self.stage]

    def _lines(self) -> list[dict[str, Any]]:
        return made_by(read(self._file), self.attn, self.kernels)


def _ends_whole(path: Path) -> bool:
    """Whether the last line of the file is whole: a process may have been killed while it wrote."""
    with path.open("rb") as f:
        n = f.seek(0, os.SEEK_END)
        return n == 0 or (f.seek(n - 1) >= 0 and f.read(1) == b"\n")


def _end_if_lost(folder: Path) -> None:
    """End this process if the device no longer computes one and one. Without the exit handlers:
    those of a lost device hang."""
    if "jax" not in sys.modules:
        return
    import jax.numpy as jnp

    try:
        jnp.add(jnp.ones(2), 1).block_until_ready()
    except Exception:
        _case(folder).unlink(missing_ok=True)
        sys.stdout.flush()
        os._exit(STICKY)


def _case(folder: Path) -> Path:
    return folder / "case.json"


def open_case(folder: Path, rc: int) -> tuple[str, str] | None:
    """The case that a process with exit code ``rc`` did not come back from, and what became of it;
    None if it ended between cases. Asked once."""
    try:
        found = json.loads(_case(folder).read_text())
    except (FileNotFoundError, ValueError):
        return None
    _case(folder).unlink()
    if time.time() - found["at"] >= found["limit"]:
        return found["name"], f"no result within {found['limit']:.0f} s (stacks in errors.log)"
    return found["name"], f"the process ended with exit code {rc}"


def made_by(lines: list[dict[str, Any]], attn: str, kernels: str) -> list[dict[str, Any]]:
    """Those of steps with this attention and these kernels, and those that depend on neither."""
    return [x for x in lines if (x.get("attn", attn), x.get("kernels", kernels)) == (attn, kernels)]


def _is(line: dict[str, Any], stage: str, name: str) -> bool:
    return line["stage"] == stage and line["name"] == name


def _short(x: Any) -> str:
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def wrong(line: dict[str, Any]) -> bool:
    """Whether a line is a failure: of the measurement, or of what was measured."""
    return "error" in line or line.get("ok") is False


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a record; none if there is no such file. A line cut in the middle of its
    writing is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines
