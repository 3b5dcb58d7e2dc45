"""Incremental detokenisation with stop strings: one ``TextStream`` per choice.

Text waits for two reasons only: its last character is incomplete, or it may be the beginning of a stop string::

    ids    ->  decoder  ->  text  ->  StopFinder  ->  delta
               holds bytes            holds a proper prefix of a stop string
               of half a character

The whole text, whatever the chunks, is that of one full decode, cut at the first stop string to
be complete.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass

from tokenizers.decoders import DecodeStream

from jserve.faults import point
from jserve.sampling import SamplingParams
from jserve.text.tokenizer import TextTokenizer

PROMPT_TAIL = 5
"""Prompt ids that non-byte-level decoders see first, so that the first word keeps its leading
space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """The result of one push: ``text`` to show, and the number of its ids that the text so far has used up."""

    text: str = ""
    n_tokens: int = 0
    """Below ``len(ids)`` only when a stop string was complete before the last id."""
    stop: str | None = None
    """The stop string that ended the text."""


class TextStream:
    """Incremental detokenisation and stop strings of one choice.

    Args:
        tokenizer: the model's. stop: strings that end the text; the first to be complete wins, of
        those the longest. include_stop: keep the stop string (and the text of a terminating
        token) in the text. skip_special_tokens: leave control tokens out of the text. min_tokens:
        text of so many first tokens takes no part in stop strings. prompt_ids: the last ids of
        the prompt, for decoders that need context; byte-level ones do not.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        stop: Iterable[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        prompt_ids: Seq[int] = (),
    ) -> None:
        hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        if tokenizer.byte_level:
            self._decoder: ByteDecoder | PieceDecoder = ByteDecoder(tokenizer, hidden)
        else:
            self._decoder = PieceDecoder(tokenizer, hidden, prompt_ids)
        self._finder = StopFinder(tuple(stop), include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._ended = False
        self.n_tokens = 0

    @classmethod
    def of(
        cls, tokenizer: TextTokenizer, params: SamplingParams, prompt_ids: Seq[int] = ()
    ) -> TextStream:
        return cls(
            tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            prompt_ids=prompt_ids,
        )

    @property
    def stopped(self) -> str | None:
        """The stop string found, or None."""
        return self._finder.found

    @point("text.decode")
    def push(self, ids: Seq[int], *, terminator: bool = False) -> TextDelta:
        """Add drawn ids. ``terminator`` marks the last one as the token that ended the sequence:
        it is counted, but has no text unless stop strings are included."""
        text: list[str] = []
        n_shown = len(ids) - (terminator and not self._include_stop)
        n_used = 0
        for n_used, token_id in enumerate(ids, start=1):
            if self._ended:
                n_used -= 1
                break
            if n_used <= n_shown:
                text.append(self._take(self._decoder.step(token_id)))
            self.n_tokens += 1
        return TextDelta(text="".join(text), n_tokens=n_used, stop=self.stopped)

    def flush(self) -> TextDelta:
        """The end: all text held back, an incomplete character as U+FFFD. Empty after a stop
        string."""
        if self._ended:
            return TextDelta(stop=self.stopped)
        text = self._take(self._decoder.flush()) + self._finder.flush()
        self._ended = True
        return TextDelta(text=text, stop=self.stopped)

    def _take(self, piece: str) -> str:
        if self.n_tokens < self._min_tokens:
            return piece
        shown = self._finder.feed(piece) if piece else ""
        self._ended = self._finder.found is not None
        return shown


class StopFinder:
    """Finds stop strings in a text that arrives in pieces; the outcome does not depend on the
    pieces.

    One Knuth-Morris-Pratt automaton per stop string. The longest matched prefix among them is the
    text held back; it is a proper prefix of a stop string by construction.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self.found: str | None = None
        self._stops = tuple((stop, _borders(stop)) for stop in stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._matched = [0] * len(stops)
        self._include = include
        self._held = ""

    def feed(self, piece: str) -> str:
        """The text that may be shown after ``piece``; sets ``found`` and drops the rest at a
        match."""
        if not self._held and self._firsts.isdisjoint(piece):
            return piece
        text = self._held + piece
        for end, char in enumerate(piece, start=len(self._held) + 1):
            stop = self._advance(char)
            if stop is not None:
                self.found, self._held = stop, ""
                return text[: end if self._include else end - len(stop)]
        shown = len(text) - max(self._matched)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Move every automaton over ``char``; the longest stop string that it completes."""
        complete: str | None = None
        for i, (stop, borders) in enumerate(self._stops):
            n = self._matched[i]
            while n and stop[n] != char:
                n = borders[n]
            n += stop[n] == char
            self._matched[i] = n
            if n == len(stop) and (complete is None or n > len(complete)):
                complete = stop
        return complete


def _borders(word: str) -> list[int]:
    """borders[n]: length of the longest proper prefix of word[:n] that is also its suffix."""
    borders = [0, 0]
    n = 0
    for char in word[1:]:
        while n and word[n] != char:
            n = borders[n]
        n += word[n] == char
        borders.append(n)
    return borders


class ByteDecoder:
    """Byte-level BPE: a table of bytes and an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: TextTokenizer, hidden: frozenset[int]) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token_id: int) -> str:
        return "" if token_id in self._hidden else self._utf8.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class PieceDecoder:
    """Any other decoder (SentencePiece, WordPiece): ``DecodeStream``, made safe.

    DecodeStream has no flush, raises when bytes that looked complete turn out not to be, and
    would show the prompt again if it ended inside a character. So the ids since the last shown
    text are kept here, with those before them as context, and decoded directly where the stream
    cannot go on.
    """

    def __init__(
        self, tokenizer: TextTokenizer, hidden: frozenset[int], prompt_ids: Seq[int]
    ) -> None:
        self._hf = tokenizer.hf
        self._hidden = hidden
        self._context = self._clean_tail([i for i in prompt_ids[-64:] if i not in hidden])
        self._pending: list[int] = []
        self._stream = self._restart()

    def step(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._pending.append(token_id)
        try:
            piece = self._stream.step(self._hf, token_id)
        except Exception:  # "Invalid prefix encountered", a bare Exception
            piece = self._text(self._pending)
            self._context, self._pending = self._clean_tail(self._context + self._pending), []
            self._stream = self._restart()
            return piece
        if piece is None:
            return ""
        self._shown()
        return piece

    def flush(self) -> str:
        before = self._text(self._context)
        after = self._text(self._context + self._pending)
        whole = after.startswith(before)
        piece = after[len(before) :] if whole else self._text(self._pending)
        self._shown()
        return piece

    def _shown(self) -> None:
        self._context, self._pending = (self._context + self._pending)[-PROMPT_TAIL:], []

    def _clean_tail(self, ids: list[int]) -> list[int]:
        """The last few ids, cut where no character is; [] when they end inside one."""
        for n in range(PROMPT_TAIL, PROMPT_TAIL + 4):
            if not self._text(ids[-n:]).endswith("\ufffd"):
                return ids[-n:]
        return []

    def _restart(self) -> DecodeStream:
        return DecodeStream(ids=list(self._context), skip_special_tokens=False)

    def _text(self, ids: Seq[int]) -> str:
        return self._hf.decode(list(ids), skip_special_tokens=False)
