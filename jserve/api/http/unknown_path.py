"""Explains unknown paths and methods, with the route that this server has instead.

A client's text is compared and never repeated.
"""

from __future__ import annotations

from collections.abc import Container

from aiohttp import web

from jserve.api.http.errors import HttpError

V1 = "/v1"
_OPERATOR = "it is on the operator's port (--enable-admin)"
ELSEWHERE = {
    "/ping": "/health says whether the server works",
    "/health_generate": "/health says whether the server works",
    "/load": "/metrics and /v1/dashboard say what the server does",
    "/slots": "/metrics and /v1/dashboard say what the server does",
    "/generate": "/v1/completions takes a prompt",
    "/generate_stream": "/v1/completions takes a prompt",
    "/completion": "/v1/completions takes a prompt",
    "/api/generate": "/v1/completions takes a prompt",
    "/api/chat": "/v1/chat/completions takes messages",
    "/api/tags": "/v1/models lists the model",
    "/props": "/v1/models lists the model",
    "/info": "/v1/models lists the model",
    "/get_model_info": "/v1/models lists the model",
    "/server_info": "/version and /v1/support say what the server is",
    "/docs": "/openapi.json describes this interface",
    "/embedding": "embeddings are not served",
    "/embeddings": "embeddings are not served",
    "/v1/embeddings": "embeddings are not served",
    "/rerank": "/v1/score scores texts",
    "/v1/rerank": "/v1/score scores texts",
    "/flush_cache": "POST /reset_prefix_cache forgets every prefix; " + _OPERATOR,
    "/abort": _OPERATOR,
    "/reset_prefix_cache": _OPERATOR,
    "/start_profile": _OPERATOR,
    "/stop_profile": _OPERATOR,
    "/pause": _OPERATOR,
    "/resume": _OPERATOR,
    "/sleep": _OPERATOR,
    "/wake_up": _OPERATOR,
    "/update_weights": _OPERATOR,
    "/rollback_weights": _OPERATOR,
}
"""Paths of vLLM, SGLang, llama.cpp, TGI and Ollama, and of our other port."""
_STORED = "responses are not stored, so there is none to get, list or delete"


def explained(request: web.Request, error: Exception, known: Container[str]) -> Exception:
    """``error``, with a hint if it is aiohttp's 404 or 405 and there is one.

    Args:
        known: the paths of this server's routes.
    """
    if isinstance(error, web.HTTPNotFound):
        return _with(404, "there is nothing at this path", _place(request.path, known)) or error
    if isinstance(error, web.HTTPMethodNotAllowed):
        words = "this path does not take this method"
        return _with(405, words, _cross_origin(request) or _get(request)) or error
    return error


def _with(status: int, words: str, hint: str) -> HttpError | None:
    return HttpError(status, f"{words}; {hint}") if hint else None


def _place(path: str, known: Container[str]) -> str:
    path = path.rstrip("/") or "/"
    for twin in (f"{V1}{path}", path.removeprefix(V1)):
        if twin != path and twin in known:
            return f"there is {twin}"
    if path.startswith("/v1/responses/"):
        return _STORED
    return ELSEWHERE.get(path, "")


def _cross_origin(request: web.Request) -> str:
    if request.method == "OPTIONS" and "Origin" in request.headers:
        return "pages of other origins may call this server where --allowed-origins names them"
    return ""


def _get(request: web.Request) -> str:
    return _STORED if request.path == "/v1/responses" and request.method == "GET" else ""
