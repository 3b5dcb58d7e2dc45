"""Runs the engine process: starts from a config, serves messages, shuts down on request.

It owns the life of the engine process: its start, its loop over the link, its exit code, its end when the parent
dies::

    Start -> build (Progress ...) -> Ready -> [ receive -> step -> Outputs ] ... -> Shutdown
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence as Seq
from typing import Any, Protocol

from jserve.config import EngineConfig
from jserve.engine.driven import DrivenEngine
from jserve.engine.watchdog import Watchdog
from jserve.engine.wire import (
    Cancel,
    Control,
    Create,
    Fault,
    HandleCommand,
    LinkClosed,
    Message,
    Outputs,
    Progress,
    Ready,
    Shutdown,
    SocketLink,
    Start,
    Submit,
    ToEngine,
    TooLarge,
)
from jserve.errors import ConfigError, JserveError, where
from jserve.types import Finish, Output

log = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]
"""Called during start-up with (stage, parts done, parts in all)."""
Build = Callable[[EngineConfig, OnProgress], tuple[DrivenEngine, dict[str, Any]]]
"""Makes the engine and the ``info`` of its Ready message (values that msgpack can carry)."""

ORPHAN_GRACE_S = 5.0
EXIT_OK, EXIT_CRASH, EXIT_CONFIG = 0, 1, 2


class Link(Protocol):
    """Either end of a boundary: a ``SocketLink``, or queues within one process."""

    def send(self, message: Message) -> None: ...

    def receive(self, timeout_s: float | None) -> list[Any]: ...


def main(fd: int, build: Build) -> int:
    """Be the engine process on the socket ``fd``; returns the exit code.

    0: shut down, or the parent is gone. 2: the config or a model file is at fault. 4: the watchdog
    ended it (``watchdog_s``). 1: anything else.
    """
    # Ctrl-C reaches the whole process group; what it means is for the parent to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(fd, False)
    link = SocketLink(socket.socket(fileno=fd), ToEngine)
    threading.Thread(target=_end_with_parent, args=(fd,), daemon=True).start()
    return run(link, build, alone=True)


def run(link: Link, build: Build, *, alone: bool) -> int:
    """Build the engine that the first message asks for and serve it; returns an exit code.

    Args:
        alone: the process is the engine's: everything alive after the start is taken out of garbage
            collection, and a watchdog ends it where nothing moves.
    """
    starting = True
    try:
        watchdog, engine, info, early = _start(link, build, alone=alone)
        starting = False
        if alone:
            gc.collect()
            gc.freeze()
        link.send(Ready(info=info))
        serve(engine, link, early, watchdog)
        watchdog.at("pages to disk")
        engine.close()
        watchdog.idle()
    except LinkClosed:
        return EXIT_OK
    except Exception as error:
        return _report(link, error, starting=starting)
    return EXIT_OK


def serve(
    engine: DrivenEngine, link: Link, early: Seq[Any] = (), watchdog: Watchdog | None = None
) -> None:
    """Step the engine whenever there is work and block on the link when there is none.

    Returns on Shutdown. ``early`` are messages that came before the engine was ready.

    Raises:
        LinkClosed: the other end is gone.
        EngineDead: see ``Engine.step``.
    """
    messages, told, watchdog = early, 0.0, watchdog or Watchdog(0.0)
    if (
        engine.describer is not None
    ):  # those who choose need to know of an engine that has not worked yet
        link.send(engine.stats())
    while True:
        for message in messages:
            if isinstance(message, Shutdown):
                return
            _take(engine, message, link)
        wait_s: float | None = None
        if engine.busy:
            before = engine.n_steps
            watchdog.at("a step")
            outputs = engine.step()
            watchdog.idle()
            if outputs:
                _send_outputs(engine, link, outputs)
            for answer in engine.take_answers():
                link.send(answer)
            if not engine.busy or time.monotonic() - told > engine.stats_every_s:
                link.send(engine.stats())
                told = time.monotonic()
            moved = outputs or engine.n_steps > before or engine.n_in_flight
            wait_s = None if not engine.busy else 0.0 if moved else engine.blocked_wait_s
        messages = link.receive(wait_s)


def _send_outputs(engine: DrivenEngine, link: Link, outputs: list[Output]) -> None:
    """Send what one step brought: in parts where it is too much for one message (log-probabilities
    of long prompts are). A choice whose output is too much alone ends in error."""
    try:
        link.send(Outputs(step=engine.n_steps, outputs=outputs))
    except TooLarge as error:
        if len(outputs) > 1:
            half = len(outputs) // 2
            _send_outputs(engine, link, outputs[:half])
            _send_outputs(engine, link, outputs[half:])
            return
        (lost,) = outputs
        engine.cancel(lost.request_id, lost.index)
        short = Output(
            request_id=lost.request_id,
            index=lost.index,
            finish=Finish.ERROR,
            error=f"the answer is too large to be sent: {error}",
            error_code="answer_too_large",
            attempt=lost.attempt,
        )
        link.send(Outputs(step=engine.n_steps, outputs=[short]))


def _start(
    link: Link, build: Build, *, alone: bool
) -> tuple[Watchdog, DrivenEngine, dict[str, Any], list[Any]]:
    """The engine that Start asks for, who watches it, its info, and the messages that came along with
    Start."""
    begun = time.monotonic()
    start = link.receive(None)
    while not start:
        start = link.receive(None)
    if not isinstance(start[0], Start):
        raise ConfigError("the first message must be Start", field="start")
    config = EngineConfig.of(**start[0].config)
    watchdog = Watchdog(config.device.watchdog_s if alone else 0.0)

    def on_progress(stage: str, done: int, total: int) -> None:
        watchdog.at(f"{stage}, {done} of {total} done")
        link.send(Progress(stage=stage, done=done, total=total))

    watchdog.at("the start")
    engine, info = build(config, on_progress)
    watchdog.idle()
    return watchdog, engine, {"startup_s": time.monotonic() - begun, **info}, start[1:]


def _take(engine: DrivenEngine, message: Any, link: Link) -> None:
    match message:
        case Submit():
            engine.submit(message.request)
        case Cancel():
            engine.cancel(message.request_id, message.index)
        case Create():
            engine.create(message.request, message.ttl_s)
        case HandleCommand() | Control():
            engine.ask(message)
        case Fault():
            log.error("%s", message.message)
            link.send(message)
        case _:
            link.send(Fault(message=f"unexpected {type(message).__name__}", code="malformed"))


def _report(link: Link, error: Exception, *, starting: bool) -> int:
    """Send the client why the engine ends. At the start no client has sent anything yet, so the
    log gets the traceback unless the user can mend it; later on only the place."""
    known = isinstance(error, JserveError)
    mendable = isinstance(error, ConfigError)
    said = f"{type(error).__name__}: {str(error)[:300]}" if starting else where(error)
    if not mendable:
        log.error("the engine ends: %s", said, exc_info=error if starting else None)
    fault = Fault(
        message=error.message if known else said,
        code=error.code if known else "engine_dead",
        field=error.field if known else None,
        fatal=True,
    )
    try:
        link.send(fault)
    except LinkClosed:
        log.error("the client is gone, so this is not sent: %s", fault.message)
    return EXIT_CONFIG if mendable else EXIT_CRASH


def _end_with_parent(fd: int) -> None:
    """End the process when the other end is gone, also out of a step or a compilation that
    hangs."""
    poll = select.poll()
    poll.register(fd, 0)  # hang-ups are reported without being asked for
    poll.poll()
    time.sleep(ORPHAN_GRACE_S)
    os._exit(EXIT_CRASH)
