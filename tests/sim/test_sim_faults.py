"""Simulated replicas that die or hang: every request ends once with exactly its tokens."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter, defaultdict
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from typer.testing import CliRunner

from jserve import cli
from jserve.errors import ConfigError
from jserve.fleet import face
from jserve.fleet.candidates import PREFILL
from jserve.fleet.member import OVERDUE_S, OVERDUE_STEPS
from jserve.fleet.roles import DECODE
from jserve.sim.clients import Clients
from jserve.sim.faults import DEATH, HANG, KINDS, ReplicaFault, parse_faults
from jserve.sim.fleet import FleetSimulation
from jserve.sim.lost_requests import PATIENCE
from jserve.sim.outages import DEATH_NOTICED_S, LOOKS_S
from jserve.sim.records import Done
from jserve.sim.replica import SimReplica
from jserve.sim.report import Slo, summarise
from jserve.sim.simulate import Run, Setup, limits_of
from jserve.sim.trace import TraceItem
from jserve.types import Output, Request
from tests.sim.test_sim_roles import apart, with_roles  # noqa: F401
from tests.sim.test_simulate import item, setup

CALM = {"max_queue_s": 0, "max_waiting": 10_000, "max_num_seqs": 16}
DEAD = "engine_dead"
STEP_S = 0.1
"""Of the device of ``setup``; a prompt token takes a tenth of that on top."""


class Watched(FleetSimulation):
    """Keeps what clients are told, and where requests are sent."""

    def __init__(self, trace: Seq[TraceItem], made: Setup) -> None:
        self.submits: list[tuple[float, str, int]] = []
        """(time, request or prefill, number of the replica)."""
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ends: Counter[tuple[str, int]] = Counter()
        self.silent_s: dict[int, float] = {}
        """By number of a replica that is gone, the seconds for which it may have said nothing, by its last view."""
        super().__init__(trace, made, limits_of(made))
        self._receive = self.clients.receive
        self.clients.receive = self._received  # type: ignore[method-assign]

    def _received(self, outputs: Seq[Output], now: float) -> None:
        for output in outputs:
            record = self.clients.records.open.get(output.request_id)
            if record is not None and output.attempt == record.attempt:
                choice = (output.request_id, output.index)
                self.tokens[choice] += output.token_ids
                self.ends[choice] += output.finish is not None
        self._receive(outputs, now)

    def leave(self, one: SimReplica, now: float) -> None:
        step_s = self.router.candidates[one.number].view.step_s
        self.silent_s[one.number] = OVERDUE_S + OVERDUE_STEPS * step_s
        super().leave(one, now)

    def _submit(self, sent: Any, request: Request, now: float) -> None:
        self.submits.append((now, request.id, sent.to.number))
        super()._submit(sent, request, now)


def lossy(faults: str, replicas: int = 2, **changes: Any) -> Setup:
    own = {name: changes.pop(name) for name in ("options",) if name in changes}
    made = setup(options=CALM | own.get("options", {}))
    return dataclasses.replace(made, replicas=replicas, faults=parse_faults(faults), **changes)


def play(trace: Seq[TraceItem], made: Setup) -> tuple[Watched, Run]:
    """The run, in which every request ended as it should."""
    played = Watched(trace, made)
    run = played.run()
    check(trace, played, run)
    return played, run


def check(trace: Seq[TraceItem], played: Watched, run: Run) -> None:
    """Every choice ended once; those that went well have exactly their tokens, the others the first of them."""
    assert not run.records.open
    assert len(run.records.done) + run.records.n_unsent == len(trace)
    found = done(run)
    assert len(found) == len(run.records.done)
    for one in [each for each in trace if each.id in found]:
        for i, output in enumerate(one.outputs):
            said, whole = played.tokens[one.id, i], played.clients.streams.answer(one, i)
            n = min(sum(piece[2] for piece in output), one.max_tokens or 1 << 20)
            assert said == whole[: len(said)]
            assert len(said) <= n
            assert played.ends[one.id, i] == found[one.id].n_sent
            if found[one.id].finish in ("stop", "length") and not one.cancels:
                assert len(said) == n
        assert found[one.id].n_output == sum(
            len(played.tokens[one.id, i]) for i in range(len(one.outputs))
        )


def done(run: Run) -> dict[str, Done]:
    return {one.id: one for one in run.records.done}


def longest_s(run: Run) -> float:
    """The longest wait between two tokens of a request that went on elsewhere."""
    return max(float(gaps.max()) for gaps in run.records.resumed_gaps)


# -- by hand


def test_a_death_by_hand():
    """Tokens come at 0.2, 0.3 ... 1.0. At 1.1 the other one computes 10 of the prompt and the 9 that were told."""
    played, run = play([item("1", 0.0, 10, 30)], lossy("death=1.05"))
    [d], [outage] = run.records.done, run.outages
    assert (d.finish, d.n_output, d.n_resumed) == ("length", 30, 1)
    assert (outage.noticed_at, outage.ready_at) == pytest.approx((1.1, 61.1))
    assert longest_s(run) == pytest.approx(0.1 + STEP_S + 0.01 * 19)
    assert d.end == pytest.approx(1.39 + 20 * STEP_S)
    assert sorted(run.by_replica) == [10 + 9, 19 + 20], "the step under way is lost"
    assert {number for _, _, number in played.submits} == {0, 1}


@pytest.mark.parametrize("at", [1.001, 1.05, 1.0999])
def test_a_hang_is_noticed_as_a_live_front_notices_it(at: float):
    """At 1.0 the replica was heard of last."""
    played, run = play([item("1", 0.0, 10, 30)], lossy(f"hang={at}"))
    [outage] = run.outages
    late_at = 1.0 + played.silent_s[outage.replica]
    assert late_at < outage.noticed_at < late_at + 1.01 * LOOKS_S
    looks = outage.noticed_at / LOOKS_S
    assert looks == pytest.approx(round(looks))
    assert longest_s(run) == pytest.approx(outage.noticed_at - 1.0 + STEP_S + 0.01 * 19)


def test_one_that_hangs_with_nothing_to_do_is_noticed_by_the_next_request():
    late = item("2", 9.0, 10, 3)
    played, run = play([item("1", 0.0, 10, 3), late, item("3", 9.001, 10, 3)], lossy("hang=4"))
    [outage] = run.outages
    late_at = 9.0 + played.silent_s[outage.replica]
    assert late_at < outage.noticed_at < late_at + 1.01 * LOOKS_S
    assert sorted(d.n_resumed for d in run.records.done) == [0, 0, 1]


def test_what_a_step_that_ends_later_would_tell_is_told_by_nobody_and_of_others_by_itself():
    """Both replicas have a step from 0 to 0.2 s. The one that lives tells its token then, the lost one none."""
    made = lossy("death=0.1")
    _played, run = play([item("1", 0.0, 10, 1), item("2", 0.0, 10, 1)], made)
    ends = sorted(d.end for d in run.records.done)
    assert ends == pytest.approx([0.2, 0.2 + 0.2]), (
        "it is read once the step of the other one is over"
    )


def test_the_one_with_the_most_requests_is_lost_and_of_two_such_the_first():
    trace = [item("1", 0.0, 10, 30), item("2", 0.0, 10, 30)]
    played, run = play(trace, lossy("death=1,hang=1.01", replicas=3, start_s=2.0))
    assert sorted(number for _, _, number in played.submits[:2]) == [1, 2]
    assert [one.replica for one in run.outages] == [1, 2]
    played, run = play([*trace, item("3", 0.3, 10, 30)], lossy("death=1", replicas=2))
    most, _ = Counter(number for _, _, number in played.submits[:3]).most_common(1)[0]
    assert [one.replica for one in run.outages] == [most]


def steady(n: int = 100) -> list[TraceItem]:
    """One request every tenth of a second, and one later."""
    return [*(item(str(i + 1), 0.1 * i, 10, 8) for i in range(n)), item("999", 30.0, 10, 8)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_router_sends_there_until_it_knows_and_again_when_another_is_ready(kind: str):
    played, run = play(
        steady(), lossy(f"{kind}=2.03", replicas=3, start_s=1.5, router="round_robin")
    )
    [outage] = run.outages
    times = [at for at, _, number in played.submits if number == outage.replica]
    assert outage.ready_at == pytest.approx(outage.noticed_at + 1.5)
    assert any(2.03 < at < outage.noticed_at for at in times) or kind == DEATH
    assert not any(outage.noticed_at < at < outage.ready_at for at in times)
    assert any(outage.ready_at <= at <= outage.ready_at + 0.5 for at in times)
    assert outage.n_requests == sum(d.n_resumed for d in run.records.done) > 0


def test_the_router_forgets_its_pages():
    played, run = play(
        [item("1", 0.0, 64, 30), item("2", 15.0, 9, 2)], lossy("death=1.5", start_s=1.0)
    )
    [outage] = run.outages
    asked = played._asking.of(played.clients.sent(item("1", 0.0, 64, 30), 0.0), played.page_size)
    known = played.router.pages.known(asked.pages, 2)
    assert known[outage.replica] == 0
    assert known[1 - outage.replica] == len(asked.pages)


def test_the_next_one_has_read_nothing():
    """With a replica in its place at once, the request goes back to that number, and its prompt is computed again."""
    first = item("1", 0.0, 64, 4)
    again = TraceItem(id="2", at=9.0, prompt=first.prompt, outputs=first.outputs, max_tokens=4)
    _, calm = play([first, again], lossy("none"))
    assert done(calm)["2"].n_cached > 0
    open_ones = [item(str(i), 1.5, 9, 40) for i in range(3, 9)]
    _, run = play([first, again, *open_ones], lossy("death=3,death=3.2", start_s=1.0))
    assert {one.replica for one in run.outages} == {0, 1}
    assert done(run)["2"].n_cached == 0


# -- nobody is left


def test_requests_wait_in_order_for_the_next_replica_and_new_ones_are_refused():
    trace = [item(str(i), 0.1 * i, 10, 30) for i in range(1, 6)]
    late = [item("7", 3.0, 10, 3), item("8", 9.0, 10, 3)]
    played, run = play([*trace, *late], lossy("death=1,death=1.02", start_s=5.0))
    found = done(run)
    assert (found["7"].error, found["7"].refused, found["7"].end) == (DEAD, True, 3.0)
    assert found["8"].error is None
    back = [id for at, id, _ in played.submits if 6.0 < at < 6.1]
    assert sorted(back) == ["1", "2", "3", "4", "5"]
    ready = min(one.ready_at for one in run.outages)
    assert ready == pytest.approx(6.05)
    assert longest_s(run) >= 5.0
    moved = [id for at, id, _ in played.submits if at == pytest.approx(1.05)]
    assert back[-len(moved) :] == moved, (
        "those that went to the one that died next are behind its own"
    )


def test_a_client_that_is_refused_meanwhile_sends_again():
    trace = [item("1", 0.0, 10, 30), item("2", 3.0, 10, 3)]
    _, run = play(trace, lossy("death=1,death=1.02", start_s=5.0, retries=1))
    found = done(run)["2"]
    assert (found.error, found.n_sent, found.finish) == (None, 2, "length")
    assert found.ttft == pytest.approx(5.0 + 0.2, abs=0.2), "it waits the 5 s that it is told"


def test_one_that_loses_replica_after_replica_before_it_is_told_anything_ends():
    """As in ``engine.resume``: the prompt takes 0.7 s, and each replica is lost sooner."""
    faults = ",".join(f"death={at}" for at in (0.1, 0.3, 0.5, 0.7))
    _played, run = play([item("1", 0.0, 60, 9), item("2", 9.0, 4, 2)], lossy(faults, replicas=5))
    found = done(run)["1"]
    assert (found.error, found.n_resumed, found.n_output) == (DEAD, 3, 0)
    assert found.end == pytest.approx(0.75)
    three = ",".join(f"death={at}" for at in (0.1, 0.3, 0.5))
    _, run = play([item("1", 0.0, 60, 9)], lossy(three, replicas=5))
    assert (done(run)["1"].error, done(run)["1"].n_resumed) == (None, 3)


# -- clients that hang up


@pytest.mark.parametrize(
    ("cancel", "end"),
    [(0.55, 0.6), (1.04, 1.05), (1.07, 1.07), (1.2, 1.39), (None, None)],
    ids=["before", "in the lost step", "not noticed", "gone on", "never"],
)
def test_a_client_hangs_up_around_a_death(cancel: float | None, end: float | None):
    cancels = () if cancel is None else ((cancel, None),)
    trace = [item("1", 0.0, 10, 30, cancels=cancels), item("2", 5.0, 4, 2)]
    _played, run = play(trace, lossy("death=1.05"))
    found = done(run)["1"]
    assert found.finish == ("length" if cancel is None else "abort")
    assert end is None or found.end == pytest.approx(end, abs=0.1 if cancel == 1.2 else 1e-6)
    assert found.n_resumed == (cancel is None or cancel > 1.1)


def test_a_client_hangs_up_while_its_request_waits_for_a_replica():
    trace = [item("1", 0.0, 10, 30, cancels=((3.0, None),)), item("2", 0.0, 10, 30)]
    _played, run = play(trace, lossy("death=1,death=1.02", start_s=5.0))
    assert (done(run)["1"].finish, done(run)["1"].end) == ("abort", 3.0)
    assert (done(run)["2"].finish, done(run)["2"].n_output) == ("length", 30)


def test_a_choice_is_given_up_meanwhile_and_the_others_go_on():
    outputs = (((11, 0, 30),), ((12, 0, 30),), ((13, 0, 4),))
    both = TraceItem(
        id="1", at=0.0, prompt=((10, 0, 20),), outputs=outputs, max_tokens=30, cancels=((1.57, 1),)
    )
    played, _run = play([both], lossy("death=1.55"))
    counts = [len(played.tokens["1", i]) for i in range(3)]
    assert counts[0] == 30
    assert counts[2] == 4, "it had ended before"
    assert 5 < counts[1] < 20


# -- roles


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_for_a_prompt_is_answered_without_it(kind: str):
    made = with_roles({PREFILL: 1, DECODE: 1}, 0.2)
    made = dataclasses.replace(made, faults=(ReplicaFault(kind, 0.9),), start_s=2.0)
    played, run = play([item("1", 0.0, 33, 3), item("2", 8.0, 33, 3)], made)
    found, [outage] = done(run), run.outages
    assert (run.n_remote, run.n_remote_failed) == (1, 1)
    assert found["1"].n_cached == 16, "two of four pages were written by then"
    assert (found["1"].ttft or 0.0) > outage.noticed_at
    assert found["1"].n_resumed == 0
    roles = Counter(one.role for one in played.replicas.values())
    assert roles == {PREFILL: 1, DECODE: 1}
    assert played.replicas[outage.replica].role == PREFILL


@pytest.mark.usefixtures("apart")
def test_a_client_hangs_up_while_its_prompt_is_computed_by_a_lost_replica():
    made = dataclasses.replace(
        with_roles({PREFILL: 1, DECODE: 1}, 0.2), faults=(ReplicaFault(HANG, 0.3),)
    )
    left = item("1", 0.0, 33, 3, cancels=((0.6, None),))
    _, run = play([left, item("2", 8.0, 33, 3)], made)
    assert (done(run)["1"].finish, done(run)["1"].end) == ("abort", 0.6)


# -- any trace


def random_trace(draw: random.Random) -> list[TraceItem]:
    """Shared prefixes, several choices, limits, hang-ups, sessions; and a late one, so that all faults come before."""
    found: list[TraceItem] = []
    for number in range(1, draw.randint(8, 24)):
        lengths = [draw.randint(1, 18) for _ in range(draw.choice([1, 1, 2, 3]))]
        outputs = tuple(((1000 * number + i, 0, n),) for i, n in enumerate(lengths))
        cancels = ((draw.uniform(0, 3), draw.choice([None, 0])),) if draw.random() < 0.3 else ()
        after = draw.choice(found).id if found and draw.random() < 0.2 else ""
        found.append(
            TraceItem(
                id=str(number),
                at=draw.uniform(0, 6),
                after=after,
                prompt=(
                    (draw.randint(1, 3), 0, draw.randint(8, 40)),
                    (10 * number, 0, draw.randint(1, 40)),
                ),
                outputs=outputs,
                max_tokens=draw.choice([None, 9, 30]),
                cancels=cancels,
            )
        )
    return [*found, item("999999", 25.0, 9, 2)]


def random_faults(draw: random.Random, most: int) -> tuple[ReplicaFault, ...]:
    times = [draw.uniform(0, 10) for _ in range(draw.randint(1, most))]
    return tuple(ReplicaFault(draw.choice(KINDS), at) for at in times)


SEEDS = [pytest.param(n, marks=pytest.mark.slow) if n >= 8 else n for n in range(30)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("form", ["plain", "overlap", "roles", "auto", "scaled"])
def test_whatever_is_lost_every_request_ends_once_with_its_tokens(seed: int, form: str):
    draw = random.Random(f"{seed} {form}")
    trace = random_trace(draw)
    n, start_s = draw.randint(2, 4), draw.choice([0.0, 0.7, 4.0])
    made = lossy("", n, start_s=start_s, options={"overlap": int(form == "overlap")})
    if form in ("roles", "auto"):
        made = dataclasses.replace(with_roles({PREFILL: 1, DECODE: n - 1}, 0.02), start_s=start_s)
        made = dataclasses.replace(made, auto_roles=form == "auto")
    if form == "scaled":
        made = dataclasses.replace(made, replicas=1, max_replicas=n)
    made = dataclasses.replace(made, faults=random_faults(draw, 1 if form == "scaled" else n))
    _played, run = play(trace, made)
    assert len(run.outages) == len(made.faults)
    for d in run.records.done:
        assert d.error in (None, DEAD)
        assert d.error is None or d.refused or d.n_resumed == 3
    again = Watched(trace, made).run()
    assert again.records.done == run.records.done
    assert again.outages == run.outages


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_wait_is_that_for_notice_and_the_prompt_again(kind: str, seed: int):
    """Where there is room: the time to notice, then the step under way there, and one for prompts and what was told."""
    trace = [item(str(i), 0.05 * i, 12, 40) for i in range(1, 7)]
    at = random.Random(seed).uniform(1.5, 3.0)
    _, run = play(trace, lossy(f"{kind}={at}", replicas=3, options={"max_num_batched_tokens": 512}))
    [outage], n = run.outages, sum(d.n_resumed for d in run.records.done)
    assert n == outage.n_requests == len(run.records.resumed_gaps) == 2
    most_new = 2 * (12 + 40)
    for gaps in run.records.resumed_gaps:
        notice_s = outage.noticed_at - outage.fault.at
        assert notice_s < gaps.max() < notice_s + 2 * STEP_S + STEP_S + 0.01 * most_new


# -- what is said of it, and what is refused


def test_the_report_counts_who_went_on_and_who_came_meanwhile():
    _, run = play(steady(), lossy("death=2.03", replicas=3, start_s=1.5))
    report = summarise(run, Slo(ttft_ms=300.0))["faults"]
    [outage] = report["outages"]
    assert (outage["kind"], outage["at"], outage["noticed_s"]) == (DEATH, 2.03, DEATH_NOTICED_S)
    assert outage["ready_s"] == pytest.approx(1.55)
    assert report["resumed"]["requests"] == outage["requests"] > 0
    assert report["resumed"]["longest_itl_ms"]["max"] == pytest.approx(
        1e3 * longest_s(run), abs=0.01
    )
    meanwhile = [d for d in run.records.done if 2.03 <= d.at < 2.03 + 1.55]
    assert report["meanwhile"]["requests"] == len(meanwhile) == 15
    assert report["meanwhile"]["ttft_ms"]["max"] == pytest.approx(
        1e3 * max(d.ttft or 0 for d in meanwhile), abs=0.01
    )
    assert 0.0 <= report["meanwhile"]["good_share"] <= 1.0
    _, calm = play(steady(), lossy("none", replicas=3))
    assert summarise(calm, Slo())["faults"] == {}


def simulate(*line: str) -> Any:
    return CliRunner().invoke(cli.app, ["simulate", *line], env={"COLUMNS": "200"})


def test_the_command_says_what_it_cost():
    line = ["rate=30,n=200,prompt=60,output=40", "--replicas", "3", "--faults", "death=2,hang=3.5"]
    result = simulate(*line)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    for words in (
        "death=2 of replica",
        "hang=3.5 of replica",
        "went on elsewhere",
        "longest wait between tokens",
    ):
        assert words in said
    [found] = json.loads(simulate(*line, "--json").stdout)
    assert [one["kind"] for one in found["faults"]["outages"]] == ["death", "hang"]
    assert found["lanes"]["all"]["ended"] == 200


@pytest.mark.slow
def test_a_sweep_compares_under_the_same_faults():
    line = [
        "rate=30,n=120,prompt=60,output=40",
        "--sweep",
        "replicas=2,3",
        "--faults",
        "death=2",
        "--json",
    ]
    found = json.loads(simulate(*line).stdout)
    assert [len(one["faults"]["outages"]) for one in found] == [1, 1]
    line = [
        "rate=30,n=120,prompt=60,output=40",
        "--sweep",
        "faults=none,death=2,hang=2",
        "--against",
        "replicas=2,3",
    ]
    found = json.loads(simulate(*line, "--json").stdout)
    kinds = [[each["kind"] for each in one["faults"].get("outages", ())] for one in found]
    assert kinds == [[], [], ["death"], ["death"], ["hang"], ["hang"]]
    assert found[-1]["setting"] == {"faults": "hang=2", "replicas": "3"}


@pytest.mark.parametrize(
    "line",
    [
        ["--faults", "death=1"],
        ["--faults", "death=1", "--batching", "static", "--replicas", "2"],
        *(
            ["--replicas", "2", "--faults", text]
            for text in ("death", "crash=1", "death=", "death=-1")
        ),
        *(
            ["--replicas", "2", "--faults", text]
            for text in ("death=nan", "death=inf", "death=1;hang=2", "hang=1,")
        ),
        ["--replicas", "2", "--faults", "death=1000"],
        ["--replicas", "2", "--faults", "death=0.1,death=0.1,death=0.1"],
        ["--replicas", "2", "--sweep", "faults=death=0.1,never=3"],
    ],
    ids=" ".join,
)
def test_faults_that_cannot_be_are_refused_by_name(line: list[str]):
    result = simulate("rate=4,n=4,prompt=60,output=8", *line)
    assert result.exit_code == 2, result.output
    assert "faults" in result.output


def test_it_is_as_patient_and_looks_as_often_as_a_live_front():
    assert (PATIENCE, LOOKS_S) == (face.PATIENCE, face.LOOKS_S)


def test_none_are_none():
    assert parse_faults("") == parse_faults("none") == ()
    assert parse_faults(" hang=1e2, death=3") == (
        ReplicaFault(HANG, 100.0),
        ReplicaFault(DEATH, 3.0),
    )
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(setup(), faults=(ReplicaFault(DEATH, 1.0),))
    assert caught.value.field == "faults"


def test_one_that_was_moved_and_is_sent_again_is_heard():
    """Its outputs carry the attempt that counts."""
    made = setup()
    clients = Clients([item("1", 0.0, 4, 2)], made)
    [(at, one, _, _)] = clients.due(0.0)
    clients.sent(one, at)
    clients.records.open["1"].attempt = 2
    assert clients.sent(one, 1.0).attempt == clients.again(one).attempt == 2
