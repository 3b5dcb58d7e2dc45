"""Finds models by hub name: in the local cache, else by download.

Fetches JSON, safetensors and tokenizer files only: no code, no pickles.
"""

from __future__ import annotations

import logging
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jserve.errors import ConfigError
from jserve.weights.hf import has_safetensors

log = logging.getLogger(__name__)

TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
WEIGHT_FILES = ["*.safetensors"]
# Folders hold other formats of the same weights (original/, onnx/); consolidated* doubles the
# download.
SKIPPED = ["*/*", "consolidated*"]
PROBE_SECONDS = 5.0


def download(name: str, revision: str = "", *, weights: bool = True) -> Path:
    """The directory of hub model ``name`` at ``revision`` (empty: main), from the cache if it is
    there.

    Raises:
        ConfigError: not cached and offline or unreachable, unknown, gated; ``field`` is the option.
    """
    wanted = TEXT_FILES + (WEIGHT_FILES if weights else [])
    cached = _cached(name, revision, wanted)
    if cached is not None and _complete(cached, weights):
        log.info("%s: from the local cache (%s)", name, cached.name)
        return cached
    _check_reachable(name)
    return _fetch(name, revision, wanted)


def _complete(snapshot: Path, weights: bool) -> bool:
    return (snapshot / "config.json").exists() and (not weights or has_safetensors(snapshot))


def _cached(name: str, revision: str, wanted: list[str]) -> Path | None:
    try:
        return Path(_snapshot(name, revision, wanted, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None


def _snapshot(name: str, revision: str, wanted: list[str], *, local_files_only: bool) -> str:
    return huggingface_hub.snapshot_download(
        name,
        revision=revision or None,
        allow_patterns=wanted,
        ignore_patterns=SKIPPED,
        local_files_only=local_files_only,
    )


def _check_reachable(name: str) -> None:
    """One quick request: huggingface_hub itself would retry for a quarter of a minute."""
    if constants.HF_HUB_OFFLINE:
        raise _cannot(name, "not in the local cache, and the hub is switched off (HF_HUB_OFFLINE)")
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
    except Exception as error:
        raise _cannot(
            name,
            f"no such directory, not in the local cache, and {constants.ENDPOINT} cannot be "
            f"reached ({type(error).__name__})",
        ) from None


def _fetch(name: str, revision: str, wanted: list[str]) -> Path:
    try:
        return Path(_snapshot(name, revision, wanted, local_files_only=False))
    except GatedRepoError:
        raise _cannot(
            name, "gated; accept its terms on the hub and log in (hf auth login)"
        ) from None
    except RevisionNotFoundError:
        raise ConfigError(
            f"model {name}: no revision {revision!r} on the hub", field="revision"
        ) from None
    except RepositoryNotFoundError:
        raise _cannot(
            name, "no such directory, and no such model on the hub (or it needs a login)"
        ) from None
    except Exception as error:
        # Whatever the library, its transport or the disk raises, the operator gets one line.
        reason = (str(error).splitlines() or [""])[0][:200]
        raise _cannot(name, f"download failed: {type(error).__name__}: {reason}") from None


def _cannot(name: str, why: str) -> ConfigError:
    return ConfigError(f"model {name}: {why}", field="model")
