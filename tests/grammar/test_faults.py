"""A grammar that fails one sequence: its limits, its matcher, its guesses. The others never notice."""

from __future__ import annotations

import threading

import pytest

from jserve import faults
from jserve.grammar import guide as guide_module, guides as guides_module
from jserve.grammar.rollback import MAX_FORCED
from jserve.sampling import StructuredOutputs
from jserve.testing import FakeProposer
from tests.grammar.kit import CITY, engine, finish, gather, guides, ids, request, run, text, tokens

WIDE = StructuredOutputs(grammar='start: "x" ' + '"y"? ' * 800)
"""Compiles, allows "xy", and has more ways on behind it than the matcher may follow."""
FREE = request("free", max_tokens=40)


class Guess(FakeProposer):
    """Proposes one text, whatever there was."""

    def __init__(self, guess: str) -> None:
        self.guess = ids(guess)

    def propose(self, seq, most):
        return self.guess[:most]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("proposer", [None, Guess("xyyy"), Guess("yyy")])
@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_limit_of_the_grammar_is_the_clients_and_names_the_field(n, proposer, fast_forward):
    """At a token that is taken or tried as a draft: 400 by its code, and nobody else is hurt."""
    alone = tokens(run(FREE), "free")
    asked = request("wide", WIDE, n=n, min_tokens=3, temperature=1.0, seed=1)
    options = {"proposer": proposer, "max_drafts": 3} if proposer else {}
    outputs = run(asked, FREE, request("city", CITY), fast_forward=fast_forward, **options)
    for i in range(n):
        last = gather(outputs)["wide", i][-1]
        assert (last.finish, last.error_code) == ("error", "invalid_schema")
        assert last.error_field == "structured_outputs"
        assert "too complex" in last.error
    assert tokens(outputs, "free") == alone
    assert tokens(outputs, "city") == tokens(run(request("city", CITY)), "city")


def test_a_guess_that_breaks_the_matcher_leaves_no_trace():
    """At every call of the walk: the drafts end there, and what may come next is as it was."""
    made = guides().guide(request("a", CITY), 120)
    plain = guides().guide(request("a", CITY), 120)
    assert made is not None
    assert plain is not None
    draft = ids('{"city": "Par')
    allowed = plain.trim(draft)
    assert len(allowed) > 3
    for at in range(1, len(allowed) + 1):
        with faults.armed("grammar.follow", at) as shot:
            assert len(made.trim(draft)) == at - 1
            assert shot.fired
        made.matcher.consume_token(1)  # broken for good, as behind a limit; a walk mends it
        assert made.trim(()) == ()
        assert list(made.trim(draft)) == list(allowed)
        assert made.mask(()).tolist() == plain.mask(()).tolist()
        assert made.fault is None
    masks = plain.mask(allowed)
    with faults.armed("grammar.follow", 2):
        assert made.mask(allowed).shape == masks.shape
    assert (made.mask(allowed) == masks).all()


def test_a_mask_that_fails_behind_a_guess_leaves_no_trace(monkeypatch):
    """Nothing may be drawn behind that guess, and all is well where the sequence stands."""
    made = guides().guide(request("a", CITY, logprobs=0), 120)
    assert made is not None
    draft = list(made.trim(ids('{"city": "Par')))
    want = made.mask(draft)
    fill = guide_module.fill_next_token_bitmask

    def failing(matcher, mask):
        raise RuntimeError("no mask")

    monkeypatch.setattr(guide_module, "fill_next_token_bitmask", failing)
    hurt = made.mask(draft)
    assert hurt.shape == want.shape
    lost = [j for j in range(len(want)) if (hurt[j] != want[j]).any()]
    assert lost, "some position asks the matcher"
    assert not hurt[lost].any()
    assert made.fault is None
    monkeypatch.setattr(guide_module, "fill_next_token_bitmask", fill)
    assert (made.mask(draft) == want).all()


@pytest.mark.parametrize("at", range(1, 30, 4))
def test_a_limit_at_any_token_ends_that_row_only(at):
    asked = [request(f"r{i}", CITY, temperature=1.0, seed=i) for i in range(3)]
    want = run(*asked, FREE)
    with faults.armed("grammar.follow", at) as shot:
        outputs = run(*asked, FREE)
    assert shot.fired
    hurt = [r.id for r in asked if tokens(outputs, r.id) != tokens(want, r.id)]
    (ended,) = [r.id for r in asked if finish(outputs, r.id) == "error"]
    assert set(hurt) <= {ended}
    last = gather(outputs)[ended, 0][-1]
    assert (last.error_code, last.error_field) == ("invalid_schema", "structured_outputs")
    assert tokens(outputs, "free") == tokens(want, "free")


def test_a_mask_that_fails_ends_that_row_only():
    """The batch fails for one of them, each is asked alone, and that one fails again."""

    class Sick:
        """A matcher that cannot say what comes next."""

        def __init__(self, matcher):
            self._matcher = matcher

        def __getattr__(self, name):
            if "mask" in name:
                raise RuntimeError("no mask")
            return getattr(self._matcher, name)

    asked = [request(f"r{i}", CITY, temperature=1.0, seed=i) for i in range(3)]
    want = run(*asked)
    made = engine()
    for each in asked:
        made.submit(each)
    outputs, sick = [], None
    while sick is None or not sick.n_output:
        outputs += made.step()
        sick = next((s for s in made.scheduler.resources.running if s.request.id == "r1"), sick)
    made.scheduler.guides.wait_masks(None)
    sick.guide.grammar.matcher = Sick(sick.guide.grammar.matcher)
    outputs += made.drain()
    last = gather(outputs)["r1", 0][-1]
    assert (last.finish, last.error_code) == ("error", "grammar_failed")
    for id in ("r0", "r2"):
        assert tokens(outputs, id) == tokens(want, id)
        assert finish(outputs, id) == "stop"


@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_long_certain_text_comes_in_pieces(fast_forward):
    """All of it at once would hold up the others; and what is not wanted need not be walked."""
    spec = StructuredOutputs(choice=("the red car " * 90,))
    asked = request("a", spec, max_tokens=330)
    outputs = run(asked, FREE, fast_forward=fast_forward)
    assert text(tokens(outputs, "a")) == text(list(ids("the red car " * 90))[:330])
    assert finish(outputs, "a") == "length"
    assert max(len(o.token_ids) for o in gather(outputs)["a", 0]) <= MAX_FORCED + 1
    assert tokens(outputs, "free") == tokens(run(FREE), "free")


def test_masks_that_never_come_end_those_who_wait_and_no_other(monkeypatch):
    """Beside one that is free, and alone; who comes later has a thread of its own."""
    release, fill = threading.Event(), guides_module.TokenGuides._fill
    monkeypatch.setattr(guides_module, "HUNG_S", 0.05)
    want = tokens(run(request("late", CITY)), "late"), tokens(run(FREE), "free")
    made = engine()

    def hangs(self, executor, jobs, mask_GW):
        monkeypatch.setattr(guides_module.TokenGuides, "_fill", fill)
        release.wait(20.0)
        fill(self, executor, jobs, mask_GW)

    try:
        for others in ((FREE,), ()):
            monkeypatch.setattr(guides_module.TokenGuides, "_fill", hangs)
            outputs = []
            for each in (request("city", CITY), *others):
                made.submit(each)
            while not any(o.request_id == "city" and o.finish for o in outputs):
                outputs += made.step()
            made.submit(request("late", CITY))
            outputs += made.drain()
            last = gather(outputs)["city", 0][-1]
            assert (last.finish, last.error_code) == ("error", "grammar_failed")
            assert "not known within" in last.error
            assert tokens(outputs, "late") == want[0]
            assert not others or tokens(outputs, "free") == want[1]
    finally:
        release.set()
