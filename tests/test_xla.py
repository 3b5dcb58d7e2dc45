"""How much memory XLA is told to take, whichever door a model is opened by."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jserve.config import DEVICE_SHARE
from jserve.xla import FRACTION, OLD_FRACTION, claim_memory


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, {FRACTION: str(DEVICE_SHARE)}),
        ({FRACTION: "0.5"}, {FRACTION: "0.5"}),
        ({OLD_FRACTION: "0.4"}, {OLD_FRACTION: "0.4"}),
        ({OLD_FRACTION: ""}, {OLD_FRACTION: "", FRACTION: str(DEVICE_SHARE)}),
    ],
)
def test_what_the_user_says_stands(given: dict, told: dict) -> None:
    claim_memory(given)
    assert given == told


OPEN = """
import os
from jserve import build
from jserve.errors import ConfigError
from jserve.config import EngineConfig

seen = []
build._runner = lambda *_: seen.append(dict(os.environ)) or (_ for _ in ()).throw(KeyError)
{how}
assert seen[0]["XLA_CLIENT_MEM_FRACTION"] == "{share}", "XLA was not told before devices were made"
from jax._src.xla_bridge import backends_are_initialized
assert not backends_are_initialized()
"""
DOORS = {
    "LLM": "from jserve import LLM\ntry: LLM()\nexcept KeyError: pass",
    "engine": "try: build.engine(EngineConfig.of())\nexcept KeyError: pass",
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_tells_xla_before_there_are_devices(door: str) -> None:
    environ = {k: v for k, v in os.environ.items() if k not in (FRACTION, OLD_FRACTION)}
    code = OPEN.format(how=DOORS[door], share=DEVICE_SHARE)
    out = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
