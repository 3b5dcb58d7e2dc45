"""Suffix automaton: finds the longest earlier occurrence of a text's end, updated token by token.

It owns the automaton (Blumer et al., 1985) and the cursor by which another text is matched against it. Appending
costs amortised O(1); n tokens make at most 2n states and 3n edges.

Each state is a set of substrings that end at the same places. The suffix link of the state of the whole text
is its longest end that occurs elsewhere, which is just what may be copied from::

    tokens   t h e _ c a t _ s a t _ o n _ t h e _ c       longest end seen before: "the_c" (5 tokens)
             '-------------' first place: goes on with "a t _"

``place`` of a state is where its strings first ended, or where they last were the longest match.
"""

from __future__ import annotations

from jserve.speculation.host.ngram import copied


class SuffixAutomaton:
    """All substrings of one text; grows at its end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.edges: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.depth = [0]
        """Length of the longest string of each state."""
        self.place = [0]
        """An index into ``tokens``: what stands there followed the state's strings once."""
        self._last = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """The text goes on with ``token``."""
        self.tokens.append(token)
        edges, link, at = self.edges, self.link, self._last
        new = self._state({}, self.depth[at] + 1, len(self.tokens))
        while at >= 0 and token not in edges[at]:
            edges[at][token] = new
            at = link[at]
        link[new] = 0 if at < 0 else self._target(at, token)
        self._last = new

    def _target(self, at: int, token: int) -> int:
        """The state of exactly one token more than ``at``; split from a longer one if need be."""
        edges, link, depth = self.edges, self.link, self.depth
        found = edges[at][token]
        if depth[found] == depth[at] + 1:
            return found
        clone = self._state(dict(edges[found]), depth[at] + 1, self.place[found])
        link[clone], link[found] = link[found], clone
        while at >= 0 and edges[at].get(token) == found:
            edges[at][token] = clone
            at = link[at]
        return clone

    def _state(self, edges: dict[int, int], depth: int, place: int) -> int:
        self.edges.append(edges)
        self.link.append(-1)
        self.depth.append(depth)
        self.place.append(place)
        return len(self.link) - 1

    @property
    def repeated(self) -> int:
        """The state of the longest end of the text that stood there before; 0: there is none."""
        return max(self.link[self._last], 0)


class SuffixIndex:
    """Predicts what follows the newest tokens of one text, from its own past.

    Args:
        least: tokens that must match.
        window: tokens held at most; the newer half is indexed anew when it is full.
    """

    def __init__(self, least: int, window: int) -> None:
        self.least, self.window = least, max(2, window)
        self._automaton = SuffixAutomaton()
        self._match = 0
        self.length = 0
        """Tokens of the end that stood there before; 0: fewer than ``least``."""

    @property
    def tokens(self) -> list[int]:
        return self._automaton.tokens

    def append(self, token: int) -> None:
        if len(self._automaton) >= self.window:
            kept = self.tokens[-(self.window // 2) :]
            self._automaton = SuffixAutomaton()
            for old in kept:
                self._take(old)
        self._take(token)

    def _take(self, token: int) -> None:
        text = self._automaton
        text.append(token)
        state = text.repeated
        self.length = text.depth[state] if text.depth[state] >= self.least else 0
        self._match = text.place[state]
        text.place[state] = len(text)  # the latest place is likelier to be gone on from alike

    def after(self, most: int) -> list[int]:
        return copied(self.tokens, self._match, most) if self.length else []


class CorpusCursor:
    """The place of one text in a corpus that never changes: the longest of its ends found there.

    A step costs amortised O(1). Many cursors share one automaton.
    """

    def __init__(self, corpus: SuffixAutomaton, least: int) -> None:
        self.corpus, self.least = corpus, least
        self._state = self._depth = 0

    @property
    def length(self) -> int:
        return self._depth if self._depth >= self.least else 0

    def append(self, token: int) -> None:
        corpus, state, depth = self.corpus, self._state, self._depth
        while state and token not in corpus.edges[state]:
            state = corpus.link[state]
            depth = corpus.depth[state]
        if token in corpus.edges[state]:
            state, depth = corpus.edges[state][token], depth + 1
        self._state, self._depth = state, depth

    def after(self, most: int) -> list[int]:
        at = self.corpus.place[self._state]
        return self.corpus.tokens[at : at + most] if self.length else []
