"""Messages between the HTTP process and the engine, encoded as msgpack frames on a socket.

Nothing is ever unpickled; numpy arrays cross as their type, shape and bytes. A frame that does not decode into one of
the expected types is reported, never raised::

    socket   [ n: uint32, little endian ][ n bytes of msgpack ][ n ][ ... ]
    front -> engine   Start  Submit  Cancel  Create  Handle  Control  Shutdown
    engine -> front   Progress  Ready  Outputs (of one step, all sequences)  Handles  Stats  Fault
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from typing import Any, Literal

import msgspec
import numpy as np

from jserve.engine.view import PageEvent, View
from jserve.faults import point
from jserve.types import HandleInfo, Output, Request

MAX_MESSAGE_BYTES = 64 * 2**20
_READ_BYTES = 2**20
_HEADER = struct.Struct("<I")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=str.lower):
    """Base of all messages; the type is the lower-case class name."""


class Start(Message, frozen=True):
    """First message: ``EngineConfig.flat()``."""

    config: dict[str, Any]


class Submit(Message, frozen=True):
    request: Request
    age_s: float | None = None
    """Seconds since its arrival, where the clock of ``request.arrival`` is another machine's."""


class Cancel(Message, frozen=True):
    """End a request, or only its choice ``index``."""

    request_id: str
    index: int | None = None


class Create(Message, frozen=True):
    """Compute the prompt of ``request`` and pin it as the cache handle ``request.cache``.

    Its outputs are those of a request of that id.
    """

    request: Request
    ttl_s: float
    age_s: float | None = None
    """As of ``Submit``."""


class HandleCommand(Message, frozen=True):
    """Renew, drop or look at cache handles; answered by one ``HandleReply`` of the same id."""

    id: str
    action: Literal["renew", "drop", "find"]
    tenant: str = ""
    name: str | None = None
    """None with "find" means all of the tenant's."""
    ttl_s: float = 0.0


class Control(Message, frozen=True):
    """An operator's command; answered by one ``HandleReply`` of the same id, without handles."""

    id: str
    action: Literal[
        "reset_prefix_cache",
        "start_profile",
        "stop_profile",
        "pause",
        "resume",
        "sleep",
        "wake",
        "update_weights",
        "rollback_weights",
        "weight_info",
    ]
    running: str = ""
    """The fate of running requests: of ``hold.PAUSES``, or of ``operate.POLICIES``; "": the default."""
    parts: list[str] = []
    """Of ``hold.PARTS``, for "sleep" and "wake"; []: all."""
    source: Any = None
    """For "update_weights": a directory; within one process also what ``LLM.update_weights`` takes."""
    version: str = ""
    partial: bool = False
    donate: bool = False
    alias: bool = False
    canary: float = 0.0
    """For "update_weights" of several replicas: the share of new requests that get the new weights; 0: all do."""
    analysis: dict[str, float] | None = None
    """Of ``canary``: the bounds by which it is promoted or rolled back (``fleet.canary.Analysis``); None: by hand."""


class Shutdown(Message, frozen=True):
    """End the engine now; what still runs is dropped."""


class Progress(Message, frozen=True):
    """Start-up: ``done`` of ``total`` parts of ``stage`` are ready."""

    stage: str
    done: int
    total: int


class Ready(Message, frozen=True):
    """The engine takes requests. ``info``: model, vocabulary, limits, memory, programs, seconds."""

    info: dict[str, Any]


class Outputs(Message, frozen=True):
    """The outputs of one step, for all sequences; split over several messages where they exceed one."""

    step: int
    outputs: list[Output]


class HandleReply(Message, frozen=True):
    """The answer to ``HandleCommand`` or ``Control`` ``id``: what is known of the handles, or why there is none."""

    id: str
    handles: list[HandleInfo] = []
    error: str | None = None
    error_code: str | None = None
    error_field: str | None = None
    info: dict[str, Any] = {}
    """Facts that answer a command."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One committed step, for those who watch."""

    at: float
    """Monotonic seconds of its commit."""
    device_us: float
    """The seconds that it ran; 0 where the runner does not know."""
    n_rows: int
    n_prefill_rows: int
    n_prefill_tokens: int
    n_drawn: int
    """Tokens drawn by all rows."""


class Stats(Message, frozen=True):
    """The engine's state after ``step`` steps; names in ``values`` that end in _total only grow."""

    step: int = 0
    waiting: int = 0
    running: int = 0
    in_flight: int = 0
    values: dict[str, float] = {}
    steps: list[StepRecord] = []
    """The steps since the last Stats, oldest first."""
    view: View | None = None
    """The cost of one more request; None where nobody chooses between several engines."""
    pages: list[PageEvent] = []
    """Pages that can be found or no longer, since the last Stats, oldest first."""


class Fault(Message, frozen=True):
    """Something went wrong beyond one request; after a fatal one the engine ends.

    ``code`` is that of a ``JserveError``, ``field`` the option or file at fault.
    """

    message: str
    code: str | None = None
    field: str | None = None
    fatal: bool = False


class Gone(Message, frozen=True):
    """Never sent: what a client reports when its engine has ended, by an exit code of
    ``process.main`` or the negative number of the signal that killed it."""

    exit_code: int


ToEngine = Start | Submit | Cancel | Create | HandleCommand | Control | Shutdown
FromEngine = Progress | Ready | Outputs | HandleReply | Stats | Fault


class LinkClosed(Exception):
    """The other end of the socket is gone, or sent a length no message may have."""


class TooLarge(ValueError):
    """A message above MAX_MESSAGE_BYTES."""


_ARRAY = 1
"""Number of the msgpack extension that holds a numpy array, as msgpack of its ``_Parts``."""
_Parts = tuple[str, tuple[int, ...], bytes]


def _packed(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        parts = (value.dtype.str, value.shape, value.tobytes())
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(parts))
    raise TypeError(f"a {type(value).__name__} cannot cross the wire")


def _unpacked(code: int, data: memoryview) -> np.ndarray:
    """Read-only. Raises ValueError for what is no array."""
    if code != _ARRAY:
        raise ValueError(f"an extension of number {code}")
    dtype, shape, raw = _array_parts.decode(data)
    return np.frombuffer(raw, dtype).reshape(shape)


_array_parts = msgspec.msgpack.Decoder(_Parts)
_encoder = msgspec.msgpack.Encoder(enc_hook=_packed)


def decoder(incoming: Any) -> msgspec.msgpack.Decoder[Any]:
    """Of the payloads of frames that ``pack`` made, as messages of the union ``incoming``."""
    return msgspec.msgpack.Decoder(incoming, ext_hook=_unpacked)


def pack(message: Message) -> bytes:
    """The frame of a message.

    Raises:
        TooLarge: more than MAX_MESSAGE_BYTES.
        TypeError, OverflowError: a value that msgpack has no form for.
    """
    payload = _encoder.encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise TooLarge(
            f"a message of {len(payload)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}"
        )
    return framed(payload)


def encoded(value: Any) -> bytes:
    """A value as it crosses the boundary. Raises TypeError or OverflowError for what msgpack has no form for."""
    return _encoder.encode(value)


def framed(payload: bytes) -> bytes:
    """The frame of a payload."""
    return _HEADER.pack(len(payload)) + payload


def take_frames(buffer: bytearray) -> list[bytes]:
    """Remove and return the payloads of all complete frames at the head of ``buffer``.

    Raises:
        LinkClosed: a length above MAX_MESSAGE_BYTES; where the next frame begins is then unknown.
    """
    payloads: list[bytes] = []
    at = 0
    while len(buffer) - at >= _HEADER.size:
        (n,) = _HEADER.unpack_from(buffer, at)
        if n > MAX_MESSAGE_BYTES:
            raise LinkClosed(f"a frame of {n} bytes was announced, above the limit")
        if len(buffer) - at - _HEADER.size < n:
            break
        payloads.append(bytes(buffer[at + _HEADER.size : at + _HEADER.size + n]))
        at += _HEADER.size + n
    del buffer[:at]
    return payloads


class SocketLink:
    """One end of the socket pair. One thread may receive, any may send.

    Args:
        sock: a connected stream socket in blocking mode; owned from here on.
        incoming: the union of message types that this end expects.
    """

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._decoder = decoder(incoming)
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message) -> None:
        """Send, waiting while the other end's buffer is full.

        Raises:
            LinkClosed: the other end is gone.
            TooLarge, TypeError, OverflowError: see ``pack``; nothing was sent.
        """
        self.send_frame(pack(message))

    @point("wire.send", LinkClosed)
    def send_frame(self, frame: bytes) -> None:
        """Send what ``pack`` made; raises LinkClosed."""
        with self._sending:
            try:
                self._sock.sendall(frame)
            except OSError as error:
                raise LinkClosed(str(error)) from error

    @point("wire.receive", LinkClosed)
    def receive(self, timeout_s: float | None) -> list[Any]:
        """Messages at hand, waiting up to ``timeout_s`` (None: for ever) for bytes to come; may
        be [].

        A frame that does not decode is in the list as a ``Fault`` that says why.

        Raises:
            LinkClosed: the other end is gone, or a frame is too long.
        """
        try:
            if not self._poll.poll(None if timeout_s is None else timeout_s * 1000):
                return []
            data = self._sock.recv(_READ_BYTES)
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if not data:
            raise LinkClosed("the other end closed the socket")
        self._buffer += data
        return [self._decode(payload) for payload in take_frames(self._buffer)]

    def shut(self) -> None:
        """End the conversation: both ends find the link closed."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _decode(self, payload: bytes) -> Any:
        try:
            return self._decoder.decode(payload)
        except (
            msgspec.MsgspecError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
        ) as error:
            return Fault(message=f"malformed message: {str(error)[:200]}", code="malformed")
