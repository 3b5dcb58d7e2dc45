"""Runs and times every program before the engine is ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jserve.model.view import Bucket
from jserve.ports import Clock, StepTime
from jserve.runner.programs import Progress
from jserve.runner.rehearsal import EVERYTHING, GREEDY
from jserve.sampling import SamplingParams

CPU_S = 1.0
"""Seconds of warm-up on a CPU, before the last program begins."""
QUICK_S = 0.1
"""A program that takes no longer runs again on a CPU, whatever it pays for at its first run."""
ROUNDS_S, MOST_ROUNDS = 2.0, 9
"""Programs that are weighed against each other are timed in rounds, the last of which begins after so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """``run`` takes a bucket through its program, with rows of these parameters, and returns the
    seconds until that is done."""

    run: Callable[[Bucket, SamplingParams], float]
    clock: Clock
    progress: Progress

    def times(self, buckets: Sequence[Bucket], *, cpu: bool, drafts: bool) -> tuple[StepTime, ...]:
        """Step times of the programs without scores or masks.

        On an accelerator all run three times (the first run of a graph is not captured), on a CPU cheapest
        first, for a second or so, and three times those that are quick (a first run pays for scratch memory
        and for what XLA builds late; the largest programs of a large model take that long anyway). The last
        run of each is its known time. With ``drafts``, all programs that drafts are weighed by run whatever
        it takes, and are then timed with care: guessed times choose wrong widths.
        """
        weighed = [b for b in buckets if drafts and not b.features]
        runs = [*weighed, *(b for b in buckets if b not in weighed)]
        began, found = self.clock(), {}
        for done, bucket in enumerate(runs):
            self.progress("warm up", done, len(runs))
            found[bucket] = self._first(bucket, cpu=cpu)
            if cpu and done >= len(weighed) and self.clock() - began > CPU_S:
                break
        found |= self._weigh({b: found[b] for b in weighed})
        self.progress("warm up", len(runs), len(runs))
        return tuple(_step_time(b, t) for b, t in found.items() if not b.features)

    def _first(self, bucket: Bucket, *, cpu: bool) -> float:
        took = self._timed(bucket)
        if cpu and took > QUICK_S:
            return took
        self.run(bucket, EVERYTHING)
        return self._timed(bucket)

    def _timed(self, bucket: Bucket) -> float:
        """With all of the host's part."""
        start = self.clock()
        self.run(bucket, GREEDY)
        return self.clock() - start

    def _weigh(self, known: dict[Bucket, float]) -> dict[Bucket, float]:
        """Medians of rounds through all of ``known``, so that what slows the machine for a while slows all
        alike; as many rounds as there is time for."""
        rounds: list[list[float]] = []
        began = self.clock()
        while known and len(rounds) < MOST_ROUNDS and self.clock() - began < ROUNDS_S:
            rounds.append([self._again(bucket, took) for bucket, took in known.items()])
        return {b: float(np.median(t)) for b, *t in zip(known, *rounds, strict=True)}

    def _again(self, bucket: Bucket, took: float) -> float:
        """The time of a program that follows itself, as those do that decode: what is small is half as fast
        behind others, whose code and scratch memory lie in the caches."""
        if took <= QUICK_S:
            self.run(bucket, GREEDY)
        return self.run(bucket, GREEDY)


def _step_time(bucket: Bucket, seconds: float) -> StepTime:
    return StepTime(
        n_decode=bucket.D,
        n_prefill=bucket.P,
        n_context=0,
        seconds=seconds,
        width=bucket.J,
        n_draft=bucket.n_draft,
    )
