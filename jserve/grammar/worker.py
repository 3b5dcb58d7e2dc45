"""The worker process that compiles clients' grammars for the first time; the checker may kill it.

Frames on stdin and stdout, as ``engine.wire`` frames them: a vocabulary first, then specs; one ``Answer`` for
each::

    [ n: uint32 ][ msgpack ]    Table   StructuredOutputs   StructuredOutputs ...
"""

from __future__ import annotations

import resource
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from jserve.errors import JserveError
from jserve.grammar.compiler import GrammarCompiler
from jserve.grammar.vocab import Vocabulary, ll_tokenizer
from jserve.sampling import StructuredOutputs

HEADER = struct.Struct("<I")
MEMORY_BYTES = 4 << 30


class VocabularyTable(msgspec.Struct, frozen=True):
    """A vocabulary without its tokenizer."""

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]


class Answer(msgspec.Struct, frozen=True):
    """Empty when the grammar can be enforced; else what is wrong with it."""

    message: str = ""
    field: str | None = None
    code: str | None = None


def write_frame(file: BinaryIO, payload: bytes) -> None:
    file.write(HEADER.pack(len(payload)) + payload)
    file.flush()


def read_frame(file: BinaryIO) -> bytes:
    """The next payload; b"" at the end."""
    head = file.read(HEADER.size)
    return file.read(HEADER.unpack(head)[0]) if len(head) == HEADER.size else b""


def answer(compiler: GrammarCompiler, spec: bytes) -> Answer:
    """The answer to one encoded spec."""
    try:
        compiler.compile(msgspec.msgpack.decode(spec, type=StructuredOutputs))
    except JserveError as error:
        return Answer(message=error.message, field=error.field, code=error.code)
    except (msgspec.MsgspecError, RecursionError, MemoryError) as error:
        name = type(error).__name__
        return Answer(
            f"the grammar cannot be read ({name})", "structured_outputs", "invalid_schema"
        )
    return Answer()


def main(source: BinaryIO, sink: BinaryIO) -> None:
    """Serve until ``source`` ends."""
    table = msgspec.msgpack.decode(read_frame(source), type=VocabularyTable)
    vocab = Vocabulary(tokens=table.tokens, special_ids=table.special_ids, eos_ids=table.eos_ids)
    compiler = GrammarCompiler(ll_tokenizer(vocab), cache_bytes=1)
    write_frame(sink, msgspec.msgpack.encode(Answer()))
    while spec := read_frame(source):
        write_frame(sink, msgspec.msgpack.encode(answer(compiler, spec)))


if __name__ == "__main__":
    # Ctrl-C reaches the whole process group; this process ends when its input does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    main(sys.stdin.buffer, sys.stdout.buffer)
