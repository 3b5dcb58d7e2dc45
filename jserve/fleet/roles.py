"""Says which replicas compute prompts for the others, and when a prompt had better be computed by one of them.

A role is a weight of the choice and nothing else: every replica has all programs, so one that computes prompts serves
whole requests where no other is left, and one that decodes computes a prompt itself where that costs less. A pure
function of views, in seconds::

    here     cost(r)                                 what a request costs at the replica r that ``route`` takes
    apart    cost(p, no tokens of output)            its prompt at the cheapest prefill replica p
             + cost(r, with all full pages moved)    moving those, the rest of the prompt, the answer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from msgspec.structs import replace

from jserve.errors import ConfigError
from jserve.fleet.candidates import PREFILL, CandidateTable
from jserve.fleet.pages import PageIndex
from jserve.fleet.route import Asked, ReplicaChoice, able_of, choice_of, prices, route

DECODE = "decode"
ROLES = (PREFILL, DECODE)
AUTO = "auto"
"""Roles that follow the load (``fleet.role_control``)."""
FIRST_SHARE = 4
"""With ``AUTO`` one in so many replicas, at least one, computes prompts at first."""


def parse_roles(text: str, replicas: int) -> dict[str, int]:
    """Replicas by role, of ``prefill=1,decode=3``, and those at first of ``auto``; {}: all do both.

    Raises:
        ConfigError: it says something else, or does not add up to ``replicas``.
    """
    if not text:
        return {}
    if text == AUTO:
        if replicas < 2:
            raise ConfigError("roles: auto needs two replicas or more", field="roles")
        n_prefill = max(1, replicas // FIRST_SHARE)
        return {PREFILL: n_prefill, DECODE: replicas - n_prefill}
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, n = part.strip().partition("=")
        if name not in ROLES or name in found or not (n.isascii() and n.isdigit()) or not int(n):
            raise ConfigError(
                f"roles must be auto or like prefill=1,decode=3, not {text[:80]!r}", field="roles"
            )
        found[name] = int(n)
    if set(found) != set(ROLES):
        raise ConfigError("roles needs replicas of both, prefill and decode", field="roles")
    if sum(found.values()) != replicas:
        raise ConfigError(
            f"roles are of {sum(found.values())} replicas, and replicas is {replicas}",
            field="roles",
        )
    return found


def lacking(wanted: dict[str, int], given: Iterable[str]) -> str:
    """The role of one more replica beside those that were ``given``: answers first, then what lacks most."""
    has = Counter(given)
    if not wanted or not has[DECODE]:
        return DECODE
    return max(ROLES, key=lambda role: (wanted[role] - has[role], role == DECODE))


def exchanged(wanted: dict[str, int], role: str) -> dict[str, int]:
    """``wanted`` once a replica of the other role has ``role``."""
    return {name: n + (1 if name == role else -1) for name, n in wanted.items()}


def prefill_at(asked: Asked, candidates: CandidateTable, pages: PageIndex) -> ReplicaChoice | None:
    """The replica that computes the prompt of ``asked`` for whoever answers; None: whoever answers does.

    Raises:
        NotReady: nobody answers it.
    """
    helpers = np.flatnonzero(able_of(asked, candidates) & ~candidates.answers)
    if not len(helpers) or not asked.pages:
        return None
    here = route(asked, candidates, pages)
    if candidates[here.replica].role == PREFILL:
        return None
    known = pages.known(asked.pages, len(candidates))
    moved = replace(asked, n_ready=len(asked.pages) * asked.page_size)
    after_s = prices(moved, candidates, known).cost_s[here.replica]
    found = prices(replace(asked, n_out=0), candidates, known)
    best = int(helpers[found.cost_s[helpers].argmin()])
    if found.cost_s[best] + after_s >= here.cost_s:
        return None
    return choice_of(asked, candidates, known, found, best)
