"""Clients of an engine that runs in a thread or in its own process.

It owns starting and ending the engine, and the threads that carry messages. Both clients report everything through
one callback, called from a thread of theirs, and always end with exactly one ``Gone``::

    front thread --submit/cancel--> outbox --writer thread--> socket --> engine
                 <---- on_message ---------- reader thread <-- socket <--
"""

from __future__ import annotations

import logging
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

from jserve.config import EngineConfig
from jserve.engine.process import EXIT_CRASH, Build, run
from jserve.engine.wire import (
    Cancel,
    Control,
    Create,
    FromEngine,
    Gone,
    HandleCommand,
    LinkClosed,
    Message,
    Ready,
    Shutdown,
    SocketLink,
    Start,
    Submit,
    TooLarge,
    pack,
)
from jserve.errors import BadRequest
from jserve.types import Request

log = logging.getLogger(__name__)

OnMessage = Callable[[Message], None]
REAP_S = 5.0


class EngineClient(Protocol):
    """One engine, from start to end; not to be started twice."""

    @property
    def alive(self) -> bool:
        """From ``start`` until the engine has ended."""
        ...

    @property
    def info(self) -> dict[str, Any]:
        """That of the Ready message, {} before it."""
        ...

    def start(self, on_message: OnMessage) -> None:
        """Start the engine and return at once. Progress, Ready, Outputs, Stats, Fault and at last
        Gone come through ``on_message``, from another thread.

        Raises:
            OSError, RuntimeError: no process or no thread can be had; nothing comes then.
        """
        ...

    def submit(self, request: Request) -> None:
        """Send a request, without waiting. BadRequest if it is too large for the boundary."""
        ...

    def cancel(self, request_id: str, index: int | None = None) -> None: ...

    def create(self, request: Request, ttl_s: float) -> None:
        """Send a request whose prompt becomes a cache handle; as ``submit``."""
        ...

    def ask(self, message: HandleCommand | Control) -> None:
        """Renew, drop or look at cache handles, or command; answered by a ``HandleReply`` message."""
        ...

    def close(self, timeout_s: float = 5.0) -> None:
        """End the engine, by force after ``timeout_s``, and wait until it has ended. Idempotent."""
        ...

    def kill(self) -> None:
        """End the engine at once, as far as that is possible."""
        ...


def pack_request(message: Submit | Create) -> bytes:
    """The frame of a message that holds a request.

    Raises:
        BadRequest: it is too large for the boundary, or holds what cannot cross it.
    """
    try:
        return pack(message)
    except (TooLarge, TypeError, OverflowError) as error:
        raise BadRequest(f"prompt cannot be sent to the engine: {error}", field="prompt") from error


class InprocClient:
    """The engine in a thread of this process.

    Args:
        config: options of the engine.
        build: see ``jserve.engine.process.Build``.
        alone: the process is the engine's, see ``jserve.engine.process.run``.
    """

    def __init__(self, config: EngineConfig, build: Build, *, alone: bool = False) -> None:
        self.info: dict[str, Any] = {}
        self._config, self._build, self._alone = config, build, alone
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._on_message: OnMessage = lambda message: None

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._inbox.put(Start(config=self._config.flat()))
        thread = threading.Thread(target=self._run, name="engine", daemon=True)
        thread.start()
        self._thread = thread

    def submit(self, request: Request) -> None:
        self._inbox.put(Submit(request=request))

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self._inbox.put(Cancel(request_id=request_id, index=index))

    def create(self, request: Request, ttl_s: float) -> None:
        self._inbox.put(Create(request=request, ttl_s=ttl_s))

    def ask(self, message: HandleCommand | Control) -> None:
        self._inbox.put(message)

    def close(self, timeout_s: float = 5.0) -> None:
        self.kill()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def kill(self) -> None:
        self._inbox.put(Shutdown())

    def send(self, message: Message) -> None:
        """The engine's way out (``process.Link``)."""
        if isinstance(message, Ready):
            self.info = message.info
        self._on_message(message)

    def receive(self, timeout_s: float | None) -> list[Message]:
        """The engine's way in (``process.Link``): all that is queued, waiting for the first."""
        messages: list[Message] = []
        try:
            messages.append(self._inbox.get(timeout_s != 0.0, timeout_s))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def _run(self) -> None:
        code = EXIT_CRASH
        try:
            code = run(self, self._build, alone=self._alone)
        finally:
            self._on_message(Gone(exit_code=code))


def engine_command(fd: int) -> list[str]:
    """The command that runs an engine on the inherited socket ``fd``."""
    return [sys.executable, "-m", "jserve.cli", "engine", "--fd", str(fd)]


class ProcClient:
    """The engine in a process of its own, which ends when this one does. Its output passes through.

    Args:
        config: options of the engine; sent as its first message.
        command: argument list of the engine process, given its socket's number.
    """

    def __init__(
        self, config: EngineConfig, *, command: Callable[[int], list[str]] = engine_command
    ) -> None:
        self.info: dict[str, Any] = {}
        self._config, self._command = config, command
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        return self._reader is not None and self._reader.is_alive()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self, on_message: OnMessage) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._spawn(theirs)
        link = SocketLink(ours, FromEngine)
        self._outbox.put(pack(Start(config=self._config.flat())))
        try:
            self._run_threads(link, on_message)
        except RuntimeError:  # the machine has no more of them
            self.kill()
            self._outbox.put(None)
            link.close()
            raise

    def _run_threads(self, link: SocketLink, on_message: OnMessage) -> None:
        """The reader comes last: it is the one that reports an end."""
        threading.Thread(
            target=self._write, args=(link,), name="engine-writer", daemon=True
        ).start()
        reader = threading.Thread(
            target=self._read, args=(link, on_message), name="engine-reader", daemon=True
        )
        reader.start()
        self._reader = reader

    def _spawn(self, theirs: socket.socket) -> None:
        fd = theirs.fileno()
        self._process = subprocess.Popen(self._command(fd), pass_fds=[fd], stdin=subprocess.DEVNULL)

    def submit(self, request: Request) -> None:
        self._post(Submit(request=request))

    def create(self, request: Request, ttl_s: float) -> None:
        self._post(Create(request=request, ttl_s=ttl_s))

    def ask(self, message: HandleCommand | Control) -> None:
        self._outbox.put(pack(message))

    def _post(self, message: Submit | Create) -> None:
        self._outbox.put(pack_request(message))

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self._outbox.put(pack(Cancel(request_id=request_id, index=index)))

    def close(self, timeout_s: float = 5.0) -> None:
        self._outbox.put(pack(Shutdown()))
        if self._reader is not None:
            self._reader.join(timeout_s)
            if self._reader.is_alive():
                self.kill()
                self._reader.join()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _read(self, link: SocketLink, on_message: OnMessage) -> None:
        try:
            while True:
                for message in link.receive(None):
                    if isinstance(message, Ready):
                        self.info = message.info
                    on_message(message)
        except LinkClosed as error:
            log.debug("engine link: %s", error)
        finally:
            self._outbox.put(None)
            link.shut()  # if the engine has not ended it ends now, without waiting
            code = self._reap()
            link.close()
            on_message(Gone(exit_code=code))

    def _write(self, link: SocketLink) -> None:
        while (frame := self._outbox.get()) is not None:
            try:
                link.send_frame(frame)
            except LinkClosed:
                link.shut()  # more messages would change nothing
                return

    def _reap(self) -> int:
        """Exit code of the process, which closed its socket and so is about to end, or is made
        to."""
        assert self._process is not None
        try:
            return self._process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
