"""A server and an ``LLM`` of the tiny model of ``tests.whole``, whose programs are those tests' too."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jserve
from jserve.build import shipped
from jserve.llm import LLM
from jserve.model import families, features
from tests.docs.neox import neox_checkpoint
from tests.docs.pages import ROOT
from tests.whole.conftest import SMALL_OPTIONS, TEMPLATE, tiny_dir
from tests.whole.test_serve import Server

__all__ = ["tiny_dir"]
NAME = "jserve-mini"
"""The model that the pages name."""
FEATURE = ROOT / "examples" / "step_feature.py"
"""The plugin that the pages serve with."""
TOOLS = "{% if tools %}{# <tool_call> #}{% endif %}"
"""What makes a chat template one that has tools."""


@pytest.fixture(scope="session")
def neox_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return neox_checkpoint(tmp_path_factory.mktemp("neox"), tiny_dir)


@pytest.fixture(scope="session")
def url(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE + TOOLS)
    named = {"served_model_name": NAME, "chat_template": template, "plugins": FEATURE}
    options = {**SMALL_OPTIONS, **named}
    yield from serving(tiny_dir, tmp_path_factory, **options)


@pytest.fixture(scope="session")
def shipped_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server as users start it, for the slow tier."""
    options = {"max_num_seqs": 4, "log_level": "warning", "plugins": FEATURE}
    yield from serving(shipped(), tmp_path_factory, **options)


def serving(model: Path, roots: pytest.TempPathFactory, **options: object) -> Iterator[str]:
    server = Server(model, roots.mktemp("serve") / "log", **options)
    yield server.url
    assert server.stop() == 0


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page or an example registers is gone with its test."""
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    monkeypatch.setattr(features, "_REGISTERED", {})
    monkeypatch.delitem(sys.modules, "jserve_plugin_own_family", raising=False)


@pytest.fixture
def in_root(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path | None], None]:
    """Programs run as from a clone, and find as ``jserve.LLM`` one of this model (None: as it is)."""

    def prepare(model: Path | None) -> None:
        monkeypatch.chdir(ROOT)
        if model is not None:
            monkeypatch.setattr(jserve, "LLM", functools.partial(tiny_llm, model), raising=False)

    return prepare


def tiny_llm(directory: Path, model: str = "", **options: Any) -> LLM:
    """``LLM`` of the tiny model, whatever model is asked for."""
    return LLM(str(directory), **{**SMALL_OPTIONS, **options})
