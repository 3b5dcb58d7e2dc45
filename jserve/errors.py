"""The error tree of jserve: each error has a kind, an HTTP status and the field at fault.

It owns the mapping from "what went wrong" to "who must act": the client (4xx), the operator (exit code 2) or us
(5xx). Knows nothing of HTTP bodies; ``jserve.api`` turns these into them.
"""

from __future__ import annotations

import traceback

MAX_CLIENT_TEXT = 64
"""Most characters of a client's text in a message."""


class JserveError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        status: HTTP status this error has when it answers a request.
        kind: OpenAI error ``type``.
        code: stable machine-readable code, or None.
        field: the request field, config key, file or tensor at fault, or None.
        retry_after: seconds after which a retry may help, or None.
    """

    status = 500
    kind = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = retry_after
        if code is not None:
            self.code = code


class BadRequest(JserveError, ValueError):
    """The client can mend this request; ``field`` names what is wrong."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_value"


class Unsupported(BadRequest):
    """A known field or value that this server or model cannot honour; ``field`` names it."""

    code = "unsupported_parameter"


class ContextTooLong(BadRequest):
    """Prompt plus requested tokens exceed the context, or can never fit the KV pool."""

    code = "context_length_exceeded"


class DeadlineInfeasible(BadRequest):
    """The deadline could not be met on an idle server either; ``field`` names it."""

    code = "deadline_infeasible"


class Unauthorized(JserveError):
    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class NotFound(JserveError):
    """Unknown model, adapter or route."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"


class CacheNotFound(NotFound):
    """No cache handle of that name; it was never made, was dropped or has expired."""

    code = "cache_not_found"


class CacheFull(JserveError):
    """Cache handles pin as many pages as they may; drop one or wait until one expires."""

    status = 429
    kind = "rate_limit_error"
    code = "cache_quota_exceeded"


class Overloaded(JserveError):
    """The queue is full; try again after ``retry_after`` seconds."""

    status = 503
    kind = "server_error"
    code = "overloaded"


class RateLimited(JserveError):
    """This tenant has its share of the queue already; try again after ``retry_after`` seconds."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full_tenant"


class DeadlineUnreachable(JserveError):
    """The deadline could be met, but not behind what is waiting now; ``field`` names it."""

    status = 503
    kind = "server_error"
    code = "deadline_unreachable"


class DeadlineExceeded(JserveError):
    """The deadline ``field`` passed (or became hopeless) after the request was accepted."""

    status = 504
    kind = "timeout_error"
    code = "deadline_exceeded"


class NotReady(JserveError):
    """Starting or draining."""

    status = 503
    kind = "server_error"
    code = "starting"


class EngineDead(JserveError):
    """The engine process ended; requests that cannot go on in another one fail with this."""

    status = 503
    kind = "server_error"
    code = "engine_dead"


class WeightsChanged(JserveError):
    """The engine that said the first part of an answer is gone, and the one that goes on has other weights."""

    status = 503
    kind = "server_error"
    code = "weights_changed"


class RequestFailed(JserveError):
    """This request hit a fault of ours (a step that raised, non-finite logits)."""

    status = 500
    kind = "server_error"
    code = "engine_step_failed"


class StepFeatureFailed(JserveError):
    """A step feature that this program registers gave what nothing can be drawn from; ``field`` names it."""

    status = 500
    kind = "server_error"
    code = "step_feature_failed"


class Unschedulable(JserveError):
    """This request waited with nothing else to do and could not be run: a fault of ours."""

    status = 500
    kind = "server_error"
    code = "unschedulable"


class ConfigError(JserveError, ValueError):
    """An option or a model's config.json cannot be honoured; ``field`` is the option or key. Exit code 2."""

    code = "config_error"


class WeightsError(ConfigError):
    """A weight, tokenizer or index file is broken; ``field`` is the file (and tensor). Exit code 2."""

    code = "weights_error"


class InvalidSchema(BadRequest):
    """A schema, grammar or other structure that cannot be read or enforced; ``field`` names it."""

    code = "invalid_schema"


class NothingAllowed(BadRequest):
    """The request's own constraints leave no token to be drawn; ``field`` is one of them."""

    code = "nothing_allowed"


def error_of(
    code: str | None,
    message: str,
    *,
    field: str | None = None,
    retry_after: float | None = None,
) -> JserveError:
    """The error that ``code`` (as carried by ``Output.error_code``) stands for; RequestFailed if unknown."""
    kinds = [
        *JserveError.__subclasses__(),
        *BadRequest.__subclasses__(),
        *NotFound.__subclasses__(),
        WeightsError,
    ]
    kind = next((k for k in kinds if k.code == code), None)
    if kind is not None:
        return kind(message, field=field, retry_after=retry_after)
    return RequestFailed(message, field=field, code=code)


def shown(text: object) -> str:
    """A client's text for a message: escaped and cut to 64 characters."""
    cut = str(text)[: MAX_CLIENT_TEXT + 1]
    return repr(cut[:MAX_CLIENT_TEXT]) + ("..." if len(cut) > MAX_CLIENT_TEXT else "")


def where(exc: BaseException) -> str:
    """Type and place of an exception for the log, without its words: these may hold a prompt.

    The device's own errors keep their first line; what is in it comes from XLA.
    """
    frames = traceback.extract_tb(exc.__traceback__)[-6:]
    lines = " < ".join(
        f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} {f.name}" for f in reversed(frames)
    )
    kind = type(exc)
    said = str(exc).split("\n", 1)[0][:300] if kind.__module__.startswith("jax") else ""
    return f"{kind.__name__}{f' ({said})' if said else ''} at {lines or 'unknown'}"
