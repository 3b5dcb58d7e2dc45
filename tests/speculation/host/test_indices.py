"""The indices against brute force: the match is the longest there is, and what is proposed followed it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from jserve.speculation.host.ngram import NgramIndex, copied
from jserve.speculation.host.suffix import CorpusCursor, SuffixAutomaton, SuffixIndex

texts = st.lists(st.integers(0, 3), max_size=60) | st.lists(st.integers(0, 1), max_size=60)


def places_before(text: list[int], n: int) -> list[int]:
    """Where the last ``n`` tokens stood before: the places after them, ascending."""
    end = text[len(text) - n :]
    return [at for at in range(n, len(text)) if text[at - n : at] == end]


def longest_before(text: list[int]) -> int:
    return max((n for n in range(1, len(text)) if places_before(text, n)), default=0)


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(1, 3), st.integers(0, 3), st.integers(0, 9))
def test_ngrams_find_the_latest_place_of_the_longest(text, least, more, most):
    index = NgramIndex(least, least + more, window=1000)
    for i, token in enumerate(text):
        index.append(token)
        past = text[: i + 1]
        n = min(least + more, longest_before(past))
        assert index.length == (n if n >= least else 0)
        at = places_before(past, n)[-1] if n >= least else 0
        assert index.after(most) == (copied(past, at, most) if at else [])


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(1, 3), st.integers(0, 9))
def test_the_automaton_knows_the_longest_end_that_stood_before(text, least, most):
    index = SuffixIndex(least, window=1000)
    for i, token in enumerate(text):
        index.append(token)
        past = text[: i + 1]
        n = longest_before(past)
        assert index.length == (n if n >= least else 0)
        if index.length:
            options = [copied(past, at, most) for at in places_before(past, n)]
            assert index.after(most) in options
        else:
            assert index.after(most) == []


@settings(max_examples=150, deadline=None)
@given(texts, texts, st.integers(1, 2), st.integers(1, 9))
def test_a_cursor_stands_at_the_longest_end_that_the_corpus_holds(corpus, text, least, most):
    automaton = SuffixAutomaton()
    for token in corpus:
        automaton.append(token)
    cursor = CorpusCursor(automaton, least)
    for i, token in enumerate(text):
        cursor.append(token)
        past = text[: i + 1]
        ends = [past[len(past) - n :] for n in range(len(past), 0, -1)]
        found = [
            (len(end), at)
            for end in ends
            for at in range(len(end), len(corpus) + 1)
            if corpus[at - len(end) : at] == end
        ]
        n = max([length for length, _ in found], default=0)
        assert cursor.length == (n if n >= least else 0)
        if cursor.length:
            options = [corpus[at : at + most] for length, at in found if length == n]
            assert cursor.after(most) in options


def test_every_substring_is_a_path_and_nothing_else_is():
    rng = random.Random(1)
    text = [rng.randrange(3) for _ in range(40)]
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    inside = {tuple(text[i:j]) for i in range(40) for j in range(i + 1, 41)}
    for n in range(1, 6):
        for code in range(3**n):
            word = [code // 3**k % 3 for k in range(n)]
            state: int | None = 0
            for token in word:
                state = None if state is None else automaton.edges[state].get(token)
            assert (state is not None) == (tuple(word) in inside)
    assert len(automaton.link) <= 2 * len(text)
    assert sum(len(edges) for edges in automaton.edges) <= 3 * len(text)


@pytest.mark.parametrize("make", [lambda w: NgramIndex(2, 4, w), lambda w: SuffixIndex(2, w)])
def test_memory_is_bounded_and_the_newest_text_is_known(make):
    """A period longer than nothing but shorter than half a window is found for ever."""
    index = make(64)
    period = list(range(20))
    for i in range(1000):
        index.append(period[i % 20])
        assert len(index.tokens) <= 64
        if i > 100:
            assert index.after(5) == [period[(i + 1 + k) % 20] for k in range(5)]
    if isinstance(index, NgramIndex):
        assert len(index._places) <= 3 * 64
    else:
        assert len(index._automaton.link) <= 2 * 64


@pytest.mark.parametrize("kind", [NgramIndex, SuffixIndex])
def test_appending_costs_the_same_at_any_length(kind):
    """Counted, not timed: edges written, and places looked up, grow with the text and not its square."""
    n_ops = []
    for n in (1000, 4000):
        index = NgramIndex(2, 4, 10**6) if kind is NgramIndex else SuffixIndex(2, 10**6)
        counter = Counting()
        if kind is NgramIndex:
            index._places = counter
        else:
            index._automaton.edges = EdgeList(counter)
            index._automaton.edges.append({})
        rng = random.Random(0)
        for _ in range(n):
            index.append(rng.randrange(2) if rng.random() < 0.9 else rng.randrange(50))
        n_ops.append(counter.n)
    assert n_ops[1] < 4.6 * n_ops[0]


class Counting(dict):
    """A dict that counts what is written to it (and to those made from it)."""

    n = 0

    def __setitem__(self, key, value):
        self.n += 1
        super().__setitem__(key, value)


class EdgeList(list):
    """Edges whose writes are counted together."""

    def __init__(self, counter: Counting) -> None:
        super().__init__()
        self.counter = counter

    def append(self, edges) -> None:
        counter = self.counter

        class Edges(dict):
            def __setitem__(self, key, value):
                counter.n += 1
                super().__setitem__(key, value)

        counter.n += len(edges)
        super().append(Edges(edges))


def test_ngrams_of_no_length_are_refused():
    for least, most, window in ((0, 2, 99), (3, 2, 99), (1, 9, 19)):
        with pytest.raises(ValueError, match="n-grams"):
            NgramIndex(least, most, window)


def test_a_copy_goes_on_with_its_period():
    assert copied([1, 2, 3], 1, 5) == [2, 3, 2, 3, 2]
    assert copied([1, 2, 3], 3, 5) == []
    assert copied([1, 2, 3], 0, 2) == [1, 2]
