"""The page as it is served: every file with its type, policy and tag, nothing that breaks the policy."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import jserve.api
from jserve.api.http.page import PAGES, TYPES, page_files
from tests.api.fake import live

FOLDER = Path(jserve.api.__file__).parent / "web"
NAMES = sorted(file.name for file in FOLDER.iterdir())


def test_every_file_of_the_folder_is_served() -> None:
    assert sorted(page_files()) == NAMES
    assert {*PAGES.values()} <= {*NAMES}
    assert len(NAMES) > 10


async def test_types_policy_and_tags() -> None:
    async with live(api_key=("sk-1",)) as srv:
        for path in [*PAGES, *(f"/web/{name}" for name in NAMES)]:
            name = PAGES.get(path) or path.removeprefix("/web/")
            async with srv.http.get(srv.url + path) as r:
                assert r.status == 200, path
                assert await r.read() == (FOLDER / name).read_bytes()
                assert r.headers["Content-Type"] == TYPES[Path(name).suffix]
                assert r.headers["Cache-Control"] == "no-cache"
                assert r.headers["X-Content-Type-Options"] == "nosniff"
                assert r.headers["Referrer-Policy"] == "no-referrer"
                tag, policy = r.headers["ETag"], _policy(r.headers)
            assert policy["default-src"] == ["'none'"]
            for kind in ("script-src", "style-src", "img-src", "connect-src"):
                assert policy[kind] == ["'self'"], kind
            for kind in ("base-uri", "form-action", "frame-ancestors"):
                assert policy[kind] == ["'none'"], kind
            for given in (tag, f'"other", {tag}', "*"):
                async with srv.http.get(srv.url + path, headers={"If-None-Match": given}) as r:
                    assert r.status == 304, (path, given)
                    assert await r.read() == b""
                    assert r.headers["ETag"] == tag
                    assert r.headers["Content-Security-Policy"]
            async with srv.http.get(srv.url + path, headers={"If-None-Match": '"old"'}) as r:
                assert r.status == 200
            async with srv.http.head(srv.url + path) as r:
                assert (r.status, r.headers["ETag"]) == (200, tag)


def _policy(headers) -> dict[str, list[str]]:
    parts = headers["Content-Security-Policy"].split(";")
    return {words[0]: words[1:] for words in (part.split() for part in parts)}


async def test_two_files_do_not_share_a_tag() -> None:
    tags = [file.etag for file in page_files().values()]
    assert len({*tags}) == len(tags)


@pytest.mark.parametrize(
    "path", ["/web/", "/web/nope.js", "/web/..%2fapp.py", "/web/%2e%2e/app.py", "/web/a/b.js"]
)
async def test_nothing_else_is_served(path: str) -> None:
    async with live(api_key=("sk-1",)) as srv:
        key = {"Authorization": "Bearer sk-1"}
        async with srv.http.get(srv.url + path, headers=key) as r:
            assert r.status == 404
            assert (await r.json())["error"]["code"] == "not_found"


async def test_the_page_can_be_switched_off() -> None:
    async with live(ui=False) as srv:
        for path in ("/", "/dashboard", "/web/chat.js"):
            assert (await srv.get(path))[0] == 404
        assert (await srv.get("/v1/models"))[0] == 200


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith(".html")])
def test_html_holds_nothing_inline_and_nothing_from_elsewhere(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert not re.search(r"\son\w+\s*=", text), "an inline handler"
    assert not re.search(r"\sstyle\s*=|<style", text), "an inline style"
    assert all(body == "" for body in re.findall(r"<script[^>]*>(.*?)</script>", text, re.S))
    links = re.findall(r'(?:href|src)="([^"]*)"', text)
    assert not [link for link in links if "//" in link or link.startswith("/")], "must be relative"
    for link in links:
        if link.startswith("web/"):
            assert link.removeprefix("web/") in NAMES, link
    ids = re.findall(r'\sid="([^"]*)"', text)
    assert len(ids) == len({*ids})
    for label in re.findall(r'<label[^>]* for="([^"]*)"', text):
        assert label in ids, label


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith(".html")])
def test_every_control_has_a_label(name: str) -> None:
    text = (FOLDER / name).read_text()
    labelled = {*re.findall(r'<label[^>]* for="([^"]*)"', text)}
    for tag in re.findall(r"<(?:input|select|textarea)\b[^>]*>", text):
        found = re.search(r'\sid="([^"]*)"', tag)
        assert "aria-label" in tag or (found and found[1] in labelled), tag


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith((".js", ".css"))])
def test_code_fetches_nothing_from_elsewhere_and_parses_no_html(name: str) -> None:
    text = (FOLDER / name).read_text()
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "@import",
    ):
        assert word not in text, word
    urls = re.findall(r"https?://[^\s\"'`]+", text)
    assert {*urls} <= {"http://www.w3.org/2000/svg"}
    for imported in re.findall(r'from "\./([^"]+)"', text):
        assert imported in NAMES, imported


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith(".js")])
def test_the_key_is_kept_for_the_tab_only(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert "document.cookie" not in text
    assert ("sessionStorage" in text) is (name == "key.js")
    assert "localStorage" not in text or name in ("store.js", "theme.js")


def test_a_wheel_takes_the_page_along() -> None:
    """The build takes the package whole: the files are in git, and nothing leaves them out."""
    root = FOLDER.parents[2]
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", str(FOLDER)],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(Path(name).name for name in listed.stdout.split()) == NAMES
    build = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert "jserve" in build["targets"]["wheel"]["packages"]
    limits = {"only-include", "include", "only-packages"}
    assert not limits & build["targets"]["wheel"].keys()
    assert not (limits | {"exclude"}) & build.keys()
    assert all(out.startswith("jserve/native/") for out in build["targets"]["wheel"]["exclude"])
