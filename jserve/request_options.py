"""Service options of a request beside sampling: lane, deadlines, cache retention.

It owns ``RequestOptions``, which the HTTP dialects and the Python door hand on whole into a ``Request``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from jserve.sampling import integer, number

MAX_RETENTIONS = 16


class Lane(StrEnum):
    """The class of a request: a person waits for it, a program, or nobody in particular."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BULK = "bulk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """A hint for how long to keep the KV of the prompt tokens ``start .. end`` (None: to the end).

    Pages of higher ``priority`` (0 to 100; 50 is everyone else's) are evicted later, for ``seconds`` after
    their last use.

    Raises:
        BadRequest: a field is out of its range.
    """

    start: int = 0
    end: int | None = None
    priority: int = 75
    seconds: float = 60.0

    def __post_init__(self) -> None:
        integer(self.start, "retain.start", 0, 2**31 - 1)
        if self.end is not None:
            integer(self.end, "retain.end", self.start + 1, 2**31 - 1)
        integer(self.priority, "retain.priority", 0, 100)
        number(self.seconds, "retain.seconds", 0.0, 86400.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Service options of a request, beside its sampling. Names are those of the HTTP fields."""

    priority: int = 0
    """Lower runs first among what its tenant has waiting in its lane."""
    lane: Lane | str = Lane.STANDARD
    tenant: str = ""
    """The tenant that is charged: tenants share a lane fairly by tokens, and never each other's cached prefixes."""
    ttft_deadline_ms: float | None = None
    """From arrival to the first token."""
    tpot_deadline_ms: float | None = None
    """Mean time between tokens after the first."""
    deadline_ms: float | None = None
    """From arrival to the last token."""
    cache_salt: str = ""
    """Sequences share cached prefixes only within one salt."""
    retain: tuple[Retention, ...] = ()
    cache: str | None = None
    """Name of the tenant's cache handle (``LLM.create_cache``) whose tokens the prompt starts with. A prompt
    that does not begin with them gets them put in front: it is the rest."""
    session: str | None = None
    """Name of a conversation: this request's KV is kept for its next turn, evicted only when nothing
    else is left to evict."""
    skip_prefix_cache: bool = False
    speculative: bool = True
    """False: no drafts for this request, whatever the server does for others."""
