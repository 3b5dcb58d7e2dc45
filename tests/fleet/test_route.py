"""The choice of a replica: what never happens, whatever the views say, and which terms count."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import asdict, replace

from jserve.engine.view import PageEvent, View
from jserve.errors import NotReady
from jserve.fleet import pages
from jserve.fleet.candidates import PREFILL, Candidate, CandidateTable
from jserve.fleet.pages import PageIndex, PageNames, digests_of
from jserve.fleet.roles import DECODE
from jserve.fleet.route import SLACK, Asked, ReplicaChoice, able_of, prices, route
from jserve.fleet.router import POLICIES, ReplicaRouter
from jserve.request_options import Lane
from tests.fleet.direct import PlainPages, direct_price, direct_route

PAGE = 16
PAGES = tuple(bytes([i]) * 8 for i in range(8))

seconds = st.floats(0.0, 10.0)
views = st.builds(
    View,
    ready=st.booleans(),
    weights=st.sampled_from(["a", "b"]),
    adapters=st.sampled_from([(), ("x",), ("x", "y")]),
    n_rows=st.integers(0, 50),
    n_before=st.integers(0, 3),
    wait_s=st.fixed_dictionaries(
        {"standard": seconds}, optional={"interactive": seconds, "bulk": seconds}
    ),
    prefill_token_s=st.floats(1e-6, 1e-2),
    row_s=st.floats(0.0, 1e-3),
    page_s=st.floats(0.0, 1e-3),
)
candidates = st.lists(
    st.builds(
        Candidate,
        view=views,
        n_sent=st.integers(0, 4),
        n_ended=st.integers(0, 4),
        sent_s=seconds,
        suspicion=st.floats(1.0, 4.0),
    ),
    min_size=1,
    max_size=9,
)
held = st.lists(st.integers(0, len(PAGES)), min_size=9, max_size=9)


def asked(**changes) -> Asked:
    values = {"pages": PAGES, "page_size": PAGE, "n_prompt": 140, "n_out": 20}
    return Asked(**values | changes)


def index(held: list[int]) -> PageIndex:
    """Replica i holds the first ``held[i]`` pages."""
    made = PageIndex()
    for i, n in enumerate(held):
        made.update(i, [PageEvent(True, d) for d in PAGES[:n]])
    return made


def view(**changes) -> View:
    base = View(n_rows=4, wait_s={"standard": 0.1}, prefill_token_s=1e-3, row_s=1e-4)
    return replace(base, **changes)


def route_to(asked: Asked, candidates: Iterable[Candidate], pages: PageIndex) -> ReplicaChoice:
    return route(asked, CandidateTable(candidates), pages)


def chosen(candidates: list[Candidate], held: list[int], **changes) -> int:
    return route_to(asked(**changes), candidates, index(held)).replica


@given(candidates, held, st.sampled_from([None, "a"]), st.sampled_from([None, "y"]))
def test_one_that_may_not_take_it_never_does(candidates, held, weights, adapter):
    able = [
        i
        for i, one in enumerate(candidates)
        if one.view.ready
        and weights in (None, one.view.weights)
        and (adapter is None or adapter in one.view.adapters)
    ]
    try:
        found = chosen(candidates, held, weights=weights, adapter=adapter)
    except NotReady:
        assert not able
    else:
        assert found in able


@given(candidates, held, st.randoms(use_true_random=False))
def test_their_order_does_not_matter(candidates, held, rng):
    """But for equal costs, which go by the numbers' hashes."""
    costs = [route_to(asked(), [one], index([n])).cost_s for one, n in _ready(candidates, held)]
    if len({*costs}) < len(costs) or not costs:
        return
    pairs = [*_ready(candidates, held)]
    found = pairs[chosen([one for one, _ in pairs], [n for _, n in pairs])][0]
    rng.shuffle(pairs)
    again = pairs[chosen([one for one, _ in pairs], [n for _, n in pairs])][0]
    if any(n for _, n in pairs):  # else the hash of the prefix decides among the near ones
        assert found is again


def _ready(candidates, held):
    return [(one, n) for one, n in zip(candidates, held, strict=False) if one.view.ready]


@given(candidates, held)
def test_more_pages_or_less_wait_lose_nobody_a_request(candidates, held):
    if not any(n for _, n in _ready(candidates, held)):
        return
    first = chosen(candidates, held)
    more = [*held]
    more[first] = min(len(PAGES), more[first] + 1)
    assert chosen(candidates, more) == first
    shorter = replace(candidates[first], view=replace(candidates[first].view, wait_s={}))
    assert chosen([*candidates[:first], shorter, *candidates[first + 1 :]], held) == first


@given(candidates)
def test_a_prefix_that_nobody_has_goes_where_it_is_not_much_dearer(candidates):
    if not any(one.view.ready for one in candidates):
        return
    choice = route_to(asked(), candidates, PageIndex())
    alone = [route_to(asked(), [one], PageIndex()).cost_s for one in candidates if one.view.ready]
    assert choice.cost_s <= SLACK * min(alone) * (1 + 1e-9)
    assert choice.n_cached == 0


def test_the_price_in_seconds_by_hand():
    one = Candidate(view=view(), n_sent=1, sent_s=0.5, suspicion=2.0)
    choice = route_to(asked(), [one], index([5]))
    new = 140 - 5 * PAGE
    assert choice.n_cached == 80
    assert choice.first_s == pytest.approx(0.1 + 0.5 + new * 1e-3)
    assert choice.cost_s == pytest.approx(2 * (choice.first_s + 5 * (new * 1e-3 + 20 * 1e-4)))
    slow = replace(one, view=view(step_s=0.09, chunk=40.0))  # 0.05 without a prompt
    in_steps = route_to(asked(), [slow], index([5]))
    assert in_steps.first_s == pytest.approx(choice.first_s + 2 * 0.05)
    assert in_steps.cost_s == choice.cost_s


def test_what_is_evicted_and_computed_again_counts():
    """Half of the prompt is there, and a wait that is longer than the other half: without what it evicts elsewhere
    the prefix would soon be everywhere."""
    holds = Candidate(view=view(wait_s={"standard": 0.1}, n_rows=0))
    empty = Candidate(view=view(wait_s={}, n_rows=0))
    assert chosen([holds, empty], [4, 0]) == 0
    dear = Candidate(view=view(wait_s={"standard": 0.15}, n_rows=0))
    assert chosen([dear, empty], [4, 0]) == 1, "more than twice what it has"
    assert route_to(asked(), [holds, empty], index([0, 0])).replica == 1


def test_a_promise_that_only_one_can_keep_is_its_own():
    """The other has the whole prefix, and a queue."""
    late = Candidate(view=view(wait_s={"standard": 0.15}, n_rows=0))
    soon = Candidate(view=view(wait_s={"standard": 0.0}, n_rows=9))
    assert chosen([late, soon], [8, 0]) == 0
    assert chosen([late, soon], [8, 0], ttft_s=0.145) == 1
    assert chosen([late, soon], [8, 0], ttft_s=0.001) == 0, "nobody can: the cheapest"


def test_prefixes_of_nobody_are_spread_and_stay_where_they_are():
    fleet = [Candidate(view=view()) for _ in range(8)]
    keys = [(bytes([i]) * 8,) for i in range(200)]
    went = [route_to(asked(pages=key), fleet, PageIndex()).replica for key in keys]
    assert {went.count(i) > 10 for i in range(8)} == {True}
    fewer = [*fleet[:7], Candidate(view=view(ready=False))]
    again = [route_to(asked(pages=key), fewer, PageIndex()).replica for key in keys]
    assert all(a == b for a, b in zip(went, again, strict=True) if a != 7)


def test_a_stampede_meets_where_the_first_one_went():
    router = ReplicaRouter(4)
    for i in range(4):
        router.update(i, view())
    first, *others = [router.choose(asked()) for _ in range(3)]
    assert {one.replica for one in others} == {first.replica}
    assert [one.n_cached for one in others] == [8 * PAGE] * 2
    router.over(asked(), first.replica)
    assert router.choose(asked()).n_cached == 8 * PAGE, "two are still there"


def test_what_was_sent_counts_until_the_view_says_so():
    router = ReplicaRouter(1)
    router.update(0, view(n_taken=0))
    router.choose(asked(pages=()))
    assert router.candidates[0].sent_s == pytest.approx(0.14)
    router.update(0, view(n_taken=0))
    assert router.candidates[0].n_sent == 1
    router.update(0, view(n_taken=1))
    assert (router.candidates[0].n_sent, router.candidates[0].sent_s) == (0, 0.0)


def test_what_ended_counts_until_the_view_says_so():
    """Two that are full: a request goes where a place became free, whatever the prefix's hash says, and the next one
    has to wait."""
    full = view(n_rows=8, n_before=1, wait_s={"standard": 0.5})
    for freed in (0, 1):
        router = ReplicaRouter(2)
        for i in range(2):
            router.update(i, full)
        router.ended(freed, 1)
        choice = router.choose(asked(pages=()))
        assert (choice.replica, choice.first_s) == (freed, pytest.approx(0.14))
        assert router.choose(asked(pages=())).first_s > 0.5
        router.update(freed, full)
        assert router.candidates[freed].n_ended == 0


@pytest.mark.parametrize(
    ("n_sent", "n_ended", "wait_s"),
    [(0, 0, 0.3), (1, 0, 0.3), (0, 2, 0.1), (1, 3, 0.1), (0, 4, 0.0)],
)
def test_the_wait_for_a_place_by_hand(n_sent: int, n_ended: int, wait_s: float):
    queue = view(n_rows=10, n_before=3, wait_s={"standard": 0.3})
    one = Candidate(view=queue, n_sent=n_sent, n_ended=n_ended)
    choice = route_to(asked(pages=()), [one], PageIndex())
    assert choice.first_s == pytest.approx(wait_s + 0.14)
    rows = 10 + n_sent - n_ended
    assert choice.cost_s == pytest.approx(choice.first_s + rows * (0.14 + 20 * 1e-4))


def test_the_router_counts_the_work_that_is_sent():
    router = ReplicaRouter(2)
    router.update(0, view(token_s=2e-3), [PageEvent(True, d) for d in PAGES[:5]])
    router.choose(asked())
    assert router.prefill_s == pytest.approx((140 - 5 * PAGE) * 1e-3), "what is cached is no work"
    assert router.decode_s == pytest.approx(20 * 2e-3)
    router.candidates.change(0, role=DECODE)
    router.update(1, view(n_rows=0, wait_s={}))
    router.candidates.change(1, role=PREFILL)
    router.candidates.change(0, view=view(n_rows=900, token_s=2e-3))
    apart = asked(pages=PROMPTS[0], n_prompt=12 * PAGE + 8)
    before = router.prefill_s, router.decode_s
    assert router.choose_prefill(apart) is not None
    assert router.prefill_s - before[0] == pytest.approx(200 * 1e-3)
    assert router.decode_s == before[1], "its answer comes later"
    router.assign(asked(pages=(), n_prompt=0), 0)
    assert router.decode_s - before[1] == pytest.approx(20 * 2e-3)


def test_a_replica_that_is_lost_has_nothing():
    router = ReplicaRouter(2)
    for i in range(2):
        router.update(i, view(), [PageEvent(True, d) for d in PAGES])
    router.lost(0)
    assert router.pages.known(PAGES, 2).tolist() == [0, 8]
    assert router.choose(asked()).replica == 1
    router.lost(1)
    with pytest.raises(NotReady):
        router.choose(asked())
    router.over(asked(), 1)
    assert len(router.pages) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_knows_weights(policy):
    router = ReplicaRouter(3, policy=policy)
    for i, weights in enumerate("aba"):
        router.update(i, view(weights=weights))
    assert {router.choose(asked(weights="b")).replica for _ in range(12)} == {1}
    assert 1 not in {router.choose(asked(weights="a")).replica for _ in range(12)}
    with pytest.raises(NotReady):
        router.choose(asked(weights="c"))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_leaves_out_who_takes_nothing(policy):
    router = ReplicaRouter(4, policy, seed=1)
    for i in range(4):
        router.update(i, view(ready=i % 2 == 1))
    assert {router.choose(asked()).replica for _ in range(40)} <= {1, 3}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_leaves_out_numbers_for_one_choice(policy):
    router = ReplicaRouter(4, policy, seed=1)
    for i in range(4):
        router.update(i, view())
    before = router.choose(asked()).replica  # it has the prefix now
    others = {0, 1, 2, 3} - {before}
    assert {router.choose(asked(), leave_out={before}).replica for _ in range(20)} <= others
    last = min(others)
    assert router.choose(asked(), leave_out={0, 1, 2, 3} - {last}).replica == last
    with pytest.raises(NotReady):
        router.choose(asked(), leave_out=range(4))
    assert able_of(asked(), router.candidates).all(), "none is left out any more"


PROMPTS = [
    tuple(
        hashlib.blake2b(path[:n].encode(), digest_size=8).digest() for n in range(1, len(path) + 1)
    )
    for path in ("aaaaaaaaaaaa", "aaaaaaabbbbb", "aaaaaaabbccc", "aac", "dddddddd", "ddde", "f")
]
"""Digests of prompts that part at several places; the digest of a page names all before it."""


class Replayed:
    """The same history in the index and in its plain form."""

    def __init__(self, rng: random.Random, n: int, slides: bool) -> None:
        self.rng, self.n, self.slides = rng, n, slides
        self.pages, self.plain = PageIndex(), PlainPages(n)
        self.sent: list[tuple[int, tuple[bytes, ...]]] = []

    def step(self) -> None:
        rng, replica = self.rng, self.rng.randrange(self.n)
        match rng.randrange(6):
            case 0 | 1:
                self._say(replica, [PageEvent(True, d) for d in self._any_prefix()])
            case 2:
                self._evict(replica)
            case 3 | 4 if len(self.sent) < 12:
                self.sent.append((replica, self._any_prefix()))
                self.pages.send(*self.sent[-1])
                self.plain.send(*self.sent[-1])
            case 5 if not rng.randrange(10):
                self.pages.forget(replica)
                self.plain.forget(replica)
            case _ if self.sent:
                one = self.sent.pop(rng.randrange(len(self.sent)))
                self.pages.over(*one)
                self.plain.over(*one)

    def _any_prefix(self) -> tuple[bytes, ...]:
        prompt = self.rng.choice(PROMPTS)
        return prompt[: self.rng.randrange(len(prompt) + 1)]

    def _evict(self, replica: int) -> None:
        """Some leaves, or with a window any pages."""
        for _ in range(self.rng.randrange(4)):
            held = self.plain.held[replica]
            above = {p[i] for p in PROMPTS for i in range(len(p) - 1) if p[i + 1] in held}
            free = sorted(held if self.slides else held - above)
            if free:
                self._say(replica, [PageEvent(False, self.rng.choice(free))])

    def _say(self, replica: int, events: list[PageEvent]) -> None:
        self.pages.update(replica, events, slides=self.slides)
        self.plain.update(replica, events)


@pytest.mark.parametrize("slides", [False, True])
@given(st.integers(0, 2**32))
def test_the_index_knows_what_a_plain_account_knows(slides, seed):
    both = Replayed(random.Random(seed), 3, slides)
    for _ in range(60):
        both.step()
        for prompt in PROMPTS:
            assert both.pages.known(prompt, 3).tolist() == both.plain.known(prompt, 3)
    for one in both.sent:
        both.pages.over(*one)
    assert not both.pages._sent._root.below, "nothing is kept of prompts that are over"
    assert {*both.pages._held} == set().union(*both.plain.held)


fleets = st.lists(
    st.builds(
        Candidate,
        view=views,
        n_sent=st.integers(0, 4),
        n_ended=st.integers(0, 4),
        sent_s=seconds,
        suspicion=st.sampled_from([1.0, 1.0, 1.7, 3.1]),
        out=st.sampled_from([False, False, False, True]),
        role=st.sampled_from(["", "", PREFILL]),
    ),
    min_size=1,
    max_size=9,
)


def changed_table(candidates: list[Candidate]) -> CandidateTable:
    """A table whose candidates became these one field after the other."""
    table = CandidateTable([Candidate(view=view(), n_sent=1, sent_s=9.0)] * len(candidates))
    for number, one in enumerate(candidates):
        for name, value in asdict(one).items():
            table.change(number, **{name: value})
    return table


@given(
    fleets,
    st.integers(0, 2**32),
    st.sampled_from([None, None, "a", "c"]),
    st.sampled_from([None, None, "y"]),
    st.sampled_from([None, 0.0, 0.5, 5.0]),
    st.sampled_from([0, 48, 144]),
    st.sampled_from(Lane),
    st.sets(st.integers(0, 8), max_size=3),
)
def test_the_choice_is_that_of_the_plain_form_bit_for_bit(
    candidates, seed, weights, adapter, ttft_s, n_ready, lane, leave_out
):
    both, n = Replayed(random.Random(seed), len(candidates), slides=False), len(candidates)
    for _ in range(40):
        both.step()
    terms = {"weights": weights, "adapter": adapter, "ttft_s": ttft_s, "lane": lane}
    table, leave_out = changed_table(candidates), leave_out & {*range(n)}
    without = [replace(one, out=one.out or i in leave_out) for i, one in enumerate(candidates)]
    for prompt in PROMPTS:
        n_full = len(prompt) * PAGE
        one = asked(pages=prompt, n_prompt=n_full + 7, n_ready=min(n_ready, n_full), **terms)
        wanted = direct_route(one, without, both.plain.known(prompt, n))
        if wanted is None:
            with pytest.raises(NotReady):
                route(one, table, both.pages, leave_out)
        else:
            assert route(one, table, both.pages, leave_out) == wanted


@given(fleets, held, st.sampled_from([0, 48, 112]), st.sampled_from(Lane))
def test_prices_are_those_of_the_plain_form_bit_for_bit(candidates, held, n_ready, lane):
    one = asked(n_ready=n_ready, lane=lane)
    known = index(held).known(PAGES, len(candidates))
    plain = [direct_price(one, *each) for each in zip(candidates, held, strict=False)]
    found = prices(one, changed_table(candidates), known)
    assert found.first_s.tolist() == [first_s for first_s, _, _ in plain]
    assert found.cost_s.tolist() == [cost_s for _, cost_s, _ in plain]
    assert found.total_s.tolist() == [cost_s + evicted_s for _, cost_s, evicted_s in plain]


def test_a_prefix_that_only_one_who_takes_nothing_has_is_one_that_nobody_has():
    """The hash says where it goes, among the near ones."""
    fleet = [Candidate(view=view(prefill_token_s=1e-3 + i * 1e-6)) for i in range(8)]
    table = CandidateTable([*fleet, Candidate(view=view(), out=True)])
    for i in range(20):
        one = asked(pages=(bytes([i]) * 8,))
        cold, pages = route(one, table, PageIndex()), PageIndex()
        pages.send(8, one.pages)
        assert route(one, table, pages) == cold


def test_a_prompt_that_was_not_sent_cannot_be_over():
    pages = PageIndex()
    pages.send(0, PROMPTS[0])
    with pytest.raises(KeyError):
        pages.over(1, PROMPTS[0])


def test_names_of_pages_depend_on_the_root_and_all_tokens_before():
    tokens = list(range(40))
    one = digests_of(("t", "", None), tokens, PAGE)
    assert len(one) == 2
    assert digests_of(("t", "", None), tokens[:33], PAGE) == one
    assert len(digests_of(("t", "", None), tokens[:32], PAGE)) == 1, "one token is left to compute"
    other = digests_of(("u", "", None), tokens, PAGE)
    changed = digests_of(("t", "", None), [9, *tokens[1:]], PAGE)
    assert not {*one} & {*other}
    assert not {*one} & {*changed}


@given(st.integers(0, 1 << 30), st.sampled_from([1, 16, 100, 256, 300]), st.integers(1, 9))
def test_names_that_are_remembered_are_the_names(seed, page_size, most):
    """Prompts of few stems, cut anywhere, under two roots; few blocks are kept."""
    rng = random.Random(seed)
    names = PageNames(most)
    stems = [[rng.randrange(9) for _ in range(1300)] for _ in range(2)]
    for _ in range(20):
        n = rng.choice([0, 1, 255, 256, 257, 512, 513, rng.randrange(1300)])
        prompt = (*rng.choice(stems)[:n], *rng.choices(range(9), k=rng.randrange(3)))
        key = (rng.choice("tu"), "", None)
        assert names.of(key, prompt, page_size) == digests_of(key, prompt, page_size)
        assert len(names._known) <= most


def test_a_known_beginning_is_not_digested_again(monkeypatch):
    names, digested = PageNames(), []
    digest_after = pages.digest_after
    monkeypatch.setattr(
        pages, "digest_after", lambda d, page: (digested.append(1), digest_after(d, page))[1]
    )
    stem = list(range(1024))
    for tail, n in (([1], 64), ([2] * 40, 2), ([1], 0)):
        digested.clear()
        assert len(names.of(("t", "", None), stem + tail, 16)) == 64 + len(tail) // 16
        assert len(digested) == n
