"""HTTP-side Prometheus metrics: request counts, latencies, tokens.

Every label comes from us, never from a client, so that their number is bounded. Names follow vLLM's suffixes under
the prefix ``jserve:``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from jserve.api.ops.engine_metrics import EngineCollector
from jserve.api.ops.recent import Recent
from jserve.api.ops.version_metrics import VersionMetrics
from jserve.api.reply.generate import TextPiece
from jserve.engine.face import EngineFace
from jserve.types import Request

_OPENMETRICS = "application/openmetrics-text"
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """All metrics of one server, in a registry of their own.

    Args:
        model: the served model's name, the label of the request metrics.
        engine: asked for the engine's counters at every scrape.
    """

    def __init__(self, model: str, engine: EngineFace) -> None:
        self.registry = CollectorRegistry()
        labels = {"labelnames": ("model_name",), "registry": self.registry}

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"jserve:{name}", help, buckets=buckets, **labels).labels(model)

        def counter(name: str, help: str) -> Counter:
            return Counter(f"jserve:{name}", help, **labels).labels(model)

        self.ttft = Recent(
            histogram("time_to_first_token_seconds", "From arrival to the first token.", _LONG)
        )
        self.itl = Recent(
            histogram("inter_token_latency_seconds", "Between outputs of a choice.", _SHORT)
        )
        self.e2e = histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _LONG
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answered requests.")
        self.output_tokens = counter("generation_tokens", "Tokens drawn.")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens not computed again.")
        self.refusals_repeated = counter(
            "refusals_repeated", "Requests refused as the engine refused one a moment before."
        )
        self.in_flight = Gauge(
            "jserve:http_requests_in_flight", "HTTP requests being answered.", **labels
        ).labels(model)
        self._finished = Counter(
            "jserve:request_success",
            "Choices that ended well, by reason.",
            labelnames=("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._http = Counter(
            "jserve:http_requests",
            "HTTP answers by route and status; 499 is a client that left.",
            labelnames=("route", "status"),
            registry=self.registry,
        )
        self.versions = VersionMetrics(model, self.registry, _LONG)
        self._model = model
        self.registry.register(EngineCollector(model, engine))

    def answered(self, route: str, status: int) -> None:
        self._http.labels(route, str(status)).inc()

    def finished(self, reason: str) -> None:
        self._finished.labels(self._model, reason).inc()

    def values(self) -> dict[tuple[str, str], float]:
        """(name without prefix, lane or "") -> value, proposers added up; nothing of other labels."""
        found: dict[tuple[str, str], float] = defaultdict(float)
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.labels.keys() <= {"model_name", "lane", "proposer"}:
                    key = sample.name.removeprefix("jserve:"), sample.labels.get("lane", "")
                    found[key] += sample.value
        return dict(found)

    def scrape(self, accept: str) -> tuple[bytes, str]:
        """(body, content type): OpenMetrics or the text format, as ``accept`` asks. The library reads
        versions out of the header that it then fails at, or repeats: it is not shown them."""
        encoder, content_type = choose_encoder(_OPENMETRICS if _OPENMETRICS in accept else "")
        return encoder(self.registry), content_type


class RequestTimer:
    """Watches the pieces of one HTTP request; times run from ``arrival`` (monotonic seconds)."""

    def __init__(self, metrics: Metrics, requests: Sequence[Request], arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._last: dict[int, float] = {}
        self._uncounted = {i: len(r.prompt_ids) for i, r in enumerate(requests)}
        """Prompt -> its tokens, until its first output: it may yet be refused."""

    def piece(self, piece: TextPiece) -> None:
        now = time.monotonic()
        metrics = self._metrics
        if piece.first:
            metrics.ttft.observe(now - self._arrival)
            metrics.versions.first(piece.weights, now - self._arrival)
            metrics.prompt_tokens.inc(self._uncounted.pop(piece.prompt, 0))
        else:
            metrics.itl.observe(now - self._last[piece.choice])
        self._last[piece.choice] = now
        metrics.output_tokens.inc(len(piece.token_ids))
        if piece.finish is not None:
            metrics.finished(piece.finish.value)
            metrics.versions.ended(piece.weights, piece.finish.value)
            metrics.e2e.observe(now - self._arrival)

    def end(self, n_cached: int) -> None:
        self._metrics.cached_tokens.inc(n_cached)
