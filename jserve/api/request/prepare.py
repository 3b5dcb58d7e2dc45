"""Renders, tokenises and checks a ``ParsedRequest`` and builds the engine's ``Request``s.

It owns the work that grows with the size of a request: it runs in threads, bounded in characters before a tokenizer
sees them, never on the event loop.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from jserve.api.request.formats import AnswerFormat, structure_names
from jserve.api.request.naming import renamed
from jserve.api.request.parsed import ModelCard, ParsedRequest
from jserve.errors import BadRequest, ContextTooLong, Overloaded
from jserve.faults import point
from jserve.grammar.checker import GrammarChecker
from jserve.grammar.vocab import vocabulary
from jserve.sampling import SamplingParams
from jserve.text.bad_words import bad_token_ids
from jserve.text.chat.template import Chat, ChatTemplate, Part
from jserve.text.pool import TokenizerPool
from jserve.text.tokenizer import TextTokenizer
from jserve.types import Request

if TYPE_CHECKING:
    from jserve.api.openai.caches import HandleBook

CHARS_PER_TOKEN = 8
"""A prompt of more characters than this times the context is refused before tokenising."""
MAX_QUEUED = 4096
"""Work that may wait for a thread: a piece for each of the connections that may be open, which bound the
memory of what waits."""


class Preparer:
    """Turns asks into requests in a few threads. ``close`` ends them."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        chat: ChatTemplate | None,
        card: ModelCard,
        book: HandleBook,
    ) -> None:
        self._checker = GrammarChecker(lambda: vocabulary(tokenizer, card.vocab_size, card.eos_ids))
        self.tokenizer = tokenizer
        self.book = book
        self.chat = chat
        self.card = card
        self.max_chars = CHARS_PER_TOKEN * card.max_model_len
        self._pool = TokenizerPool(tokenizer, max_chars=self.max_chars)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="jserve-render")
        self._queued = 0

    def close(self) -> None:
        self._checker.close()
        self._pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @point("api.prepare")
    async def requests(self, ask: ParsedRequest) -> list[Request]:
        """One request per prompt, within the model's limits.

        Raises:
            ContextTooLong: more characters or tokens than the context takes.
            BadRequest: an empty prompt, a token id outside the vocabulary, refused messages, a
            structure that cannot be enforced.
            Overloaded: too many requests wait for a thread.
        """
        await self._check_shape(ask.shape, ask.options.tenant)
        prompts = [tuple(ids) for ids in await self.prompt_ids(ask)]
        head = self.book.head(ask)
        if head is not None:
            prompts = await self._behind(ask, head, prompts)
        params = await self._with_bad_words(ask.params)
        batch = uuid.uuid4().hex if len(prompts) > 1 else ""
        return [
            self._request(ask, params, self._fitted(ask, params, ids), batch) for ids in prompts
        ]

    async def prompt_ids(self, ask: ParsedRequest) -> list[list[int]]:
        """Token ids of every prompt of ``ask``, before any truncation."""
        with ask.words():
            return await self._prompt_ids(ask)

    async def _prompt_ids(self, ask: ParsedRequest) -> list[list[int]]:
        if ask.chat is not None:
            parts = await self.render(ask.chat)
            return [await self._pool.encode_parts_async(parts, field=ask.holder)]
        found = []
        encode = self._pool.encode_async
        for prompt in ask.prompts:
            if not isinstance(prompt, str):
                found.append(list(prompt))
                continue
            found.append(
                await encode(prompt, add_special_tokens=ask.add_special_tokens, field=ask.holder)
            )
        return found

    async def _behind(
        self, ask: ParsedRequest, head: tuple[int, ...], prompts: list[tuple[int, ...]]
    ) -> list[tuple[int, ...]]:
        """The prompts with ``head`` in front; one that begins with it is complete already. A text
        that goes on behind it gets no special tokens."""
        rest = await self.prompt_ids(replace(ask, add_special_tokens=False))
        n = len(head)
        return [
            ids if ids[:n] == head else (*head, *tail)
            for ids, tail in zip(prompts, rest, strict=True)
        ]

    async def render(self, chat: Chat) -> list[Part]:
        """The prompt of ``chat`` by the model's template.

        Raises:
            BadRequest: the model has no chat template (code "no_chat_template").
        """
        if self.chat is None:
            raise BadRequest(
                "this model has no chat template; use /v1/completions",
                field="messages",
                code="no_chat_template",
            )
        self._check_chars(chat)
        return await self.run(self.chat.render, chat)

    async def run(self, work, *args):
        """``work(*args)`` in a thread.

        Raises:
            Overloaded: too many calls wait already.
        """
        if self._queued >= MAX_QUEUED:
            raise Overloaded("too many requests wait to be read", retry_after=1)
        self._queued += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        finally:
            self._queued -= 1

    async def _check_shape(self, shape: AnswerFormat, tenant: str) -> None:
        """Have the structure compiled, its parts first, so that an error names its field."""
        last = () if shape.spec is None else ((shape.field, shape.spec),)
        for field, spec in (*shape.checks, *last):
            try:
                future = self._checker.check(spec, tenant)
                if future is not None:
                    await asyncio.wrap_future(future)
            except BadRequest as e:
                raise renamed(e, structure_names(field)) from None

    def _check_chars(self, chat: Chat) -> None:
        n_chars = sum(len(m.get("content") or "") for m in chat.messages)
        if n_chars > self.max_chars:
            raise ContextTooLong(
                f"the messages have {n_chars} characters; this model takes at most "
                f"{self.max_chars} ({self.card.max_model_len} tokens)",
                field="messages",
            )

    async def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        if not params.bad_words:
            return params
        ids = await self.run(bad_token_ids, self.tokenizer, params.bad_words)
        return replace(params, bad_token_ids=ids)

    def _fitted(
        self, ask: ParsedRequest, params: SamplingParams, ids: tuple[int, ...]
    ) -> tuple[int, ...]:
        limit = self.card.max_model_len
        n_out = params.max_tokens if params.max_tokens is not None else 1
        if ask.truncate is not None:
            keep = max(limit - n_out, 1) if ask.truncate < 0 else ask.truncate
            ids = ids[-keep:] if ask.truncate_left else ids[:keep]
        if not ids:
            raise BadRequest(f"{ask.holder} must hold at least one token", field=ask.holder)
        self._check_ids(ask, ids)
        if len(ids) >= limit:
            raise ContextTooLong(
                f"the prompt has {len(ids)} tokens; this model's context is {limit} tokens, "
                "of which one at least is for the answer",
                field=ask.holder,
            )
        if len(ids) + n_out > limit:
            raise ContextTooLong(
                f"the prompt has {len(ids)} tokens and {ask.length_field} is {n_out}; together "
                f"they exceed this model's context of {limit} tokens",
                field=ask.length_field,
            )
        return ids

    def _check_ids(self, ask: ParsedRequest, ids: tuple[int, ...]) -> None:
        if min(ids) < 0 or max(ids) >= self.card.vocab_size:
            raise BadRequest(
                f"{ask.holder} holds a token id outside [0, {self.card.vocab_size - 1}]",
                field=ask.holder,
            )

    def _request(
        self, ask: ParsedRequest, params: SamplingParams, ids: tuple[int, ...], batch: str
    ) -> Request:
        thinking = None
        if ask.chat is not None and params.guided:
            thinking = self.card.speech.thinking_after(ids, self.tokenizer)
        return Request.of(
            ask.options,
            id=uuid.uuid4().hex,
            prompt_ids=ids,
            params=params,
            eos_ids=self.card.eos_ids,
            arrival=time.monotonic(),
            batch=batch,
            thinking=thinking,
        )
