"""The table of docs/models.md that says what runs with each architecture is what the engine and the tests say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import generate
from jserve.gguf import config as gguf
from jserve.model.families import ARCHITECTURES
from tests.model import support
from tests.weights import test_weights_gguf

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_code_writes() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    assert page == generate.models(), "run python docs/generate.py --quick"


def test_every_architecture_has_models() -> None:
    assert all(support.archs(name) for name in ARCHITECTURES)


@pytest.mark.parametrize("name", [name for c in support.COLUMNS for name in c.tests])
def test_the_tests_of_the_features_are_there(name: str) -> None:
    file, _, test = name.partition("::")
    assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.M)


def test_what_a_test_runs_is_served() -> None:
    """Of a family: one architecture of it is enough."""
    for column in support.COLUMNS:
        for tested in {ARCHITECTURES[name] for name in column.tested}:
            cells = [column.cell(name) for name, own in ARCHITECTURES.items() if own == tested]
            # Experts of Llama 4 are compiled for GPUs beside attention that is not hopper's.
            assert support.YES in cells or (column.title, tested) == ("`hopper`", "llama4"), tested


def test_a_feature_without_a_test_is_not_a_yes() -> None:
    column = support.Column(title="it", tests=(), tested=["LlamaForCausalLM"])
    assert column.cell("LlamaForCausalLM") == support.YES
    assert column.cell("OlmoeForCausalLM") == support.ACCEPTED
    refused = support.Column(title="it", tests=(), tested=ARCHITECTURES, served=support.spread)
    assert refused.cell("LlamaForCausalLM") == support.NO
    assert refused.cell("OlmoeForCausalLM") == support.YES


def test_gguf_reads_no_other_architecture() -> None:
    assert set(gguf.FAMILIES) == {kind for kind, _ in test_weights_gguf.FAMILIES.values()}
