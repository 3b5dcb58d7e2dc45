"""Tenant quotas: requests and tokens per minute, concurrent requests.

Rates are buckets that fill evenly and hold one minute's worth. A request is let in while there is anything left,
and its tokens are taken when they are known, so a bucket may go below zero: the next request waits until it is
above again. Nobody is refused for what a request might come to.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jserve.errors import JserveError, RateLimited
from jserve.ports import Clock

BUSY_S = 1.0
"""Retry-after of a tenant whose requests run; when one ends is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of one tenant; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a bucket: capacity, tokens left, seconds until it is full."""

    limit: int
    remaining: int
    reset_s: float


class TokenBucket:
    """Holds up to ``per_minute``, fills at that rate; starts full."""

    def __init__(self, per_minute: float, clock: Clock) -> None:
        self._size = self._level = float(per_minute)
        self._clock, self._at = clock, clock()

    @property
    def standing(self) -> Standing:
        self._fill()
        missing_s = (self._size - self._level) * 60.0 / self._size
        return Standing(int(self._size), max(0, int(self._level)), missing_s)

    def take(self, n: float) -> None:
        self._fill()
        self._level -= n

    def wait_s(self, n: float) -> float:
        """Seconds until ``n`` are in it."""
        self._fill()
        return max(0.0, (n - self._level) * 60.0 / self._size)

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self._size, self._level + (now - self._at) * self._size / 60.0)
        self._at = now


class Account:
    """The requests and tokens that one tenant has used."""

    def __init__(self, quota: Quota | None = None, clock: Clock = time.monotonic) -> None:
        quota = quota or Quota()
        self._requests = _bucket(quota.requests_per_minute, clock)
        self._tokens = _bucket(quota.tokens_per_minute, clock)
        self._concurrent = quota.concurrent
        self.n_running = 0

    @property
    def standings(self) -> dict[str, Standing]:
        """Those of the limits there are, by what they limit: requests, tokens."""
        buckets = {"requests": self._requests, "tokens": self._tokens}
        return {name: bucket.standing for name, bucket in buckets.items() if bucket is not None}

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """One request of the tenant is answered inside.

        Raises:
            RateLimited: it is one too many; it counts for nothing.
        """
        if self._concurrent is not None and self.n_running >= self._concurrent:
            raise _refused("concurrent", f"{self._concurrent} requests at once", BUSY_S)
        for bucket, name in ((self._requests, "requests"), (self._tokens, "tokens")):
            wait_s = bucket.wait_s(1.0) if bucket is not None else 0.0
            if wait_s > 0:
                raise _refused(f"{name}_per_minute", f"{name} a minute", wait_s)
        if self._requests is not None:
            self._requests.take(1.0)
        self.n_running += 1
        try:
            yield
        finally:
            self.n_running -= 1

    @contextlib.contextmanager
    def answer(self, n_prompt: int, n_drawn: Callable[[], int]) -> Iterator[None]:
        """The engine is asked inside. The prompt's tokens are taken at once, those drawn in the end;
        none where it refused or failed before it drew any."""
        self.spend(n_prompt)
        try:
            yield
        except JserveError:
            if not n_drawn():
                self.spend(-n_prompt)
            raise
        finally:
            self.spend(n_drawn())

    def spend(self, n_tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(n_tokens)


def _bucket(per_minute: int | None, clock: Clock) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute, clock)


def _refused(limit: str, words: str, wait_s: float) -> RateLimited:
    message = f"this key's limit of {words} is reached"
    return RateLimited(message, field=limit, code="rate_limit_exceeded", retry_after=wait_s)


class Accounts:
    """The accounts of all tenants, made when they first ask."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def of(self, tenant: str, quota: Quota) -> Account:
        found = self._accounts.get(tenant)
        if found is None:
            found = self._accounts[tenant] = Account(quota, self._clock)
        return found
