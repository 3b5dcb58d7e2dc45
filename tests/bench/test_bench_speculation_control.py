"""Speculation on a virtual clock: what its control is worth there."""

from __future__ import annotations

import pytest

from bench import speculation_control as control


@pytest.mark.parametrize("method", control.METHODS)
def test_drafts_change_no_token_and_a_right_one_is_a_token(method):
    """The runner draws the answers, whoever drafts: as many tokens as were asked for."""
    asked = control.load(12)
    ran = control.run("gpu", method, asked, 4)
    assert set(ran.ended) == {one.request.id for one in asked}
    assert 0 < max(ran.ended.values()) <= ran.seconds
    assert 1.0 <= ran.per_step <= 1 + control.MOST
    assert len(ran.shares) == len(asked)


def test_without_drafts_every_request_decodes_as_fast_as_without_drafts():
    """Whatever prompts of others fall into its steps."""
    ran = control.run("cpu", "draft", control.load(12), 4, k=0)
    assert ran.shares == pytest.approx([1.0] * 12)
    ran = control.run("cpu", "eagle3", control.load(12), 4, k=control.MOST)
    assert min(ran.shares) < 0.95 < 1.05 < max(ran.shares)


def test_the_table_grows_with_acceptance_and_shrinks_with_rows():
    found = control.table("gpu", "eagle3")
    assert all(ks == sorted(ks) for ks in found.values())
    columns = [list(column) for column in zip(*found.values(), strict=True)]
    assert all(ks == sorted(ks, reverse=True) for ks in columns)
    assert found[1][0] == 0 < found[1][5] < found[1][10] == control.MOST


def test_where_drafts_cost_more_than_they_bring_a_load_loses_next_to_nothing():
    """EAGLE-3 among four on a machine whose wide steps are dear: a control that shares the time of prompts out over the
    steps drafts there, at 0.87."""
    found = control.cell("old cpu", "eagle3", 4, loads=1)
    assert found["speedup"] > 0.97
    assert found["below_0.9"] < 0.15


def test_where_drafts_are_cheap_a_load_gains():
    found = control.cell("gpu", "draft", 1, loads=1)
    assert found["speedup"] > 1.8
    assert found["slowest"] > 0.9
