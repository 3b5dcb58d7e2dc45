"""``GET /v1/dashboard``: a snapshot of the server as one JSON object for the dashboard page.

Nothing is computed unless asked. ::

    ?after=N   only steps with a number above N: what a page that polls has not seen yet
    totals     grow since the start; rates are differences of two answers by their "now"
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from aiohttp import web

from jserve.api.http.front import Front, json_response
from jserve.api.ops.recent import WINDOW_S, Recent
from jserve.engine.face import ReplicaState
from jserve.errors import BadRequest
from jserve.types import Lane

STEP_COLUMNS = ("number", "at", "ms", "rows", "prefill_rows", "prefill_tokens", "drawn")
_LANE_NAMES = {
    "waiting": "lane_requests_waiting",
    "running": "lane_requests_running",
    "refused": "lane_refused_total",
    "expired": "lane_deadline_exceeded_total",
    "finished": "lane_sequences_finished_total",
}
_DRAFTED, _ACCEPTED = "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"

Samples = Mapping[tuple[str, str], float]
"""(metric without its prefix, lane or "") -> value."""


async def dashboard(request: web.Request, front: Front) -> web.Response:
    """The handler of the route.

    Raises:
        BadRequest: ``after`` is not a whole number.
    """
    after = _after(request.query.get("after", "-1"))
    body = snapshot(front, after, time.monotonic())
    return json_response(body, headers={"Cache-Control": "no-store"})


def _after(text: str) -> int:
    try:
        return int(text[:20])
    except ValueError:
        raise BadRequest("after must be the number of a step", field="after") from None


def snapshot(front: Front, after: int, now: float) -> dict[str, Any]:
    """All figures at ``now`` (monotonic seconds) and the steps numbered above ``after``."""
    found = front.metrics.values()
    card = front.card
    return {
        "now": now,
        "server": {
            "model": card.name,
            "version": card.version,
            "max_model_len": card.max_model_len,
            "healthy": front.engine.healthy(),
            "degraded_reasons": front.engine.degraded_reasons(),
            "draining": front.engine.draining,
            "restarts": found.get(("engine_restarts_total", ""), 0),
        },
        "requests": {
            "running": found[("num_requests_running", "")],
            "waiting": found[("num_requests_waiting", "")],
            "http": found[("http_requests_in_flight", "")],
        },
        "latency_ms": {
            "window_s": WINDOW_S,
            "ttft": _milliseconds(front.metrics.ttft, now),
            "itl": _milliseconds(front.metrics.itl, now),
        },
        "totals": {
            "steps": found[("engine_steps_total", "")],
            "prompt_tokens": found[("prompt_tokens_total", "")],
            "cached_tokens": found[("prompt_tokens_cached_total", "")],
            "output_tokens": found[("generation_tokens_total", "")],
            "preemptions": found.get(("num_preemptions_total", ""), 0),
        },
        "lanes": {lane.value: _lane(found, lane) for lane in Lane},
        "overload_level": found.get(("overload_level", ""), 0),
        "kv": {name: found.get((f"kv_{name}", ""), 0) for name in ("pages", *_KV)},
        "prefix": {
            "looked_up": found.get(("prefix_cache_queries_total", ""), 0),
            "found": found.get(("prefix_cache_hits_total", ""), 0),
        },
        "speculation": _speculation(found),
        "experts": _experts(found),
        "replicas": [_replica(one) for one in front.engine.replicas()],
        "fleet": {
            "load": found.get(("fleet_load", ""), 0),
            "needed": found.get(("replicas_needed", ""), 0),
        },
        "steps": {"columns": STEP_COLUMNS, "rows": _steps(front, after)},
    }


def _replica(state: ReplicaState) -> dict[str, Any]:
    """Without addresses and processes, which are for operators."""
    found = asdict(state)
    del found["kv_events"], found["pid"]
    return found


_KV = ("pages_free", "pages_cached")


def _milliseconds(recent: Recent, now: float) -> dict[str, float | int | None]:
    values = asdict(recent.percentiles(now))
    n = values.pop("n")
    return {"n": n} | {name: None if s is None else 1e3 * s for name, s in values.items()}


def _lane(found: Samples, lane: Lane) -> dict[str, float]:
    return {name: found.get((metric, lane.value), 0) for name, metric in _LANE_NAMES.items()}


def _speculation(found: Samples) -> dict[str, float] | None:
    """Tokens drafted and accepted since the start; None where nothing drafts."""
    sums = {
        name: sum(value for (counter, _), value in found.items() if counter == name)
        for name in (_DRAFTED, _ACCEPTED)
    }
    return {"drafted": sums[_DRAFTED], "accepted": sums[_ACCEPTED]} if sums[_DRAFTED] else None


def _experts(found: Samples) -> dict[str, float] | None:
    """The evenness of experts' loads of late, and the number of moves; None where nobody counts."""
    if ("expert_load_max_over_mean", "") not in found:
        return None
    return {
        "fullest": found["expert_load_max_over_mean", ""],
        "worst": found["expert_load_max_over_mean_worst", ""],
        "hottest": found["expert_load_hottest_share", ""],
        "moves": found.get(("expert_moves_total", ""), 0),
    }


def _steps(front: Front, after: int) -> list[tuple[float, ...]]:
    return [
        (
            number,
            record.at,
            record.device_us / 1e3,
            record.n_rows,
            record.n_prefill_rows,
            record.n_prefill_tokens,
            record.n_drawn,
        )
        for number, record in list(front.engine.steps)
        if number > after
    ]
