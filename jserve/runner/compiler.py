"""Compiles programs for abstract arguments, or loads what an earlier start kept of them.

A kept program has two keys. One is made of the model and our source, and found without tracing. Where that is new, the
program is lowered, and the other, made of the text of its module, says whether that was compiled before: so a new
version of jserve whose programs are the same does not compile them again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import jax

from jserve.model.step import StepModel
from jserve.runner.program_files import ProgramFiles
from jserve.runner.program_key import (
    UnknownCode,
    arguments,
    described,
    digest,
    environment,
    source_digest,
)

log = logging.getLogger(__name__)

_ASKED = "/jax/compilation_cache/compile_requests_use_cache"
_HIT = "/jax/compilation_cache/cache_hits"


class Compiler:
    """Makes the programs of one engine.

    Args:
        model: what they all have in common.
        files: where they are kept in serialised form; None: nowhere, and ``model`` is not read.
    """

    def __init__(self, model: StepModel | None = None, files: ProgramFiles | None = None) -> None:
        self.loaded: set[str] = set()
        """Names of the programs that were not compiled but loaded."""
        self._files, self._devices = None, []
        self._environment = self._model = ""
        if model is None or files is None:
            return
        try:
            self._model = described(model)
        except UnknownCode as error:
            log.info("programs are not kept in serialised form: the model has %s", error)
            return
        self._environment = environment(model.mesh)
        self._files, self._devices = files, list(model.mesh.devices.flat)

    def __call__(
        self,
        name: str,
        jitted: Any,
        *args: Any,
        options: Mapping[str, str | bool] | None = None,
        about: Any = None,
    ) -> Any:
        """``jitted``, compiled for ``args``.

        Args:
            name: of the program; with the model, ``args`` and ``about`` it says what ``jitted`` computes.
            options: of XLA's compiler.
            about: what else shapes it.
        """
        options = dict(options or {})
        key = self._key(name, args, (options, about))
        if self._files is None or not key:
            return jitted.lower(*args).compile(options)
        program = self._files.load(key, args, self._devices)
        if program is None:
            return self._lowered(name, key, jitted.lower(*args), args, options)
        self.loaded.add(name)
        return program

    def _lowered(self, name: str, key: str, lowered: Any, args: Any, options: Any) -> Any:
        """The program, and its file where it can have one."""
        files = self._files
        assert files is not None, "nothing is kept"
        trees = f"{lowered.in_tree} {lowered.out_tree}"
        text = (lowered.as_text(), trees, arguments(args), described(options))
        same = digest(self._environment, *text)
        program = files.load(same, args, self._devices)
        if program is not None:
            self.loaded.add(name)
            files.alias(key, same)
            return program
        program, fresh = _CACHE.compiled(lowered, options)
        if fresh:
            files.save(same, program)
            files.alias(key, same)
        return program

    def _key(self, name: str, args: Any, about: Any) -> str:
        """Empty: the program is not kept."""
        if self._files is None:
            return ""
        try:
            parts = (name, described(about), arguments(args))
        except UnknownCode as error:
            log.info("%s is not kept in serialised form: it has %s", name, error)
            return ""
        return digest(self._environment, source_digest(), self._model, *parts)


class _CompileCache:
    """The events of jax's compile cache, in the thread that compiles."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listening = False
        self._heard = threading.local()

    def compiled(self, lowered: Any, options: Any) -> tuple[Any, bool]:
        """(the program, whether it was compiled here and not read from the cache)."""
        with self._lock:
            if not self._listening:
                jax.monitoring.register_event_listener(self._listen)
                self._listening = True
        self._heard.events = heard = set()
        program = lowered.compile(options)
        # jax has to say that it looked: silence may as well be another name of the event.
        return program, heard & {_ASKED, _HIT} == {_ASKED}

    def _listen(self, event: str, **kwargs: Any) -> None:
        if hasattr(self._heard, "events"):
            self._heard.events.add(event)


_CACHE = _CompileCache()
