"""The table of candidates: a row is that of the candidate as it is now."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from jserve.engine.view import View
from jserve.fleet.candidates import PREFILL, Candidate, CandidateTable
from jserve.request_options import Lane
from tests.fleet.test_route import fleets, views

VIEW = View(
    n_rows=10,
    n_before=4,
    wait_s={Lane.STANDARD: 2.0, Lane.BULK: 8.0},
    prefill_token_s=1e-3,
    row_s=1e-4,
    page_s=1e-5,
)


COLUMNS = ("prefill_token_s", "row_s", "page_s", "rows", "suspicion", "takes_requests", "answers")


def row_of(table: CandidateTable, number: int) -> dict[str, Any]:
    """What the table has of candidate ``number``, by column."""
    before_s = {lane: column[number] for lane, column in table.before_s.items()}
    return {"before_s": before_s} | {name: getattr(table, name)[number] for name in COLUMNS}


def test_a_row_by_hand():
    one = Candidate(view=VIEW, n_sent=1, n_ended=2, sent_s=0.5, suspicion=2.0, role=PREFILL)
    assert row_of(CandidateTable([one]), 0) == {
        # One of the four places that had to become free is.
        "before_s": {Lane.INTERACTIVE: 0.5, Lane.STANDARD: 2.0, Lane.BULK: 6.5},
        "prefill_token_s": 1e-3,
        "row_s": 1e-4,
        "page_s": 1e-5,
        "rows": 9.0,
        "suspicion": 2.0,
        "takes_requests": True,
        "answers": False,
    }


@pytest.mark.parametrize(
    ("field", "value", "changed"),
    [
        ("n_sent", 3, {"rows"}),
        ("n_ended", 1, {"rows", "before_s"}),
        ("sent_s", 0.25, {"before_s"}),
        ("suspicion", 3.0, {"suspicion"}),
        ("out", True, {"takes_requests"}),
        ("role", PREFILL, {"answers"}),
        ("view", View(ready=False), {"before_s", "rows", "takes_requests"}),
    ],
)
def test_a_change_is_in_its_row_and_in_no_other(field, value, changed):
    table = CandidateTable([Candidate(view=VIEW)] * 3)
    before = row_of(table, 1)
    table.change(1, **{field: value})
    assert getattr(table[1], field) == value
    after = row_of(table, 1)
    prices = {"prefill_token_s", "row_s", "page_s"} if field == "view" else set()
    assert {name for name in after if after[name] != before[name]} == changed | prices
    assert row_of(table, 0) == row_of(table, 2) == before


def test_a_field_that_a_candidate_has_not_cannot_change():
    with pytest.raises(TypeError):
        CandidateTable([Candidate(view=VIEW)]).change(0, ready=False)


@given(fleets, fleets, st.lists(st.tuples(st.integers(0, 8), views, st.booleans()), max_size=9))
def test_a_table_that_changed_is_as_one_made_anew(first, more, changes):
    table = CandidateTable(first)
    for one in more:
        table.append(one)
    for number, view, out in changes:
        table.change(number % len(table), view=view, out=out)
        table.replace(-1, first[0])
    made = CandidateTable(table)
    assert len(table) == len(table.rows) == len(first) + len(more)
    assert all(row_of(table, i) == row_of(made, i) for i in range(len(made)))
