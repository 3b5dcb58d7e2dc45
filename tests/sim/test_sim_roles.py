"""Simulated replicas with roles: prompts computed apart, pages on their way, clients that hang up meanwhile."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from jserve import cli
from jserve.errors import ConfigError
from jserve.fleet import router
from jserve.fleet.candidates import PREFILL
from jserve.fleet.roles import DECODE
from jserve.fleet.route import ReplicaChoice, route
from jserve.sim import traffic
from jserve.sim.fleet import FleetSimulation
from jserve.sim.records import Done
from jserve.sim.simulate import Run, Setup, limits_of
from jserve.sim.trace import TraceItem
from tests.sim.test_simulate import item, setup

PAGE_BYTES, MOVE_S = 1000, 0.01
TWO = {PREFILL: 1, DECODE: 1}


def with_roles(roles: dict[str, int], page_s: float = MOVE_S, **changes: Any) -> Setup:
    """Pages take ``MOVE_S`` to host memory or back, and ``page_s`` to be written or read."""
    made = setup(options={"max_queue_s": 0, "max_waiting": 10_000, "max_num_seqs": 16}, **changes)
    device = dataclasses.replace(made.device, page_bytes=PAGE_BYTES, move_s=MOVE_S)
    transfer = PAGE_BYTES / page_s / 1e9
    n = sum(roles.values())
    return dataclasses.replace(made, device=device, roles=roles, replicas=n, transfer_gb_s=transfer)


def play(trace: list[TraceItem], made: Setup) -> Run:
    return FleetSimulation(trace, made, limits_of(made)).run()


def done(run: Run) -> dict[str, Done]:
    return {one.id: one for one in run.records.done}


@pytest.fixture
def apart(monkeypatch):
    """Every prompt is computed apart, whatever that costs."""

    def always(asked, candidates, pages):
        [helper] = [i for i, one in enumerate(candidates) if one.role == PREFILL]
        route(asked, candidates, pages)
        return (
            ReplicaChoice(replica=helper, n_cached=0, first_s=0.0, cost_s=0.0)
            if asked.pages
            else None
        )

    monkeypatch.setattr(router, "prefill_at", always)


@pytest.mark.parametrize("page_s", [0.05, 0.2])
def test_a_prompt_computed_apart_by_hand(apart, page_s):
    """Of 33 tokens four pages of 8 are full. The prompt takes 0.1 + 0.33 s, its pages ``page_s`` each to be written and
    as much to be read, then MOVE_S each in the step that computes the last token: 0.1 + 0.01 s."""
    run = play([item("1", 5.0, 33, 3)], with_roles(TWO, page_s))
    [d] = run.records.done
    assert d.ttft == pytest.approx(0.43 + 8 * page_s + 4 * MOVE_S + 0.11, abs=0.005)
    assert d.tpot == pytest.approx(0.1)
    assert (d.finish, d.n_output, d.n_cached) == ("length", 3, 32)
    assert (run.n_remote, run.counters["disk_pages_read_total"]) == (1, 4)
    assert sorted(run.by_replica) == [1 + 2, 33], "one computes the prompt, the other the rest"


def test_pages_that_are_there_do_not_travel_again(apart):
    """The second request has the pages of the first, which its prefill replica kept and the other one too."""
    first = item("1", 0.0, 33, 3)
    second = TraceItem(id="2", at=9.0, prompt=first.prompt, outputs=first.outputs, max_tokens=3)
    run = play([first, second], with_roles(TWO, 0.2))
    cold_s, warm_s = (done(run)[id].ttft or 0.0 for id in ("1", "2"))
    assert 0.0 < warm_s < cold_s - 8 * 0.2
    assert run.counters["disk_pages_read_total"] == 4


def test_a_client_that_hangs_up_meanwhile_takes_its_prompt_along(apart):
    left = item("1", 0.0, 120, 9, cancels=((0.3, None),))  # in the first of two steps
    run = play([left, item("2", 8.0, 33, 3)], with_roles(TWO))
    found = done(run)
    assert (found["1"].finish, found["1"].n_output, found["1"].end) == ("abort", 0, 0.3)
    assert (found["2"].finish, found["2"].n_output) == ("length", 3)
    assert (run.n_remote, run.n_tokens) == (1, 64 + 33 + 1 + 2)
    assert not run.records.open


def test_a_choice_that_its_client_gave_up_meanwhile_is_not_begun(apart):
    outputs = (((11, 0, 4),), ((12, 0, 4),))
    asked = TraceItem(
        id="1",
        at=0.0,
        prompt=((10, 0, 33),),
        outputs=outputs,
        max_tokens=4,
        cancels=((0.3, 0),),
    )
    run = play([asked], with_roles(TWO))
    [d] = run.records.done
    assert (d.n_output, run.n_remote) == (4, 1)
    assert run.n_tokens == 33 + 1 + 3


LONG = "prefixes=6,prefix=40,zipf=0,prompt=120,prompt_sigma=0.5,output=12,context=400,rate=1.5,n=60"
TURNS = ";rate=0.5,n=12,prompt=30,output=5,turns=3,think=2,context=400,lane=interactive"


def test_every_request_has_one_end_and_a_run_repeats():
    trace = traffic.generate(traffic.parse(LONG + TURNS), 1)
    run, again = (play(trace, with_roles({PREFILL: 1, DECODE: 2})) for _ in range(2))
    assert not run.records.open
    assert {d.error for d in run.records.done} == {None}
    assert len(run.records.done) == len(trace)
    assert run.records.done == again.records.done
    assert run.n_remote == again.n_remote
    assert 5 < (run.n_remote or 0) < len(trace), "some are computed apart, by price"
    assert len(run.by_replica) == 3


def test_who_decodes_is_disturbed_less(apart):
    """The time between tokens beside long prompts, with as many replicas."""
    trace = traffic.generate(traffic.parse(LONG), 1)
    roles = play(trace, with_roles({PREFILL: 1, DECODE: 2}))
    both = play(trace, dataclasses.replace(with_roles(TWO), roles={}, replicas=3, transfer_gb_s=0))
    assert both.n_remote is None
    p99 = [sorted(d.tpot or 0.0 for d in run.records.done)[-3] for run in (roles, both)]
    assert p99[0] < 0.5 * p99[1]


def test_nobody_is_asked_who_hands_over_too_slowly():
    """Pages take longer than the prompt."""
    trace = traffic.generate(traffic.parse(LONG), 1)
    assert play(trace, with_roles({PREFILL: 1, DECODE: 2}, page_s=1.0)).n_remote == 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_replicas": 4}, "max_replicas"),
        ({"options": {"prefix_caching": False}}, "prefix_caching"),
    ],
)
def test_what_makes_no_sense_with_roles_is_refused(changes, field):
    made = with_roles(TWO)
    options = changes.pop("options", None)
    if options is not None:
        made = dataclasses.replace(
            made, config=type(made.config).of(**made.config.flat() | options)
        )
    made = dataclasses.replace(made, **changes)
    with pytest.raises(ConfigError) as caught:
        play([item("1", 0.0, 4, 2)], made)
    assert caught.value.field == field


def simulate(*line: str) -> Any:
    return CliRunner().invoke(cli.app, ["simulate", *line], env={"COLUMNS": "200"})


def test_the_command_takes_roles_and_says_what_came_of_them():
    line = ["rate=4,n=40,prompt=3000,output=60", "--replicas", "3", "--roles", "prefill=1,decode=2"]
    line += ["--page-size", "64", "--transfer-gb-s", "20"]
    result = simulate(*line)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())  # it is wrapped
    found = re.search(r"(\d+) prompts computed apart, (\d+) pages handed over", said)
    assert found is not None, said
    assert 0 < int(found[1]) < 40
    assert int(found[2]) >= int(found[1])


def test_the_command_follows_the_load_and_says_how_often_roles_changed():
    line = ["rate=4,n=160,prompt=3000,output=10", "--replicas", "4", "--roles", "auto"]
    result = simulate(
        *line, "--page-size", "64", "--transfer-gb-s", "20", "--roofline", "qwen3-32b"
    )
    assert result.exit_code == 0, result.output
    found = re.search(r"(\d+) role changes", " ".join(result.stdout.split()))
    assert found is not None
    assert 1 <= int(found[1]) <= 3


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (["--roles", "auto"], "roles"),
        (["--replicas", "3", "--roles", "prefill=1,decode=1"], "roles"),
        (["--replicas", "2", "--roles", "cook=1,decode=1"], "roles"),
        (["--replicas", "2", "--transfer-gb-s", "3"], "transfer_gb_s"),
    ],
)
def test_roles_that_cannot_be_are_refused_by_name(line, word):
    result = simulate("rate=4,n=4", *line)
    assert result.exit_code == 2
    assert word in result.output
