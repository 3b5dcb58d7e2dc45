"""Creates, renews, drops and lists cache handles as journalled scheduler inputs.

It owns their order: the clock first, then the journal, then the change, so that a replay does alike.
"""

from __future__ import annotations

from jserve.errors import JserveError
from jserve.sched.scheduler import Scheduler
from jserve.types import HandleInfo, Request


def create(scheduler: Scheduler, request: Request, ttl_s: float, now: float) -> None:
    """Queue ``request``, whose prompt becomes the cache handle ``request.cache`` for ``ttl_s``.

    Its output ends as that of any request; if it ends well the handle is pinned, if not it is gone.

    Raises:
        BadRequest, CacheFull: see ``Handles.open``; and as ``Scheduler.submit``.
    """
    retention = scheduler.resources.retention
    retention.advance(now)
    request = scheduler.with_kv_name(request)
    if scheduler.journal is not None:
        scheduler.journal.create(request, ttl_s, now)
    handle = retention.open(request, ttl_s)
    try:
        scheduler.enqueue(request, now)
    except JserveError:
        retention.handles.abandon(handle, request.id)
        raise


def renew(scheduler: Scheduler, tenant: str, name: str, ttl_s: float, now: float) -> HandleInfo:
    """Let a handle live for ``ttl_s`` from ``now``.

    Raises:
        CacheNotFound, BadRequest: there is none; ``ttl_s`` is out of range.
    """
    retention = scheduler.resources.retention
    retention.advance(now)
    if scheduler.journal is not None:
        scheduler.journal.renew(tenant, name, ttl_s, now)
    return retention.handles.info(retention.handles.renew(tenant, name, ttl_s))


def drop(scheduler: Scheduler, tenant: str, name: str, now: float) -> HandleInfo:
    """Forget a handle; its pages are evicted when room is needed. Raises CacheNotFound."""
    retention = scheduler.resources.retention
    retention.advance(now)
    if scheduler.journal is not None:
        scheduler.journal.drop(tenant, name, now)
    return retention.handles.info(retention.handles.drop(tenant, name))


def find(
    scheduler: Scheduler, tenant: str, name: str | None = None, now: float = 0.0
) -> list[HandleInfo]:
    """The handles of a tenant, or one of them. Changes nothing, so it is not journalled.

    Raises:
        CacheNotFound: there is none of that name.
    """
    handles = scheduler.resources.retention.handles
    found = handles.of(tenant) if name is None else [handles.find(tenant, name)]
    return [handles.info(handle, now) for handle in found]
