"""Parses draft trees as users write them: by name, by branches per depth, or path by path.

What comes out are parents, level by level, as ``jserve.model.draft_tree`` numbers nodes::

    "auto"                         the ``num_tokens`` nodes most likely to be accepted
    [3, 2, 1]                      3 tokens for the next place, 2 after each of them, 1 after each of these
    [[0], [1], [0, 0], [0, 1]]     path by path: each number is a rank among its siblings, likeliest first

The last is how Medusa and vLLM (``speculative_token_tree``) write them.

Source of the choice: the greedy construction of Medusa (arXiv 2401.10774, section 2.3.3).
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Sequence as Seq
from typing import Any

from jserve.errors import ConfigError

Parents = tuple[int, ...]
Path = tuple[int, ...]
FIELD = "speculative.tree"
CHANCES = "speculative.tree_chances"
AUTO = "auto"
MAX_NODES = 15

RANKS = (0.60, 0.15, 0.07, 0.04, 0.03)
"""Chance that the draft of each rank is accepted, given that its parent is: what ``auto`` assumes where
nobody measured it."""


def chances_of(text: str) -> tuple[float, ...]:
    """The chances by rank that ``text`` lists; ``RANKS`` where it is empty.

    Raises:
        ConfigError: no list of chances, likeliest first, that can all be true at once.
    """
    if not text:
        return RANKS
    given = _json(text)
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_NODES or not _numbers(given):
        raise _wrong(f"must list 1 to {MAX_NODES} chances, not {text[:80]!r}", CHANCES)
    falls = sorted(given, reverse=True) == given
    if not (falls and min(given) > 0 and sum(given) <= 1 + 1e-9):  # nor NaN
        raise _wrong(f"{text[:80]} must fall, be above 0 and make at most 1 together", CHANCES)
    return tuple(map(float, given))


def written(text: str, n_drafts: int, deepest: int, ranks: Seq[float] = RANKS) -> Parents:
    """The tree of one shape that ``text`` means.

    Args:
        n_drafts: drafts of ``auto``.
        deepest: most drafts after one another that ``auto`` takes.
        ranks: chances of siblings, likeliest first, that ``auto`` goes by.

    Raises:
        ConfigError: no tree, or one of more than ``MAX_NODES`` drafts.
    """
    if text == AUTO:
        return parents_of(likeliest(n_drafts, deepest, ranks))
    given = _parsed(text)
    return parents_of(_branched(given) if _whole(given) else _paths(given))


def likeliest(n: int, deepest: int, ranks: Seq[float]) -> list[Path]:
    """The ``n`` paths of at most ``deepest`` drafts with the largest products of ``ranks``, which is
    the tree with the most expected accepted drafts."""
    found: list[Path] = []
    heap: list[tuple[float, Path]] = [(-ranks[0], (0,))]
    while heap and len(found) < n:
        chance, path = heapq.heappop(heap)
        found.append(path)
        rank = path[-1]
        if rank + 1 < len(ranks):
            heapq.heappush(heap, (chance / ranks[rank] * ranks[rank + 1], (*path[:-1], rank + 1)))
        if len(path) < deepest:
            heapq.heappush(heap, (chance * ranks[0], (*path, 0)))
    return found


def parents_of(paths: Seq[Path]) -> Parents:
    """Parents of the nodes at the ends of ``paths``, numbered from 1 level by level.

    Raises:
        ConfigError: a path whose beginning or likelier sibling is missing, one said twice, or too many.
    """
    order = sorted(paths, key=lambda path: (len(path), path))
    number: dict[Path, int] = {(): 0}
    for path in order:
        if path in number:
            raise _wrong(f"has path {list(path)} twice")
        for before in _needed(path):
            if before not in number:
                raise _wrong(f"has path {list(path)} but not {list(before)}")
        number[path] = len(number)
    if not 1 <= len(order) <= MAX_NODES:
        raise _wrong(f"has {len(order)} drafts, 1 to {MAX_NODES} can be verified")
    return tuple(number[path[:-1]] for path in order)


def is_chain(parents: Parents) -> bool:
    return parents == tuple(range(len(parents)))


def _needed(path: Path) -> list[Path]:
    likelier = [(*path[:-1], path[-1] - 1)] if path[-1] else []
    return [path[:-1], *likelier]


def _branched(counts: Seq[int]) -> list[Path]:
    """Every node of one depth has as many children as its entry says."""
    level: list[Path] = [()]
    found: list[Path] = []
    for count in counts:
        if count < 1 or len(level) * count > MAX_NODES:
            raise _wrong(f"{list(counts)} has a depth of {len(level) * count} drafts")
        level = [(*path, rank) for path in level for rank in range(count)]
        found += level
    return found


def _paths(given: list[Any]) -> list[Path]:
    for path in given:
        if not isinstance(path, list) or not path or not _whole(path) or min(path) < 0:
            raise _wrong(f"has {path!r} for a path: a list of ranks from 0")
    return [tuple(path) for path in given]


def _whole(given: list[Any]) -> bool:
    return all(isinstance(x, int) and not isinstance(x, bool) for x in given)


def _numbers(given: list[Any]) -> bool:
    return all(isinstance(x, int | float) and not isinstance(x, bool) for x in given)


def _parsed(text: str) -> list[Any]:
    """JSON; also with round brackets and commas before them, as vLLM has it."""
    given = _json(re.sub(r",\s*\]", "]", text.translate({ord("("): "[", ord(")"): "]"})))
    if not isinstance(given, list) or not given:
        raise _wrong(f"must be {AUTO!r}, branches per depth or a list of paths, not {text[:80]!r}")
    return given


def _json(text: str) -> Any:
    """None where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _wrong(what: str, field: str = FIELD) -> ConfigError:
    return ConfigError(f"{field} {what}", field=field)
