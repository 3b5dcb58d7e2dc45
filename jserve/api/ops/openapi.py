"""Generates ``/openapi.json`` (OpenAPI 3.1) from the declarations that validate requests."""

from __future__ import annotations

import functools
import re
from typing import Any

from aiohttp import web

from jserve.api.http.auth import Access
from jserve.api.http.error_format import ANTHROPIC
from jserve.api.http.front import Front, json_response
from jserve.api.http.route import Route, Table, hidden
from jserve.api.request.fields import Fields

Json = dict[str, Any]
_REF = "#/components/schemas/{model}"


async def answer(front: Front, routes: Table) -> web.Response:
    version = {"version": front.card.version or "0"}
    found = await front.prepare.run(document, routes)  # made once, and not on the event loop
    left_away = hidden(front.options)
    paths = {path: parsed for path, parsed in found["paths"].items() if path not in left_away}
    return json_response(found | {"info": found["info"] | version, "paths": paths})


@functools.cache
def document(routes: Table) -> Json:
    """The whole document of ``routes``, but for the version."""
    schemas: Json = {"Error": _OPENAI_ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    paths: Json = {}
    for route in routes:
        if route.fields is not None:
            schemas |= body_schemas(route.fields)
        path = re.sub(r":[^}]*", "", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jserve", "version": "0"},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def body_schemas(fields: type[Fields]) -> Json:
    """JSON schemas of a body and of the objects in it, by name."""
    schema = fields.model_json_schema(ref_template=_REF)
    found = schema.pop("$defs", {})
    prefix = fields.__name__
    # Two bodies may hold objects of one name: each body's are its own.
    text_safe = {name: f"{prefix}{name}" for name in found}
    schemas = {prefix: schema} | {text_safe[name]: inner for name, inner in found.items()}
    return {name: _clean(inner, text_safe) for name, inner in schemas.items()}


def _clean(node: Any, names: dict[str, str]) -> Any:
    """A schema without our own marks: required fields are where JSON schema has them."""
    if isinstance(node, list):
        return [_clean(child, names) for child in node]
    if not isinstance(node, dict):
        return node
    found = {k: _clean(v, names) for k, v in node.items() if k not in ("x-neutral", "x-required")}
    ref = found.get("$ref")
    if isinstance(ref, str):
        name = ref.rsplit("/", 1)[-1]
        found["$ref"] = _REF.replace("{model}", names.get(name, name))
    if isinstance(node.get("properties"), dict):
        required = [
            k for k, v in node["properties"].items() if isinstance(v, dict) and v.get("x-required")
        ]
        if required:
            found["required"] = sorted({*found.get("required", []), *required})
    return found


def _operation(route: Route, path: str) -> Json:
    name = "AnthropicError" if route.error_format is ANTHROPIC else "Error"
    error = {"schema": {"$ref": _REF.replace("{model}", name)}}
    content: Json = {kind: {} for kind in route.media}
    if route.streams:
        content["text/event-stream"] = {}
    found: Json = {
        "summary": route.says,
        "responses": {
            "200": {"description": "the answer", "content": content},
            "default": {"description": "an error", "content": {"application/json": error}},
        },
    }
    if route.access is not Access.OPEN:
        found["security"] = [{}, {"bearer": []}, {"x-api-key": []}]
    parameters = re.findall(r"{(\w+)}", path)
    if parameters:
        found["parameters"] = [
            {"name": p, "in": "path", "required": True, "schema": {"type": "string"}}
            for p in parameters
        ]
    if route.fields is not None:
        body = {"schema": {"$ref": _REF.replace("{model}", route.fields.__name__)}}
        found["requestBody"] = {"required": True, "content": {"application/json": body}}
    return found


_NULLABLE = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["message", "type", "param", "code"],
    "properties": {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": _NULLABLE,
        "code": _NULLABLE,
    },
}
_OPENAI_ERROR = {"type": "object", "required": ["error"], "properties": {"error": _ERROR}}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {"type": {"const": "error"}, "error": _ERROR},
}
