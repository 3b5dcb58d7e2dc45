"""What an engine was made of is in its journal, and is read again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.kv_layout import Reach, Span
from jserve.ports import RunnerLimits
from jserve.sched.record.journal import JournalFile
from jserve.sched.record.replay import replay
from jserve.sched.record.start import FUNCTIONS, limits_of, read_start, write_start
from tests.sched.record.test_journal import record
from tests.sched.sched_drive import limits, step_times, wants_prompt

CONFIG = EngineConfig.of(model="m", seed=5, max_waiting=6, served_model_name=("a", "b"))
LIMITS = limits(
    n_pages=11,
    kv_names={"echo": str},
    reaches=(Reach(span=Span(window=8), n_groups=2),),
    group_columns=(3,),
    draft_depths=(1, 2),
    step_times=step_times(),
)
CHECKS = {"echo": str, "other": int}
KNOWN = {"features": CHECKS, "kv_names": CHECKS, "prompt_features": {"echo": wants_prompt}}


def written(path: Path, config: EngineConfig = CONFIG, limits: RunnerLimits = LIMITS) -> Path:
    with path.open("wb") as file:
        write_start(JournalFile(file), config, limits, "stamp", "tp=2")
    return path


def test_options_and_limits_come_back(tmp_path: Path) -> None:
    config, event = read_start(written(tmp_path / "journal"))
    assert config == CONFIG
    assert (event.weights, event.sharding) == ("stamp", "tp=2")
    assert limits_of(event, KNOWN) == LIMITS


def test_nothing_of_the_server_or_secret_is_written(tmp_path: Path) -> None:
    config = EngineConfig.of(api_key=("sesame",), kv_transfer_key="sesame", replicas=2, port=81)
    path = written(tmp_path / "journal", config)
    assert b"sesame" not in path.read_bytes()
    assert read_start(path)[0] == EngineConfig()


def test_a_journal_with_its_start_replays_by_what_it_says(tmp_path: Path) -> None:
    drive, _ = record(tmp_path / "events", 3)
    path = written(tmp_path / "journal", drive.config, drive.limits)
    path.write_bytes(path.read_bytes() + (tmp_path / "events").read_bytes())
    config, event = read_start(path)
    done = replay(path, limits_of(event, KNOWN), config)
    assert done.n_steps == drive.scheduler.n_steps
    assert (done.n_tokens, done.until) == (0, "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello\n",
        '{"type":"expire","now":1.0}\n',
        '{"type":"start","options":{"no":1},"limits":{}}\n',
    ],
)
def test_a_file_that_says_no_start_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "journal"
    with pytest.raises(ConfigError, match="No such file"):
        read_start(path)
    path.write_text(text)
    with pytest.raises(ConfigError, match="no start event") as caught:
        read_start(path)
    assert caught.value.field == "journal"


def test_a_feature_that_is_not_registered_names_the_plugin(tmp_path: Path) -> None:
    _, event = read_start(written(tmp_path / "journal"))
    with pytest.raises(ConfigError, match="'echo'") as caught:
        limits_of(event, {})
    assert caught.value.field == "plugins"


@pytest.mark.parametrize("change", [{"n_slots": "many"}, {"no_such": 1}, {"step_times": [{}]}])
def test_limits_of_another_version_are_refused(tmp_path: Path, change: dict) -> None:
    path = written(
        tmp_path / "journal", limits=dataclasses.replace(LIMITS, **{kind: {} for kind in FUNCTIONS})
    )
    said = json.loads(path.read_text())
    said["limits"] |= change
    path.write_text(json.dumps(said) + "\n")
    _, event = read_start(path)
    with pytest.raises(ConfigError, match="another version"):
        limits_of(event, {})
