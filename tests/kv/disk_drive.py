"""A drive whose device has a disk: reads are answered late, in any order, or not at all."""

from __future__ import annotations

from jserve.sched.cache import tiers as tiering
from jserve.testing import FakeRunner, HostCopy
from jserve.types import PageFetch
from tests.kv.counting import CountingDrive


class DiskRunner(FakeRunner):
    """Keeps what goes out with a digest in ``disk``, a dict that outlives it."""

    def __init__(self, limits, disk: dict[bytes, HostCopy], **options) -> None:
        super().__init__(limits, **options)
        self.disk = disk
        self.asked: list[PageFetch] = []

    def collect(self, flight):
        result = super().collect(flight)
        for move in flight.plan.moves:
            if move.out and move.digest:
                self.disk[move.digest] = self.host[move.host]
        return result

    def answer(self, number: int, *, fail: bool = False) -> tuple[int, bool]:
        """The answer to one of the reads that wait."""
        fetch = self.asked.pop(number % len(self.asked))
        data = None if fail else self.disk.get(fetch.digest)
        if data is not None:
            self.host[fetch.host] = data
        return fetch.ticket, data is not None


class DiskDrive(CountingDrive):
    """``lag``: how many steps each read takes at least."""

    def __init__(self, lim, *, disk=None, eos_rate=0, **options) -> None:
        self.lag = 0
        super().__init__(lim, eos_rate=eos_rate, **options)
        self.attach({} if disk is None else disk, eos_rate)

    def attach(self, disk: dict[bytes, HostCopy], eos_rate: int = 0) -> None:
        """Begin with what ``disk`` holds."""
        self.runner = DiskRunner(self.limits, disk, eos_rate=eos_rate)
        tiering.learn(self.scheduler, disk, self.now)

    def launch(self) -> bool:
        launched = super().launch()
        self.runner.asked += tiering.take_fetches(self.scheduler)
        self.check()
        return launched

    def deliver(self, number: int = 0, *, fail: bool = False) -> bool:
        """Answer one read; False when none waits."""
        if not self.runner.asked:
            return False
        answer = self.runner.answer(number, fail=fail)
        tiering.fetched(self.scheduler, [answer], self.now)
        self.check()
        return True

    def step(self) -> bool:
        moved = False
        if self.lag:
            self.lag -= 1
        else:
            moved = self.deliver()
        launched = self.launch()
        if self.flight and (not launched or len(self.flight) > self.depth):
            self.commit()
            return True
        waits = bool(self.runner.asked)
        if not launched and not moved and not waits:
            self.check_rest()
        return launched or moved or waits

    def _most_steps(self) -> int:
        return super()._most_steps() + 300
