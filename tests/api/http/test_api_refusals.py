"""A refusal stands for a moment, for those it was meant for."""

from __future__ import annotations

import pytest

from jserve.api.http.front import Limits
from jserve.api.http.repeated_refusals import Refusals
from jserve.errors import DeadlineUnreachable, JserveError, Overloaded, RateLimited
from jserve.types import Lane
from tests.api.fake import FakeEngine, live

COMP = "/v1/completions"

FULL = Overloaded("full", retry_after=3)
SHARE = RateLimited("your share", code="queue_full_tenant", retry_after=2)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Book:
    """Refusals, how often one was repeated, and the clock they go by."""

    def __init__(self) -> None:
        self.clock, self.n = Clock(), 0
        self.refusals = Refusals(self._count, hold_s=0.05, clock=self.clock)

    def _count(self) -> None:
        self.n += 1

    def refuse(self, error: JserveError, lane: Lane = Lane.STANDARD, tenant: str = "") -> None:
        with pytest.raises(type(error)), self.refusals.noted(lane, tenant):
            raise error

    def told(self, lane: object = Lane.STANDARD, tenant: str = "") -> JserveError | None:
        try:
            self.refusals.check(lane, tenant)
        except JserveError as error:
            return error
        return None


def test_a_full_queue_stands_for_its_lane_only_and_for_a_moment() -> None:
    book = Book()
    assert book.told() is None
    book.refuse(FULL)
    for tenant in ("", "ann"):
        told = book.told(tenant=tenant)
        assert isinstance(told, Overloaded)
        assert (told.message, told.code, told.retry_after) == ("full", "overloaded", 3)
        assert told is not FULL, "one exception is raised once"
    assert book.told(Lane.INTERACTIVE) is None
    assert isinstance(book.told(None), Overloaded), "the lane of a body that names none"
    assert book.told(["standard"]) is None, "what is no lane is told so when it is read"
    book.clock.now += 0.051
    assert book.told() is None
    assert book.n == 3


def test_a_share_stands_for_its_tenant_in_every_lane() -> None:
    book = Book()
    book.refuse(SHARE, tenant="bulk")
    assert isinstance(book.told(Lane.INTERACTIVE, "bulk"), RateLimited)
    assert book.told(Lane.BULK, "bob") is None, "a tenant may be called like a lane"
    assert book.told(Lane.BULK) is None
    book.refuse(SHARE)
    assert book.told() is None, "without a key there is no share"


def test_what_is_one_requests_own_does_not_stand() -> None:
    book = Book()
    book.refuse(DeadlineUnreachable("too late", retry_after=1))
    assert book.told() is None


def test_two_threads_may_find_the_same_refusal_over() -> None:
    """Large bodies are read in threads; the other one comes by while this one looks at the clock."""
    book = Book()
    book.refuse(FULL)
    book.clock.now += 1.0
    looked: list[JserveError | None] = []

    def clock() -> float:
        if not looked:
            looked.append(None)
            looked[0] = book.told()
        return book.clock.now

    book.refusals._clock = clock
    assert book.told() is None
    assert looked == [None]
    assert book.n == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMP, {"prompt": "x", "lane": "bulk"}),
        ("/v1/score", {"query": "x", "items": ["y"], "lane": "bulk"}),
    ],
)
async def test_a_flood_is_answered_without_asking_the_engine_again(
    monkeypatch, path: str, body: dict
) -> None:
    engine = FakeEngine()
    async with live(engine, limits=Limits()) as srv:
        clock = Clock()
        monkeypatch.setattr(srv.server.front.refusals, "_clock", clock)
        engine.refuse = FULL
        for _ in range(10):
            status, told, headers = await srv.post(path, body)
            assert (status, told["error"]["code"]) == (503, "overloaded")
            assert headers["Retry-After"] == "3"
        engine.refuse = None
        assert (await srv.post(path, body))[0] == 503
        assert (await srv.post(COMP, {"prompt": "x"}))[0] == 200
        clock.now += 1.0
        assert (await srv.post(path, body))[0] == 200
        assert 'refusals_repeated_total{model_name="tiny"} 10.0' in srv.app_metrics()
