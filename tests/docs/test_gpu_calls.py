"""The calls that the pages tell to make of a GPU: their stages and options exist, and they fit the time lent."""

from __future__ import annotations

import json
import re
import shlex
from argparse import Namespace
from typing import Any

import pytest

from bench import gpu
from tests.docs.pages import PAGES, ROOT, blocks

PAGE = ROOT / "docs" / "first_gpu_run.md"
LENT_S, LONGEST_S, START_S = 900, 600, 120
"""Device time in all, of one command, and of a start of the machine."""
AROUND_S = 20
"""Seconds that a call needs beside its budget."""
MOST_CHARACTERS = 2000
CALLS = [json.loads(b.text) for b in blocks("json") if b.page == PAGE]


def options(command: str) -> Namespace:
    """As ``bench.gpu`` reads them. Raises SystemExit for a stage or an option that does not exist."""
    return gpu.options().parse_args(shlex.split(command.split("bench.gpu ", 1)[1], comments=True))


def named() -> list[str]:
    """Every call of ``bench.gpu`` on any page, in blocks and in sentences."""
    pages = [*PAGES, ROOT / "bench" / "README.md"]
    found = [m for page in pages for m in re.findall(r"bench\.gpu --[^`\n\"]+", page.read_text())]
    assert len(found) > 10
    return found


@pytest.mark.parametrize("command", named())
def test_stages_and_options_exist(command: str) -> None:
    options(command)


def test_a_stage_or_option_that_does_not_exist_would_be_seen() -> None:
    for wrong in ("--only facts,decode_numbers", "--butget 3", "--attn hoper"):
        with pytest.raises(SystemExit):
            options(f"bench.gpu {wrong}")


def test_there_are_three_calls_which_fit_the_time_lent() -> None:
    assert len(CALLS) == 3 == len(re.findall(r"^## Call \d", PAGE.read_text(), re.M))
    budgets = [options(call["command"]).budget for call in CALLS]
    assert START_S + sum(budgets) + len(budgets) * AROUND_S <= LENT_S
    for call, budget in zip(CALLS, budgets, strict=True):
        assert budget + AROUND_S <= call["timeout_s"] <= LONGEST_S


@pytest.mark.parametrize("call", CALLS, ids=["first", "second", "third"])
def test_a_call_takes_along_what_it_needs(call: dict[str, Any]) -> None:
    assert set(call) == {"command", "timeout_s", "carry"}
    assert len(call["command"]) <= MOST_CHARACTERS
    assert call["carry"] == ["bench/wheels"]
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "bench/wheels/" in ignored, "only what git ignores has to be named"


def test_each_goes_on_from_the_record_of_the_one_before() -> None:
    kept = re.findall(r"cp FILES_AT/gpu\.jsonl (\S+\.jsonl)", PAGE.read_text())
    assert [options(c["command"]).resume for c in CALLS] == [None, *kept]
    assert all("--out $OUT" in c["command"] for c in CALLS)


def test_each_kernel_is_proved_first_and_every_stage_of_a_call_is_told_of_once() -> None:
    calls = [options(call["command"]).only for call in CALLS]
    rows = re.findall(r"^\| ([\w, ]+) \| [^|]+ \| [^|]+ \|$", PAGE.read_text(), re.M)
    said = [name for row in rows for name in row.split(", ") if name in gpu.STAGES]
    assert sorted(said) == sorted({name for names in calls for name in names})
    assert {"decode_numerics", "prefill_numerics", "mla_numerics"} <= set(calls[0])
