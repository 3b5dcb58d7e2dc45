"""The pages of the project and the blocks of code in them, as the tests of the docs read them.

A comment on the line before a block says what becomes of it::

    <!-- test: slow -->              it runs in the slow tier, with the shipped model
    <!-- test: not run, REASON -->   it is only parsed
"""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
WRITTEN = ("options.md", "http-fields.md", "metrics.md")
"""Pages that docs/generate.py writes."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
_FENCE = re.compile(
    r"^(?:<!-- test: (?P<mark>slow|not run, [^>]+) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: where it stands, its language, and the mark before it ("" for none)."""

    page: Path
    line: int
    kind: str
    mark: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[list[str]]:
        """The words of each command of a shell block, without what a shell does with it."""
        lines = self.text.replace("\\\n", " ").splitlines()
        split = [shlex.split(line, comments=True) for line in lines]
        found: list[list[str]] = []
        for words in split:
            command: list[str] = []
            for word in [*words, "&&"]:
                if word != "&&":
                    command.append(word)
                elif command:
                    found.append(command)
                    command = []
        return found


def blocks(*kinds: str) -> list[Block]:
    """The blocks of these languages on all pages, in their order."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _FENCE.finditer(text):
            if match["kind"] in kinds:
                line = text[: match.start("text")].count("\n") + 1
                found.append(Block(page, line, match["kind"], match["mark"] or "", match["text"]))
    return found


def posted(url: str, body: dict[str, Any]) -> Any:
    """The response to a JSON body. Raises urllib.error.HTTPError."""
    headers = {"content-type": "application/json"}
    return urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120
    )
