"""Greedy, float32: whoever drafts, chains or trees, and however requests are run, every text is the one
without drafts. A cell is one proposer run one way, and has to show that it was that way."""

from __future__ import annotations

import dataclasses
import random
from functools import lru_cache
from typing import Any

import pytest

from jserve.config import SpeculativeOptions
from jserve.model.draft_tree import TreeShape
from jserve.outputs import PartialOutput
from jserve.ports import Proposer
from jserve.sampling import SamplingParams
from jserve.speculation.host.methods import proposer_of
from jserve.types import Output, Request
from tests.api.fake import byte_tokenizer
from tests.whole import equal
from tests.whole.drafters import KINDS, TREE, TREES, Watching, drafting
from tests.whole.test_equalities import compare

DEVICE = [(kind, ()) for kind in KINDS] + [(kind, TREE) for kind in TREES]
NAMES: dict[TreeShape, str] = {(): "chain", TREE: "tree"}
HOST = [(kind, ()) for kind in ("ngram", "suffix", "corpus")]
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, ""),
    "chunked": ({"chunk": 7, "budget": 13}, "chunks"),
    "preempted": ({"n_pages": 40}, "anew"),
    "cached": ({"prefix_caching": True}, "cached"),
    "overlap 1": ({"overlap": 1}, "overlapping"),
    "overlap 2": ({"overlap": 2}, "overlapping"),
    "all at once": (
        {"chunk": 9, "budget": 13, "n_pages": 40, "prefix_caching": True, "overlap": 1},
        "anew",
    ),
}
"""Options of a way, and what ``Watching`` must have counted."""
TEXT = byte_tokenizer()


@lru_cache
def asked() -> tuple[Request, ...]:
    """Prompts over one shared prefix, so that any drafter is right at times: two greedy with few tokens to choose
    from, which copy themselves; two sampled, whose noise a drafter on the device shares. One asks for three
    choices, one for log-probabilities."""
    rng = random.Random(8)
    stem = tuple(rng.randrange(equal.V) for _ in range(24))
    found = []
    for i, n in enumerate((1, 3, 1, 1)):
        few = tuple(rng.sample(range(33, equal.V), 3))
        params = SamplingParams(
            temperature=0.0 if i % 2 else 1.0,
            seed=i,
            n=n,
            max_tokens=30,
            allowed_token_ids=few if i % 2 else None,
            bad_token_ids=tuple((token, token) for token in few),  # it would say one thing only
            frequency_penalty=2.0 if i else 0.0,
            logprobs=2 if i == 2 else None,
        )
        tail = tuple(rng.choice(few) for _ in range(3 + 7 * i))
        found.append(Request(id=f"c{i}", prompt_ids=stem + tail, params=params))
    return tuple(found)


def proposer(kind: str) -> Proposer | None:
    """Of the host, or the shadow of a device that copies; None: the device drafts by itself."""
    kind = "ngram" if kind == "lookup" else kind
    if kind in KINDS:
        return None
    corpus = [random.Random(3).randrange(equal.V) for _ in range(400)] if kind == "corpus" else []
    method = {"corpus": "suffix"}.get(kind, kind)
    options = SpeculativeOptions(method=method, prompt_lookup_min=1, suffix_min_match=1)
    return proposer_of(options, equal.V, corpus)


def cells() -> list[Any]:
    return [
        pytest.param(
            kind, tree, way,
            id=f"{kind}-{NAMES[tree]}-{way}",
        )
        for kind, tree in (*DEVICE, *HOST)
        for way in WAYS
    ]  # fmt: skip


def outputs(plain: Any, kind: str, tree: TreeShape, way: str, tp: int = 1) -> list[Output]:
    options, shows = WAYS[way]
    device: Any = Watching(drafting(kind, tree, tp) if kind in KINDS else plain)
    how = dataclasses.replace(equal.PLAIN, **options)
    found = equal.outputs_of(
        device, list(asked()), how, random.Random(5),
        proposer=proposer(kind), preempts=shows == "anew",
    )  # fmt: skip
    assert device.stood > 0, "no draft stood: nothing was tested"
    assert device.drafted > device.stood or (kind, tree) == ("draft", ())
    waits = kind not in KINDS and shows == "overlapping"  # drafts of the host need the last token
    assert not shows or waits or getattr(device, shows) > 0, f"nothing was {way}"
    return found


_ALONE: dict[str, list[Output]] = {}


def alone(plain: Any) -> list[Output]:
    """Each request on its own, undrafted."""
    if not _ALONE:
        for request in asked():
            _ALONE[request.id] = equal.outputs_of(plain, [request], equal.PLAIN, random.Random(0))
    return [out for part in _ALONE.values() for out in part]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tree", "way"), cells())
def test_every_text_is_the_one_without_drafts(runner, kind, tree, way) -> None:
    got, wanted = outputs(runner, kind, tree, way), alone(runner)
    compare(equal.gathered(got), equal.gathered(wanted))
    assert alternatives(got) == alternatives(wanted)
    for request in asked():
        mine = [out for out in got if out.request_id == request.id]
        assert sum(out.n_accepted for out in mine) <= sum(len(out.token_ids) for out in mine)


def alternatives(found: list[Output]) -> list[Any]:
    """The likeliest tokens beside each token that was asked for them: the target's, drafted or not."""
    told = [t for out in found if out.request_id == "c2" for t in out.logprobs or ()]
    assert len(told) == 30
    return [(t.token, t.top_ids) for t in told]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tree"), DEVICE)
def test_every_text_is_the_one_without_drafts_on_two_devices(runner, kind, tree) -> None:
    got = outputs(runner, kind, tree, "all at once", tp=2)
    compare(equal.gathered(got), equal.gathered(alone(runner)))


def told(found: list[Output], request: Request, **changes: Any) -> list[Any]:
    """What a user sees of the first choice, with other sampling fields: text, ids, reason, usage."""
    params = dataclasses.replace(request.params, n=1, **changes)
    running = PartialOutput(dataclasses.replace(request, params=params), None, TEXT)
    for out in found:
        if out.request_id == request.id and out.index == 0 and not running.output.finished:
            running.take(out)
    choice = running.output.outputs[0]
    return [choice.text, list(choice.token_ids), choice.finish_reason, choice.stop_reason]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tree"), [pytest.param(*kind, id=str(kind)) for kind in (*DEVICE, *HOST)]
)
def test_a_stop_string_cuts_an_accepted_block_where_it_would_have_cut(runner, kind, tree) -> None:
    got, wanted = outputs(runner, kind, tree, "plain"), alone(runner)
    cut = 0
    for request in asked():
        text = told(wanted, request)[0]
        assert told(got, request)[0] == text
        for at in range(0, len(text) - 2, 2):
            stop = {"stop": (text[at : at + 2],)}
            assert told(got, request, **stop) == told(wanted, request, **stop)
            cut += told(got, request, **stop)[3] == stop["stop"][0]
    assert cut > 10
