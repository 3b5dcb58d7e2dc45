"""Error bodies and rate-limit headers per API dialect: OpenAI's and Anthropic's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jserve.api.http.errors import error_body
from jserve.api.http.quota import Standing
from jserve.errors import JserveError

Standings = Mapping[str, Standing]
"""By what is limited: requests, tokens."""


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """One family's shapes."""

    error: Callable[[JserveError], dict[str, Any]]
    """An error's body."""
    limits: Callable[[Standings], dict[str, str]]
    """Rate-limit headers of a tenant."""


_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: JserveError) -> dict[str, Any]:
    """An error's body, and its event in a stream; ``param`` and ``code`` are as in OpenAI's."""
    body = error_body(error)["error"]
    kind = _ANTHROPIC_KINDS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": body | {"type": kind}}


def openai_limits(standings: Standings) -> dict[str, str]:
    found = {}
    for name, standing in standings.items():
        found[f"x-ratelimit-limit-{name}"] = str(standing.limit)
        found[f"x-ratelimit-remaining-{name}"] = str(standing.remaining)
        found[f"x-ratelimit-reset-{name}"] = duration(standing.reset_s)
    return found


def anthropic_limits(standings: Standings) -> dict[str, str]:
    found = {}
    for name, standing in standings.items():
        found[f"anthropic-ratelimit-{name}-limit"] = str(standing.limit)
        found[f"anthropic-ratelimit-{name}-remaining"] = str(standing.remaining)
        found[f"anthropic-ratelimit-{name}-reset"] = moment(time.time() + standing.reset_s)
    return found


def duration(seconds: float) -> str:
    """A time as OpenAI writes it, rounded up: 6m0s, 1.5s, 120ms."""
    ms = math.ceil(1000 * seconds)
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"


def moment(epoch_s: float) -> str:
    """A time of day as Anthropic writes it, rounded up: 2026-11-22T10:15:00Z."""
    return datetime.fromtimestamp(math.ceil(epoch_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


OPENAI = ErrorFormat(error_body, openai_limits)
ANTHROPIC = ErrorFormat(anthropic_error, anthropic_limits)
