"""Latency and success by version of the weights, so that an operator can compare a canary with the rest.

Operators choose versions, and a trainer makes many: only the ``KEPT`` most recently used ones have series.
"""

from __future__ import annotations

from collections import OrderedDict

from prometheus_client import CollectorRegistry, Counter, Histogram

KEPT = 4
FIRST = "first"


class VersionMetrics:
    """Figures by version of the weights.

    Args:
        model: the label of the request metrics.
        buckets: of the histogram, in seconds.
    """

    def __init__(self, model: str, registry: CollectorRegistry, buckets: tuple[float, ...]) -> None:
        self._model = model
        self._first = Histogram(
            "jserve:weights_time_to_first_token_seconds",
            "From arrival to the first token, by the version of the weights that drew it.",
            labelnames=("model_name", "version"),
            buckets=buckets,
            registry=registry,
        )
        self._ended = Counter(
            "jserve:weights_request_success",
            "Choices that ended well, by the version of the weights that drew their last token and by reason.",
            labelnames=("model_name", "version", "finished_reason"),
            registry=registry,
        )
        self._series: OrderedDict[str, set[str]] = OrderedDict()
        """By version, least recently used first: ``FIRST`` and the reasons of ends."""

    def first(self, version: str, seconds: float) -> None:
        self._keep(version, FIRST)
        self._first.labels(self._model, version).observe(seconds)

    def ended(self, version: str, reason: str) -> None:
        self._keep(version, reason)
        self._ended.labels(self._model, version, reason).inc()

    def _keep(self, version: str, series: str) -> None:
        """Note a series of ``version``; those of the least recently used version go, where there are too many."""
        self._series.setdefault(version, set()).add(series)
        self._series.move_to_end(version)
        if len(self._series) > KEPT:
            old, gone = self._series.popitem(last=False)
            for each in gone:
                if each == FIRST:
                    self._first.remove(self._model, old)
                else:
                    self._ended.remove(self._model, old, each)
