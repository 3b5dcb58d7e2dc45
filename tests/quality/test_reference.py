"""References that are kept: found again under a copy of the weights, and written anew where the file is broken."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jserve.build import located
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.quality import reference as kept, run
from jserve.quality.gate import check_report
from jserve.quality.metrics import TokenScores
from jserve.quality.report import identity
from jserve.quality.texts import Texts
from tests.quality.test_gate import report, write
from tests.weights.weights_kit import LLAMA, Model

TEXTS = Texts(name="t", scored=[(1, 2, 3), (4, 5)])


class Bench:
    """Says three tokens, and counts how often it was made."""

    made = 0

    def __init__(self, *_: Any) -> None:
        Bench.made += 1

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def check(self, texts: Sequence[Sequence[int]]) -> None:
        pass

    def scores(self, texts: Sequence[Sequence[int]]) -> Iterator[TokenScores]:
        for ids in texts:
            n = len(ids) - 1
            each = np.full((n, 2), Bench.made, np.int32)
            yield TokenScores(
                logprob_n=np.zeros(n, np.float32), ids_nK=each, top_nK=each.astype(np.float32)
            )

    def answers(self, questions: Sequence[Any]) -> list[str]:
        return []


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run, "Bench", Bench)
    monkeypatch.setattr(Bench, "made", 0)
    return Model(tmp_path / "m", LLAMA).single().path


def copied(model: Path, to: Path) -> Path:
    """Elsewhere, by other times, and with another README."""
    shutil.copytree(model, to)
    for path in to.iterdir():
        os.utime(path, (1, 1))
    (to / "README.md").write_text("a copy")
    return to


def scored(model: Path, directory: Path, **options: Any) -> kept.Reference:
    config = EngineConfig.of(model=str(model), **options)
    return run._reference(config, located(config), TEXTS, directory, lambda *_: None)


def test_a_reference_serves_a_copy_of_its_weights(tmp_path: Path, model: Path) -> None:
    first = scored(model, tmp_path / "kept")
    again = scored(copied(model, tmp_path / "copy"), tmp_path / "kept")
    assert Bench.made == 1
    np.testing.assert_array_equal(again.scores.ids_nK, first.scores.ids_nK)
    scored(model, tmp_path / "kept", dtype="float32")
    assert Bench.made == 2


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"no archive"])
def test_a_broken_reference_is_replaced(tmp_path: Path, model: Path, data: bytes) -> None:
    scored(model, tmp_path / "kept")
    (path,) = (tmp_path / "kept").iterdir()
    path.write_bytes(data)
    scored(model, tmp_path / "kept")
    found = scored(model, tmp_path / "kept")
    assert Bench.made == 2
    np.testing.assert_array_equal(found.scores.ids_nK, np.full((3, 2), 2))


def test_dummy_weights_have_no_reference(tmp_path: Path, model: Path) -> None:
    for _ in range(2):
        scored(model, tmp_path / "kept", load_format="dummy")
    assert Bench.made == 2


def test_a_report_is_of_its_weights_wherever_they_lie(tmp_path: Path, model: Path) -> None:
    def of(path: Path) -> dict[str, Any]:
        config = EngineConfig.of(model=str(path))
        return identity(config, located(config))

    path = write(tmp_path / "report.json", report(identity=of(model)))
    copy = copied(model, tmp_path / "copy")
    check_report(path, of(copy))
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[data.index(b"pt")] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ConfigError, match="another model: weights is"):
        check_report(path, of(copy))
