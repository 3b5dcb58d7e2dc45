"""Thousands of connections: each gate can fail, and memory that a server forgets is seen."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import connections
from bench.engines import Engine, Running

FAKE = str(Path(__file__).with_name("fake_server.py"))
TIMED = {"failed": 0, "gap_p99_ms": 5.0, "health_max_ms": 9.0}
USED = {"files": 20, "mib": 90.0}
FOUND = {
    "alone": TIMED,
    "crowded": TIMED,
    "before": USED,
    "after": [USED, USED],
    "kib_per_connection": 14.0,
    "kib_kept": 12.0,
    "kib_added": 0.1,
}


def failing(found: dict[str, Any]) -> list[str]:
    return [name for name, holds in connections.gates(found) if not holds]


@pytest.mark.parametrize(
    "changed",
    [
        {"alone": TIMED | {"failed": 1}},
        {"crowded": TIMED | {"health_max_ms": 1001.0}},
        {"crowded": TIMED | {"gap_p99_ms": 11.0}},
        {"kib_per_connection": 100.0},
        {"after": [USED | {"files": 25}, USED]},
        {"after": [USED, USED | {"files": 25}]},
        {"kib_kept": 16.1},
        {"kib_added": 1.1},
    ],
    ids=str,
)
def test_each_gate_can_fail(changed: dict[str, Any]) -> None:
    assert failing(FOUND) == []
    assert len(failing(FOUND | changed)) == 1


def measured(tmp_path: Path, *options: str) -> dict[str, Any]:
    """Three rounds of 184 idle connections."""
    engine = Engine(name="fake", argv=(sys.executable, FAKE, "{port}", *options), model="good")
    args = argparse.Namespace(connections=204, streams=4, seconds=0.3, rounds=3)
    with Running(engine, tmp_path) as server:
        server.wait_ready(60)
        return asyncio.run(connections.measure(server, args))


@pytest.mark.slow
def test_memory_that_a_server_keeps_of_every_connection_is_seen(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(connections, "SETTLE_S", 0.3)
    sound = measured(tmp_path)
    assert len(sound["after"]) == 3
    assert sound["alone"]["failed"] == sound["crowded"]["failed"] == 0
    assert sound["open"]["files"] >= sound["before"]["files"] + 184
    assert all(a["files"] <= sound["before"]["files"] + 4 for a in sound["after"])
    leaking = measured(tmp_path, "--leak-kib", "16")
    assert leaking["kib_added"] > 8
    assert leaking["kib_kept"] > 24
    assert {name[:7] for name in failing(leaking)} >= {"at most"}


def test_one_round_cannot_show_a_leak() -> None:
    with pytest.raises(SystemExit) as e:
        connections.main(["--rounds", "1"])
    assert e.value.code == 2
