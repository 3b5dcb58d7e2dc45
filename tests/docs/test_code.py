"""Every piece of Python on the pages runs."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import Block, blocks

PORT = "http://127.0.0.1:8000"
ALL = blocks("python")
RUN = [b for b in ALL if not b.mark]
SLOW = [b for b in ALL if not b.mark.startswith("not run")]


def test_there_are_some() -> None:
    assert len(RUN) > 5


@pytest.mark.parametrize("block", ALL, ids=lambda b: b.where)
def test_it_parses(block: Block) -> None:
    ast.parse(block.text)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("block", RUN, ids=lambda b: b.where)
def test_it_runs(
    block: Block, tiny_dir: Path, in_root: Callable, request: pytest.FixtureRequest
) -> None:
    in_root(tiny_dir)
    run(block, request, "url")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", SLOW, ids=lambda b: b.where)
def test_it_runs_with_the_shipped_model(
    block: Block, in_root: Callable, request: pytest.FixtureRequest
) -> None:
    in_root(None)
    run(block, request, "shipped_url")


def run(block: Block, request: pytest.FixtureRequest, server: str) -> None:
    """Runs a block; one that names the address of a server gets that of ours, which it starts."""
    text = block.text
    if PORT in text:
        text = text.replace(PORT, request.getfixturevalue(server))
    exec(compile("\n" * (block.line - 1) + text, str(block.page), "exec"), {"__name__": "page"})
