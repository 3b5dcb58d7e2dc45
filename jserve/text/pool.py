"""Tokenises in a bounded thread pool beside the event loop.

It owns the promise that no prompt, however large, holds up the streams of others. ``tokenizers`` lets go of the
interpreter lock while it works, at about one second per 3 to 4 million characters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor

from jserve.errors import BadRequest, ContextTooLong, Overloaded
from jserve.faults import point
from jserve.text.tokenizer import TextTokenizer

MAX_QUEUED = 4096
"""As many texts as connections may be open: who comes at once with others is not refused here."""


class TokenizerPool:
    """Encodes in ``threads`` threads; at most ``max_queued`` texts wait or run at a time.

    Args:
        max_chars: longest text accepted, in characters, checked before any work.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        max_chars: int,
        threads: int = 2,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_chars = max_chars
        self.max_queued = max_queued
        self.n_queued = 0
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")

    async def encode_async(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        field: str = "prompt",
    ) -> list[int]:
        """``TextTokenizer.encode``, in a thread.

        Raises:
            ContextTooLong: more than ``max_chars`` characters; ``field`` names the request field.
            BadRequest: a lone surrogate in the text.
            Overloaded: too many texts are waiting already.
        """
        self._check_size(len(text), field)
        return await self._run(
            field,
            lambda: self.tokenizer.encode(
                text, add_special_tokens=add_special_tokens, parse_special=parse_special
            ),
        )

    async def encode_parts_async(
        self, parts: Seq[tuple[str, bool]], *, field: str = "messages"
    ) -> list[int]:
        """``TextTokenizer.encode_parts``, in a thread; raises as ``encode_async`` does."""
        self._check_size(sum(len(text) for text, _ in parts), field)
        return await self._run(field, lambda: self.tokenizer.encode_parts(parts))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_size(self, n_chars: int, field: str) -> None:
        if n_chars > self.max_chars:
            raise ContextTooLong(
                f"{field} has {n_chars} characters; at most {self.max_chars} can fit the context",
                field=field,
            )

    @point("text.encode")
    async def _run(self, field: str, work: Callable[[], list[int]]) -> list[int]:
        if self.n_queued >= self.max_queued:
            raise Overloaded("too many prompts are waiting to be tokenised", retry_after=1.0)
        self.n_queued += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except BadRequest as error:
            raise BadRequest(f"{field} {error.message}", field=field) from None
        finally:
            self.n_queued -= 1
