"""How many cores a process may use, and that those who start threads ask for that."""

from __future__ import annotations

import os

from jserve.cores import n_cores
from jserve.grammar.guides import TokenGuides


def test_the_cores_are_those_of_this_process(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 7, 9}, raising=False)
    assert n_cores() == 4
    guides = TokenGuides(lambda: None)  # type: ignore[arg-type, return-value]
    assert guides._n_threads == 2
    guides.close()


def test_where_nobody_says_it_is_the_machines(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert n_cores() == 64
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert n_cores() == 1
