"""Loads a model's tokenizer and converts text to ids and back.

It owns reading tokenizer.json (through ``tokenizers``), the special tokens, the bytes of every token, and the
faults of these files. A directory without tokenizer.json is read by ``transformers``, which is imported only then.

Byte-level BPE writes each byte as one printable character; ``token_bytes`` undoes that::

    token   "Ġhé"  ->  chars  Ġ     h     Ã     ©        (the bytes 0x20 0x68 0xC3 0xA9)
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from jserve.errors import BadRequest, WeightsError
from jserve.gguf.header import is_gguf
from jserve.gguf.tokenizer import files as gguf_files

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_alphabet() -> dict[str, int]:
    """Character of byte-level BPE -> byte: printable Latin-1 stands for itself, the rest moves to
    256+."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(moved)}


_ALPHABET = _byte_alphabet()


class TextTokenizer:
    """The tokenizer of one model; satisfies ``ports.Tokenizer``. Safe to use from several threads.

    Attributes:
        vocab_size: highest token id + 1.
        special_ids: ids of control tokens, left out of text when special tokens are skipped.
        bos_token, eos_token, pad_token, unk_token: their text, or None.
        bos_id, eos_id: their ids, or None.
        byte_level: True when ``token_bytes`` concatenated is exactly the decoded text.
        config: tokenizer_config.json, {} when there is none.
    """

    def __init__(self, hf: HFTokenizer, config: dict[str, Any] | None = None) -> None:
        self.config = config or {}
        self.hf = hf
        self.hf.no_truncation()
        self.hf.no_padding()
        added = self.hf.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._special_re = _any_of([added[i].content for i in self.special_ids])
        self.vocab_size = max(self.hf.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.byte_level = _is_byte_level(self.hf)
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self.bos_token, self.eos_token, self.pad_token, self.unk_token = (
            _token_text(self.config.get(name)) for name in _NAMED
        )
        self.bos_id, self.eos_id = self.token_id(self.bos_token), self.token_id(self.eos_token)

    @functools.cached_property
    def _plain(self) -> HFTokenizer:
        """A copy for which control tokens are ordinary text; made when first needed (0.5 s at
        150k ids)."""
        plain = HFTokenizer.from_str(self.hf.to_str())
        plain.encode_special_tokens = True
        return plain

    def token_id(self, token: str | None) -> int | None:
        return None if token is None else self.hf.token_to_id(token)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Ids of ``text``. With ``parse_special`` False, control tokens written in it are
        ordinary text.

        Raises:
            BadRequest: the text holds a lone surrogate.
        """
        hf = self.hf if parse_special else self._plain
        try:
            return hf.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise BadRequest(
                "must be valid Unicode text (it holds a lone surrogate)", field="prompt"
            ) from None

    def encode_parts(self, parts: Seq[tuple[str, bool]]) -> list[int]:
        """Ids of a rendered prompt given as (text, trusted) pieces in order; adds no special
        tokens.

        Control tokens count only where they lie wholly in trusted text. When untrusted text holds
        none the ids are those of ``encode`` of the joined text.
        """
        text, trusted = _join(parts)
        genuine = [
            (start + m.start(), start + m.end())
            for start, end in trusted
            for m in self._special_re.finditer(text[start:end])
        ]
        if genuine == [m.span() for m in self._special_re.finditer(text)]:
            return self.encode(text, add_special_tokens=False)
        return self._encode_around(text, genuine)

    def _encode_around(self, text: str, spans: list[tuple[int, int]]) -> list[int]:
        """Ids of ``text`` with control tokens at ``spans`` and nowhere else."""
        ids: list[int] = []
        at = 0
        for start, end in spans:
            ids += self.encode(text[at:start], add_special_tokens=False, parse_special=False)
            ids += self.encode(text[start:end], add_special_tokens=False)
            at = end
        return ids + self.encode(text[at:], add_special_tokens=False, parse_special=False)

    def decode(self, ids: Seq[int], *, skip_special_tokens: bool = True) -> str:
        return self.hf.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds in the middle of a text; b"" for an id without a token."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """``token_bytes`` as text, bytes that are no UTF-8 by themselves shown as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _look_up(self, token_id: int) -> bytes:
        token = self.hf.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            known = all(c in _ALPHABET for c in token)
            return bytes(_ALPHABET[c] for c in token) if known else token.encode()
        byte = _BYTE_TOKEN.match(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def load_tokenizer(directory: str | Path) -> TextTokenizer:
    """The tokenizer of a model directory, or of a GGUF file.

    Raises:
        WeightsError: a file is missing, truncated or not a tokenizer; ``field`` is the file.
    """
    folder = Path(directory)
    if is_gguf(folder):
        return _from_gguf(folder)
    config = _read_json(folder / "tokenizer_config.json")
    names = _read_json(folder / "special_tokens_map.json")
    config = {**{k: names[k] for k in _NAMED if k in names}, **config}
    path = folder / "tokenizer.json"
    if not path.exists():
        return TextTokenizer(_from_transformers(folder), config)
    try:
        return TextTokenizer(HFTokenizer.from_file(str(path)), config)
    except Exception as error:  # tokenizers raises bare Exception for every fault of the file
        raise WeightsError(
            f"{path} is not a readable tokenizer: {error}", field=path.name
        ) from error


def check_vocab(tokenizer: TextTokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer that can produce ids the model has no embedding row for.

    Raises:
        WeightsError: the highest id is not below ``vocab_size`` (rows of the embedding).
    """
    if tokenizer.vocab_size > vocab_size:
        raise WeightsError(
            f"tokenizer.json has token ids up to {tokenizer.vocab_size - 1}, "
            f"but the model's embedding has only {vocab_size} rows",
            field="tokenizer.json",
        )


def _any_of(words: list[str]) -> re.Pattern[str]:
    """Matches any of ``words``, the longest first; nothing when there are none."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if words else r"(?!)")


def _join(parts: Seq[tuple[str, bool]]) -> tuple[str, list[tuple[int, int]]]:
    """The whole text, and the (start, end) of its trusted stretches, neighbours merged."""
    spans: list[tuple[int, int]] = []
    at = 0
    for text, trusted in parts:
        if trusted and spans and spans[-1][1] == at:
            spans[-1] = (spans[-1][0], at + len(text))
        elif trusted:
            spans.append((at, at + len(text)))
        at += len(text)
    return "".join(text for text, _ in parts), spans


def _is_byte_level(hf: HFTokenizer) -> bool:
    if hf.decoder is None:
        return False
    decoder = json.loads(hf.decoder.__getstate__())
    if decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return decoder.get("type") == "ByteLevel"


def _token_text(value: Any) -> str | None:
    """A special token as tokenizer_config.json writes it: a string, or {"content": string, ...}."""
    return value.get("content") if isinstance(value, dict) else value


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} is not readable JSON: {error}", field=path.name) from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} must hold a JSON object", field=path.name)
    return value


def _from_gguf(path: Path) -> TextTokenizer:
    files = gguf_files(path)
    try:
        hf = HFTokenizer.from_str(json.dumps(files["tokenizer.json"]))
    except Exception as error:  # as above
        why = f"{path}: the header has no readable tokenizer: {str(error)[:200]}"
        raise WeightsError(why, field=f"{path}:tokenizer.ggml") from error
    return TextTokenizer(hf, dict(files["tokenizer_config.json"]))


def _from_transformers(folder: Path) -> HFTokenizer:
    """A tokenizer that exists only in another format (tokenizer.model, vocab.json + merges.txt)."""
    missing = f"{folder} holds no tokenizer.json"
    if not folder.is_dir():
        raise WeightsError(f"{folder} is not a directory", field="tokenizer.json")
    try:
        auto = importlib.import_module("transformers").AutoTokenizer
        loaded = auto.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        return loaded.backend_tokenizer
    except Exception as error:  # whatever transformers meets, the file to mend is the tokenizer
        raise WeightsError(
            f"{missing}, and transformers cannot build one from it: {str(error)[:200]}",
            field="tokenizer.json",
        ) from error
