"""A stream without a client library: server-sent events, the time to the first token, and the counts at the end.

python examples/streaming_client.py [URL]
"""

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any


def events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each event of a streamed answer, until ``[DONE]``."""
    head = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body | {"stream": True}).encode(), head)
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:  # events are "data: ..." lines; comments keep the connection alive
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))


def main(url: str = "http://127.0.0.1:8000") -> None:
    body = {
        "model": "jserve-mini",
        "messages": [{"role": "user", "content": "Tell me a short story about a fox."}],
        "max_tokens": 64,
        "stream_options": {"include_usage": True},
    }
    began, first = time.monotonic(), None
    for event in events(f"{url}/v1/chat/completions", body):
        if "error" in event:  # the stream began well and did not end so
            sys.exit(event["error"]["message"])
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                first = first or time.monotonic()
                print(text, end="", flush=True)
        if event.get("usage"):
            print(f"\n{event['usage']['completion_tokens']} tokens")
    if first:
        print(
            f"first text after {first - began:.3f} s, all of it after {time.monotonic() - began:.3f} s"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
