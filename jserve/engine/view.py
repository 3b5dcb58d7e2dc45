"""The values by which an engine describes itself to those who choose between several.

A view holds prices in seconds, which come from the engine's own table of step times; page events say which prefixes it
holds, by digests (``kv.tiers.next_digest``). Views never leave the fronts: digests tell who asked what.
"""

from __future__ import annotations

import msgspec

DIGEST_BYTES = 8
"""Of a page's digest, what fronts are told."""


class View(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The price that one replica would charge for one more request. Times in seconds."""

    ready: bool = True
    """False: it takes no new requests."""
    weights: str = ""
    """Names the weights that it computes with."""
    adapters: tuple[str, ...] = ()
    slides: bool = False
    """It may give back a page before those that follow it in a prompt, because layers have a sliding window."""
    n_taken: int = 0
    """Requests that it has read so far: what was sent later is not in these figures."""
    n_rows: int = 0
    """Sequences that run or wait."""
    n_before: int = 0
    """Those that have to end before a new one begins; 0: there is room."""
    wait_s: dict[str, float] = {}
    """By lane, the wait until a new sequence is computed."""
    prefill_token_s: float = 0.0
    """Computing one more prompt token."""
    row_s: float = 0.0
    """Added to every step by one more sequence that decodes."""
    token_s: float = 0.0
    """One token of an answer: its share of a step in which as many sequences decode as fit."""
    page_s: float = 0.0
    """Moving one KV page between device and host memory, and where it shares pages also writing or reading it."""
    step_s: float = 0.0
    """The longest step that is usual now, with its prefill."""
    chunk: float = 0.0
    """Prompt tokens that such a step computes; 0: nobody says."""


class PageEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A page that can be found from now on, or no longer."""

    added: bool
    digest: bytes
