"""Models that think and call tools: an engine that says given texts, behind a live server."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from jserve.api.http.app import make_app
from jserve.api.http.server import HttpServer
from jserve.api.request.parsed import ModelCard
from jserve.config import EngineConfig
from jserve.text.chat.template import ChatTemplate
from jserve.types import Finish, Output, Request
from tests.api.fake import CHATML, FakeEngine, Live
from tests.grammar.kit import EOS, VOCAB, tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
FORMATS = {
    "hermes": "{# <tool_call> #}" + CHATML,
    "llama3": '{# {"name": "parameters": } #}' + CHATML,
    "mistral": "{# [TOOL_CALLS] #}" + CHATML,
}


class Script(FakeEngine):
    """Says ``texts`` in the vocabulary of ``tests.grammar.kit``.

    Attributes:
        cuts: tokens per output, in turn; empty: ``chunk`` each.
        end: how the answer ends; with LENGTH there is no end token.
    """

    cuts: tuple[int, ...] = ()
    end = Finish.STOP

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        self.records.append(request)  # type: ignore[arg-type]
        parsed = self.texts[(len(self.records) - 1) % len(self.texts)]
        ids = tokenizer().encode(parsed, add_special_tokens=False)
        ids = [*ids, EOS] if self.end is Finish.STOP or not ids else [*ids]
        sizes, at = itertools.cycle(self.cuts or (self.chunk,)), 0
        while at < len(ids):
            batch = tuple(ids[at : (stop := at + next(sizes))])
            yield Output(
                request_id=request.id,
                index=0,
                token_ids=batch,
                logprobs=self._logprobs(batch, request.params),
                finish=self.end if stop >= len(ids) else None,
                seed=1 if at == 0 else None,
                n_cached=self.n_cached if at == 0 else 0,
            )
            at = stop

    @property
    def n_active(self) -> int:
        return 0

    def abort(self, request_id: str, index: int | None = None) -> None: ...


@asynccontextmanager
async def talking(engine, template: str = FORMATS["hermes"], *, text=None, **options):
    """A live server over ``engine``; ``text`` is its tokenizer where it is not the kit's."""
    config = EngineConfig.of(port=0, **options)
    card = ModelCard(name="tiny", max_model_len=900, vocab_size=VOCAB, eos_ids=(EOS,))
    app = make_app(config, engine, text or tokenizer(), ChatTemplate({"default": template}), card)
    server = HttpServer(app, config.server.host, 0)
    url = await server.start()
    async with aiohttp.ClientSession() as http:
        try:
            yield Live(url, engine, http, app, server)
        finally:
            await server.stop(0.2)
