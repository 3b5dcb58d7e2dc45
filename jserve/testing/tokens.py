"""A tokenizer whose tokens are bytes.

It owns ``ByteTokenizer``.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from jserve.errors import BadRequest


class ByteTokenizer:
    """``ports.Tokenizer``: UTF-8 bytes are ids 0 .. n_bytes-1, special tokens follow.

    ``n_bytes`` below 256 makes a small vocabulary (128: ASCII only); other text is refused.
    Special tokens never come from text: their names are encoded byte by byte.
    """

    def __init__(
        self,
        *,
        n_bytes: int = 256,
        specials: Seq[str] = ("<|bos|>", "<|eos|>", "<|pad|>"),
        add_bos: bool = False,
    ) -> None:
        if not 1 <= n_bytes <= 256:
            raise ValueError(f"n_bytes must be in [1, 256], not {n_bytes}")
        self.n_bytes = n_bytes
        self.specials = {name: n_bytes + i for i, name in enumerate(specials)}
        self.add_bos = add_bos

    @property
    def vocab_size(self) -> int:
        return self.n_bytes + len(self.specials)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        eos = self.specials.get("<|eos|>")
        return () if eos is None else (eos,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises BadRequest for text outside UTF-8 or outside a small vocabulary."""
        try:
            ids = list(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise BadRequest("text is not valid Unicode", field="prompt") from error
        if ids and max(ids) >= self.n_bytes:
            raise BadRequest(
                f"text has bytes outside the {self.n_bytes} known ones", field="prompt"
            )
        bos = [self.specials["<|bos|>"]] if self.add_bos and add_special_tokens else []
        return bos + ids

    def decode(self, ids: Seq[int], *, skip_special_tokens: bool = True) -> str:
        """Invalid UTF-8 becomes U+FFFD, one per maximal bad part."""
        names = {i: name.encode() for name, i in self.specials.items()}
        parts = [
            bytes([i]) if i < self.n_bytes else b"" if skip_special_tokens else names[i]
            for i in ids
        ]
        return b"".join(parts).decode("utf-8", errors="replace")
