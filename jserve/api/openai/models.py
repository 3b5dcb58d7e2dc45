"""``/v1/models``: lists the served model under each of its names."""

from __future__ import annotations

from aiohttp import web

from jserve.api.http.front import Front, json_response
from jserve.api.reply.generate import Json
from jserve.api.request.parsed import ModelCard
from jserve.errors import NotFound, shown


async def listed(request: web.Request, front: Front) -> web.Response:
    names = (front.card.name, *front.card.aliases)
    data = [model_object(front.card, name) for name in names]
    return json_response({"object": "list", "data": data})


async def one(request: web.Request, front: Front) -> web.Response:
    name = request.match_info["model"]
    if not front.card.knows(name):
        raise NotFound(f"the model {shown(name)} does not exist", field="model")
    return json_response(model_object(front.card, name))


def model_object(card: ModelCard, name: str) -> Json:
    """One entry of the list of models."""
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "jserve",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
    }
