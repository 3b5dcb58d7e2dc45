"""Speculation on a virtual clock: what its control is worth there."""

from __future__ import annotations

import pytest

from bench import speculation_control as control


@pytest.mark.parametrize("method", control.METHODS)
def test_drafts_change_no_token_and_a_right_one_is_a_token(method):
    """The runner draws the answers, whoever drafts: as many tokens as were asked for."""
    asked = control.load(12)
    seconds, took, per_step = control.run("gpu", method, asked, 4)
    assert set(took) == {one.request.id for one in asked}
    assert 0 < max(took.values()) <= seconds
    assert 1.0 <= per_step <= 1 + control.MOST


def test_where_drafts_cost_more_than_they_bring_a_load_loses_next_to_nothing():
    """EAGLE-3 among four on a machine whose wide steps are dear: a control that shares the time of prompts out over the
    steps drafts there, at 0.87."""
    found = control.cell("old cpu", "eagle3", 4)
    assert found["speedup"] > 0.97
    assert found["below_0.9"] < 0.15


def test_where_drafts_are_cheap_a_load_gains():
    assert control.cell("gpu", "draft", 1)["speedup"] > 1.8
