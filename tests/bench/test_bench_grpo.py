"""The figures of ``bench.grpo``, read from what the example prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.grpo import figures, main
from jserve.errors import ConfigError

SAID = """update 1: reward 0.211, log-probabilities differ by 1.3e-05
update 2: reward 0.375, log-probabilities differ by 9.0e-06
at the end: reward 0.500
"""


def test_figures_are_those_of_every_update_and_of_the_end() -> None:
    found = figures(SAID)
    assert found["updates"] == 2
    assert found["rewards"] == [0.211, 0.375, 0.5]
    assert found["rise"] == pytest.approx(0.289)
    assert found["largest_difference"] == 1.3e-5


def test_a_record_is_drawn_without_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.delattr("bench.grpo.subprocess")
    [*_, record] = sorted(Path("bench/results").glob("*-grpo.json"))
    pictures = [tmp_path / name for name in ("a.svg", "b.svg")]
    for picture in pictures:
        assert main(["--record", str(record), "--plot", str(picture)]) == 0
    one, again = (picture.read_text() for picture in pictures)
    assert one == again
    assert "mean reward of 128 samples" in one
    with pytest.raises(ConfigError) as caught:
        main(["--record", str(record), "--plot", str(tmp_path / "a.png")])
    assert caught.value.field == "plot"


def test_a_run_without_an_end_has_no_figures() -> None:
    with pytest.raises(IndexError):
        figures(SAID.rsplit("at the end", 1)[0])
