"""``/v1/support``: lists the effect of every field of every endpoint.

It owns their form as JSON and as markdown (docs/http-fields.md). Fields come from the bodies of the routes, the
pairs of features from ``features``.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from jserve.api.http.front import json_response
from jserve.api.http.route import Table
from jserve.api.ops import features
from jserve.api.request.declared import NEUTRAL, Holds, held
from jserve.api.request.fields import Fields, declaration, members_of

Json = dict[str, Any]

WORDS = {
    Holds.APPLIED: "applied, or refused with 400 naming the field",
    Holds.LABEL: "taken, and without effect by its nature",
    Holds.IGNORED: "without effect: listed in x-jserve-ignored-params, refused by --strict-params",
    Holds.REFUSED: "400 unsupported_parameter, unless null or a value that asks for nothing",
}


@functools.cache
def endpoints(routes: Table) -> Json:
    """Path -> field -> {"holds", "but", "members"}: "but" lists the values that ask for nothing,
    "members" has the same for what the objects inside a field may hold, by path."""
    found: Json = {}
    for route in routes:
        if route.fields is not None:
            found[f"{route.method} {_shown(route.path)}"] = dict(_fields(route.fields))
    return found


def _fields(fields: type[Fields]) -> list[tuple[str, Json]]:
    rows = []
    for name, field in sorted(fields.model_fields.items()):
        members = {path: _row(schema) for path, schema in members_of(field, name)}
        rows.append((name, _row(declaration(field)) | ({"members": members} if members else {})))
    return rows


def _row(declared: Mapping[str, Any]) -> Json:
    row: Json = {"holds": held(declared).value}
    if held(declared) in (Holds.REFUSED, Holds.IGNORED):
        row["but"] = declared.get(NEUTRAL, [])
    return row


def _shown(path: str) -> str:
    return path.replace(":.+", "")


def answer(routes: Table) -> web.Response:
    words = {kind.value: text for kind, text in WORDS.items()}
    return json_response(
        {"words": words, "endpoints": endpoints(routes), "together": features.pairs()}
    )


def markdown(routes: Table) -> str:
    """Tables: fields endpoint by endpoint, then the members of the objects in them."""
    lines = ["| endpoint | applied | no effect | refused |", "|---|---|---|---|"]
    lines += [f"| `{path}` | {_cells(fields)} |" for path, fields in endpoints(routes).items()]
    lines += ["", "| inside | at | applied | no effect | refused |", "|---|---|---|---|---|"]
    for (name, cells), paths in _members(routes).items():
        lines.append(f"| `{name}` | {', '.join(f'`{path}`' for path in paths)} | {cells} |")
    return "\n".join(lines) + "\n"


def _members(routes: Table) -> dict[tuple[str, str], list[str]]:
    """(field, cells) -> the endpoints whose field of that name has these members."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, fields in endpoints(routes).items():
        for name, row in fields.items():
            inside = {
                at.removeprefix(name): member for at, member in row.get("members", {}).items()
            }
            if inside:
                found[name, _cells(inside)].append(path.partition(" ")[2])
    return found


def _cells(rows: Mapping[str, Json]) -> str:
    """Names by what holds for them: three cells of a table."""
    by: dict[str, list[str]] = defaultdict(list)
    for name, row in rows.items():
        by[row["holds"]].append(f"`{name}`" + _but(row))
    cells = (by[Holds.APPLIED], by[Holds.LABEL] + by[Holds.IGNORED], by[Holds.REFUSED])
    return " | ".join(", ".join(cell) for cell in cells)


def _but(row: Json) -> str:
    values = [json.dumps(v) for v in row.get("but", ()) if not isinstance(v, float)]
    return f" (but {', '.join(values)})" if values and row["holds"] == Holds.REFUSED else ""
