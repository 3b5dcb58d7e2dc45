"""First tokens and ends by version of the weights: an operator compares two that both answer.

Versions are the operator's words and may be many (a trainer names each update): the latest ``KEPT`` have figures.
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
        """By version, the one seen last at the end: ``FIRST`` and reasons of ends."""

    def first(self, version: str, seconds: float) -> None:
        self._keep(version, FIRST)
        self._first.labels(self._model, version).observe(seconds)

    def ended(self, version: str, reason: str) -> None:
        self._keep(version, reason)
        self._ended.labels(self._model, version, reason).inc()

    def _keep(self, version: str, series: str) -> None:
        """``version`` has this series; those of the version that was seen last the longest ago go."""
        self._series.setdefault(version, set()).add(series)
        self._series.move_to_end(version)
        if len(self._series) > KEPT:
            old, gone = self._series.popitem(last=False)
            for each in gone:
                if each == FIRST:
                    self._first.remove(self._model, old)
                else:
                    self._ended.remove(self._model, old, each)
