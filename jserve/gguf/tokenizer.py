"""The tokenizer.json and tokenizer_config.json that a Hugging Face directory of a GGUF file's model would have."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from jserve.errors import WeightsError
from jserve.gguf.header import broken, read

Json = dict[str, Any]
KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens."""
MAX_TOKEN = 1024
"""Characters."""
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = ENDINGS + WORDS + r"\p{N}{1,3}" + REST
QWEN2 = ENDINGS + WORDS + r"\p{N}" + REST
PATTERNS = {
    "gpt-2": GPT2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "smollm": GPT2,
}
"""``tokenizer.ggml.pre`` -> how text is cut before merges."""
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")
"""Values of ``pre`` whose words are taken whole where they are tokens, and which begin with BOS."""


def files(path: Path) -> Mapping[str, Json]:
    """tokenizer.json and tokenizer_config.json, by name.

    Raises:
        WeightsError: the header has no tokenizer, or one of a kind that is not read; ``field`` is the file and key.
    """
    try:
        about = path.stat()
    except OSError as error:
        raise broken(path, f"cannot be read: {error.strerror}") from None
    return _files(path, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=2)
def _files(path: Path, size: int, time: int) -> Mapping[str, Json]:
    given = _Given(path, read(path).metadata)
    model = given.get("model")
    if not isinstance(model, str) or model not in MODELS:
        raise given.broken("model", f"{str(model)[:40]!r} is not read, only {', '.join(MODELS)}")
    return {
        "tokenizer.json": MODELS[model](given) | _around(given),
        "tokenizer_config.json": _config(given),
    }


class _Given:
    """The keys of the tokenizer, checked."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path, self._metadata = path, metadata
        self.tokens = self._texts("tokens")
        if not self.tokens or len(set(self.tokens)) < len(self.tokens):
            raise self.broken("tokens", "must be a list of different texts")
        if max(map(len, self.tokens)) > MAX_TOKEN:
            raise self.broken("tokens", f"has a token of more than {MAX_TOKEN} characters")
        kinds = metadata.get(f"{KEY}token_type", np.full(len(self.tokens), NORMAL))
        found = self._numbers("token_type", kinds)
        if found.dtype.kind not in "iu":
            raise self.broken("token_type", "must be whole numbers")
        self.kinds = found.tolist()

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(KEY + key, default)

    def broken(self, key: str, why: str) -> WeightsError:
        return broken(self._path, why, KEY + key)

    def merges(self) -> list[str]:
        return self._texts("merges")

    def scores(self) -> np.ndarray:
        return self._numbers("scores", self.get("scores")).astype(np.float64)

    def flag(self, key: str, default: bool) -> bool:
        found = self.get(key, default)
        if not isinstance(found, bool):
            raise self.broken(key, f"{str(found)[:40]} is neither true nor false")
        return found

    def token(self, name: str) -> str | None:
        """The text of token ``name``; None: there is none."""
        key, n = f"{name}_token_id", len(self.tokens)
        found = self.get(key)
        if found is None:
            return None
        if type(found) is not int or not 0 <= found < n:
            raise self.broken(key, f"{str(found)[:40]} is no token of {n}")
        return self.tokens[found]

    def template(self) -> str | None:
        found = self._metadata.get("tokenizer.chat_template")
        if found is not None and not isinstance(found, str):
            raise broken(self._path, "is no text", "tokenizer.chat_template")
        return found

    def _texts(self, key: str) -> list[str]:
        found = self.get(key)
        if not isinstance(found, list) or not all(isinstance(x, str) for x in found):
            raise self.broken(key, "must be a list of texts")
        return found

    def _numbers(self, key: str, found: Any) -> np.ndarray:
        if not isinstance(found, np.ndarray) or len(found) != len(self.tokens):
            raise self.broken(key, f"must be {len(self.tokens)} numbers")
        return found


def _config(given: _Given) -> Json:
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    found = {f"{name}_token": given.token(key) for name, key in names.items()}
    found["chat_template"] = given.template()
    return {key: value for key, value in found.items() if value is not None}


def _around(given: _Given) -> Json:
    """The parts of all tokenizers: tokens that are never cut, and those at both ends of a text."""
    added = [
        {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER,
        }
        for i, (text, kind) in enumerate(zip(given.tokens, given.kinds, strict=True))
        if kind in (UNKNOWN, CONTROL, USER)
    ]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added} | _ends(
        given
    )


def _ends(given: _Given) -> Json:
    bpe = given.get("model") == "gpt2"
    begins = given.flag("add_bos_token", not bpe or given.get("pre") in WHOLE_WORDS)
    ends = given.flag("add_eos_token", False)
    first, last = given.token("bos") if begins else None, given.token("eos") if ends else None
    parts: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    used = [token for token in (first, last) if token is not None]
    if not used:
        return {}
    parts = [_special(token) for token in [first] if token] + parts
    parts += [_special(token) for token in [last] if token]
    tokens = {
        token: {"id": token, "ids": [given.tokens.index(token)], "tokens": [token]}
        for token in used
    }
    pair = [*parts, {"Sequence": {"id": "B", "type_id": 1}}]
    template = {"type": "TemplateProcessing", "single": parts, "pair": pair}
    return {"post_processor": template | {"special_tokens": tokens}}


def _special(token: str) -> Json:
    return {"SpecialToken": {"id": token, "type_id": 0}}


def _byte_level(given: _Given) -> Json:
    """Merges of bytes, each written as a character."""
    pre = given.get("pre", "gpt-2")
    if not isinstance(pre, str) or pre not in PATTERNS:
        why = f"{str(pre)[:40]!r} is not read, only {', '.join(PATTERNS)}; give --tokenizer"
        raise given.broken("pre", why)
    cut = {"type": "Split", "pattern": {"Regex": PATTERNS[pre]}, "behavior": "Isolated"}
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    steps = [cut | {"invert": False}, whole | {"use_regex": False}]
    if pre == "smollm":
        steps = [{"type": "Digits", "individual_digits": True}, *steps]
    return {
        "normalizer": {"type": "NFC"} if PATTERNS[pre] == QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": whole | {"use_regex": True},
        "model": _bpe(given, given.merges(), ignore_merges=pre in WHOLE_WORDS),
    }


def _pieces(given: _Given) -> Json:
    """SentencePiece: merges by score, with bytes of what is no token."""
    spaces: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
    back: list[Json] = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if given.flag("add_space_prefix", True):
        spaces = [{"type": "Prepend", "prepend": "\u2581"}, *spaces]
        back = [*back, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    return {
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": _bpe(
            given,
            [f"{a} {b}" for a, b in merges_of(given.tokens, given.kinds, given.scores())],
            fuse_unk=True,
            byte_fallback=True,
            unk_token=given.token("unknown"),
        ),
    }


def _bpe(given: _Given, merges: list[str], **how: Any) -> Json:
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise given.broken("merges", "must be pairs of tokens")
    vocab = {token: i for i, token in enumerate(given.tokens)}
    plain = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {
        "type": "BPE",
        "dropout": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        **plain,
        **how,
        "vocab": vocab,
        "merges": [list(pair) for pair in pairs],
    }


def merges_of(tokens: list[str], kinds: list[int], scores: np.ndarray) -> list[tuple[str, str]]:
    """The merges that make these tokens: all pairs of tokens that are one together, the best scores first."""
    known = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (NORMAL, USER, UNUSED)
    }
    found = []
    for token, i in known.items():
        for cut in range(1, len(token)):
            left, right = known.get(token[:cut]), known.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[i], i, left, right))
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(found)]


MODELS = {"gpt2": _byte_level, "llama": _pieces}
