"""Writes batch answers in OpenAI's JSONL and reads what an earlier run answered.

::

    {"id": ..., "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}
    {"id": ..., "custom_id": null, "response": null, "error": {"code", "message", "param", "line": 7}}

The server's errors are in ``response.body``; the second form is of a line that could not be asked, or
whose connection broke each time.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import orjson

from jserve.api.batch.lines import Json, Line, Name
from jserve.errors import ConfigError, JserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Lines that the output holds an answer to, and those of them that failed."""

    names: frozenset[Name]
    failed: frozenset[Name]


class AnswerFile:
    """The output file: opened for this process alone, repaired, read once, then only appended to.

    Raises:
        ConfigError: it cannot be written, another run writes it, or a line of it is no answer.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115  (closed by ``close``)
        except OSError as e:
            raise ConfigError(f"{path}: {e.strerror}", field="output") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._repair()
            self.answered = self._read()
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"{path}: another run writes it", field="output") from None
        except ConfigError:
            self._file.close()
            raise

    def write(self, record: Json) -> None:
        """Appends one answer; it is on its way to the disk when this returns.

        Raises:
            ConfigError: the disk is full, or the like.
        """
        try:
            self._file.write(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
            self._file.flush()
        except OSError as e:
            raise ConfigError(f"{self._path}: {e.strerror}", field="output") from None

    def close(self) -> None:
        """Returns when everything is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _repair(self) -> None:
        """A run that was killed may have left half a line at the end: it goes, its line is asked again."""
        size = self._file.seek(0, os.SEEK_END)
        keep = _end_of_lines(self._file, size)
        if keep == size:
            return
        self._file.seek(keep)
        if _is_answer(self._file.read()):
            self._file.write(b"\n")
            self._file.flush()
        else:
            self._file.truncate(keep)

    def _read(self) -> Answered:
        names: set[Name] = set()
        failed: set[Name] = set()
        self._file.seek(0)
        for number, raw in enumerate(self._file, 1):
            record = _answer(raw)
            if record is None:
                raise ConfigError(
                    f"{self._path}: line {number} is not an answer of a batch", field="output"
                )
            name = name_of(record)
            names.add(name)
            if is_failure(record):
                failed.add(name)
        return Answered(names=frozenset(names), failed=frozenset(failed))


def _end_of_lines(file: BinaryIO, size: int) -> int:
    """The offset at which the last complete line ends, searched from the back."""
    end, step = size, 1 << 16
    while end > 0:
        start = max(0, end - step)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def _answer(raw: bytes) -> Json | None:
    """The record in ``raw``; None when it is none of ours."""
    try:
        record = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(record, dict) or not {"custom_id", "response", "error"} <= record.keys():
        return None
    name, response, error = record["custom_id"], record["response"], record["error"]
    if isinstance(error, dict):
        return record if isinstance(name, str) or isinstance(error.get("line"), int) else None
    parsed = isinstance(response, dict) and isinstance(response.get("status_code"), int)
    return record if parsed and error is None and isinstance(name, str) else None


def _is_answer(raw: bytes) -> bool:
    return _answer(raw) is not None


def name_of(record: Json) -> Name:
    """The name of the line that ``record`` answers."""
    custom_id = record["custom_id"]
    return record["error"]["line"] if custom_id is None else custom_id


def is_failure(record: Json) -> bool:
    return record["error"] is not None or record["response"]["status_code"] != 200


def answer_of(line: Line, status: int, request_id: str, body: Json) -> Json:
    """The record of what the server said, good or bad."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _record(line, response=response, error=None)


def refusal_of(line: Line, error: JserveError) -> Json:
    """The record of a line that could not be asked, or got no answer."""
    failure = {
        "code": error.code,
        "message": f"line {line.number}: {error.message}",
        "param": error.field,
        "line": line.number,
    }
    return _record(line, response=None, error=failure)


def _record(line: Line, *, response: Json | None, error: Json | None) -> Json:
    id = f"batch_req_{uuid.uuid4().hex}"
    return {"id": id, "custom_id": line.custom_id, "response": response, "error": error}
