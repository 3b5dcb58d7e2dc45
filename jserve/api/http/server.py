"""Runs the HTTP server: listens, handles signals, drains and stops.

It owns the listening socket, the life of the process on the HTTP side and its exit code. ::

    SIGTERM or SIGINT   /ready 503, new requests 503, running ones finish  -> 0
    a second signal     everything ends now                                -> 128 + signal
    engine gave up      everything ends, the reason is logged              -> 1
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import resource
import signal
from collections.abc import Callable

from aiohttp import web

from jserve.api.http.app import FRONT, make_admin_app, make_app
from jserve.api.http.auth import Keys
from jserve.api.http.connection import Connection
from jserve.api.http.front import Front, Limits
from jserve.api.request.parsed import ModelCard
from jserve.config import EngineConfig, ServerOptions
from jserve.engine.face import EngineFace
from jserve.errors import ConfigError
from jserve.text.chat.template import ChatTemplate
from jserve.text.tokenizer import TextTokenizer

log = logging.getLogger("jserve.api")
LAST_WORDS_S = 5.0
"""The time that answers may take to leave once the engine has drained."""
SPARE_FILES = 128
"""Open files beside the connections: model files, pipes, the engine's socket."""


class HttpServer:
    """One application on one listening socket.

    Args:
        app: from ``make_app`` or ``make_admin_app``.
        host, port: where; port 0 takes a free one.
    """

    def __init__(self, app: web.Application, host: str, port: int) -> None:
        self.front: Front = app[FRONT]
        self._host, self._port = host, port
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        self._listener: asyncio.Server | None = None

    async def start(self) -> str:
        """Listens; the address as a URL.

        Raises:
            ConfigError: the address is taken or not ours.
        """
        await self._runner.setup()
        _allow_files(self.front.limits.max_connections)
        loop = asyncio.get_running_loop()
        host, port = self._host, self._port
        try:
            self._listener = await loop.create_server(
                self._connect,
                host,
                port,
                backlog=self.front.limits.max_connections,
                reuse_address=True,
            )
        except (OSError, OverflowError) as e:
            await self._runner.cleanup()
            reason = getattr(e, "strerror", None) or str(e)
            raise ConfigError(f"cannot listen on {host}:{port}: {reason}", field="port") from None
        name = self._listener.sockets[0].getsockname()
        shown = f"[{name[0]}]" if ":" in name[0] else name[0]
        return f"http://{shown}:{name[1]}"

    async def stop(self, timeout_s: float = LAST_WORDS_S) -> None:
        """Stops listening, gives answers ``timeout_s`` to leave, closes every connection."""
        if self._listener is not None:
            self._listener.close()
        server = self._runner.server
        if server is not None:
            server.pre_shutdown()
            await server.shutdown(timeout_s)
        await self._runner.cleanup()

    def _connect(self) -> Connection:
        server = self._runner.server
        assert server is not None
        limits = self.front.limits
        return Connection(
            server,
            limits,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=limits.idle_timeout_s,
            access_log=None,
            lingering_time=1.0,
        )


async def serve(
    config: EngineConfig,
    engine: EngineFace,
    tokenizer: TextTokenizer,
    chat: ChatTemplate | None,
    card: ModelCard,
    *,
    on_listening: Callable[[str], None] | None = None,
    limits: Limits | None = None,
) -> int:
    """Serves until a signal or until the engine gives up; the exit code of the process.

    Args:
        engine: started.
        chat: the model's template, or None for a model without one.
        on_listening: called with the URL once the port is open.

    Raises:
        ConfigError: a port cannot be opened, or would be open to everyone.
    """
    options = config.server
    app = make_app(config, engine, tokenizer, chat, card, limits=limits)
    check_doors(options, app[FRONT].keys)
    async with contextlib.AsyncExitStack() as open_ports:
        server = HttpServer(app, options.host, options.port)
        url = await server.start()
        open_ports.push_async_callback(server.stop, 0.5)
        if options.enable_admin:
            admin = HttpServer(make_admin_app(app), options.admin_host, options.admin_port)
            log.info("the operator's port is %s", await admin.start())
            open_ports.push_async_callback(admin.stop, 0.5)
        with _signals() as signals:
            if on_listening is not None:
                on_listening(url)
            return await _until_end(engine, signals, options, server)


def check_doors(options: ServerOptions, keys: Keys) -> None:
    """Warns of a public port that takes no key.

    Raises:
        ConfigError: the operator's port would be public and take no key.
    """
    if options.enable_admin and not _is_loopback(options.admin_host) and not keys.any_admin:
        raise ConfigError(
            f"admin_host {options.admin_host} is public: api_keys_file must hold a key of a tenant "
            "with admin: true",
            field="admin_host",
        )
    if not keys and not _is_loopback(options.host):
        log.warning(
            "%s is public and no API key is set: whoever reaches port %d may use this server",
            options.host,
            options.port,
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _until_end(
    engine: EngineFace, signals: asyncio.Queue[int], options: ServerOptions, server: HttpServer
) -> int:
    signalled = asyncio.ensure_future(signals.get())
    gave_up = asyncio.ensure_future(engine.gave_up.wait())
    try:
        await asyncio.wait({signalled, gave_up}, return_when=asyncio.FIRST_COMPLETED)
        if gave_up.done():
            log.error("the engine gave up: %s", engine.gave_up_reason)
            return 1
        log.info("draining for at most %.0f s", options.drain_timeout_s)
        drained = asyncio.ensure_future(_drain(engine, server, options))
        again = asyncio.ensure_future(signals.get())
        await asyncio.wait({drained, again, gave_up}, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if drained.done():
            return 0
        drained.cancel()
        await asyncio.gather(drained, return_exceptions=True)
        return 1 if gave_up.done() else 128 + again.result()
    finally:
        for task in (signalled, gave_up):
            task.cancel()


async def _drain(engine: EngineFace, server: HttpServer, options: ServerOptions) -> None:
    drained = engine.drain(options.drain_timeout_s)
    n_aborted, _ = await asyncio.gather(drained, asyncio.sleep(options.drain_delay_s))
    if n_aborted:
        log.warning("%d requests did not finish in time", n_aborted)
    await server.stop()


def _allow_files(n_connections: int) -> None:
    """Raise the process's limit of open files to what the connections need, or say that it is low."""
    wanted = n_connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted or soft == resource.RLIM_INFINITY:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft < wanted:
        log.warning(
            "%d open files are allowed; %d connections need %d", soft, n_connections, wanted
        )


@contextlib.contextmanager
def _signals():
    """A queue of the SIGTERM and SIGINT that arrive."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, arrived.put_nowait, int(number))
    try:
        yield arrived
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
