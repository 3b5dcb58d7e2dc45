"""/v1/support: what every field of every endpoint does here, and which go together.

x
"""
from aiohttp import web

from jserve.api.front import json_response


def answer() -> web.Response:
    return json_response({})
