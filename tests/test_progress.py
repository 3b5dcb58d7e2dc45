"""A start without a terminal: how many lines it prints, and what they say."""

from __future__ import annotations

import io
import re
import threading
import time
from types import SimpleNamespace

from rich.console import Console

from jserve.config import EngineConfig
from jserve.progress import Lines, start_progress
from jserve.serve_commands import banner, local_url, start_notes

INFO = {
    "family": "llama",
    "max_model_len": 64,
    "device": "2 x cpu",
    "sharding": "tp=2 kv_heads:tp",
    "dtype": "float32",
    "backend": "xla",
    "no_better_backend": "native serves no capped scores",
    "kernels": "xla",
    "no_kernels": "no library was built",
    "weights_gib": 0.1,
    "kv_gib": 1,
    "kv_tokens": 64,
    "kv_pages": 2,
    "kv_dtype": "float32",
    "programs": 3,
    "programs_loaded": 2,
    "load_s": 0.1,
    "compile_s": 1.0,
}


def test_without_a_terminal_a_stage_says_how_many_what_next_and_how_long() -> None:
    out = io.StringIO()
    with start_progress(Console(file=out), {"compile": "kept in /tmp/[x]"}) as show:
        for done in range(18):
            show("compile", done, 17)
        show("load weights", 0, 9)
        show("warm up", 0, 5)
        show("warm up", 5, 5)
        show("warm up", 5, 5)
    assert out.getvalue().splitlines() == [
        "compile: 17 programs; kept in /tmp/[x]",
        "compile: 17 of 17 programs, 0 s",
        "load weights: 9 bytes",
        "warm up: 5 programs",
        "warm up: 5 of 5 programs, 0 s",
    ]


def test_a_long_stage_says_how_far_it_is_though_no_program_is_done() -> None:
    said: list[str] = []
    lines = Lines(said.append, {}, every_s=0.1)
    thread = threading.Thread(target=lines.run)
    thread.start()
    lines.show("compile", 0, 9)
    lines.show("compile", 2, 9)
    began = time.monotonic()
    while len(said) < 4 and time.monotonic() - began < 10:
        time.sleep(0.01)
    took = time.monotonic() - began
    lines.stop()
    thread.join(5)
    assert not thread.is_alive()
    assert said[1:4] == ["compile: 2 of 9 programs, 0 s"] * 3
    assert took >= 0.2, "one line each 0.1 s and no more"
    lines.show("compile", 9, 9)
    assert "9 of 9" not in said[-1], "nothing is said after the end"


def test_the_note_says_whether_the_next_start_is_short() -> None:
    assert start_notes(EngineConfig.of(compile_cache="/x/y")) == {
        "compile": "they are kept in /x/y, so the next start is short"
    }
    assert "every start compiles" in start_notes(EngineConfig.of(compile_cache=""))["compile"]


def shown(url: str, *, keyed: bool, chat: object = object()) -> str:
    text = SimpleNamespace(name="tiny", chat=chat)
    return banner(url, text, INFO, 1.5, keyed=keyed)  # type: ignore[arg-type]


def test_the_banner_says_which_kernels_multiply_or_why_there_are_none() -> None:
    assert "  kernels   xla (no library was built)\n" in shown("http://127.0.0.1:8000", keyed=False)
    text, info = SimpleNamespace(name="tiny", chat=None), {"kernels": "avx2", "no_kernels": ""}
    said = banner("http://x", text, INFO | info, 1.5)  # type: ignore[arg-type]
    assert "  kernels   avx2\n" in said


def test_the_banner_says_why_attention_is_not_the_best_one() -> None:
    said = shown("http://127.0.0.1:8000", keyed=False)
    assert "  attention xla (native serves no capped scores)\n" in said


def test_the_banner_says_how_a_model_lies_on_several_devices() -> None:
    assert "  device    2 x cpu (tp=2 kv_heads:tp), " in shown("http://127.0.0.1:8000", keyed=False)
    text, alone = SimpleNamespace(name="tiny", chat=None), {"device": "cpu", "sharding": "tp=1"}
    assert "  device    cpu, " in banner("http://x", text, INFO | alone, 1.5)  # type: ignore[arg-type]


def test_the_curl_line_has_an_address_that_works() -> None:
    said = shown("http://0.0.0.0:8000", keyed=False)
    assert "listening on http://0.0.0.0:8000" in said
    assert "\ncurl -N http://127.0.0.1:8000/v1/chat/completions -H 'content-type" in said
    assert local_url("http://[::]:80") == "http://[::1]:80"
    assert local_url("http://10.0.0.1:80") == "http://10.0.0.1:80"


def test_the_curl_line_sends_a_key_that_it_does_not_print() -> None:
    said = shown("http://127.0.0.1:8000", keyed=True)
    assert re.search(r'^curl .* -H "Authorization: Bearer \$JSERVE_API_KEY" ', said, re.M)
    assert "$JSERVE_API_KEY:" in said
    assert "Authorization" not in shown("http://127.0.0.1:8000", keyed=False)
