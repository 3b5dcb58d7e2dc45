"""Names options: flat and dotted names, vLLM's names for them, and what comes together under ``speculative``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jserve.errors import ConfigError

DOTTED = "speculative"
"""The section whose options are known by section and name."""
_VLLM = {
    "num_speculative_tokens": "num_tokens",
    "speculative_token_tree": "tree",
    "draft_tensor_parallel_size": "tensor_parallel_size",
}
_VLLM_METHODS = {"draft_model": "draft"}


def flat_name(section: str, f: dataclasses.Field[Any]) -> str:
    """The one name of an option on the command line, in files and in Python."""
    return f"{section}.{f.name}" if section == DOTTED else f.name


def dotted(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` with what came together under ``speculative`` (or vLLM's ``speculative_config``)
    under one name each; an option that also stands alone wins.

    Raises:
        ConfigError: no mapping and no JSON object.
    """
    found: dict[str, Any] = {}
    for key in ("speculative_config", DOTTED):
        for name, value in _mapping(key, options.get(key)).items():
            name = str(name).replace("-", "_")
            found[f"{DOTTED}.{_VLLM.get(name, name)}"] = value
    found |= {k: v for k, v in options.items() if k not in (DOTTED, "speculative_config")}
    method = found.get(f"{DOTTED}.method")
    if isinstance(method, str) and method in _VLLM_METHODS:
        found[f"{DOTTED}.method"] = _VLLM_METHODS[method]
    return found


def _mapping(key: str, given: Any) -> Mapping[str, Any]:
    if given is None or given == "":
        return {}
    if isinstance(given, str) and not given.lstrip().startswith("{"):
        return {"method": given}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise ConfigError(f"{key} is not valid JSON: {given[:80]!r}", field=key) from None
    if not isinstance(given, Mapping):
        raise ConfigError(f"{key} must be a JSON object or a method, not {given!r}", field=key)
    return given


def hint(name: str, known: Any) -> str:
    """The option that ``name`` may have meant, for an error message; empty if none is close."""
    import difflib

    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
